"""Mismatch statistics against their definitions."""

import math

import numpy as np
import pytest
from slipstream_trainer.alignment import lag_stats, summary


def test_statistics_follow_their_definitions_for_each_lag_apart() -> None:
    lag = np.array([0, 1, 0])
    mu = np.log(np.array([0.5, 0.2, 0.4]))
    logp = np.log(np.array([0.6, 0.1, 0.3]))
    zero, one = lag_stats(lag, logp, mu, np.array([True, False, False]))
    assert (zero.lag, zero.num_tokens, one.lag, one.num_tokens) == (0, 2, 1, 1)
    r = np.array([1.2, 0.75])
    assert zero.k1 == pytest.approx(-np.log(r).mean())
    assert zero.k3 == pytest.approx((r - 1 - np.log(r)).mean())
    assert zero.max_abs_dp == pytest.approx(0.1)
    assert zero.ess == pytest.approx(r.sum() ** 2 / (2 * (r**2).sum()))
    assert zero.clipped == 0.5
    assert one.k3 == pytest.approx(0.5 - 1 - math.log(0.5))


def test_equal_log_probs_have_no_mismatch() -> None:
    values = np.array([-0.1, -7.0, -60.0])
    (stats,) = lag_stats(np.zeros(3, np.int64), values, values, np.zeros(3, bool))
    assert (stats.k1, stats.k3, stats.max_abs_dp, stats.ess) == (0, 0, 0, 1)


def test_an_impossible_token_gives_finite_numbers() -> None:
    mu, logp = np.array([-0.1, -1.0]), np.array([-1e4, -1.0])
    (stats,) = lag_stats(np.zeros(2, np.int64), logp, mu, np.zeros(2, bool))
    assert all(math.isfinite(v) for v in (stats.k1, stats.k3, stats.ess))
    assert stats.max_abs_dp == pytest.approx(math.exp(-0.1))


def test_the_summary_weighs_by_tokens_and_keeps_lag_zero_apart() -> None:
    zeros = np.zeros(3, bool)
    fresh = lag_stats(np.zeros(3, np.int64), np.log([0.5] * 3), np.log([0.5] * 3), zeros)
    stale = lag_stats(np.array([2]), np.log([0.25]), np.log([0.5]), np.array([True]))
    found = summary([*fresh, *stale])
    assert found["k3/lag0"] == 0
    assert found["k3"] == pytest.approx((0.5 - 1 - math.log(0.5)) / 4)
    assert found["clipped"] == 0.25
    assert found["max_abs_dp"] == 0.25
    assert summary([]) == {}
