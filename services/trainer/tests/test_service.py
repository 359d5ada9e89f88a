"""The trainer over gRPC: steps, versions, records, the lease, duplicates, lag, faults."""

import asyncio

import grpc
import grpc.aio
import pytest
import torch
from slipstream_trainer.checkpoint import Checkpoint, load_newest
from slipstream_trainer.lease import Lease

from slipstream.errors import ConflictError, FencedError, SlipstreamError
from slipstream.recipe import Settings
from slipstream.rpc import make_channel
from slipstream.topics import ALIGNMENT, STEPS, VERSIONS
from slipstream.v1 import trainer_service_pb2 as pb
from slipstream.v1.train_pb2 import GROUP_OUTCOME_DROPPED, GROUP_OUTCOME_TRAINED, GROUP_OUTCOME_VOID
from slipstream.v1.weight_sync_service_pb2 import OpenEpochRequest
from slipstream.v1.weight_sync_service_pb2_grpc import WeightSyncServiceStub
from slipstream.v1.weights_pb2 import KV_CACHE_POLICY_RECOMPUTE
from slipstream.weights.manifest import parse_manifest
from tests.support.trainer import RUN, Cluster, Loop, scored_group


async def refused(call: object, code: grpc.StatusCode) -> str:
    """The details of a call that must fail with `code`."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call  # type: ignore[misc]
    assert caught.value.code() is code
    return str(caught.value.details())


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


async def test_a_runs_cache_policy_is_in_each_of_its_manifests(cluster: Cluster) -> None:
    settings = Settings(kv_cache="recompute")
    async with (
        cluster.trainer() as trainer,
        trainer.open(kv_cache=settings.run_config().kv_cache) as loop,
    ):
        await cluster.feed(scored_group(0), scored_group(1))
        await loop.step(1)
    keys = [announced.manifest_key for announced in cluster.read(VERSIONS)]
    manifests = [parse_manifest(await cluster.store.get(key), key) for key in keys]
    assert [m.kv_cache for m in manifests] == [KV_CACHE_POLICY_RECOMPUTE] * 2


async def test_void_stale_and_repeated_groups_are_accounted_for_once(cluster: Cluster) -> None:
    async with cluster.trainer() as trainer, trainer.open(max_lag=0) as loop:
        await cluster.feed(scored_group(0), scored_group(1))
        await loop.step(1)
        late = scored_group(4, version=(1, 0))
        fresh = [scored_group(s, version=(1, 1)) for s in (2, 3)]
        await cluster.feed(scored_group(0), late, late, scored_group(5, void="no replica"), *fresh)
        groups = await loop.step(2)
        assert sorted((g.record.sequence, g.record.outcome) for g in groups) == [
            (2, GROUP_OUTCOME_TRAINED),
            (3, GROUP_OUTCOME_TRAINED),
            (5, GROUP_OUTCOME_VOID),
        ]
        await cluster.feed(scored_group(6, version=(1, 2)), scored_group(7, version=(1, 2)))
        groups = await loop.step(3)
        assert {g.record.sequence: g.record.outcome for g in groups}[4] == GROUP_OUTCOME_DROPPED
    named = [g.group_id for record in cluster.read(STEPS) for g in record.groups]
    assert sorted(named) == [f"{RUN}/{s}" for s in range(8)]


async def test_next_batch_returns_early_when_a_group_must_be_replaced(cluster: Cluster) -> None:
    async with cluster.trainer() as trainer, trainer.open() as loop:
        await cluster.feed(scored_group(0, void="the prompt is too long"))
        (group,) = await asyncio.wait_for(loop.next(2), 5)
        assert (group.record.outcome, group.record.reason) == (GROUP_OUTCOME_VOID, "the prompt is too long")
        assert not group.samples


async def test_a_second_loop_is_refused_and_told_who_holds_the_run_until_the_first_lets_go(
    cluster: Cluster,
) -> None:
    async with cluster.trainer() as trainer:
        async with trainer.open(client="ann@laptop:12") as loop:
            for run_id in (RUN, "another"):
                stream = trainer.stub.OpenRun(pb.OpenRunRequest(run_id=run_id, client="bob"))
                details = await refused(stream.read(), grpc.StatusCode.ALREADY_EXISTS)
                assert "ann@laptop:12" in details
            status = await trainer.stub.GetTrainerStatus(pb.GetTrainerStatusRequest())
            assert (status.run_id, status.client, status.phase) == (RUN, "ann@laptop:12", "idle")
            old = Loop(trainer.stub, loop.opened)
        async with asyncio.timeout(5):
            while (await trainer.stub.GetTrainerStatus(pb.GetTrainerStatusRequest())).client:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        async with trainer.open(client="bob") as loop:
            assert loop.opened.version.epoch == 2
            details = await refused(old.publish(), grpc.StatusCode.UNAVAILABLE)
            assert "does not hold the run" in details


async def test_a_loop_that_dies_while_it_waits_frees_the_run(cluster: Cluster) -> None:
    async with cluster.trainer() as trainer:
        async with trainer.open() as loop:
            waiting = asyncio.ensure_future(loop.next())
            await asyncio.sleep(0.1)
        async with asyncio.timeout(5):
            with pytest.raises(grpc.aio.AioRpcError):
                await waiting
        async with asyncio.timeout(5), trainer.open() as loop:
            assert loop.opened.version.epoch == 2


def test_a_lease_is_let_go_by_its_holder_only() -> None:
    lease = Lease()
    first = lease.acquire("r", "ann")
    with pytest.raises(ConflictError, match="held by ann"):
        lease.acquire("r", "bob")
    lease.release(first)
    second = lease.acquire("r", "")
    lease.release(first)
    lease.check(second.session_id)
    with pytest.raises(SlipstreamError, match="open the run again"):
        lease.check(first.session_id)
    with pytest.raises(ConflictError, match="an unnamed client"):
        lease.acquire("r", "bob")


async def test_an_optimizer_step_is_made_once_however_often_it_is_asked_for(cluster: Cluster) -> None:
    async with cluster.trainer() as trainer, trainer.open() as loop:
        await cluster.feed(scored_group(0), scored_group(1))
        await loop.step(1)
        for number in (1, 3):
            details = await refused(loop.optim(number), grpc.StatusCode.FAILED_PRECONDITION)
            assert "has made 1 steps" in details
        again = await loop.publish()
        assert again.version.number == 1
    assert len(cluster.read(STEPS)) == 1
    assert [v.version.number for v in cluster.read(VERSIONS)] == [0, 1]


@pytest.mark.parametrize(
    ("advantages", "loss", "message"),
    [
        ({f"{RUN}/9/0": 1.0}, {"name": "grpo"}, "not in the current batch: toy/9/0"),
        ({f"{RUN}/0/0": float("nan")}, {"name": "grpo"}, "advantage of toy/0/0 is nan"),
        ({f"{RUN}/0/0": 1.0}, {"name": "gppo"}, "unknown loss 'gppo'"),
        ({f"{RUN}/0/0": 1.0}, {"name": "grpo", "beta": 1.0}, "no parameter beta"),
    ],
)
async def test_wrong_arguments_are_named(
    cluster: Cluster, advantages: dict[str, float], loss: dict[str, float], message: str
) -> None:
    async with cluster.trainer() as trainer, trainer.open(groups_per_step=1) as loop:
        await cluster.feed(scored_group(0))
        await loop.next(1)
        assert message in await refused(loop.gradient(advantages, **loss), grpc.StatusCode.INVALID_ARGUMENT)  # type: ignore[arg-type]


async def test_a_run_with_settings_that_make_no_sense_is_not_opened(cluster: Cluster) -> None:
    async with cluster.trainer() as trainer:
        for run_id, config, message in (
            ("Not A Name", {}, "run name"),
            (RUN, {"groups_per_step": 0}, "groups_per_step"),
            (RUN, {"max_lag": -1}, "max_lag"),
            (RUN, {"adam_beta1": 1.5}, "beta"),
        ):
            settings = pb.RunConfig(**{"max_lag": 1, "groups_per_step": 1, **config})  # type: ignore[arg-type]
            stream = trainer.stub.OpenRun(pb.OpenRunRequest(run_id=run_id, config=settings))
            assert message in await refused(stream.read(), grpc.StatusCode.INVALID_ARGUMENT)
        async with trainer.open():
            pass


async def test_a_loss_that_is_not_finite_refuses_the_step_and_a_good_one_goes_on(cluster: Cluster) -> None:
    async with cluster.trainer() as trainer, trainer.open(groups_per_step=1) as loop:
        await cluster.feed(scored_group(0))
        await loop.next(1)
        huge = loop.gradient({f"{RUN}/0/0": 1e39, f"{RUN}/0/1": 1.0})
        assert "not finite" in await refused(huge, grpc.StatusCode.FAILED_PRECONDITION)
        assert "not finite" in await refused(loop.optim(1), grpc.StatusCode.FAILED_PRECONDITION)
        await loop.gradient({f"{RUN}/0/0": 1.0})
        assert (await loop.optim(1))["grad_norm"] > 0


async def test_a_batch_that_teaches_nothing_still_makes_a_step(cluster: Cluster) -> None:
    async with cluster.trainer() as trainer, trainer.open(groups_per_step=1) as loop:
        await cluster.feed(scored_group(0, rewards=(1.0, 1.0)))
        await loop.next(1)
        assert (await loop.gradient({}))["tokens"] == 0
        assert (await loop.optim(1))["grad_norm"] == 0
        assert (await loop.publish()).metrics["changed"] == 0


async def train(cluster: Cluster, run_id: str, parts: list[list[int]]) -> tuple[list[float], Checkpoint]:
    """Trains the steps of `parts`, with a new process for each part; (losses and norms, last checkpoint)."""
    seen: list[float] = []
    for number, part in enumerate(parts):
        async with cluster.trainer() as trainer, trainer.open(run_id, max_lag=20) as loop:
            assert loop.opened.step == part[0] - 1
            if number == 0:
                rewards = [(float(s % 2), float(1 - s % 2)) for s in range(8)]
                await cluster.feed(
                    *(scored_group(s, rewards=r, run_id=run_id) for s, r in enumerate(rewards))
                )
            for step in part:
                samples = [s for g in await loop.next(2) for s in g.samples]
                seen.append((await loop.gradient({s.sample_id: 2 * s.reward - 1 for s in samples}))["loss"])
                seen.append((await loop.optim(step))["grad_norm"])
                await loop.publish()
            await loop.save()
    found = load_newest(cluster.checkpoint_dir, run_id)
    assert found is not None
    return seen, found


async def test_a_resumed_run_is_bit_for_bit_the_one_that_was_never_interrupted(cluster: Cluster) -> None:
    seen, once = await train(cluster, "once", [[1, 2, 3, 4]])
    seen_again, twice = await train(cluster, "twice", [[1, 2], [3, 4]])
    assert seen == seen_again
    assert all(torch.equal(once.masters[name], twice.masters[name]) for name in once.masters)
    assert all(torch.equal(once.moments[name], twice.moments[name]) for name in once.moments)
    assert once.moments
    assert [tuple(o) for o in twice.state.lineage] == [(1, 0), (2, 2)]


async def test_after_a_crash_the_run_goes_on_from_its_checkpoint_and_counts_every_group_once(
    cluster: Cluster,
) -> None:
    async with cluster.trainer() as trainer, trainer.open() as loop:
        await cluster.feed(scored_group(1), scored_group(0), scored_group(2, void="lost"), scored_group(4))
        await loop.step(1)
        name = await loop.save(b"two done")
        await cluster.feed(scored_group(3, version=(1, 1)))
        await loop.step(2)  # not saved: it will be as if it had not been
    assert name == "000001-000000001"
    async with cluster.trainer() as trainer, trainer.open() as loop:
        assert (loop.opened.step, loop.opened.version.epoch, loop.opened.version.number) == (1, 2, 1)
        assert loop.opened.recipe_state == b"two done"
        # The loop publishes again what it had published after the save; replicas may answer twice.
        await cluster.feed(scored_group(3, version=(2, 1)))
        groups = await loop.step(2)
        trained = {
            g.record.sequence: g.record.lag for g in groups if g.record.outcome == GROUP_OUTCOME_TRAINED
        }
        assert trained == {3: 0, 4: 1}
    lineage = [r for r in cluster.read(STEPS) if (r.version.epoch, r.step) in ((1, 1), (2, 2))]
    named = [g.sequence for r in lineage for g in r.groups]
    assert sorted(named) == [0, 1, 2, 3, 4]


async def test_a_trainer_that_was_taken_over_stops_and_says_so(cluster: Cluster) -> None:
    async with cluster.trainer() as trainer, trainer.open(groups_per_step=1) as loop:
        await cluster.feed(scored_group(0))
        channel = make_channel(cluster.common.weightsync_target)
        await WeightSyncServiceStub(channel).OpenEpoch(OpenEpochRequest(run_id=RUN))
        await channel.close()
        groups = await loop.next(1)
        await loop.gradient({s.sample_id: 1.0 for s in groups[0].samples})
        await loop.optim(1)
        await refused(loop.publish(), grpc.StatusCode.ABORTED)
        with pytest.raises(FencedError):
            await asyncio.wait_for(trainer.running, 5)


async def test_publishing_waits_out_a_store_that_is_away(cluster: Cluster) -> None:
    async with cluster.trainer() as trainer, trainer.open(groups_per_step=1) as loop:
        await cluster.feed(scored_group(0))
        groups = await loop.next(1)
        await loop.gradient({s.sample_id: 1.0 for s in groups[0].samples})
        await loop.optim(1)
        cluster.store.away = True
        publishing = asyncio.ensure_future(loop.publish())
        await asyncio.sleep(0.3)
        assert not publishing.done()
        status = await trainer.stub.GetTrainerStatus(pb.GetTrainerStatusRequest())
        assert status.phase == "publish"
        cluster.store.away = False
        assert (await asyncio.wait_for(publishing, 10)).version.number == 1


async def test_groups_that_a_cancelled_call_had_taken_are_returned_by_the_next(cluster: Cluster) -> None:
    async with cluster.trainer() as trainer, trainer.open() as loop:
        await cluster.feed(scored_group(0))
        cancelled = asyncio.ensure_future(loop.next(2))
        await asyncio.sleep(0.3)
        cancelled.cancel()
        await asyncio.sleep(0.3)
        await cluster.feed(scored_group(1))
        assert [g.record.sequence for g in await loop.next(2)] == [0, 1]


async def test_an_optimizer_step_whose_caller_went_away_is_whole(cluster: Cluster) -> None:
    async with cluster.trainer() as trainer, trainer.open(groups_per_step=1) as loop:
        await cluster.feed(scored_group(0))
        groups = await loop.next(1)
        await loop.gradient({s.sample_id: 1.0 for s in groups[0].samples})
        stepping = asyncio.ensure_future(loop.optim(1))
        await asyncio.sleep(0.002)
        stepping.cancel()
        if (await trainer.stub.GetTrainerStatus(pb.GetTrainerStatusRequest())).phase == "idle":
            await asyncio.sleep(0.05)  # it came too late, or not at all: both leave the trainer whole
        published = await loop.publish()
        assert published.version.number in (0, 1)
        assert (published.metrics["changed"] > 0) == (published.version.number == 1)


async def test_a_large_group_is_waited_for_while_the_store_is_away(cluster: Cluster) -> None:
    async with cluster.trainer() as trainer, trainer.open(groups_per_step=2) as loop:
        large = scored_group(0)
        large.rollout.prompt.metadata_json = "x" * 300_000
        await cluster.feed(large, scored_group(1))
        cluster.store.away = True
        waiting = asyncio.ensure_future(loop.next(2))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        cluster.store.away = False
        assert [g.record.sequence for g in await asyncio.wait_for(waiting, 10)] == [0, 1]


async def test_mismatch_at_lag_0_is_waited_for_when_none_was_seen_for_four_steps(cluster: Cluster) -> None:
    async with cluster.trainer() as trainer, trainer.open(max_lag=1) as loop:
        for step in range(1, 6):
            oldest = max(0, step - 2)  # of the first step lag 0, of the others lag 1
            await cluster.feed(*(scored_group(2 * (step - 1) + i, version=(1, oldest)) for i in range(2)))
            if step == 4:
                await asyncio.sleep(1.0)  # what the wait in the next step may take
            if step < 5:
                await loop.step(step)
        samples = [s for group in await loop.next() for s in group.samples]
        await loop.gradient({s.sample_id: 2 * s.reward - 1 for s in samples})
        waiting = asyncio.create_task(loop.optim(5))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await cluster.feed(scored_group(10, version=(1, 4)))
        assert "k3/lag0" in await waiting
