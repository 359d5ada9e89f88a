"""Group-relative advantages."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.recipe.advantages import group_advantages

rewards = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=16)


def test_matches_the_published_formula() -> None:
    # mean 0.5, population std 0.5
    assert group_advantages([1.0, 0.0, 1.0, 0.0]) == pytest.approx([1.0, -1.0, 1.0, -1.0], abs=1e-5)


def test_without_scaling_only_the_mean_is_taken_off() -> None:
    assert group_advantages([3.0, 1.0], scale_by_std=False) == [1.0, -1.0]


def test_completions_without_a_reward_do_not_count() -> None:
    assert group_advantages([1.0, None, 0.0], scale_by_std=False) == [0.5, None, -0.5]


@pytest.mark.parametrize("values", [[0.3, 0.3, 0.3], [1.0], [None, 1.0], [None, None], []])
def test_groups_with_nothing_to_compare_teach_nothing(values: list[float | None]) -> None:
    assert group_advantages(values) == [None] * len(values)


@given(rewards)
def test_advantages_are_centred_and_keep_the_order(values: list[float]) -> None:
    result = group_advantages(values)
    if result[0] is None:
        assert max(values) == min(values)
        return
    known = [a for a in result if a is not None]
    assert math.isclose(sum(known), 0.0, abs_tol=1e-6 * len(known) * max(1.0, max(map(abs, known))))
    order = sorted(range(len(values)), key=values.__getitem__)
    assert [known[i] for i in order] == sorted(known)
