"""The windows: the same whatever the order of topics and however often records are read; bounded."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream_monitor.state import GROUPS_KEPT_STEPS, MAX_REPLICAS, MonitorState
from slipstream_monitor.views import overview, run_summary, series

from slipstream.errors import PoisonMessageError
from slipstream.v1.common_pb2 import Version
from slipstream.v1.reward_pb2 import ScoredGroup
from slipstream.v1.train_pb2 import (
    Alert,
    AlignmentRecord,
    GateState,
    GroupOutcome,
    GroupRecord,
    LagStats,
    StepRecord,
)
from slipstream.v1.weights_pb2 import ReplicaStatus, VersionAnnounced
from tests.support.page_demo import Timed, run

NOW_MS = 1_000_000


def step_record(step: int, epoch: int = 1, run_id: str = "r", **metrics: float) -> StepRecord:
    return StepRecord(run_id=run_id, step=step, version=Version(epoch=epoch, number=step), metrics=metrics)


def alignment(step: int, group: str, k3: float, epoch: int = 1) -> AlignmentRecord:
    stats = LagStats(num_tokens=10, k3=k3, k1=0, ess=0.9)
    return AlignmentRecord(
        run_id="r", step=step, version=Version(epoch=epoch, number=step - 1), group_id=group, by_lag=[stats]
    )


def filled(messages: Iterable[Timed], **bounds: int) -> MonitorState:
    state = MonitorState(**bounds)
    for message, time_ms in messages:
        state.apply(message, time_ms)
    return state


def picture(state: MonitorState) -> Any:
    """Everything that the page can show."""
    now = NOW_MS / 1000
    shown = [(run_summary(r), series(r)) for r in (state.runs[name] for name in state.run_ids())]
    return json.loads(json.dumps([overview(state, state.find(), [], now), shown], allow_nan=False))


def taken_over() -> list[Timed]:
    """Epoch 1 gets to step 6; epoch 2 goes on from the checkpoint at 3 and gets to 5."""
    messages: list[Timed] = []
    for epoch, steps in ((1, range(1, 7)), (2, range(4, 6))):
        for step in steps:
            at = NOW_MS - 90_000 + epoch * 30_000 + step * 1000
            messages.append((alignment(step, f"r/{step}", epoch / 100, epoch), at))
            messages.append((step_record(step, epoch), at + 1))
            messages.append((VersionAnnounced(run_id="r", version=Version(epoch=epoch, number=step)), at + 2))
    return messages


RUNS = {
    "plain": list(run("arithmetic", 8, start_ms=NOW_MS - 90_000)),
    "takeover": taken_over(),
    "two": [*run("a", 4, start_ms=NOW_MS - 200_000, seed=3), *run("b", 4, start_ms=NOW_MS - 90_000, seed=4)],
}


@pytest.mark.parametrize("name", RUNS)
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_topics_may_come_in_any_order_and_be_read_twice(name: str, data: st.DataObject) -> None:
    messages = RUNS[name]
    wanted = picture(filled(messages))
    queues: dict[type, list[Timed]] = {}
    for message, time_ms in messages:
        queues.setdefault(type(message), []).append((message, time_ms))
    for queue in queues.values():
        queue.extend(queue[data.draw(st.integers(0, len(queue))) :])
    state = MonitorState()
    while queues:
        kind = data.draw(st.sampled_from(sorted(queues, key=str)))
        count = data.draw(st.integers(5, 80))
        for message, time_ms in queues[kind][:count]:
            state.apply(message, time_ms)
        if not (rest := queues.pop(kind)[count:]):
            continue
        queues[kind] = rest
    assert picture(state) == wanted


def test_a_takeover_throws_away_what_the_older_epoch_did_after_the_checkpoint() -> None:
    found = filled(taken_over()).find("r")
    assert found is not None
    assert sorted(found.steps.entries) == [1, 2, 3, 4, 5]
    assert [found.steps.entries[n].record.version.epoch for n in (3, 4, 5)] == [1, 2, 2]
    assert [found.mismatch.entries[n].sums[0].stats().k3 for n in (3, 4)] == pytest.approx([0.01, 0.02])
    assert sorted(found.mismatch.entries) == [1, 2, 3, 4, 5]


def test_a_straggler_of_a_fenced_trainer_changes_nothing() -> None:
    state = filled(taken_over())
    before = picture(state)
    state.apply(step_record(6, epoch=1), NOW_MS - 1)
    state.apply(alignment(6, "r/6", 0.5, epoch=1), NOW_MS - 1)
    after = picture(state)
    before[1][0][0]["seen"] = after[1][0][0]["seen"] = before[0]["run"]["seen"] = after[0]["run"]["seen"] = (
        None
    )
    assert after == before


def test_groups_of_a_step_are_merged_and_a_repeat_counts_once() -> None:
    records = [alignment(1, "r/0", 0.01), alignment(1, "r/1", 0.03), alignment(1, "r/0", 0.01)]
    found = filled((record, 0) for record in records).find("r")
    assert found is not None
    merged = found.mismatch.entries[1].sums[0].stats()
    assert merged.num_tokens == 20
    assert merged.k3 == pytest.approx(0.02)


def test_only_the_last_steps_are_kept_and_groups_only_of_the_newest() -> None:
    group = GroupRecord(outcome=GroupOutcome.GROUP_OUTCOME_VOID, reason="x")
    records = [step_record(n) for n in range(1, 201)]
    for record in records:
        record.groups.append(group)
    found = filled(((record, 0) for record in records), max_steps=100).find("r")
    assert found is not None
    assert sorted(found.steps.entries) == list(range(101, 201))
    with_groups = [n for n, step in found.steps.entries.items() if step.record.groups]
    assert min(with_groups) == 200 - GROUPS_KEPT_STEPS + 1
    assert run_summary(found)["groups"] == {"trained": 0, "void": 100, "dropped": 0}


def test_the_run_silent_for_longest_makes_room_and_does_not_come_back() -> None:
    state = MonitorState(max_runs=2)
    for time_ms, name in enumerate(["a", "b", "a", "c"]):
        state.apply(step_record(time_ms + 1, run_id=name), time_ms)
    assert state.run_ids() == ["a", "c"]
    state.apply(Alert(run_id="b"), 1)
    assert state.run_ids() == ["a", "c"]


def test_the_newest_run_is_the_one_opened_last_whoever_speaks() -> None:
    state = MonitorState()
    for time_ms, name in enumerate(["a", "b", "a", "b", "a"]):
        state.apply(step_record(time_ms + 1, run_id=name), time_ms)
    newest = state.find()
    assert newest is not None
    assert newest.run_id == "b"
    state.apply(VersionAnnounced(run_id="a", version=Version(epoch=2, number=5)), 9)
    assert state.run_ids() == ["b", "a"]


def test_replicas_are_bounded() -> None:
    state = filled((ReplicaStatus(replica_id=f"x{i}", run_id="r"), i) for i in range(MAX_REPLICAS + 5))
    assert len(state.replicas) == MAX_REPLICAS
    assert "x0" not in state.replicas


def test_the_last_swap_is_remembered_over_heartbeats() -> None:
    swapped = ReplicaStatus(replica_id="x", run_id="r", uptime_s=1)
    swapped.swap.pause_ms = 7
    state = filled([(swapped, 1), (ReplicaStatus(replica_id="x", run_id="r", uptime_s=2), 2)])
    swap = state.replicas["x"].last_swap
    assert swap is not None
    assert swap.pause_ms == 7


def test_the_gate_is_that_of_the_last_alert() -> None:
    hold, ok = (Alert(run_id="r", state=state) for state in ("GATE_STATE_HOLD", "GATE_STATE_OK"))
    state = filled([(hold, 5), (ok, 3)])
    found = state.find()
    assert found is not None
    assert found.gate == GateState.GATE_STATE_HOLD
    state.apply(ok, 6)
    assert found.gate == GateState.GATE_STATE_OK


@pytest.mark.parametrize(
    "message",
    [StepRecord(step=1), StepRecord(run_id="r"), AlignmentRecord(run_id="r"), Alert(), ReplicaStatus(),
     VersionAnnounced(), ScoredGroup()],
)  # fmt: skip
def test_a_message_that_belongs_nowhere_is_refused_and_changes_nothing(message: Any) -> None:
    state = MonitorState()
    with pytest.raises(PoisonMessageError):
        state.apply(message, 0)
    assert (state.runs, state.replicas) == ({}, {})
