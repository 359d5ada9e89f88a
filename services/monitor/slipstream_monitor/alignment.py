"""Merging mismatch statistics of many groups into those of one step. Pure.

With r = pi_train / mu_rollout per token, the means k1 = mean(-log r), k3 = mean(r - 1 - log r) and the
clipped share merge by their token counts, and the largest |dp| is the largest of all. The effective sample
size merges exactly too: mean(r) = 1 + k3 - k1, and a share ess = (sum r)^2 / (n * sum r^2) gives back
sum r^2, so that the merged value equals the one computed from all tokens at once.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.v1.train_pb2 import LagStats


@dataclass
class LagSum:
    """Running sums over the tokens of one lag."""

    lag: int
    num_tokens: int = 0
    k1: float = 0.0
    k3: float = 0.0
    clipped: float = 0.0
    max_abs_dp: float = 0.0
    ratio_tokens: int = 0
    """Tokens whose effective sample size is known; the two sums below run over these."""
    ratio: float = 0.0
    ratio_squared: float = 0.0

    def add(self, stats: LagStats) -> None:
        """Adds a group's statistics. Entries without tokens count nothing; a NaN stays visible."""
        n = stats.num_tokens
        if n <= 0:
            return
        self.num_tokens += n
        self.k1 += n * stats.k1
        self.k3 += n * stats.k3
        self.clipped += n * stats.clipped
        self.max_abs_dp = _largest(self.max_abs_dp, stats.max_abs_dp)
        mean_ratio = 1.0 + stats.k3 - stats.k1
        if stats.ess > 0 and mean_ratio > 0 and math.isfinite(mean_ratio) and math.isfinite(stats.ess):
            self.ratio_tokens += n
            self.ratio += n * mean_ratio
            self.ratio_squared += n * mean_ratio * (mean_ratio / stats.ess)

    def stats(self) -> LagStats:
        """The merged statistics; `ess` is 0 where no entry told it."""
        n = self.num_tokens
        if n == 0:
            return LagStats(lag=self.lag)
        return LagStats(
            lag=self.lag,
            num_tokens=n,
            k1=self.k1 / n,
            k3=self.k3 / n,
            max_abs_dp=self.max_abs_dp,
            ess=self._ess(),
            clipped=self.clipped / n,
        )

    def _ess(self) -> float:
        if self.ratio_squared <= 0:
            return 0.0
        return min(1.0, (self.ratio / self.ratio_squared) * (self.ratio / self.ratio_tokens))


def add_all(sums: dict[int, LagSum], by_lag: Iterable[LagStats]) -> None:
    """Adds a record's entries to the sums of their lags."""
    for stats in by_lag:
        sums.setdefault(stats.lag, LagSum(stats.lag)).add(stats)


def merge(entries: Iterable[LagStats]) -> list[LagStats]:
    """One entry per lag with any tokens, smallest lag first."""
    sums: dict[int, LagSum] = {}
    add_all(sums, entries)
    return [sums[lag].stats() for lag in sorted(sums) if sums[lag].num_tokens]


def _largest(a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)
