"""The figures of a run, computed from what its topics hold."""

import math
from collections.abc import Sequence
from statistics import fmean, quantiles
from typing import Any

from slipstream.v1.train_pb2 import (
    GROUP_OUTCOME_DROPPED,
    GROUP_OUTCOME_TRAINED,
    GROUP_OUTCOME_VOID,
    StepRecord,
)
from slipstream.v1.weights_pb2 import ReplicaStatus
from slipstream.weights.manifest import version_str


def summarize(
    run_id: str,
    steps: Sequence[StepRecord],
    replicas: Sequence[ReplicaStatus],
    *,
    published: int,
    wall_s: float,
    resumed_from: int,
) -> dict[str, Any]:
    """Summary of a run, ready for JSON; figures that were never measured are null.

    Args:
        steps: every StepRecord of the run in log order; a step made again after a crash counts once.
        replicas: every status of the run's replicas since this process took the run.
        published: prompt groups published.
        wall_s: seconds this process ran the recipe.
        resumed_from: step that this process began at.
    """
    by_step = {record.step: record for record in steps}
    ordered = [by_step[step] for step in sorted(by_step)]
    here = [record for record in ordered if record.step > resumed_from]
    outcome = {group.sequence: group.outcome for record in ordered for group in record.groups}
    counts = {kind: sum(o == kind for o in outcome.values()) for kind in set(outcome.values())}
    rewards = _metric(ordered, "reward/mean")
    k3 = _metric(ordered, "k3/lag0")
    pauses = [status.swap.pause_ms for status in replicas if status.HasField("swap")]
    last = {status.replica_id: status for status in replicas}
    lags = [group.lag for r in ordered for group in r.groups if group.outcome == GROUP_OUTCOME_TRAINED]
    accounted = len(outcome)
    lost = sum(status.requests_lost for status in last.values())
    return {
        "run_id": run_id,
        "steps": len(ordered),
        "resumed_from_step": resumed_from,
        "reward_mean_first_5": _mean(rewards[:5]),
        "reward_mean_last_5": _mean(rewards[-5:]),
        "max_lag": max(lags, default=None),
        "mismatch_k3_lag0_mean": _mean(k3),
        "mismatch_k3_lag0_max": max(k3, default=None),
        "delta_bytes_mean": _mean(_metric(ordered, "publish/delta_bytes")),
        "delta_ratio_to_full_bf16": _ratio(ordered),
        "swap_pause_ms_p50": _quantile(pauses, 50),
        "swap_pause_ms_p95": _quantile(pauses, 95),
        "groups_trained": counts.get(GROUP_OUTCOME_TRAINED, 0),
        "groups_void": counts.get(GROUP_OUTCOME_VOID, 0),
        "groups_dropped": counts.get(GROUP_OUTCOME_DROPPED, 0),
        "requests_lost": lost + max(0, published - accounted),
        "wall_s": round(wall_s, 3),
        "tokens_generated_per_s": _generated(replicas) / wall_s if wall_s > 0 else None,
        "tokens_trained_per_s": sum(_metric(here, "tokens/trained")) / wall_s if wall_s > 0 else None,
        "versions": {name: version_str(status.version) for name, status in sorted(last.items())},
    }


def _metric(records: Sequence[StepRecord], name: str) -> list[float]:
    values = (record.metrics.get(name, math.nan) for record in records)
    return [value for value in values if math.isfinite(value)]


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


def _quantile(values: Sequence[float], percent: int) -> float | None:
    if len(values) < 2:
        return values[0] if values else None
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def _ratio(records: Sequence[StepRecord]) -> float | None:
    """Full bytes over delta bytes, both summed."""
    delta, full = sum(_metric(records, "publish/delta_bytes")), sum(_metric(records, "publish/full_bytes"))
    return full / delta if delta else None


def _generated(replicas: Sequence[ReplicaStatus]) -> int:
    """Tokens sampled between each replica's first and last status."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for status in replicas:
        first.setdefault(status.replica_id, status.tokens_generated)
        last[status.replica_id] = status.tokens_generated
    return sum(last[name] - first[name] for name in first)
