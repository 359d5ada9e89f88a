"""Nothing is committed past a record that is still in hand."""

from hypothesis import given
from hypothesis import strategies as st

from slipstream.bus import Record, TopicPartition
from slipstream.bus.offsets import OffsetTracker

TP = TopicPartition("t", 0)


def record(offset: int, partition: int = 0) -> Record:
    return Record("t", partition, offset, None, b"")


def test_records_finished_in_order_move_the_offset_one_by_one() -> None:
    tracker = OffsetTracker()
    assert tracker.begin(record(5))
    assert tracker.begin(record(6))
    tracker.done(record(5))
    assert tracker.take() == {TP: 6}
    tracker.done(record(6))
    assert tracker.take() == {TP: 7}


def test_a_record_finished_early_waits_for_those_before_it() -> None:
    tracker = OffsetTracker()
    for offset in (0, 1, 2):
        tracker.begin(record(offset))
    tracker.done(record(2))
    tracker.done(record(1))
    assert tracker.take() == {}
    tracker.done(record(0))
    assert tracker.take() == {TP: 3}


def test_an_offset_is_reported_once() -> None:
    tracker = OffsetTracker()
    tracker.begin(record(0))
    tracker.done(record(0))
    assert tracker.take() == {TP: 1}
    assert tracker.take() == {}


def test_holes_in_the_log_do_not_hold_up() -> None:
    tracker = OffsetTracker()
    tracker.begin(record(3))
    tracker.begin(record(90))
    tracker.done(record(3))
    assert tracker.take() == {TP: 90}


def test_a_redelivered_record_is_skipped_and_its_offset_reported_again() -> None:
    tracker = OffsetTracker()
    for offset in (0, 1):
        tracker.begin(record(offset))
        tracker.done(record(offset))
    assert tracker.take() == {TP: 2}
    assert not tracker.begin(record(0))
    assert tracker.take() == {TP: 2}


def test_a_record_redelivered_while_in_hand_is_not_begun_twice() -> None:
    tracker = OffsetTracker()
    assert tracker.begin(record(0))
    assert not tracker.begin(record(0))
    assert tracker.in_hand == 1


def test_a_lost_partition_is_forgotten() -> None:
    tracker = OffsetTracker()
    tracker.begin(record(0))
    tracker.begin(record(0, partition=1))
    tracker.retain({TopicPartition("t", 1)})
    tracker.done(record(0))
    tracker.done(record(0, partition=1))
    assert tracker.take() == {TopicPartition("t", 1): 1}
    # When it comes back, the records that were in hand are taken on again.
    assert tracker.begin(record(0))


@given(st.lists(st.integers(1, 5), min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_every_committed_prefix_is_finished(steps: list[int], random: "object") -> None:
    offsets = [sum(steps[: i + 1]) for i in range(len(steps))]
    tracker, done = OffsetTracker(), set()
    for offset in offsets:
        tracker.begin(record(offset))
    order = list(offsets)
    random.shuffle(order)  # type: ignore[attr-defined]
    last = offsets[0]
    for offset in order:
        tracker.done(record(offset))
        done.add(offset)
        for committed in tracker.take().values():
            assert committed > last
            last = committed
            assert {o for o in offsets if o < committed} <= done
    assert last == offsets[-1] + 1
    assert tracker.in_hand == 0
