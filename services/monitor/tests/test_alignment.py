"""Merging statistics of groups gives the statistics of all their tokens."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slipstream_monitor.alignment import merge

from slipstream.v1.train_pb2 import LagStats

log_ratios = st.lists(st.floats(-3, 3), min_size=1, max_size=20)


def stats_of(log_r: list[float], lag: int = 0) -> LagStats:
    """What a trainer computes for one group from log r of its tokens."""
    x = np.asarray(log_r)
    r = np.exp(x)
    return LagStats(
        lag=lag,
        num_tokens=len(x),
        k1=float(-x.mean()),
        k3=float((r - 1 - x).mean()),
        max_abs_dp=float(np.abs(r - 1).max() / 30),
        ess=float(r.sum() ** 2 / (len(x) * (r**2).sum())),
        clipped=float((np.abs(x) > 0.2).mean()),
    )


def assert_close(found: LagStats, wanted: LagStats) -> None:
    assert (found.lag, found.num_tokens) == (wanted.lag, wanted.num_tokens)
    for name in ("k1", "k3", "max_abs_dp", "ess", "clipped"):
        assert getattr(found, name) == pytest.approx(getattr(wanted, name), rel=1e-6, abs=1e-9), name


@given(st.lists(log_ratios, min_size=1, max_size=6))
def test_merged_groups_equal_all_tokens_at_once(groups: list[list[float]]) -> None:
    [merged] = merge(stats_of(group) for group in groups)
    assert_close(merged, stats_of([x for group in groups for x in group]))


@given(st.lists(log_ratios, min_size=2, max_size=6), st.integers(1, 5))
def test_merging_in_stages_changes_nothing(groups: list[list[float]], cut: int) -> None:
    stats = [stats_of(group) for group in groups]
    cut = min(cut, len(stats) - 1)
    [whole] = merge(stats)
    [staged] = merge([*merge(stats[:cut]), *merge(stats[cut:])])
    assert_close(staged, whole)


def test_lags_stay_apart_and_come_in_order() -> None:
    merged = merge([stats_of([0.1], lag=2), stats_of([0.0]), stats_of([0.3], lag=2), LagStats(lag=1)])
    assert [(s.lag, s.num_tokens) for s in merged] == [(0, 1), (2, 2)]


def test_ess_counts_only_tokens_for_which_it_is_known() -> None:
    [merged] = merge([stats_of([0.1, -0.1]), LagStats(num_tokens=1000, k3=0.01)])
    assert merged.ess == pytest.approx(stats_of([0.1, -0.1]).ess)
    assert merged.num_tokens == 1002
    [unknown] = merge([LagStats(num_tokens=3, k3=0.01)])
    assert unknown.ess == 0


@pytest.mark.parametrize("name", ["k1", "k3", "max_abs_dp", "clipped"])
def test_a_value_that_is_no_number_stays_visible(name: str) -> None:
    broken = LagStats(num_tokens=1)
    setattr(broken, name, math.nan)
    [merged] = merge([stats_of([0.1]), broken, stats_of([0.2])])
    assert math.isnan(getattr(merged, name))
