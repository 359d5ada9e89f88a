"""The torch engine: exact, deterministic, swapped between two tokens."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import torch
from slipstream_rollout.engine import Sampling
from slipstream_rollout.engine_torch import TorchEngine
from slipstream_rollout.layouts import narrowed

from slipstream.delta.tensors import Weights
from slipstream.errors import ConfigError

pytestmark = pytest.mark.timeout(300)

PROMPT = [1, 20, 30, 40]
GREEDY = Sampling(max_tokens=16, temperature=0)


@pytest.fixture
async def engine(models: list[Path]) -> AsyncIterator[TorchEngine]:
    engine = TorchEngine(models[0], max_model_len=400, compute="float32")
    await engine.start()
    yield engine
    await engine.close()


async def test_after_each_swap_it_is_bit_for_bit_the_engine_loaded_from_that_checkpoint(
    engine: TorchEngine, models: list[Path], weights: list[Weights]
) -> None:
    for which in (1, 2, 0):
        await engine.stage(weights[which], list(weights[which]))
        await engine.commit(f"run/1-{which}")
        found = await engine.read_back()
        assert found.keys() == weights[which].keys() | {"lm_head.weight"}
        for name, tensor in weights[which].items():
            assert np.array_equal(found[name].data, tensor.data)
        assert np.array_equal(found["lm_head.weight"].data, found["model.embed_tokens.weight"].data)
        fresh = TorchEngine(models[which], max_model_len=400, compute="float32")
        await fresh.start()
        ours, theirs = [
            await e.generate(PROMPT, 3, Sampling(max_tokens=16, seed=4), "x") for e in (engine, fresh)
        ]
        await fresh.close()
        assert [(c.token_ids, c.logprobs) for c in ours] == [(c.token_ids, c.logprobs) for c in theirs]


@pytest.mark.parametrize(
    ("compute", "dtype", "tolerance"),
    [("float32", torch.float32, 1e-5), ("bfloat16", torch.bfloat16, 0.05)],
)
async def test_logprobs_are_those_of_the_model_in_the_type_to_compute_in(
    models: list[Path], weights: list[Weights], compute: str, dtype: torch.dtype, tolerance: float
) -> None:
    from transformers import AutoModelForCausalLM

    engine = TorchEngine(models[0], max_model_len=400, compute=compute)
    await engine.start()
    await engine.stage(weights[1], list(weights[1]))
    await engine.commit("run/1-1")
    (sampled,) = await engine.generate(PROMPT, 1, Sampling(max_tokens=12, temperature=0.6, seed=2), "x")
    await engine.close()
    model = AutoModelForCausalLM.from_pretrained(models[1], dtype=dtype).eval()
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + sampled.token_ids])).logits[0].float() / 0.6
    table = torch.log_softmax(logits, -1)[len(PROMPT) - 1 : -1]
    expected = table.gather(1, torch.tensor(sampled.token_ids)[:, None])[:, 0]
    assert torch.allclose(expected, torch.tensor(sampled.logprobs), atol=tolerance)


def test_what_bf16_cannot_hold_is_read_back_as_it_is() -> None:
    stored = torch.tensor([1.0, -0.0, 3.5], dtype=torch.bfloat16)
    assert narrowed(stored.float()).view(torch.int16).equal(stored.view(torch.int16))
    finer = torch.tensor([1.0, 1.0 + 2**-20])
    assert narrowed(finer).equal(finer)


async def test_equal_seeds_repeat_and_siblings_differ(engine: TorchEngine) -> None:
    sampling = Sampling(max_tokens=16, seed=9)
    first = await engine.generate(PROMPT, 4, sampling, "a")
    second = await engine.generate(PROMPT, 4, sampling, "b")
    assert [c.token_ids for c in first] == [c.token_ids for c in second]
    assert len({tuple(c.token_ids) for c in first}) == 4


async def test_a_stop_token_ends_a_completion_and_is_part_of_it(engine: TorchEngine) -> None:
    (free,) = await engine.generate(PROMPT, 1, GREEDY, "a")
    stop = free.token_ids[5]
    (ended,) = await engine.generate(
        PROMPT, 1, Sampling(max_tokens=16, temperature=0, stop_token_ids=(stop,)), "b"
    )
    assert ended.stopped
    assert ended.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert not free.stopped
    assert len(free.token_ids) == 16


async def test_a_swap_in_the_middle_keeps_every_completion(
    engine: TorchEngine, weights: list[Weights]
) -> None:
    running = asyncio.ensure_future(engine.generate(PROMPT, 4, Sampling(max_tokens=300, seed=1), "x"))
    while not engine.in_flight:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await engine.stage(weights[1], list(weights[1]))
    done = await engine.commit("run/1-1")
    assert done.in_flight > 0
    mixed = 0
    for completion in await running:
        assert [s.label for s in completion.spans] in ([""], ["", "run/1-1"])
        assert completion.spans[0].start == 0
        assert completion.spans[-1].end == len(completion.token_ids)
        mixed += len(completion.spans) - 1
    assert mixed == done.in_flight


async def test_weights_of_another_model_are_refused_and_nothing_changes(
    engine: TorchEngine, weights: list[Weights]
) -> None:
    before = await engine.generate(PROMPT, 1, GREEDY, "a")
    name = "model.embed_tokens.weight"
    with pytest.raises(ConfigError, match="no tensor alien"):
        await engine.stage({"alien": weights[0][name]}, ["alien"])
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is"):
        await engine.stage({"model.norm.weight": weights[0][name]}, ["model.norm.weight"])
    assert [c.token_ids for c in await engine.generate(PROMPT, 1, GREEDY, "b")] == [
        c.token_ids for c in before
    ]
