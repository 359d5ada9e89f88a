"""A replica with the torch engine, from prompts in the log to rollouts in the log."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest
from slipstream_rollout.settings import RolloutSettings
from slipstream_rollout.tokens import Tokens

from slipstream import topics
from slipstream.delta.tensors import Weights
from slipstream.settings import load
from slipstream.v1.common_pb2 import Version
from slipstream.v1.rollout_pb2 import ChatMessage, ChatPrompt, PromptGroup, RolloutGroup
from slipstream.v1.rollout_service_pb2 import DrainRequest, GenerateRequest, GetReplicaStatusRequest
from slipstream.v1.rollout_service_pb2_grpc import RolloutServiceStub
from slipstream.v1.weights_pb2 import ReplicaState

# A busy machine imports torch and transformers in a minute.
pytestmark = pytest.mark.timeout(300)

Prompt = Callable[..., PromptGroup]


def check_tiled(rollout: RolloutGroup) -> list[list[int]]:
    """Asserts that spans tile each completion; returns the version numbers, per completion."""
    numbers = []
    for completion in rollout.completions:
        ends = [0, *(span.end for span in completion.spans)]
        assert [span.start for span in completion.spans] == ends[:-1]
        assert ends[-1] == len(completion.token_ids) == len(completion.logprobs)
        numbers.append([span.version.number for span in completion.spans])
    return numbers


async def test_a_prompt_becomes_a_complete_rollout(
    replica: Any, weights: list[Weights], prompt: Prompt
) -> None:
    await replica.versions.publish("run", 0, weights[0])
    await replica.start()
    asked = prompt("run", 0, num_samples=4)
    await replica.ask(asked)
    rollout = (await replica.rollouts(1))["run/0"]
    assert rollout.prompt == asked
    assert list(rollout.prompt_token_ids) == list(asked.tokens.token_ids)
    assert [c.sample_id for c in rollout.completions] == [f"run/0/{i}" for i in range(4)]
    assert check_tiled(rollout) == [[0]] * 4
    assert all(span.version.epoch == 1 for c in rollout.completions for span in c.spans)
    assert all(p <= 0 for c in rollout.completions for p in c.logprobs)
    tokens = Tokens(replica._model)
    assert [c.text for c in rollout.completions] == [
        tokens.decode(list(c.token_ids)) for c in rollout.completions
    ]
    assert rollout.void_reason == ""
    await replica.stop()
    assert await replica.committed() == 1


async def test_equal_seeds_give_equal_completions(
    replica: Any, weights: list[Weights], prompt: Prompt
) -> None:
    await replica.versions.publish("run", 0, weights[0])
    await replica.start()
    for i in range(2):
        await replica.ask(prompt("run", i, seed=5))
    first, second = (await replica.rollouts(2)).values()
    assert [c.token_ids for c in first.completions] == [c.token_ids for c in second.completions]
    assert len({tuple(c.token_ids) for c in first.completions}) > 1


async def test_a_chat_is_built_with_the_models_template(
    replica: Any, weights: list[Weights], prompt: Prompt
) -> None:
    await replica.versions.publish("run", 0, weights[0])
    await replica.start()
    asked = prompt("run", 0)
    asked.chat.CopyFrom(ChatPrompt(messages=[ChatMessage(role="user", content="2+2?")]))
    await replica.ask(asked)
    rollout = (await replica.rollouts(1))["run/0"]
    ids = list(rollout.prompt_token_ids)
    assert ids[:2] == [1, 3]
    assert ids[-2:] == [2, 4]
    assert len(ids) == 8


async def test_nothing_is_sampled_before_the_run_has_a_version(
    replica: Any, weights: list[Weights], prompt: Prompt
) -> None:
    await replica.start()
    await replica.ask(prompt("run", 0))
    assert await replica.rollouts(1, timeout_s=1.0) == {}
    await replica.versions.publish("run", 4, weights[1])
    rollout = (await replica.rollouts(1))["run/0"]
    assert check_tiled(rollout) == [[4]] * 3


async def test_a_run_that_never_has_a_version_is_voided_with_the_reason(replica: Any, prompt: Prompt) -> None:
    await replica.start(version_wait_s=0.3)
    await replica.ask(prompt("ghost", 0))
    rollout = (await replica.rollouts(1))["ghost/0"]
    assert "ghost" in rollout.void_reason
    assert "trainer" in rollout.void_reason


async def test_weights_change_in_the_middle_of_a_generation_and_no_request_is_lost(
    replica: Any, weights: list[Weights], prompt: Prompt
) -> None:
    await replica.versions.publish("run", 0, weights[0])
    await replica.start(poll_versions_s=1000)
    asked = prompt("run", 0, num_samples=6, max_tokens=300)
    await replica.ask(asked)
    while not (await replica.statuses(1000, 0.1))[-1].groups_running:
        pass
    await replica.announce("run", await replica.versions.publish("run", 1, weights[1]))
    rollout = (await replica.rollouts(1))["run/0"]
    assert any(numbers == [0, 1] for numbers in check_tiled(rollout))
    swaps = [s.swap for s in await replica.statuses(1000, 0.2) if s.HasField("swap")]
    assert [s.version.number for s in swaps] == [0, 1]
    assert swaps[1].requests_in_flight > 0
    assert swaps[1].fetched_bytes > 0
    assert 0 < swaps[1].pause_ms < 1000
    status = (await replica.statuses(1000, 0.2))[-1]
    assert status.requests_lost == 0
    assert status.version == Version(epoch=1, number=1)


async def test_a_group_is_sampled_by_no_version_before_the_one_it_asks_for(
    replica: Any, weights: list[Weights], prompt: Prompt
) -> None:
    await replica.versions.publish("run", 0, weights[0])
    await replica.start(poll_versions_s=1000)
    for number in range(3):
        if number:
            await replica.versions.publish("run", number, weights[number])  # and announces nothing
        await replica.ask(prompt("run", number, min_version=Version(epoch=1, number=number)))
        rollout = (await replica.rollouts(number + 1))[f"run/{number}"]
        assert check_tiled(rollout) == [[number]] * 3
    # One that is still to come is waited for.
    await replica.ask(prompt("run", 3, min_version=Version(epoch=1, number=3)))
    assert len(await replica.rollouts(4, timeout_s=0.7)) == 3
    await replica.versions.publish("run", 3, weights[0])
    assert check_tiled((await replica.rollouts(4))["run/3"]) == [[3]] * 3


async def test_a_version_that_never_comes_voids_the_group_with_the_reason(
    replica: Any, weights: list[Weights], prompt: Prompt
) -> None:
    await replica.versions.publish("run", 0, weights[0])
    await replica.start(version_wait_s=0.3)
    await replica.ask(prompt("run", 0, min_version=Version(epoch=2, number=5)))
    assert "no version 2-5" in (await replica.rollouts(1))["run/0"].void_reason
    await replica.ask(prompt("run", 1))
    assert check_tiled((await replica.rollouts(2))["run/1"]) == [[0]] * 3


async def test_a_run_whose_weights_are_damaged_is_voided_and_does_not_hold_up_another(
    replica: Any, weights: list[Weights], prompt: Prompt
) -> None:
    await replica.versions.publish("bad", 0, weights[1])
    for shard in replica.versions.manifests[0].shards:
        await replica.blobs.put(shard.blob.key, b"x" * shard.blob.size_bytes)
    await replica.versions.publish("good", 0, weights[0])
    await replica.start(version_wait_s=0.5)
    await replica.ask(prompt("bad", 0))
    await replica.ask(prompt("good", 0))
    rollouts = await replica.rollouts(2)
    assert "run bad has no usable version" in rollouts["bad/0"].void_reason
    assert check_tiled(rollouts["good/0"]) == [[0]] * 3


def test_replicas_on_different_machines_have_different_names(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for machine in ("3F2a9c", "gpu-7"):
        monkeypatch.setattr("socket.gethostname", lambda name=machine: name)
        names.append(load(RolloutSettings, {"SLIPSTREAM_ROLLOUT_MODEL": "m"}).replica_id)
    assert names == ["3f2a9c", "gpu-7"]


async def test_runs_take_turns_and_each_is_sampled_by_its_own_weights(
    replica: Any, weights: list[Weights], prompt: Prompt
) -> None:
    await replica.versions.publish("red", 1, weights[1])
    await replica.versions.publish("blue", 2, weights[2])
    await replica.start()
    for i in range(3):
        await replica.ask(prompt("red", i))
        await replica.ask(prompt("blue", i))
    rollouts = await replica.rollouts(6)
    assert len(rollouts) == 6
    for group_id, rollout in rollouts.items():
        assert check_tiled(rollout) == [[1 if group_id.startswith("red") else 2]] * 3


async def test_a_message_that_is_no_prompt_is_set_aside_and_its_group_voided(
    replica: Any, weights: list[Weights], prompt: Prompt
) -> None:
    await replica.versions.publish("run", 0, weights[0])
    await replica.start()
    await replica.bus.producer.send(topics.PROMPTS.full_name("test"), b"\xff\xff", key="run/7")
    await replica.bus.producer.send(topics.PROMPTS.full_name("test"), b"\xff\xff", key="nonsense")
    await replica.ask(prompt("run", 8))
    rollouts = await replica.rollouts(2)
    assert rollouts["run/7"].prompt.sequence == 7
    assert rollouts["run/7"].prompt.run_id == "run"
    assert "no ce_type" in rollouts["run/7"].void_reason
    assert rollouts["run/8"].void_reason == ""
    await replica.stop()
    assert await replica.committed() == 3
    dead = topics.dead_letter_name("test", "rollout")
    assert sum(end for _, end in (await replica.bus.topic_offsets([dead])).values()) == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_tokens": 5000}, "exceed the model length of 400"),
        ({"temperature": 0.0}, "temperature is 0"),
        ({"temperature": -1.0}, "temperature is -1"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"max_tokens": 0}, "max_tokens 0"),
        ({"tokens": None}, "neither text, nor chat, nor tokens"),
        ({"tokens": {"token_ids": [5000]}}, "outside the vocabulary"),
        ({"tokens": {"token_ids": []}}, "no tokens"),
    ],
)
async def test_a_group_that_cannot_be_sampled_is_void_with_the_reason(
    replica: Any, weights: list[Weights], prompt: Prompt, changes: dict[str, Any], reason: str
) -> None:
    await replica.versions.publish("run", 0, weights[0])
    await replica.start()
    await replica.ask(prompt("run", 0, **changes))
    rollout = (await replica.rollouts(1))["run/0"]
    assert reason in rollout.void_reason
    assert not rollout.completions
    await replica.stop()
    assert await replica.committed() == 1


async def test_prompts_of_a_killed_replica_are_sampled_by_the_next(
    replica: Any, weights: list[Weights], prompt: Prompt
) -> None:
    await replica.versions.publish("run", 0, weights[0])
    await replica.start()
    for i in range(5):
        await replica.ask(prompt("run", i, max_tokens=200))
    await replica.rollouts(1)
    await replica.kill()
    done = await replica.rollouts(5, timeout_s=0.2)
    assert len(done) < 5
    await replica.close()

    heir = type(replica)(replica.log, replica.blobs, replica.versions, replica._model)
    await heir.start()
    try:
        rollouts = await heir.rollouts(5, timeout_s=120)
        assert {f"run/{i}" for i in range(5)} == rollouts.keys()
        assert all(not r.void_reason for r in rollouts.values())
    finally:
        await heir.close()


async def test_stopping_finishes_what_is_in_hand_and_commits_it(
    replica: Any, weights: list[Weights], prompt: Prompt
) -> None:
    await replica.versions.publish("run", 0, weights[0])
    await replica.start()
    await replica.ask(prompt("run", 0, max_tokens=300))
    while not (await replica.statuses(1000, 0.1))[-1].groups_running:
        pass
    await replica.stop()
    assert (await replica.rollouts(1)).keys() == {"run/0"}
    assert await replica.committed() == 1


async def test_a_drained_replica_takes_no_more_prompts_and_says_so(
    replica: Any, weights: list[Weights], prompt: Prompt
) -> None:
    await replica.versions.publish("run", 0, weights[0])
    await replica.start()
    await replica.ask(prompt("run", 0))
    await replica.rollouts(1)
    async with replica.channel() as channel:
        stub = RolloutServiceStub(channel)
        await stub.Drain(DrainRequest(), timeout=10)
        await replica.ask(prompt("run", 1))
        assert (await replica.rollouts(2, timeout_s=1)).keys() == {"run/0"}
        status = (await stub.GetReplicaStatus(GetReplicaStatusRequest())).status
        assert status.state == ReplicaState.REPLICA_STATE_DRAINING
        answer = await stub.Generate(GenerateRequest(prompt=prompt("run", 9)), timeout=10)
        assert check_tiled(answer.rollout) == [[0]] * 3
    await replica.stop()
    assert await replica.committed() == 1


async def test_generate_answers_directly_and_refuses_what_cannot_be_sampled(
    replica: Any, weights: list[Weights], prompt: Prompt
) -> None:
    await replica.versions.publish("run", 2, weights[1])
    await replica.start()
    async with replica.channel() as channel:
        stub = RolloutServiceStub(channel)
        base = await stub.Generate(GenerateRequest(prompt=prompt("", 0)))
        assert check_tiled(base.rollout) == [[0]] * 3
        answer = await stub.Generate(GenerateRequest(prompt=prompt("run", 0)))
        assert check_tiled(answer.rollout) == [[2]] * 3
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.Generate(GenerateRequest(prompt=prompt("run", 0, max_tokens=5000)))
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert await replica.rollouts(1, timeout_s=0.2) == {}


async def test_heartbeats_tell_what_the_replica_holds_and_did(
    replica: Any, weights: list[Weights], prompt: Prompt
) -> None:
    await replica.versions.publish("run", 3, weights[1])
    await replica.start()
    await replica.ask(prompt("run", 0))
    rollout = (await replica.rollouts(1))["run/0"]
    await asyncio.sleep(0.3)
    status = (await replica.statuses(1000, 0.2))[-1]
    assert (status.replica_id, status.run_id, status.engine) == ("rollout-0", "run", "torch")
    assert status.version == Version(epoch=1, number=3)
    assert status.state == ReplicaState.REPLICA_STATE_SERVING
    assert status.groups_done == 1
    assert status.tokens_generated == sum(len(c.token_ids) for c in rollout.completions)
    assert 0 < status.busy_s < status.uptime_s
    assert status.requests_lost == 0


async def test_a_version_of_another_model_voids_the_runs_groups_and_leaves_the_replica_up(
    replica: Any, weights: list[Weights], prompt: Prompt
) -> None:
    alien = {name: tensor for name, tensor in weights[0].items() if "layers.1" not in name}
    await replica.versions.publish("alien", 0, alien)
    await replica.versions.publish("run", 0, weights[0])
    await replica.start()
    await replica.ask(prompt("alien", 0))
    await replica.ask(prompt("run", 0))
    rollouts = await replica.rollouts(2)
    assert "different models" in rollouts["alien/0"].void_reason
    assert rollouts["run/0"].void_reason == ""
