"""Losses against values worked out by hand, and which tokens they let the gradient through to."""

import math

import pytest
import torch
from slipstream_trainer.losses import LOSSES, resolve
from torch import Tensor

from slipstream.errors import ConfigError


def run(
    name: str, ratio: float, advantage: float, mu: float = -1.0, **params: float
) -> tuple[float, float, bool]:
    """(loss, d loss / d logp, clipped) of one token with r = `ratio`."""
    logp = torch.tensor([mu + math.log(ratio)], dtype=torch.float64, requires_grad=True)
    constant = torch.tensor([mu], dtype=torch.float64)
    loss, clipped = resolve(name, params)(logp, constant, torch.tensor([advantage], dtype=torch.float64))
    (slope,) = torch.autograd.grad(loss.sum(), logp)
    return float(loss.detach()), float(slope), bool(clipped)


GRPO = {"eps_low": 0.2, "eps_high": 0.28, "dual_clip": 3.0}


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, False),
        (1.1, 2.0, -2.2, -2.2, False),
        (1.5, 2.0, -2.56, 0.0, True),  # at most 1 + eps_high
        (0.5, 2.0, -1.0, -1.0, False),  # too small and A > 0: pulled back up
        (0.5, -2.0, 1.6, 0.0, True),  # at least 1 - eps_low
        (1.5, -2.0, 3.0, 3.0, False),
        (4.0, -2.0, 6.0, 0.0, True),  # dual clip: at most -A c
    ],
)
def test_grpo_clips_where_ppo_does(
    ratio: float, advantage: float, loss: float, slope: float, clipped: bool
) -> None:
    found = run("grpo", ratio, advantage, **GRPO)
    assert found[:2] == pytest.approx((loss, slope))
    assert found[2] is clipped


def test_grpo_without_dual_clip_has_no_ceiling() -> None:
    assert run("grpo", 4.0, -2.0, **{**GRPO, "dual_clip": 0.0})[:2] == pytest.approx((8.0, 8.0))


def test_at_ratio_one_every_loss_has_the_policy_gradient() -> None:
    for name in LOSSES:
        _, slope, clipped = run(name, 1.0, 1.5)
        assert slope == pytest.approx(-1.5), name
        assert not clipped, name


@pytest.mark.parametrize(
    ("ratio", "slope", "clipped"),
    [(1.5, -3.0, False), (2.0, -4.0, False), (5.0, -4.0, True), (0.1, -0.2, False)],
)
def test_reinforce_truncates_the_weight_and_keeps_the_gradient(
    ratio: float, slope: float, clipped: bool
) -> None:
    loss, found, was = run("reinforce", ratio, 2.0, eps_high=1.0)
    assert found == pytest.approx(slope)
    assert was is clipped
    assert loss == pytest.approx(slope * (-1.0 + math.log(ratio)))


@pytest.mark.parametrize(("ratio", "weight"), [(0.5, 0.8), (1.1, 1.1), (9.0, 1.3)])
def test_cispo_clips_the_weight_on_both_sides_and_masks_no_token(ratio: float, weight: float) -> None:
    _, slope, clipped = run("cispo", ratio, -2.0, eps_low=0.2, eps_high=0.3)
    assert slope == pytest.approx(2.0 * weight)
    assert clipped is (weight != ratio)


def test_dppo_masks_by_probability_not_by_ratio() -> None:
    # From 0.1 to 0.25 the ratio is 2.5 but the probability moved by 0.15 only.
    rare = run("dppo_tv", 2.5, 1.0, mu=math.log(0.1), delta=0.2, beta=0.0)
    assert rare[:2] == pytest.approx((-2.5, -2.5))
    assert rare[2] is False
    likely = run("dppo_tv", 1.6, 1.0, mu=math.log(0.5), delta=0.2, beta=0.0)
    assert likely == (0.0, 0.0, True)
    assert run("dppo_tv", 0.5, -1.0, mu=math.log(0.5), delta=0.2, beta=0.0)[2] is True
    # Moving back towards mu is never masked.
    assert run("dppo_tv", 1.6, -1.0, mu=math.log(0.5), delta=0.2, beta=0.0)[2] is False
    # The penalty beta (log r)^2 still pulls a masked token back.
    assert run("dppo_tv", 1.6, 1.0, mu=math.log(0.5), delta=0.2, beta=0.1)[:2] == pytest.approx(
        (0.1 * math.log(1.6) ** 2, 0.2 * math.log(1.6))
    )


@pytest.mark.parametrize("name", list(LOSSES))
def test_a_token_all_but_impossible_in_the_trainer_or_the_engine_gives_finite_loss_and_gradient(
    name: str,
) -> None:
    for logp, mu in ((-1e4, -0.1), (-0.1, -1e4)):
        value = torch.tensor([logp], requires_grad=True)
        loss, _ = resolve(name, {})(value, torch.tensor([mu]), torch.tensor([-1.0]))
        torch.autograd.backward(loss.sum())
        assert torch.isfinite(loss).all()
        assert isinstance(value.grad, Tensor)
        assert torch.isfinite(value.grad).all()


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("ppo2", {}, "unknown loss 'ppo2'; known are grpo, reinforce, cispo, dppo_tv"),
        ("grpo", {"epsilon": 0.2}, "no parameter epsilon; it has eps_low=0.2"),
        ("grpo", {"eps_low": -0.1}, "eps_low must be from 0 to 1"),
        ("grpo", {"eps_high": float("nan")}, "eps_high must be"),
        ("grpo", {"eps_high": 3.0, "dual_clip": 3.0}, "dual_clip=3 must exceed"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(
    name: str, params: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(name, params)
