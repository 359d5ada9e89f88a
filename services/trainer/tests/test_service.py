"""The trainer over gRPC: steps, versions, records, the lease, duplicates, lag, faults."""

from slipstream.topics import ALIGNMENT, STEPS, VERSIONS
from slipstream.v1.train_pb2 import GROUP_OUTCOME_TRAINED

from .conftest import RUN, Cluster, scored_group


async def test_a_step_trains_publishes_and_leaves_an_audit_trail(cluster: Cluster) -> None:
    async with cluster.trainer() as trainer, trainer.open() as loop:
        assert (loop.opened.step, loop.opened.version.epoch, loop.opened.version.number) == (0, 1, 0)
        assert loop.opened.num_parameters > 100_000
        await cluster.feed(scored_group(0), scored_group(1))
        groups = await loop.next()
        assert [g.record.outcome for g in groups] == [GROUP_OUTCOME_TRAINED] * 2
        assert [s.reward for s in groups[0].samples] == [1.0, 0.0]
        assert [s.num_tokens for s in groups[0].samples] == [3, 4]
        metrics = await loop.gradient({f"{RUN}/0/0": 1.0, f"{RUN}/0/1": -1.0, f"{RUN}/1/0": 1.0})
        assert metrics["tokens"] == 10
        assert metrics["k3/lag0"] > 0
        assert (await loop.optim(1))["grad_norm"] > 0
        published = await loop.publish(**{"reward/mean": 0.5})
        assert (published.version.epoch, published.version.number) == (1, 1)
        assert 0 < published.metrics["changed"] <= 1
    (record,) = cluster.read(STEPS)
    assert (record.step, record.version.number, record.metrics["reward/mean"]) == (1, 1, 0.5)
    assert [g.group_id for g in record.groups] == [f"{RUN}/0", f"{RUN}/1"]
    assert sum(record.offsets.values()) == 2
    assert [a.group_id for a in cluster.read(ALIGNMENT)] == [f"{RUN}/0", f"{RUN}/1"]
    assert all(a.by_lag[0].lag == 0 and a.replica_id == "r0" for a in cluster.read(ALIGNMENT))
    assert [v.version.number for v in cluster.read(VERSIONS)] == [0, 1]
