"""Group-relative advantages."""

from collections.abc import Sequence
from math import sqrt

_EPS = 1e-6


def group_advantages(rewards: Sequence[float | None], *, scale_by_std: bool = True) -> list[float | None]:
    """Advantages of one group's completions relative to the group.

    A = (R - mean) / (std + 1e-6), with the population standard deviation (GRPO, arXiv 2402.03300);
    without scaling A = R - mean (Dr. GRPO, arXiv 2503.20783).

    Args:
        rewards: one per completion; None where it could not be scored.

    Returns:
        One per completion; None where there is no reward, or where fewer than two rewards or all equal
        ones give nothing to compare.
    """
    valid = [r for r in rewards if r is not None]
    if len(valid) < 2 or max(valid) == min(valid):
        return [None] * len(rewards)
    mean = sum(valid) / len(valid)
    std = sqrt(sum((r - mean) ** 2 for r in valid) / len(valid))
    scale = 1.0 / (std + _EPS) if scale_by_std else 1.0
    return [None if r is None else (r - mean) * scale for r in rewards]
