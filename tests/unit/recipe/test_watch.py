"""What is kept of a run's replicas: enough for the summary, however long the run."""

from slipstream.recipe.summary import summarize
from slipstream.recipe.watch import RunWatch
from slipstream.v1.common_pb2 import Version
from slipstream.v1.weights_pb2 import ReplicaStatus, SwapReport


def status(name: str, beat: int) -> ReplicaStatus:
    """Each beat is two seconds and ten tokens; every tenth reports a swap."""
    swap = SwapReport(version=Version(epoch=1, number=beat), pause_ms=beat) if beat % 10 == 0 else None
    return ReplicaStatus(
        replica_id=name,
        run_id="run",
        version=Version(epoch=1, number=beat // 10),
        uptime_s=2.0 * beat,
        tokens_generated=10 * beat,
        swap=swap,
    )


def test_few_statuses_are_kept_of_many_and_the_summary_is_the_same() -> None:
    watch = RunWatch("run")
    every = [status(name, beat) for beat in range(1, 1001) for name in ("a", "b")]
    for each in every:
        watch.take(each)
    watch.take(ReplicaStatus(replica_id="c", run_id="another"))
    assert len(watch.replicas) == 2 * (1 + 100)
    assert watch.tokens_per_s == 10.0
    kept, all_of_them = (
        summarize("run", [], each, published=0, wall_s=10, resumed_from=0) for each in (watch.replicas, every)
    )
    assert kept == all_of_them
