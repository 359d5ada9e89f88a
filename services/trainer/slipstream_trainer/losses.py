"""Policy-gradient losses by name. Pure functions of tensors.

Shapes: all tensors are `[T]`, one entry per sampled token of a micro-batch, in any order.

    logp       log pi(token), the trainer's, with gradient
    mu         log mu(token), recorded when the token was sampled, by whatever version sampled it
    advantage  A of the token's sample

A loss returns its value per token, and which tokens it clipped or masked (no gradient reaches those). Callers
sum and divide by the number of tokens of the whole batch, so that every token weighs the same (token mean).

All losses are anchored on r = pi / mu, the ratio to the policy that really sampled the token, old or new: one
correction for staleness and numerics together, and nothing to multiply on top of it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.errors import ConfigError

_MAX_LOG_RATIO = 20.0
Params = Mapping[str, float]
LossFn = Callable[[Tensor, Tensor, Tensor, Params], tuple[Tensor, Tensor]]


def log_ratio(logp: Tensor, mu: Tensor) -> Tensor:
    """log r, kept within +-20 so that its exponential is finite."""
    return (logp - mu).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def grpo(logp: Tensor, mu: Tensor, advantage: Tensor, p: Params) -> tuple[Tensor, Tensor]:
    """PPO's clip: max(-A r, -A clip(r, 1 - eps_low, 1 + eps_high)), and for A < 0 at most -A dual_clip."""
    ratio = log_ratio(logp, mu).exp()
    plain = -advantage * ratio
    inside = ratio.clamp(1 - p["eps_low"], 1 + p["eps_high"])
    loss = torch.maximum(plain, -advantage * inside)
    clipped = (loss > plain) & (inside != ratio)
    if p["dual_clip"] > 0:
        ceiling = -advantage * p["dual_clip"]
        over = (advantage < 0) & (loss > ceiling)
        loss, clipped = torch.where(over, ceiling, loss), clipped | over
    return loss, clipped


def reinforce(logp: Tensor, mu: Tensor, advantage: Tensor, p: Params) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling: -A min(r, 1 + eps_high) log pi, the weight held constant."""
    ratio = log_ratio(logp, mu).exp().detach()
    weight = ratio.clamp(max=1 + p["eps_high"])
    return -advantage * weight * logp, weight < ratio


def cispo(logp: Tensor, mu: Tensor, advantage: Tensor, p: Params) -> tuple[Tensor, Tensor]:
    """-A clip(r, 1 - eps_low, 1 + eps_high) log pi, the weight held constant; no token is masked."""
    ratio = log_ratio(logp, mu).exp().detach()
    weight = ratio.clamp(1 - p["eps_low"], 1 + p["eps_high"])
    return -advantage * weight * logp, weight != ratio


def dppo_tv(logp: Tensor, mu: Tensor, advantage: Tensor, p: Params) -> tuple[Tensor, Tensor]:
    """Masks tokens that moved too far the way A pushes: -A r + beta (log r)^2, without the first term where
    A > 0 and pi - mu > delta or A < 0 and pi - mu < -delta (probabilities)."""
    logr = log_ratio(logp, mu)
    dp = (logp.exp() - mu.exp()).detach()
    masked = ((advantage > 0) & (dp > p["delta"])) | ((advantage < 0) & (dp < -p["delta"]))
    return torch.where(masked, 0.0, -advantage * logr.exp()) + p["beta"] * logr.square(), masked


@dataclass(frozen=True)
class Loss:
    """A loss with its parameters' defaults and allowed ranges."""

    function: LossFn
    ranges: Mapping[str, tuple[float, float, float]]
    """Name -> (default, lowest, highest)."""


LOSSES: Mapping[str, Loss] = {
    "grpo": Loss(grpo, {"eps_low": (0.2, 0, 1), "eps_high": (0.28, 0, 10), "dual_clip": (3.0, 0, 100)}),
    "reinforce": Loss(reinforce, {"eps_high": (1.0, 0, 100)}),
    "cispo": Loss(cispo, {"eps_low": (1.0, 0, 1), "eps_high": (4.0, 0, 100)}),
    "dppo_tv": Loss(dppo_tv, {"delta": (0.2, 0, 1), "beta": (1e-3, 0, 10)}),
}


def resolve(name: str, params: Params) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The named loss with its parameters set.

    Raises:
        ConfigError: unknown name or parameter, a value out of range, or settings that cancel each other.
    """
    if name not in LOSSES:
        raise ConfigError(f"unknown loss {name!r}; known are {', '.join(LOSSES)}")
    loss = LOSSES[name]
    if unknown := sorted(set(params) - set(loss.ranges)):
        known = ", ".join(f"{key}={default:g}" for key, (default, _, _) in loss.ranges.items())
        raise ConfigError(f"loss {name} has no parameter {', '.join(unknown)}; it has {known}")
    values = {key: params.get(key, default) for key, (default, _, _) in loss.ranges.items()}
    for key, (_, low, high) in loss.ranges.items():
        if not (math.isfinite(values[key]) and low <= values[key] <= high):
            raise ConfigError(f"loss {name}: {key} must be from {low:g} to {high:g}, not {values[key]:g}")
    if name == "grpo" and 0 < values["dual_clip"] <= 1 + values["eps_high"]:
        raise ConfigError(
            f"loss grpo: dual_clip={values['dual_clip']:g} must exceed 1 + eps_high = "
            f"{1 + values['eps_high']:g}, or be 0 for none; less would stop tokens that the clip lets pass"
        )
    return lambda logp, mu, advantage: loss.function(logp, mu, advantage, values)
