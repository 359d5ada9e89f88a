"""The policy: its weights are the published ones, its names the checkpoint's; bad numbers change nothing."""

import shutil
from pathlib import Path

import pytest
import torch
from slipstream_trainer.model import AdamW, Policy
from slipstream_trainer.packing import Sample, pack
from transformers import AutoModelForCausalLM

from slipstream.delta.tensors import load_checkpoint, write_safetensors
from slipstream.errors import ConfigError, SlipstreamError
from tests.support.tiny_model import make_tiny_model

SAMPLE = Sample([1, 20, 21], [10, 11, 2], 1.0)


def export(policy: Policy, directory: Path) -> None:
    """Writes the bf16 weights as a Hugging Face checkpoint."""
    directory.mkdir()
    shutil.copy2(policy.path / "config.json", directory)
    write_safetensors(directory / "model.safetensors", policy.weights(), {"format": "pt"})


def gradient(policy: Policy) -> None:
    (row,) = pack([SAMPLE], 64)
    policy.backward(-policy.forward(row).logp.mean())


def logp(policy: Policy) -> torch.Tensor:
    return policy.forward(pack([SAMPLE], 64)[0]).logp.detach()


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_it_computes_with_exactly_the_weights_it_publishes(
    model_dir: Path, tmp_path: Path, compute: str
) -> None:
    policy = Policy(str(model_dir), device="cpu", compute=compute)
    policy.reset(AdamW())
    before = logp(policy)
    for _ in range(3):
        gradient(policy)
        policy.step(1e-3, 1.0)
    assert not torch.equal(logp(policy), before)
    # The masters keep what bf16 cannot hold.
    assert any(not torch.equal(m, m.bfloat16().float()) for m in policy.masters.values())
    export(policy, tmp_path / "out")
    again = Policy(str(tmp_path / "out"), device="cpu", compute=compute)
    assert torch.equal(logp(again), logp(policy))


@pytest.mark.parametrize("tied", [True, False])
def test_published_names_are_those_of_the_checkpoint(tmp_path: Path, tied: bool) -> None:
    directory = make_tiny_model(tmp_path / "m", tied=tied)
    policy = Policy(str(directory), device="cpu", compute="float32")
    published, stored = policy.weights(), load_checkpoint(directory)
    assert published.keys() == stored.keys()
    assert ("lm_head.weight" in published) is not tied
    for name, raw in published.items():
        assert (raw.dtype, raw.shape) == (stored[name].dtype, stored[name].shape)
        assert (raw.data == stored[name].data).all()


def test_a_published_copy_does_not_change_with_the_next_step(policy: Policy) -> None:
    policy.reset(AdamW())
    weights = policy.weights()
    kept = {name: raw.data.copy() for name, raw in weights.items()}
    gradient(policy)
    policy.step(1e-1, 0)
    assert all((weights[name].data == kept[name]).all() for name in kept)


def test_a_tied_head_stored_twice_is_published_once(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "m", tied=True)
    stored = load_checkpoint(directory)
    both = {**stored, "lm_head.weight": stored["model.embed_tokens.weight"]}
    write_safetensors(directory / "model.safetensors", both, {"format": "pt"})
    assert "lm_head.weight" not in Policy(str(directory), device="cpu", compute="float32").weights()


def test_a_checkpoint_whose_names_do_not_match_the_model_is_refused(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "m")
    stored = load_checkpoint(directory)
    write_safetensors(
        directory / "model.safetensors",
        {**stored, "model.layers.0.extra.weight": stored["model.norm.weight"]},
        {"format": "pt"},
    )
    with pytest.raises(ConfigError, match=r"model.layers.0.extra.weight"):
        Policy(str(directory), device="cpu", compute="float32")


@pytest.mark.parametrize("where", ["nowhere", ""])
def test_a_model_path_that_is_wrong_is_named(tmp_path: Path, where: str) -> None:
    with pytest.raises(ConfigError, match=r"no model at .*config.json"):
        Policy(str(tmp_path / where), device="cpu")


def test_a_gradient_that_is_not_finite_changes_neither_weights_nor_optimizer(policy: Policy) -> None:
    policy.reset(AdamW())
    gradient(policy)
    policy.step(1e-3, 1.0)
    masters = {name: m.clone() for name, m in policy.masters.items()}
    steps, moments = policy.optimizer_state()
    moments = {name: t.clone() for name, t in moments.items()}
    (row,) = pack([SAMPLE], 64)
    policy.backward((policy.forward(row).logp * float("inf")).sum())
    with pytest.raises(SlipstreamError, match="step is refused"):
        policy.step(1e-3, 1.0)
    assert all(torch.equal(policy.masters[name], masters[name]) for name in masters)
    assert policy.optimizer_state()[0] == steps
    assert all(torch.equal(policy.optimizer_state()[1][name], moments[name]) for name in moments)
    assert policy.step(1e-3, 1.0) == 0.0  # and nothing of it is left over


def test_the_gradient_is_clipped_to_the_norm(policy: Policy) -> None:
    policy.reset(AdamW())
    gradient(policy)
    before = {name: m.grad.clone() for name, m in policy.masters.items() if m.grad is not None}
    total = torch.cat([g.flatten() for g in before.values()]).norm()
    assert policy.step(0.0, 1e-3) == pytest.approx(float(total), rel=1e-5)
    _, moments = policy.optimizer_state()
    name = next(iter(before))
    torch.testing.assert_close(moments[f"m/{name}"], 0.1 * before[name] * 1e-3 / total, rtol=1e-3, atol=1e-9)


def test_micro_batches_add_up_to_the_whole(policy: Policy) -> None:
    samples = [Sample([1, 20], [10 + i, 2], 1.0) for i in range(6)]
    grads = []
    for budget in (1, 1024):
        policy.clear_gradients()
        for row in pack(samples, budget):
            policy.backward(policy.forward(row).logp.sum())
        grads.append({n: m.grad.clone() for n, m in policy.masters.items() if m.grad is not None})
    for name in grads[0]:
        torch.testing.assert_close(grads[0][name], grads[1][name], rtol=1e-3, atol=1e-4)


def test_published_weights_load_with_plain_transformers(policy: Policy, tmp_path: Path) -> None:
    export(policy, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
