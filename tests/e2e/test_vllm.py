"""A real model on the real engine: swaps in place, and the engine holds exactly the published weights."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from slipstream import rpc
from slipstream.blobs import open_store
from slipstream.delta.tensors import write_safetensors
from slipstream.local import models, paths
from slipstream.settings import CommonSettings
from slipstream.v1.common_pb2 import Version
from slipstream.v1.rollout_pb2 import ChatMessage, ChatPrompt, PromptGroup, SamplingParams
from slipstream.v1.rollout_service_pb2 import GenerateRequest
from slipstream.v1.rollout_service_pb2_grpc import RolloutServiceStub
from slipstream.v1.weight_sync_service_pb2 import PlanUpdateRequest
from slipstream.v1.weight_sync_service_pb2_grpc import WeightSyncServiceStub
from slipstream.v1.weights_pb2 import Manifest
from slipstream.weights.puller import Puller
from tests.e2e.stack import Deployment
from tests.e2e.stack import deployment as services
from tests.support.fixtures import StartService

EXAMPLE = Path(__file__).parents[2] / "examples/arithmetic/recipe.py"
# Trainer and engine share the cores: neither may bind to one or spin on it.
SHARED = {"SLIPSTREAM_ROLLOUT_THREADS": "nobind"}
pytestmark = [pytest.mark.e2e, pytest.mark.integration, pytest.mark.vllm, pytest.mark.timeout(600)]


async def test_three_steps_on_vllm_lose_no_request_and_leave_exactly_the_published_bits(
    deployment: CommonSettings, start_service: StartService, tmp_path: Path
) -> None:
    settings = deployment
    model = await models.prepare(models.DEFAULT, paths.cache())
    async with services(settings, tmp_path, model, engine="vllm", **SHARED) as running:
        # The example's own recipe, with fewer groups to a step: what is asked here does not depend on many.
        recipe = tmp_path / "recipe.py"
        recipe.write_text(EXAMPLE.read_text().replace("groups_per_step=8", "groups_per_step=3"))
        done = await running.run(recipe, "--run", "vllm", "--steps", "3", timeout_s=400)
        assert done.code == 0, done.output
        summary = done.summary("vllm")
        assert summary["requests_lost"] == 0
        assert summary["groups_trained"] == 3 * 3
        assert summary["groups_dropped"] == 0
        assert summary["versions"] == {"rollout-0": "1-3"}
        assert summary["mismatch_k3_lag0_max"] < 0.02
        assert "abort" not in running.log("rollout").lower()

        served = await greedy(running.variables["SLIPSTREAM_ROLLOUT_TARGET"])
        exported = await export(running, model, tmp_path / "exported")
        await running.services.pop("rollout").stop(20)

    fresh = await start_service(
        "rollout",
        settings,
        {
            "SLIPSTREAM_ROLLOUT_MODEL": str(exported),
            "SLIPSTREAM_ROLLOUT_WORK_DIR": str(tmp_path / "fresh"),
            "SLIPSTREAM_ROLLOUT_REPLICA_ID": "fresh",
            **SHARED,
        },
        timeout_s=240,
    )
    assert await greedy(fresh.target) == served


async def greedy(target: str) -> list[tuple[list[int], list[float]]]:
    """Greedy completions of fixed prompts, with their log-probs: they differ when any weight differs."""
    results = []
    async with rpc.make_channel(target) as channel:
        stub = RolloutServiceStub(channel)
        for text in ("What is 31 + 26?", "Name three rivers.", "Write a short poem about rain."):
            prompt = PromptGroup(
                group_id=f"probe/{text}",
                num_samples=1,
                sampling=SamplingParams(temperature=0, max_tokens=24),
                chat=ChatPrompt(messages=[ChatMessage(role="user", content=text)]),
            )
            answer = await rpc.call(target, stub.Generate, GenerateRequest(prompt=prompt), timeout_s=120)
            assert not answer.rollout.void_reason
            (completion,) = answer.rollout.completions
            results.append((list(completion.token_ids), list(completion.logprobs)))
    return results


async def export(running: Deployment, model: Path, directory: Path) -> Path:
    """The newest version as a Hugging Face checkpoint, built from what is in the store alone."""
    target = running.variables["SLIPSTREAM_WEIGHTSYNC_TARGET"]
    store = open_store(running.settings)
    async with rpc.make_channel(target) as channel:
        stub = WeightSyncServiceStub(channel)

        async def plan(run_id: str, have: Version | None, want: Version | None) -> Sequence[Manifest]:
            request = PlanUpdateRequest(run_id=run_id, have=have, target=want)
            return list((await rpc.call(target, stub.PlanUpdate, request, timeout_s=30)).manifests)

        pulled = await Puller(store, plan).pull("vllm")
    await store.close()
    assert pulled is not None
    assert (pulled.version.epoch, pulled.version.number) == (1, 3)
    directory.mkdir()
    for file in model.iterdir():
        if file.suffix != ".safetensors":
            (directory / file.name).write_bytes(file.read_bytes())
    write_safetensors(directory / "model.safetensors", pulled.weights, {"format": "pt"})
    return directory
