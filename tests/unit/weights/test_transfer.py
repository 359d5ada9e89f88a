"""Publisher and puller together: exact, harmless to repeat, and never half way."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from slipstream.blobs.memory import MemoryStore
from slipstream.delta import RawTensor, Weights
from slipstream.errors import (
    ConfigError,
    ConflictError,
    FencedError,
    IntegrityError,
    NotFoundError,
    RetryableError,
    WrongBaseError,
)
from slipstream.v1.common_pb2 import Version
from slipstream.v1.weights_pb2 import KV_CACHE_POLICY_RECOMPUTE, VERSION_KIND_ANCHOR, Canary, Manifest
from slipstream.weights import Publisher, Puller
from slipstream.weights.manifest import order
from slipstream.weights.plan import plan
from slipstream.weights.shards import split
from tests.support.weights import make_model, pairs, same, step


def v(number: int) -> Version:
    return Version(epoch=1, number=number)


class Store(MemoryStore):
    """Counts reads and, when told, lets them fail."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []
        self.spoil: Callable[[str, bytes], bytes] = lambda key, data: data

    async def get(self, key: str) -> bytes:
        self.reads.append(key)
        await asyncio.sleep(0)
        return self.spoil(key, await super().get(key))


class World:
    """A store, a run's manifests, a publisher and a replica."""

    def __init__(self, *, num_shards: int = 2) -> None:
        self.store = Store()
        self.manifests: list[Manifest] = []
        self.publisher = Publisher(self.store, self.commit, "run", num_shards=num_shards)
        self.puller = Puller(self.store, self.plan)
        self.plans: list[tuple[Version | None, Version | None]] = []
        self.before_commit: Callable[[], Awaitable[None]] | None = None

    async def commit(self, manifest: Manifest) -> None:
        if self.before_commit is not None:
            await self.before_commit()
        self.manifests.append(manifest)

    async def plan(self, run_id: str, have: Version | None, target: Version | None) -> Sequence[Manifest]:
        self.plans.append((have, target))
        return plan(self.manifests, have, target)

    async def publish(self, number: int, weights: Weights) -> Manifest:
        first = self.publisher.reference is None
        publish = self.publisher.publish_anchor if first else self.publisher.publish_delta
        return (await publish(v(number), weights)).manifest

    async def follow(self) -> list[str]:
        """Pulls and accepts; names of the tensors that changed."""
        pulled = await self.puller.pull("run")
        assert pulled is not None
        self.puller.accept(pulled)
        return pulled.changed


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def models() -> list[dict[str, RawTensor]]:
    """A base model and three steps from it; `layer.1.w` is untouched by the second."""
    base = make_model()
    one = step(base, 1)
    two = step(one, 2, names=("embed", "layer.0.w"))
    return [base, one, two, step(two, 3)]


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(pairs())
def test_any_weights_reach_the_replica(pair: tuple[Weights, Weights]) -> None:
    old, new = pair
    if not old:
        return

    async def run() -> None:
        world = World()
        world.puller.seed(old)
        await world.publish(0, old)
        assert await world.follow() == []
        await world.publish(1, new)
        changed = await world.follow()
        assert world.puller.weights is not None
        assert same(world.puller.weights, new)
        assert changed == [n for n in old if old[n].data.tobytes() != new[n].data.tobytes()]

    asyncio.run(run())


async def test_a_seeded_replica_fetches_no_anchor_of_what_it_holds(
    world: World, models: list[Weights]
) -> None:
    world.puller.seed(models[0])
    await world.publish(0, models[0])
    pulled = await world.puller.pull("run")
    assert pulled is not None
    assert (pulled.changed, pulled.fetched_bytes, world.store.reads) == ([], 0, [])
    assert all(pulled.weights[name] is tensor for name, tensor in models[0].items())


async def test_only_the_shards_that_changed_are_fetched(models: list[Weights]) -> None:
    world = World(num_shards=len(models[0]))
    world.puller.seed(models[0])
    await world.publish(0, models[0])
    await world.publish(1, step(models[0], 7, names=("norm",)))
    assert await world.follow() == ["norm"]
    assert len(world.store.reads) == 1


async def test_a_replica_without_weights_gets_them_all(world: World, models: list[Weights]) -> None:
    for number, model in enumerate(models):
        await world.publish(number, model)
    assert sorted(await world.follow()) == sorted(models[0])
    assert same(world.puller.weights or {}, models[-1])
    assert world.puller.version == v(3)


async def test_a_chain_ends_where_single_steps_end(models: list[Weights]) -> None:
    world = World(num_shards=3)
    world.puller.seed(models[0])
    await world.publish(0, models[0])
    await world.follow()
    for number in (1, 2, 3):
        await world.publish(number, models[number])
    pulled = await world.puller.pull("run", v(2))
    assert pulled is not None
    assert same(pulled.weights, models[2])
    assert set(pulled.changed) == set(models[0]) - {"norm"}
    assert world.puller.version == v(0), "nothing is taken over before the engine committed"
    await world.follow()
    assert same(world.puller.weights or {}, models[3])
    assert await world.puller.pull("run") is None


async def test_the_weights_held_are_never_written_to(world: World, models: list[Weights]) -> None:
    base = {name: RawTensor(t.dtype, t.shape, t.data.copy()) for name, t in models[0].items()}
    for t in base.values():
        t.data.flags.writeable = False
    world.puller.seed(base)
    for number in (0, 1):
        await world.publish(number, models[number])
        await world.follow()
    assert same(base, models[0])


async def test_a_delta_delivered_again_changes_nothing(world: World, models: list[Weights]) -> None:
    world.puller.seed(models[0])
    for number in (0, 1):
        await world.publish(number, models[number])
        await world.follow()
    world.puller.version = v(0)  # as if the replica had forgotten that it took the last one
    assert await world.follow() == []
    assert same(world.puller.weights or {}, models[1])
    assert world.puller.version == v(1)


async def test_weights_that_are_not_the_deltas_base_lead_back_to_the_anchor(
    world: World, models: list[Weights]
) -> None:
    world.puller.seed(models[0])
    await world.publish(0, models[0])
    await world.follow()
    held = {**models[0], "embed": step(models[0], 9)["embed"]}
    world.puller.weights = held
    await world.publish(1, models[1])
    await world.follow()
    assert same(world.puller.weights or {}, models[1])
    assert world.plans[-2:] == [(v(0), None), (None, None)]


async def test_a_replica_of_another_run_goes_by_the_anchor(world: World, models: list[Weights]) -> None:
    world.puller.seed(models[2])
    world.puller.run_id, world.puller.version = "other", v(1)
    await world.publish(0, models[0])
    await world.publish(1, models[1])
    await world.follow()
    assert same(world.puller.weights or {}, models[1])
    assert world.plans == [(None, None)]


def damage(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


async def test_a_blob_damaged_on_the_way_is_fetched_again(world: World, models: list[Weights]) -> None:
    world.puller.seed(models[0])
    await world.publish(0, models[0])
    await world.publish(1, models[1])
    seen: set[str] = set()

    def once(key: str, data: bytes) -> bytes:
        first = key not in seen
        seen.add(key)
        return damage(data) if first else data

    world.store.spoil = once
    await world.follow()
    assert same(world.puller.weights or {}, models[1])


@pytest.mark.parametrize("trouble", ["damaged", "missing"])
async def test_a_lost_delta_leads_to_a_newer_anchor(trouble: str, models: list[Weights]) -> None:
    world = World(num_shards=1)
    world.puller.seed(models[0])
    await world.publish(0, models[0])
    await world.follow()
    lost = (await world.publish(1, models[1])).shards[0].blob.key
    await world.publish(2, models[2])
    anchor = await Publisher(world.store, world.commit, "run").publish_anchor(v(3), models[2])
    assert anchor.manifest.kind == VERSION_KIND_ANCHOR
    assert await world.follow()  # the anchor is on the way from 0 to 3 in any case
    world.puller.seed(models[0])
    if trouble == "missing":
        await world.store.delete(lost)
    else:
        world.store.objects[lost] = damage(world.store.objects[lost])
    with pytest.raises((IntegrityError, NotFoundError)):
        await world.puller.pull("run", v(2))
    assert same(world.puller.weights or {}, models[0])
    assert world.puller.version is None
    await world.follow()
    assert same(world.puller.weights or {}, models[2])


async def test_a_blob_with_other_tensors_than_its_manifest_is_refused(
    world: World, models: list[Weights]
) -> None:
    world.puller.seed(models[0])
    await world.publish(0, models[0])
    await world.follow()
    honest = await world.publish(1, models[1])
    other = World()
    await other.publish(0, models[0])
    forged = await other.publish(1, step(models[0], 42))
    world.store.objects.update(other.store.objects)
    for shard, with_blob in zip(honest.shards, forged.shards, strict=True):
        shard.blob.CopyFrom(with_blob.blob)
    with pytest.raises(IntegrityError, match="does not hold the tensors of its manifest"):
        await world.puller.pull("run")
    assert same(world.puller.weights or {}, models[0])


async def test_an_anchor_with_other_bytes_than_its_manifest_is_refused(
    world: World, models: list[Weights]
) -> None:
    manifest = await world.publish(0, models[0])
    manifest.shards[0].tensors[0].digest_after = "0" * 32
    with pytest.raises(IntegrityError, match="does not hold the tensors of its manifest"):
        await world.puller.pull("run")
    assert world.puller.weights is None


@pytest.mark.parametrize("other", ["names", "types"])
async def test_a_run_of_another_model_is_refused_before_anything_is_fetched(
    other: str, world: World, models: list[Weights]
) -> None:
    model = dict(models[0])
    if other == "names":
        model["lm_head"] = model.pop("embed")
    else:
        model["norm"] = RawTensor("F16", (3,), model["norm"].data)
    world.puller.seed(models[0])
    await world.publish(0, model)
    with pytest.raises(ConfigError, match="different models"):
        await world.puller.pull("run")
    assert world.store.reads == []


async def test_a_delta_alone_is_no_beginning(world: World, models: list[Weights]) -> None:
    await world.publish(0, models[0])
    await world.publish(1, models[1])
    world.manifests.pop(0)
    with pytest.raises(NotFoundError, match="1-0 is gone"):
        await world.puller.pull("run")
    world.puller.version, world.puller.run_id = v(0), "run"  # claims to hold what it does not
    with pytest.raises((WrongBaseError, NotFoundError)):
        await world.puller.pull("run")


# --- the publisher ------------------------------------------------------------------------------


async def test_blobs_are_durable_before_the_commit_and_the_reference_moves_after_it(
    world: World, models: list[Weights]
) -> None:
    await world.publish(0, models[0])
    stored = len(world.store.objects)

    async def look() -> None:
        assert len(world.store.objects) == stored + 2
        assert world.publisher.reference is models[0]
        assert world.publisher.version == v(0)

    world.before_commit = look
    await world.publish(1, models[1])
    assert world.publisher.reference is models[1]
    assert world.publisher.version == v(1)


@pytest.mark.parametrize("error", [RetryableError, ConflictError, FencedError])
async def test_a_failed_commit_leaves_the_reference_where_replicas_are(
    error: type[Exception], world: World, models: list[Weights]
) -> None:
    await world.publish(0, models[0])

    async def fail() -> None:
        raise error("no")

    world.before_commit = fail
    with pytest.raises(error):
        await world.publish(1, models[1])
    world.before_commit = None
    world.puller.seed(models[0])
    await world.publish(1, models[2])
    await world.follow()
    assert same(world.puller.weights or {}, models[2])


async def test_a_publication_repeated_after_a_lost_answer_makes_the_same_manifest(
    world: World, models: list[Weights]
) -> None:
    await world.publish(0, models[0])
    sent: list[bytes] = []

    async def lose(manifest: Manifest) -> None:
        sent.append(manifest.SerializeToString(deterministic=True))
        if len(sent) < 3:
            raise RetryableError("the answer was lost")

    publisher = Publisher(world.store, world.commit, "run")
    await publisher.publish_anchor(v(0), models[0])
    publisher._commit = lose
    for _ in range(2):
        with pytest.raises(RetryableError):
            await publisher.publish_delta(v(1), models[1])
    await publisher.publish_delta(v(1), models[1])
    assert sent == [sent[0]] * 3


async def test_a_failed_upload_commits_nothing(world: World, models: list[Weights]) -> None:
    await world.publish(0, models[0])

    async def full(key: str, data: object) -> None:
        raise RetryableError("no room")

    put, world.store.put = world.store.put, full  # type: ignore[method-assign]
    with pytest.raises(RetryableError):
        await world.publish(1, models[1])
    assert [order(m.version) for m in world.manifests] == [(1, 0)]
    world.store.put = put  # type: ignore[method-assign]
    await world.publish(1, models[1])
    assert same({**await pulled(world)}, models[1])


async def pulled(world: World) -> Weights:
    await world.follow()
    assert world.puller.weights is not None
    return world.puller.weights


async def test_a_reference_that_was_written_to_is_found_out(world: World, models: list[Weights]) -> None:
    mine = {name: RawTensor(t.dtype, t.shape, t.data.copy()) for name, t in models[0].items()}
    await world.publish(0, mine)
    mine["embed"].data[0] ^= 1
    with pytest.raises(IntegrityError, match="'embed' was written to"):
        await world.publish(1, models[1])
    assert len(world.manifests) == 1


async def test_a_delta_needs_an_anchor_and_a_newer_version_of_the_same_tensors(
    world: World, models: list[Weights]
) -> None:
    with pytest.raises(ConfigError, match="needs an anchor"):
        await world.publisher.publish_delta(v(1), models[1])
    await world.publish(1, models[0])
    for number in (0, 1):
        with pytest.raises(ConfigError, match="not newer"):
            await world.publish(number, models[1])
    with pytest.raises(ConfigError, match="'norm' is missing"):
        await world.publish(2, {n: t for n, t in models[1].items() if n != "norm"})


async def test_what_is_published_is_measured(models: list[Weights]) -> None:
    publisher = Publisher(Store(), _accept, "run")
    first = await publisher.publish_anchor(v(0), models[0])
    second = await publisher.publish_delta(v(1), models[1])
    elements = sum(t.data.size // 2 for t in models[0].values())
    differ = sum(
        int(np.count_nonzero(models[0][n].data.view("<u2") != models[1][n].data.view("<u2")))
        for n in models[0]
    )
    assert first.full_bytes == second.full_bytes == 2 * elements
    assert (first.changed, second.changed) == (1.0, differ / elements)
    assert second.size_bytes < second.full_bytes < first.size_bytes


async def _accept(manifest: Manifest) -> None:
    pass


async def test_canaries_and_the_cache_policy_are_in_the_manifest(models: list[Weights]) -> None:
    publisher = Publisher(Store(), _accept, "run", kv_cache=KV_CACHE_POLICY_RECOMPUTE)
    canary = Canary(token_ids=[1, 2], logprobs=[-0.5])
    anchor = await publisher.publish_anchor(v(0), models[0], [canary])
    delta = await publisher.publish_delta(v(1), models[1])
    assert (list(anchor.manifest.canaries), list(delta.manifest.canaries)) == ([canary], [])
    assert {p.manifest.kv_cache for p in (anchor, delta)} == {KV_CACHE_POLICY_RECOMPUTE}


@pytest.mark.parametrize("num_shards", [1, 2, 3, 100])
def test_shards_hold_every_tensor_once_and_weigh_about_the_same(num_shards: int) -> None:
    model = {f"{i}": t for i in range(20) for t in [make_model(size=100 + i)["embed"]]}
    shards = split(model, num_shards)
    assert sorted(name for shard in shards for name in shard) == sorted(model)
    assert len(shards) == min(num_shards, len(model))
    sizes = [sum(t.data.nbytes for t in shard.values()) for shard in shards]
    assert max(sizes) - min(sizes) <= max(t.data.nbytes for t in model.values())
