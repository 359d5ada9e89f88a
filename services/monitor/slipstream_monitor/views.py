"""What the page shows, as JSON-ready dicts. Pure.

Absent and non-finite numbers are None. Times are seconds since the Unix epoch.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from slipstream.v1.common_pb2 import Version
from slipstream.v1.monitor_service_pb2 import TopicStatus
from slipstream.v1.train_pb2 import (
    GROUP_OUTCOME_DROPPED,
    GROUP_OUTCOME_TRAINED,
    GROUP_OUTCOME_VOID,
    GateState,
)
from slipstream.v1.weights_pb2 import ReplicaState
from slipstream_monitor.rates import rates, recent_rates
from slipstream_monitor.state import MonitorState, Replica, Run, Step, Swap

Json = dict[str, Any]

GONE_S = 600.0
"""Replicas silent for longer are no longer shown."""
SILENT_S = 15.0
"""Replicas silent for longer have missed several heartbeats."""
RECENT_S = 15.0
"""Span over which a replica's own rates are taken."""
GROUPS_SHOWN = 40
OPEN_ROWS = 3
"""Last steps whose rates may still change when later heartbeats come in."""

METRICS = {
    "reward": "reward/mean",
    "reward_std": "reward/std",
    "loss": "loss",
    "entropy": "entropy",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "clipped": "clipped",
    "k3_lag0": "k3/lag0",
    "lag_mean": "lag/mean",
    "delta_bytes": "publish/delta_bytes",
    "full_bytes": "publish/full_bytes",
    "ratio": "publish/ratio",
    "changed": "publish/changed",
    "length": "length/mean",
    "truncated": "truncated",
    "wait_s": "time/wait_s",
    "forward_backward_s": "time/forward_backward_s",
    "optim_s": "time/optim_s",
    "publish_s": "time/publish_s",
}
"""Column -> name in StepRecord.metrics."""

_OUTCOMES = {GROUP_OUTCOME_TRAINED: "trained", GROUP_OUTCOME_VOID: "void", GROUP_OUTCOME_DROPPED: "dropped"}


def overview(state: MonitorState, run: Run | None, topics: Iterable[TopicStatus], now_s: float) -> Json:
    """Everything on the page that is not a chart."""
    return {
        "runs": state.run_ids(),
        "run": run_summary(run) if run else None,
        "replicas": [_replica(state, r, now_s) for r in shown_replicas(state, now_s)],
        "topics": [{"topic": t.topic, "messages": t.messages, "behind": t.behind} for t in topics],
    }


def shown_replicas(state: MonitorState, now_s: float) -> list[Replica]:
    """Replicas heard of lately, by name."""
    found = [r for r in state.replicas.values() if now_s - r.time_ms / 1000 <= GONE_S]
    return sorted(found, key=lambda r: r.status.replica_id)


def run_summary(run: Run) -> Json:
    """Where a run stands."""
    last, alert = run.steps.newest, run.alerts[-1] if run.alerts else None
    return {
        "id": run.run_id,
        "opened": run.opened_ms / 1000,
        "seen": run.last_ms / 1000,
        "step": last.record.step if last else None,
        "version": _version(last.record.version) if last else None,
        "head": _version(run.head.version) if run.head else None,
        "gate": gate_name(run.gate),
        "alert": {"time": alert[0] / 1000, "step": alert[1].step, "reason": alert[1].reason}
        if alert
        else None,
        "groups": {
            outcome: sum(getattr(step, outcome) for step in run.steps.entries.values())
            for outcome in _OUTCOMES.values()
        },
        "last_groups": _last_groups(run),
    }


def gate_name(gate: GateState) -> str:
    """`ok`, `warn`, `tighten` or `hold`."""
    known = gate in GateState.values() and gate != GateState.GATE_STATE_UNSPECIFIED
    return GateState.Name(gate).removeprefix("GATE_STATE_").lower() if known else "ok"


def series(run: Run, after: int = -1) -> Json:
    """Chart data: what changed after a serial, or all of it.

    Returns:
        `steps`: columns of equal length, by step; `mismatch`: [step, lag, tokens, k1, k3, max |dp|, ess,
        clipped] rows; `swaps`: [version number, replica, pause ms, fetch s, decode s, stage s, bytes,
        requests in flight] rows.
    """
    numbers = sorted(run.steps.entries)
    fresh = {n for n in numbers if run.steps.entries[n].serial > after} | set(numbers[-OPEN_ROWS:])
    return {
        "steps": _columns(run, [n for n in numbers if n in fresh]),
        "mismatch": [row for n in sorted(run.mismatch.entries) for row in _mismatch(run, n, after)],
        "swaps": [_swap(swap) for swap in run.swaps if swap.serial > after],
    }


def number(value: float | None) -> float | None:
    """The value where JSON can hold it, to six digits."""
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def _columns(run: Run, numbers: Sequence[int]) -> Json:
    steps = [run.steps.entries[n] for n in numbers]
    ends = [step.time_ms / 1000 for step in steps]
    starts = [_start(run, step) for step in steps]
    generated = rates(run.curves.values(), starts, ends)
    columns: Json = {"step": list(numbers), "time": ends}
    for column, metric in METRICS.items():
        columns[column] = [step.metrics.get(metric) for step in steps]
    columns["lag_max"] = [
        _first(step.metrics.get("lag/max"), step.max_lag if step.trained else None) for step in steps
    ]
    columns["step_s"] = [
        _first(step.metrics.get("time/step_s"), end - start if end > start else None)
        for step, start, end in zip(steps, starts, ends, strict=True)
    ]
    columns["trainer_idle"] = [
        number(min(1.0, wait / total)) if wait is not None and total else None
        for wait, total in zip(columns["wait_s"], columns["step_s"], strict=True)
    ]
    columns["replicas_idle"] = [number(value) for value in generated.idle_share]
    columns["generated_per_s"] = [number(value) for value in generated.tokens_per_s]
    columns["trained_per_s"] = [
        number(tokens / total)
        if total and (tokens := _first(step.metrics.get("tokens/trained"), step.tokens))
        else None
        for step, total in zip(steps, columns["step_s"], strict=True)
    ]
    return columns


def _start(run: Run, step: Step) -> float:
    """When the work of a step began: at the step before, or as long ago as it says where that is unknown."""
    before = run.steps.entries.get(step.record.step - 1)
    if before and before.record.version.epoch == step.record.version.epoch and before.time_ms < step.time_ms:
        return before.time_ms / 1000
    return step.time_ms / 1000 - (step.metrics.get("time/step_s") or 0.0)


def _mismatch(run: Run, step: int, after: int) -> list[list[float | None]]:
    entry = run.mismatch.entries[step]
    if entry.serial <= after:
        return []
    merged = (entry.sums[lag].stats() for lag in sorted(entry.sums))
    return [
        [step, s.lag, s.num_tokens, *map(number, (s.k1, s.k3, s.max_abs_dp, s.ess, s.clipped))]
        for s in merged
        if s.num_tokens
    ]


def _swap(swap: Swap) -> list[float | str | None]:
    report = swap.report
    times = (report.pause_ms, report.fetch_s, report.decode_s, report.stage_s)
    return [
        report.version.number,
        swap.replica_id,
        *map(number, times),
        report.fetched_bytes,
        report.requests_in_flight,
    ]


def _last_groups(run: Run) -> list[Json]:
    """Newest groups first. Those not trained on come with their reason."""
    rows: list[Json] = []
    for step in sorted(run.steps.entries, reverse=True):
        record = run.steps.entries[step].record
        for group in sorted(record.groups, key=lambda g: g.sequence, reverse=True):
            if len(rows) == GROUPS_SHOWN:
                return rows
            rows.append(
                {
                    "step": step,
                    "sequence": group.sequence,
                    "outcome": _OUTCOMES.get(group.outcome, "unknown"),
                    "reason": group.reason,
                    "lag": group.lag,
                    "reward": number(group.mean_reward),
                    "tokens": group.num_tokens,
                }
            )
    return rows


def _replica(windows: MonitorState, replica: Replica, now_s: float) -> Json:
    status = replica.status
    age = max(0.0, now_s - replica.time_ms / 1000)
    state = status.state if status.state in ReplicaState.values() else ReplicaState.REPLICA_STATE_UNSPECIFIED
    run = windows.runs.get(status.run_id)
    behind = run.head.version.number - status.version.number if run and run.head else None
    recent = recent_rates(run.curves.get(status.replica_id) if run else None, RECENT_S)
    return {
        "id": status.replica_id,
        "run": status.run_id,
        "version": _version(status.version) if status.HasField("version") else None,
        "behind": behind,
        "state": "silent"
        if age > SILENT_S
        else ReplicaState.Name(state).removeprefix("REPLICA_STATE_").lower(),
        "detail": status.detail,
        "engine": status.engine,
        "age": round(age, 1),
        "groups_running": status.groups_running,
        "groups_done": status.groups_done,
        "tokens": status.tokens_generated,
        "lost": status.requests_lost,
        "tokens_per_s": number(recent.tokens_per_s[0]),
        "idle": number(recent.idle_share[0]),
        "pause_ms": number(replica.last_swap.pause_ms) if replica.last_swap else None,
    }


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)


def _version(version: Version) -> str:
    return f"{version.epoch}-{version.number}"
