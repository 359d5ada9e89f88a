"""Packing: every sample sees what it would see alone, and nothing is computed twice within a row."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream_trainer.model import Policy
from slipstream_trainer.packing import Row, Sample, pack

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=5)
SAMPLES = st.lists(st.builds(Sample, TOKENS, TOKENS, st.sampled_from([1.0, 0.7])), max_size=12)


def context(row: Row, place: int) -> list[int]:
    """Tokens that a place attends to, in order of their positions."""
    seen = np.flatnonzero(row.mask()[place])
    assert row.positions[seen].tolist() == list(range(len(seen)))
    return [int(t) for t in row.tokens[seen]]


@settings(deadline=None)
@given(SAMPLES, st.integers(1, 40))
def test_each_sampled_token_is_predicted_from_exactly_its_own_prefix(
    samples: list[Sample], budget: int
) -> None:
    found: dict[int, list[tuple[list[int], int]]] = {}
    for row in pack(samples, budget):
        for index, predictor, target in zip(row.sample, row.predictor, row.target, strict=True):
            assert row.temperature == samples[index].temperature
            prefix = context(row, int(row.predictors[predictor]))
            found.setdefault(int(index), []).append((prefix, int(target)))
    for index, sample in enumerate(samples):
        whole = [*sample.prompt, *sample.completion]
        expected = [(whole[:i], whole[i]) for i in range(len(sample.prompt), len(whole))]
        assert found[index] == expected


@settings(deadline=None)
@given(SAMPLES, st.integers(1, 40))
def test_rows_keep_the_budget_and_hold_no_prefix_twice(samples: list[Sample], budget: int) -> None:
    for row in pack(samples, budget):
        alone = len(set(row.sample.tolist())) == 1
        assert len(row.tokens) <= budget or alone
        prefixes = [tuple(context(row, place)) for place in range(len(row.tokens))]
        assert len(set(prefixes)) == len(prefixes)


def test_a_group_computes_its_prompt_once() -> None:
    prompt = list(range(60))
    group = [Sample(prompt, [100 + i] * 12, 1.0) for i in range(8)]
    (row,) = pack(group, 1024)
    assert len(row.tokens) == 60 + 8 * 11
    assert len(row.predictors) == 1 + 8 * 11


def test_samples_without_tokens_are_left_out() -> None:
    assert pack([Sample([1], [], 1.0)], 8) == []


def _logp(policy: Policy, sample: Sample) -> torch.Tensor:
    """Plain transformers, one sample at a time."""
    ids = torch.tensor([[*sample.prompt, *sample.completion]])
    logits = policy._module(input_ids=ids).logits[0, len(sample.prompt) - 1 : -1].float() / sample.temperature
    logp: torch.Tensor = logits.log_softmax(-1)
    return logp[torch.arange(len(sample.completion)), torch.tensor(list(sample.completion))]


@pytest.mark.parametrize(("compute", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.06)])
def test_packed_log_probs_and_gradients_equal_those_of_each_sample_alone(
    model_dir: object, compute: str, tolerance: float
) -> None:
    policy = Policy(str(model_dir), device="cpu", compute=compute)
    rng = np.random.default_rng(0)

    def draw(count: int) -> list[int]:
        return [int(t) for t in rng.integers(3, 100, count)]

    common = draw(9)
    samples = [
        Sample([*common, *prompt], draw(int(rng.integers(1, 9))), temperature)
        for prompt, temperature in ((draw(4), 1.0), (draw(6), 1.0), (draw(2), 0.7))
        for _ in range(4)
    ]
    packed = torch.cat([policy.forward(row).logp for row in pack(samples, 48)])
    order = [index for row in pack(samples, 48) for index in dict.fromkeys(row.sample.tolist())]
    alone = torch.cat([_logp(policy, samples[index]) for index in order])
    torch.testing.assert_close(packed, alone, atol=tolerance, rtol=0)

    policy.backward(packed.mean())
    grads = {name: m.grad.clone() for name, m in policy.masters.items() if m.grad is not None}
    policy.clear_gradients()
    policy.backward(alone.mean())
    assert grads.keys() == policy.masters.keys()
    for name, master in policy.masters.items():
        assert master.grad is not None
        difference = (grads[name] - master.grad).norm() / master.grad.norm()
        assert difference < (1e-4 if compute == "float32" else 0.05), name


def test_entropy_is_that_of_the_distribution_the_tokens_were_drawn_from(policy: Policy) -> None:
    sample = Sample([1, 5, 6], [7, 8], 0.5)
    (row,) = pack([sample], 64)
    logits = policy._module(input_ids=torch.tensor([[1, 5, 6, 7]])).logits[0, 2:4].float() / 0.5
    p = logits.softmax(-1)
    expected = -(p * p.log()).sum(-1)
    torch.testing.assert_close(policy.forward(row).entropy, expected, atol=1e-4, rtol=0)
