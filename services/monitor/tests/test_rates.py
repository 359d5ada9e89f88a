"""Rates from counters in heartbeats."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slipstream_monitor.rates import MAX_POINTS, Curve, counted, rates, recent_rates

from slipstream.v1.weights_pb2 import ReplicaStatus


def steady(tokens_per_s: float, busy: float, start: float, end: float, every: float = 2.0) -> Curve:
    curve, now = Curve(), start
    while now + every <= end:
        curve.advance(now, now + every, tokens_per_s * every, busy * every, every)
        now += every
    return curve


def test_rates_add_up_over_replicas() -> None:
    found = rates([steady(30, 0.5, 0, 100), steady(20, 1.0, 0, 100)], [10, 33.3], [20, 47.7])
    assert found.tokens_per_s == pytest.approx([50, 50])
    assert found.idle_share == pytest.approx([0.25, 0.25])


def test_an_interval_is_cut_off_at_the_newest_heartbeat() -> None:
    found = rates([steady(30, 0.5, 0, 50)], [46, 60], [60, 70])
    assert found.tokens_per_s[0] == pytest.approx(30)
    assert math.isnan(found.tokens_per_s[1])


def test_a_replica_counts_only_while_it_was_there() -> None:
    found = rates([steady(30, 0.5, 0, 100), steady(30, 0.5, 50, 100)], [40], [60])
    assert found.tokens_per_s == pytest.approx([45])


def test_nothing_is_known_without_heartbeats() -> None:
    assert all(
        math.isnan(x[0]) for x in (*rates([], [0], [1]), *rates([Curve()], [0], [1]), *recent_rates(None, 9))
    )


def test_a_restarted_process_counts_from_zero() -> None:
    before = ReplicaStatus(tokens_generated=1000, busy_s=50, uptime_s=60)
    assert counted(before, ReplicaStatus(tokens_generated=1100, busy_s=51, uptime_s=62)) == (100, 1, 2)
    assert counted(before, ReplicaStatus(tokens_generated=40, busy_s=1, uptime_s=3)) == (40, 1, 3)


@settings(deadline=None)
@given(st.integers(1, 5 * MAX_POINTS))
def test_thinning_bounds_memory_and_keeps_totals(beats: int) -> None:
    curve = Curve()
    for i in range(beats):
        curve.advance(i, i + 1, 3, 0.5, 1)
    assert len(curve.times) <= MAX_POINTS
    assert curve.times[0] == 0
    found = rates([curve], [0], [beats])
    assert found.tokens_per_s == pytest.approx([3])
    assert found.idle_share == pytest.approx([0.5])


def test_a_pause_between_two_stays_on_a_run_is_flat() -> None:
    curve = Curve()
    curve.advance(0, 10, 100, 10, 10)
    curve.advance(30, 40, 100, 10, 10)
    assert rates([curve], [0, 10, 30], [10, 30, 40]).tokens_per_s == pytest.approx([10, 0, 10])
