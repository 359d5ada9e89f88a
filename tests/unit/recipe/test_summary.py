"""The figures of a run."""

import json

import pytest

from slipstream.recipe.summary import summarize
from slipstream.v1.common_pb2 import Version
from slipstream.v1.train_pb2 import (
    GROUP_OUTCOME_DROPPED,
    GROUP_OUTCOME_TRAINED,
    GROUP_OUTCOME_VOID,
    GroupRecord,
    StepRecord,
)
from slipstream.v1.weights_pb2 import ReplicaStatus, SwapReport


def step(number: int, sequence: int, reward: float, *, lag: int = 0, **metrics: float) -> StepRecord:
    group = GroupRecord(sequence=sequence, outcome=GROUP_OUTCOME_TRAINED, lag=lag)
    record = StepRecord(step=number, groups=[group], metrics={"reward/mean": reward, "tokens/trained": 50.0})
    record.metrics.update({name.replace("__", "/"): value for name, value in metrics.items()})
    return record


def status(tokens: int, number: int, pause: float | None = None, lost: int = 0) -> ReplicaStatus:
    swap = SwapReport(pause_ms=pause) if pause is not None else None
    return ReplicaStatus(
        replica_id="r0",
        version=Version(epoch=1, number=number),
        tokens_generated=tokens,
        requests_lost=lost,
        swap=swap,
    )


def test_figures_come_from_the_records() -> None:
    steps = [
        step(
            i + 1,
            i,
            i / 10,
            lag=i % 2,
            publish__delta_bytes=10.0,
            publish__full_bytes=1000.0,
            k3__lag0=i / 100,
        )
        for i in range(10)
    ]
    steps[3].groups.add(sequence=50, outcome=GROUP_OUTCOME_VOID)
    steps[4].groups.add(sequence=51, outcome=GROUP_OUTCOME_DROPPED)
    replicas = [status(100, 0), status(200, 5, 4.0), status(600, 10, 8.0)]
    result = summarize("r", steps, replicas, published=12, wall_s=10.0, resumed_from=0)
    assert result["reward_mean_first_5"] == pytest.approx(0.2)
    assert result["reward_mean_last_5"] == pytest.approx(0.7)
    assert result["max_lag"] == 1
    assert result["mismatch_k3_lag0_mean"] == pytest.approx(0.045)
    assert result["mismatch_k3_lag0_max"] == pytest.approx(0.09)
    assert result["delta_ratio_to_full_bf16"] == pytest.approx(100.0)
    assert (result["swap_pause_ms_p50"], result["swap_pause_ms_p95"]) == pytest.approx((6.0, 7.8))
    assert (result["groups_trained"], result["groups_void"], result["groups_dropped"]) == (10, 1, 1)
    assert result["requests_lost"] == 0
    assert result["tokens_generated_per_s"] == pytest.approx(50.0)
    assert result["tokens_trained_per_s"] == pytest.approx(50.0)
    assert result["versions"] == {"r0": "1-10"}


def test_a_group_that_was_published_and_never_heard_of_again_is_lost() -> None:
    result = summarize(
        "r", [step(1, 0, 0.5)], [status(0, 1, lost=2)], published=4, wall_s=1.0, resumed_from=0
    )
    assert result["requests_lost"] == 2 + 3


def test_a_step_made_again_after_a_crash_counts_once() -> None:
    steps = [step(1, 0, 0.1), step(2, 1, 0.2), step(2, 1, 0.4)]
    result = summarize("r", steps, [], published=2, wall_s=1.0, resumed_from=1)
    assert result["steps"] == 2
    assert result["groups_trained"] == 2
    assert result["reward_mean_last_5"] == pytest.approx(0.25)
    assert result["tokens_trained_per_s"] == pytest.approx(50.0)


def test_what_was_never_measured_is_null_and_not_zero() -> None:
    result = json.loads(json.dumps(summarize("r", [], [], published=0, wall_s=1.0, resumed_from=0)))
    for name in (
        "reward_mean_first_5",
        "mismatch_k3_lag0_mean",
        "delta_bytes_mean",
        "swap_pause_ms_p50",
        "max_lag",
    ):
        assert result[name] is None
