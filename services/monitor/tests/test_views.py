"""What the page is told."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream_monitor.state import MonitorState
from slipstream_monitor.views import METRICS, OPEN_ROWS, gate_name, overview, run_summary, series

from slipstream.v1.common_pb2 import Version
from slipstream.v1.train_pb2 import (
    AlignmentRecord,
    GateState,
    GroupOutcome,
    GroupRecord,
    LagStats,
    StepRecord,
)
from slipstream.v1.weights_pb2 import ReplicaStatus
from tests.support.page_demo import FULL_BYTES, run


def state_of(steps: int, start_ms: int = 0) -> MonitorState:
    state = MonitorState()
    for message, time_ms in run("r", steps, start_ms=start_ms):
        state.apply(message, time_ms)
    return state


def test_series_of_a_run_have_a_value_for_every_step() -> None:
    found = state_of(6).find()
    assert found is not None
    shown = series(found)
    columns = shown["steps"]
    assert columns["step"] == [1, 2, 3, 4, 5, 6]
    assert all(len(values) == 6 for values in columns.values())
    assert {name for name, values in columns.items() if None in values} <= {
        "k3_lag0",
        "clipped",
        "length",
        "truncated",
    }
    assert all(0 <= share <= 1 for name in ("trainer_idle", "replicas_idle") for share in columns[name])
    assert all(40 < rate < 110 for rate in columns["generated_per_s"])
    assert set(columns["full_bytes"]) == {FULL_BYTES}
    assert {(step, lag) for step, lag, *_ in shown["mismatch"]} == {
        (s, g) for s in range(1, 7) for g in range(min(2, s - 1) + 1)
    }
    assert len(shown["swaps"]) == 12


def test_later_series_hold_what_changed_and_the_open_rows() -> None:
    state = state_of(6)
    found = state.find()
    assert found is not None
    shown = series(found, after=state.serial)
    assert shown["steps"]["step"] == [4, 5, 6][-OPEN_ROWS:]
    assert (shown["mismatch"], shown["swaps"]) == ([], [])


def test_absent_metrics_are_none_and_what_the_groups_say_is_used() -> None:
    groups = [GroupRecord(outcome=GroupOutcome.GROUP_OUTCOME_TRAINED, lag=2, num_tokens=50)]
    state = MonitorState()
    for step in (1, 2):
        state.apply(
            StepRecord(run_id="r", step=step, version=Version(epoch=1, number=step), groups=groups),
            step * 5000,
        )
    found = state.find()
    assert found is not None
    columns = series(found)["steps"]
    assert all(columns[name] == [None, None] for name in METRICS)
    assert columns["lag_max"] == [2, 2]
    assert columns["step_s"] == [None, 5]
    assert columns["trained_per_s"] == [None, 10]


@settings(deadline=None)
@given(
    st.dictionaries(st.sampled_from([*METRICS.values(), "time/step_s", "tokens/trained", "x"]), st.floats()),
    st.floats(),
)
def test_whatever_a_record_holds_is_valid_json(metrics: dict[str, float], value: float) -> None:
    state = MonitorState()
    status = ReplicaStatus(replica_id="x", run_id="r", busy_s=value, uptime_s=value)
    status.swap.pause_ms = value
    stats = LagStats(num_tokens=3, k1=value, k3=value, ess=value, max_abs_dp=value, clipped=value)
    groups = [GroupRecord(mean_reward=value)]
    for time_ms in (1000, 2000):
        step = time_ms // 1000
        state.apply(status, time_ms)
        status.busy_s += 1
        state.apply(AlignmentRecord(run_id="r", step=step, group_id="g", by_lag=[stats]), time_ms)
        state.apply(StepRecord(run_id="r", step=step, metrics=metrics, groups=groups), time_ms)
    found = state.find()
    assert found is not None
    json.dumps([overview(state, found, [], 2.0), series(found)], allow_nan=False)


def test_reading_a_metric_does_not_add_it_to_the_record() -> None:
    state = MonitorState()
    state.apply(StepRecord(run_id="r", step=1), 0)
    found = state.find()
    assert found is not None
    series(found)
    assert not found.steps.entries[1].record.metrics


def test_replicas_fall_silent_and_then_go() -> None:
    state = state_of(3)
    heard = max(replica.time_ms for replica in state.replicas.values()) / 1000
    states = [
        [replica["state"] for replica in overview(state, None, [], heard + seconds)["replicas"]]
        for seconds in (1, 60, 3600)
    ]
    assert states == [["serving"] * 2, ["silent"] * 2, []]


def test_a_replica_that_serves_an_older_version_is_behind() -> None:
    state = state_of(3)
    found = state.find()
    assert found is not None
    assert found.head is not None
    found.head.version.number = 7
    assert [replica["behind"] for replica in overview(state, found, [], 0)["replicas"]] == [4, 4]


def test_last_groups_come_newest_first_with_their_reasons() -> None:
    found = state_of(9).find()
    assert found is not None
    rows = run_summary(found)["last_groups"]
    assert [row["sequence"] for row in rows] == list(range(71, 31, -1))
    assert [row["reason"] for row in rows if row["outcome"] == "void"] == [
        "reward raised ValueError: no number in the completion"
    ]


@pytest.mark.parametrize(("state", "name"), [(0, "ok"), (1, "ok"), (2, "warn"), (4, "hold"), (99, "ok")])
def test_gate_names(state: GateState, name: str) -> None:
    assert gate_name(state) == name
