"""How far trainer and engine disagree about the same tokens. Pure.

With r = pi / mu (trainer over rollout), k1 = -log r and k3 = r - 1 - log r estimate KL(mu || pi) from tokens
that mu sampled. Lag 0 stands apart from the rest: there only numerics differ. The effective sample size uses
raw weights; truncating them first would hide the tail that it is there to show.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from slipstream.v1.train_pb2 import LagStats

Floats = NDArray[np.float64]
_MAX_LOG_RATIO = 20.0


def lag_stats(lag: NDArray[np.int64], logp: Floats, mu: Floats, clipped: NDArray[np.bool_]) -> list[LagStats]:
    """Statistics of tokens (all arrays `[T]`), one entry per lag that occurs, ascending."""
    return [
        _stats(int(value), logp[lag == value], mu[lag == value], clipped[lag == value])
        for value in np.unique(lag)
    ]


def _stats(lag: int, logp: Floats, mu: Floats, clipped: NDArray[np.bool_]) -> LagStats:
    log_r = np.clip(logp - mu, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    r = np.exp(log_r)
    return LagStats(
        lag=lag,
        num_tokens=len(r),
        k1=float(-log_r.mean()),
        k3=float((np.expm1(log_r) - log_r).mean()),
        max_abs_dp=float(np.abs(np.exp(logp) - np.exp(mu)).max()),
        ess=float(r.sum() ** 2 / (len(r) * np.square(r).sum())),
        clipped=float(clipped.mean()),
    )


def summary(groups: Iterable[LagStats]) -> dict[str, float]:
    """One number each for the step's record: token means at lag 0 and over all lags."""
    entries = list(groups)
    result: dict[str, float] = {}
    for suffix, chosen in (("/lag0", [e for e in entries if e.lag == 0]), ("", entries)):
        tokens = sum(e.num_tokens for e in chosen)
        if not tokens:
            continue
        for name in ("k1", "k3", "ess", "clipped"):
            result[f"{name}{suffix}"] = sum(getattr(e, name) * e.num_tokens for e in chosen) / tokens
        result[f"max_abs_dp{suffix}"] = max(e.max_abs_dp for e in chosen)
    return result
