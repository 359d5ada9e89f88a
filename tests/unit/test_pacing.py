"""Pacing: the bound on age, nothing lost, nothing starved; lag across epochs."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import ConfigError
from slipstream.pacing import Origin, Window, lag, max_outstanding, window_size, worst_age

SMALL = st.integers(min_value=1, max_value=9)


def test_window_is_three_tenths_of_what_may_be_outstanding_and_never_empty() -> None:
    assert max_outstanding(4, 8) == 29
    assert window_size(4, 8) == 12
    assert window_size(0, 1) == window_size(0, 3) == 1
    assert window_size(0, 10) == window_size(1, 10) == 1
    assert window_size(2, 10) == 9
    assert max_outstanding(0, 10) == 10
    with pytest.raises(ConfigError, match="max_lag"):
        max_outstanding(-1, 8)


def simulate(max_lag: int, per_step: int, steps: int, rng: random.Random, void_share: float) -> list[int]:
    """Ages of all trained groups under a paced recipe, replicas of wildly different speed, and duplicates."""
    window = Window[int](window_size(max_lag, per_step))
    published_at: dict[int, int] = {}
    in_flight: dict[int, float] = {}
    ages: list[int] = []
    step, finished, batch = 0, 0, 0
    while step < steps:
        while len(published_at) - finished < max_outstanding(max_lag, per_step):
            sequence = len(published_at)
            published_at[sequence] = step
            in_flight[sequence] = rng.expovariate(1.0) * rng.choice([1, 1, 1, 20])
        arrived = min(in_flight, key=lambda s: in_flight[s])
        in_flight.pop(arrived)
        if rng.random() < void_share:
            assert window.skip(arrived)
            assert not window.skip(arrived)
            finished += 1
        else:
            assert window.add(arrived, arrived)
            assert not window.add(arrived, arrived)
        while batch < per_step and (taken := window.take()):
            ages.append(step - published_at[taken[0]])
            batch += 1
            assert not window.add(*taken)
        if batch == per_step:
            step, finished, batch = step + 1, finished + per_step, 0
        assert len(published_at) - finished <= max_outstanding(max_lag, per_step)
    # No starvation: whatever is left is younger than the window allows to be passed over.
    assert all(step - published_at[s] <= worst_age(max_lag, per_step) + 1 for s in window.waiting)
    return ages


@given(st.integers(1, 20), st.integers(1, 64))
def test_a_whole_batch_is_out_while_another_is_trained_on(max_lag: int, per_step: int) -> None:
    assert max_outstanding(max_lag, per_step) - per_step >= per_step


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 5), st.integers(1, 7), st.randoms(use_true_random=False), st.sampled_from([0.0, 0.1, 0.5])
)
def test_no_group_is_ever_older_than_the_bound(
    max_lag: int, per_step: int, rng: random.Random, void_share: float
) -> None:
    ages = simulate(max_lag, per_step, 12, rng, void_share)
    assert len(ages) >= 12 * per_step
    assert max(ages) <= worst_age(max_lag, per_step) == max_lag


@settings(deadline=None)
@given(SMALL, st.permutations(range(20)), st.sets(st.integers(0, 19)))
def test_every_group_is_released_exactly_once_in_any_order_of_arrival(
    size: int, order: list[int], void: set[int]
) -> None:
    window = Window[str](size)
    out: list[int] = []
    for sequence in order:
        head = window.head
        if sequence in void:
            assert window.skip(sequence)
        else:
            window.add(sequence, f"g{sequence}")
        while taken := window.take():
            assert taken == (taken[0], f"g{taken[0]}")
            assert taken[0] < max(head, window.head) + size
            out.append(taken[0])
            head = window.head
    assert sorted(out) == sorted(set(range(20)) - void)
    assert window.head == 20
    assert not window.waiting
    assert not window.released


def test_a_quick_group_outside_the_window_waits_for_the_slow_one() -> None:
    window = Window[str](2)
    window.add(2, "quick")
    assert window.take() is None
    window.add(1, "inside")
    assert window.take() == (1, "inside")
    assert window.take() is None
    window.add(0, "slow")
    assert window.take() == (0, "slow")
    assert window.take() == (2, "quick")


@settings(deadline=None)
@given(SMALL, st.permutations(range(16)), st.integers(0, 16), st.data())
def test_a_window_restored_from_a_checkpoint_goes_on_where_it_was(
    size: int, order: list[int], cut: int, data: st.DataObject
) -> None:
    window = Window[int](size)
    done: list[int] = []
    for sequence in order[:cut]:
        window.add(sequence, sequence)
        while taken := window.take():
            done.append(taken[0])
    unfinished = data.draw(st.sets(st.sampled_from(done))) if done else set()
    head, above = window.consumed(without=unfinished)
    restored = Window[int](size, head, set(above))
    again: list[int] = []
    for sequence in order:
        restored.add(sequence, sequence)
        while taken := restored.take():
            again.append(taken[0])
    assert sorted([*again, *(set(done) - unfinished)]) == list(range(16))


LINEAGE = [Origin(1, 0), Origin(2, 20), Origin(4, 30)]


@pytest.mark.parametrize(
    ("epoch", "number", "expected"),
    [
        (4, 33, 2),
        (4, 35, 0),
        (4, 36, -1),
        (5, 30, -1),
        (2, 30, 5),
        (2, 28, 7),
        (2, 32, 2 + 5),
        (1, 18, 17),
        (1, 22, 2 + 15),
        (3, 31, 1 + 5),
    ],
)
def test_lag_counts_the_way_over_the_branch_point(epoch: int, number: int, expected: int) -> None:
    assert lag(LINEAGE, epoch, number, 35) == expected


def test_a_run_that_went_back_to_an_older_checkpoint_branches_there() -> None:
    went_back = [Origin(1, 0), Origin(2, 20), Origin(3, 10)]
    assert lag(went_back, 1, 15, 12) == 5 + 2
    assert lag(went_back, 1, 9, 12) == 3
