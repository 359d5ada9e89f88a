"""Weightsync lets each version in once, in order, from the newest trainer only, and tells of it."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from slipstream import topics
from slipstream.blobs.memory import MemoryStore
from slipstream.errors import ConfigError, ConflictError, FencedError, NotFoundError
from slipstream.v1 import weight_sync_service_pb2 as pb
from slipstream.v1.common_pb2 import Version
from slipstream.v1.weights_pb2 import VERSION_KIND_ANCHOR, VERSION_KIND_DELTA, Manifest
from slipstream.weights import Publisher, Puller
from slipstream.weights.manifest import order, version_key
from tests.support.weights import make_model, same, step


def v(number: int, epoch: int = 1) -> Version:
    return Version(epoch=epoch, number=number)


class Trainer:
    """A publisher that commits at weightsync, or holds its manifest back."""

    def __init__(self, weightsync: Any, blobs: MemoryStore, run_id: str = "run") -> None:
        self._weightsync, self._blobs, self._run_id = weightsync, blobs, run_id
        self.weights = make_model()
        self.held: Manifest | None = None

    async def open(self) -> int:
        self.epoch = await self._weightsync.open_epoch(self._run_id)
        self.publisher = Publisher(self._blobs, self._commit, self._run_id)
        return self.epoch

    async def _commit(self, manifest: Manifest) -> None:
        self.held = manifest
        await self._weightsync.commit(manifest)

    async def anchor(self, number: int = 0) -> Manifest:
        published = await self.publisher.publish_anchor(v(number, self.epoch), self.weights)
        return published.manifest

    async def step(self, number: int, seed: int | None = None) -> Manifest:
        self.weights = step(self.weights, number if seed is None else seed)
        published = await self.publisher.publish_delta(v(number, self.epoch), self.weights)
        return published.manifest


@pytest.fixture
async def trainer(weightsync: Any, blobs: MemoryStore) -> Trainer:
    trainer = Trainer(weightsync, blobs)
    await trainer.open()
    return trainer


async def test_a_replica_follows_a_trainer_through_weightsync(
    weightsync: Any, trainer: Trainer, blobs: MemoryStore
) -> None:
    puller = Puller(blobs, weightsync.plan)
    puller.seed(trainer.weights)
    await trainer.anchor()
    for number in range(1, 4):
        await trainer.step(number)
        pulled = await puller.pull("run")
        assert pulled is not None
        puller.accept(pulled)
        assert puller.version == v(number)
        assert same(puller.weights or {}, trainer.weights)
    assert await puller.pull("run") is None


async def test_epochs_count_up_from_one_for_each_run(weightsync: Any) -> None:
    assert [await weightsync.open_epoch("a") for _ in range(3)] == [1, 2, 3]
    assert await weightsync.open_epoch("b") == 1


async def test_no_two_trainers_get_the_same_epoch(start: Any) -> None:
    instances = [await start() for _ in range(3)]
    epochs = await asyncio.gather(*(i.open_epoch() for i in instances for _ in range(5)))
    assert sorted(epochs) == list(range(1, 16))


async def test_of_two_rivals_for_a_version_one_wins(start: Any, blobs: MemoryStore) -> None:
    first, second = await start(), await start()
    one = Trainer(first, blobs)
    await one.open()
    two = Trainer(second, blobs)
    two.epoch = one.epoch
    two.publisher = Publisher(blobs, two._commit, "run")
    base = await one.anchor()
    two.publisher.reference, two.publisher.version = two.weights, v(0)
    two.publisher._digests = {e.name: e.digest_after for e in base.shards[0].tensors}
    results = await asyncio.gather(one.step(1, seed=1), two.step(1, seed=2), return_exceptions=True)
    assert sorted(type(r) for r in results if not isinstance(r, Manifest)) == [ConflictError]
    winner = next(r for r in results if isinstance(r, Manifest))
    assert (await first.plan("run", v(0), None)) == [winner]


async def test_the_same_manifest_again_is_no_conflict_and_is_announced_again(
    weightsync: Any, trainer: Trainer
) -> None:
    manifest = await trainer.anchor()
    again = await weightsync.commit(manifest)
    assert again.already_committed
    assert again.manifest_key == version_key("run", v(0))
    assert len(await weightsync.announced()) == 2
    manifest.created_unix_s += 1
    with pytest.raises(ConflictError, match="someone else published version 1-0"):
        await weightsync.commit(manifest)


async def test_an_old_trainer_is_fenced(weightsync: Any, trainer: Trainer, blobs: MemoryStore) -> None:
    await trainer.anchor()
    newer = Trainer(weightsync, blobs)
    await newer.open()
    with pytest.raises(FencedError, match=r"epoch 2.*epoch 1 was replaced"):
        await trainer.step(1)
    await newer.anchor(0)
    await newer.step(1)
    with pytest.raises(FencedError):
        await trainer.step(2)
    assert [order(i.version) for i in await weightsync.versions()] == [(1, 0), (2, 0), (2, 1)]


async def test_an_epoch_that_opens_during_a_commit_fences_it(start: Any, blobs: MemoryStore) -> None:
    mine, other = await start(), await start()
    trainer = Trainer(mine, blobs)
    await trainer.open()
    create = blobs.create

    async def slow(key: str, data: Any) -> None:
        blobs.create = create  # type: ignore[method-assign]
        await other.open_epoch()
        await create(key, data)

    blobs.create = slow  # type: ignore[method-assign]
    with pytest.raises(FencedError):
        await trainer.anchor()
    assert await mine.announced() == []


async def test_a_version_of_an_epoch_that_nobody_opened_is_refused(weightsync: Any, trainer: Trainer) -> None:
    trainer.epoch = 7
    with pytest.raises(ConfigError, match="no epoch 7"):
        await trainer.anchor()


async def test_versions_do_not_go_backwards(weightsync: Any, trainer: Trainer) -> None:
    await trainer.anchor()
    await trainer.step(5)
    manifest = await trainer.step(7)
    manifest.version.number = 6
    with pytest.raises(ConfigError, match="at version 1-7; 1-6 would go backwards"):
        await weightsync.commit(manifest)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda m: m.parent.CopyFrom(v(1)), NotFoundError, "no version 1-1"),
        (
            lambda m: setattr(m.shards[0].tensors[0], "digest_before", "0" * 32),
            ConfigError,
            "does not begin where the parent ends",
        ),
        (lambda m: setattr(m.shards[0].tensors[1], "name", "embed"), ConfigError, "named twice"),
        (lambda m: setattr(m.shards[0].blob, "size_bytes", 1), ConfigError, "1 in the manifest"),
        (lambda m: setattr(m.shards[0].blob, "key", "elsewhere"), ConfigError, "not under the key"),
        (lambda m: setattr(m, "run_id", "A/b"), ConfigError, "run name"),
        (lambda m: setattr(m, "format", 9), ConfigError, "format 9"),
    ],
)
async def test_a_manifest_that_does_not_fit_is_refused_and_not_announced(
    change: Callable[[Manifest], object],
    error: type[Exception],
    message: str,
    weightsync: Any,
    trainer: Trainer,
) -> None:
    await trainer.anchor()
    honest = await trainer.step(2)
    await weightsync.blobs.delete(version_key("run", v(2)))
    told = len(await weightsync.announced())
    wrong = Manifest()
    wrong.CopyFrom(honest)
    change(wrong)
    with pytest.raises(error, match=message):
        await weightsync.commit(wrong)
    assert len(await weightsync.announced()) == told
    assert [order(i.version) for i in await weightsync.versions()] == [(1, 0)]


async def test_a_missing_blob_is_named(weightsync: Any, trainer: Trainer, blobs: MemoryStore) -> None:
    manifest = await trainer.anchor()
    await blobs.delete(manifest.shards[0].blob.key)
    manifest.version.number = 1
    with pytest.raises(NotFoundError, match="upload blobs before committing"):
        await weightsync.commit(manifest)


async def test_a_version_is_announced_once_its_manifest_is_there(
    weightsync: Any, trainer: Trainer, blobs: MemoryStore
) -> None:
    await trainer.anchor()
    manifest = await trainer.step(1)
    told = await weightsync.announced()
    assert [(order(a.version), a.kind) for a in told] == [
        ((1, 0), VERSION_KIND_ANCHOR),
        ((1, 1), VERSION_KIND_DELTA),
    ]
    assert told[1].size_bytes == manifest.shards[0].blob.size_bytes
    assert Manifest.FromString(blobs.objects[told[1].manifest_key]) == manifest


async def test_an_announcement_lost_in_a_crash_is_made_at_the_next_start(
    start: Any, blobs: MemoryStore
) -> None:
    first = await start()
    trainer = Trainer(first, blobs)
    await trainer.open()
    await trainer.anchor()

    async def crash(manifest: Manifest) -> None:
        raise RuntimeError("killed between manifest and announcement")

    first.service._announce = crash
    with pytest.raises(Exception, match="killed"):
        await trainer.step(1)
    await first.stop()
    second = await start()
    async with asyncio.timeout(10):
        while len(told := await second.announced()) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert order(told[-1].version) == (1, 1)
    await second.stop()
    third = await start()
    await asyncio.sleep(0.2)
    assert len(await third.announced()) == 2, "what was announced is not announced again"


async def test_a_new_instance_knows_all_that_the_store_holds(start: Any, blobs: MemoryStore) -> None:
    first = await start()
    trainer = Trainer(first, blobs)
    await trainer.open()
    manifests = [await trainer.anchor(), await trainer.step(1), await trainer.step(2)]
    await first.pin(v(1))
    await first.stop()
    second = await start()
    assert await second.plan("run", None, None) == manifests
    assert [i.pinned for i in await second.versions()] == [False, True, False]
    assert await second.open_epoch() == 2


async def test_versions_are_listed_oldest_first_with_their_sizes_and_pins(
    weightsync: Any, trainer: Trainer
) -> None:
    manifests = [await trainer.anchor(8), await trainer.step(9), await trainer.step(10)]
    await weightsync.pin(v(9))
    await weightsync.pin(v(9))
    infos = await weightsync.versions()
    assert [order(i.version) for i in infos] == [(1, 8), (1, 9), (1, 10)]
    assert [i.size_bytes for i in infos] == [m.shards[0].blob.size_bytes for m in manifests]
    assert [i.pinned for i in infos] == [False, True, False]
    await weightsync.pin(v(9), False)
    await weightsync.pin(v(9), False)
    assert not any(i.pinned for i in await weightsync.versions())
    with pytest.raises(NotFoundError, match="no version 1-11"):
        await weightsync.pin(v(11))


async def test_plans_follow_the_cheapest_way_and_name_what_is_missing(
    weightsync: Any, trainer: Trainer
) -> None:
    with pytest.raises(NotFoundError, match="no version yet"):
        await weightsync.plan("run", None, None)
    for number in range(3):
        await (trainer.step(number) if number else trainer.anchor())
    assert [order(m.version) for m in await weightsync.plan("run", v(1), None)] == [(1, 2)]
    assert [order(m.version) for m in await weightsync.plan("run", v(2), v(1))] == [(1, 0), (1, 1)]
    assert await weightsync.plan("run", v(2), None) == []
    with pytest.raises(NotFoundError, match="1-9"):
        await weightsync.plan("run", None, v(9))


async def test_a_plan_reads_only_the_manifests_on_the_way(start: Any, blobs: MemoryStore) -> None:
    first = await start()
    trainer = Trainer(first, blobs)
    await trainer.open()
    for number in range(6):
        await (trainer.step(number) if number else trainer.anchor())
    second, read, get = await start(), [], blobs.get

    async def counted(key: str) -> bytes:
        read.append(key)
        return await get(key)

    blobs.get = counted  # type: ignore[method-assign]
    assert len(await second.plan("run", v(4), None)) == 1
    assert read == [version_key("run", v(5))]


async def test_a_damaged_manifest_is_passed_over(
    weightsync: Any, start: Any, trainer: Trainer, blobs: MemoryStore
) -> None:
    await trainer.anchor()
    await trainer.step(1)
    blobs.objects[version_key("run", v(1))] = b"\xff" * 40
    blobs.objects["runs/run/versions/README"] = b"what is this"
    fresh = await start()
    assert [order(i.version) for i in await fresh.versions()] == [(1, 0)]
    with pytest.raises(NotFoundError):
        await fresh.plan("run", v(0), v(1))


async def test_watching_begins_with_the_newest_version_and_repeats_none(
    weightsync: Any, trainer: Trainer, blobs: MemoryStore
) -> None:
    await trainer.anchor()
    await trainer.step(1)
    stream = weightsync.stub.WatchVersions(pb.WatchVersionsRequest(run_id="run"))

    async def following() -> tuple[str, tuple[int, int]]:
        response = await asyncio.wait_for(stream.read(), 10)
        return response.announced.run_id, order(response.announced.version)

    assert await following() == ("run", (1, 1))
    other = Trainer(weightsync, blobs, "other")
    await other.open()
    await other.anchor()
    await weightsync.commit(trainer.held)
    topic = topics.VERSIONS.full_name("test")
    await weightsync.bus.producer.send(topic, b"noise", key="run")
    await trainer.step(2)
    assert await following() == ("run", (1, 2))
    stream.cancel()


async def test_all_runs_can_be_watched_together(
    weightsync: Any, trainer: Trainer, blobs: MemoryStore
) -> None:
    await trainer.anchor()
    stream = weightsync.stub.WatchVersions(pb.WatchVersionsRequest())
    assert (await asyncio.wait_for(stream.read(), 10)).announced.run_id == "run"
    other = Trainer(weightsync, blobs, "other")
    await other.open()
    await other.anchor()
    assert (await asyncio.wait_for(stream.read(), 10)).announced.run_id == "other"
    stream.cancel()
