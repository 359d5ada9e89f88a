"""Weightsync as a process, on a real Kafka and a real S3 server."""

import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from slipstream import topics
from slipstream.blobs import BlobStore, open_store
from slipstream.bus import open_bus
from slipstream.bus.events import parse
from slipstream.errors import ConflictError, FencedError
from slipstream.rpc import call, make_channel
from slipstream.settings import CommonSettings
from slipstream.v1 import weight_sync_service_pb2 as pb
from slipstream.v1.common_pb2 import Version
from slipstream.v1.weight_sync_service_pb2_grpc import WeightSyncServiceStub
from slipstream.v1.weights_pb2 import Manifest
from slipstream.weights import Publisher, Puller
from slipstream.weights.manifest import order
from tests.support.weights import make_model, same, step

pytestmark = pytest.mark.integration


def v(number: int, epoch: int = 1) -> Version:
    return Version(epoch=epoch, number=number)


class Client:
    """What a trainer and a replica ask of weightsync."""

    def __init__(self, target: str) -> None:
        self._target, self._channel = target, make_channel(target)
        self._stub = WeightSyncServiceStub(self._channel)

    async def open_epoch(self) -> int:
        response = await call(
            self._target, self._stub.OpenEpoch, pb.OpenEpochRequest(run_id="run"), timeout_s=20
        )
        return int(response.epoch)

    async def commit(self, manifest: Manifest) -> None:
        request = pb.CommitVersionRequest(manifest=manifest)
        await call(self._target, self._stub.CommitVersion, request, timeout_s=20)

    async def plan(self, run_id: str, have: Version | None, target: Version | None) -> list[Manifest]:
        request = pb.PlanUpdateRequest(run_id=run_id, have=have, target=target)
        return list((await call(self._target, self._stub.PlanUpdate, request, timeout_s=20)).manifests)

    async def close(self) -> None:
        await self._channel.close()


@pytest_asyncio.fixture
async def store(common_settings: CommonSettings) -> AsyncIterator[BlobStore]:
    store = open_store(common_settings)
    yield store
    await store.close()


async def announced(settings: CommonSettings) -> list[tuple[int, int]]:
    """Versions in the order in which they were announced first. One that is committed while the service looks
    for announcements that a crash lost may be announced by both: at least once is what is promised."""
    async with open_bus(settings) as bus:
        consumer = await bus.assign([topics.VERSIONS.full_name(settings.namespace)], offsets="earliest")
        records = []
        ends = await consumer.end_offsets()
        while any(offset < ends[tp] for tp, offset in consumer.positions().items()):
            records += await consumer.poll()
        versions = [order((await parse(record, topics.VERSIONS)).version) for record in records]
        return list(dict.fromkeys(versions))


async def test_weights_go_from_a_trainer_to_a_replica_through_a_restart(
    common_settings: CommonSettings, store: BlobStore, start_service: Any
) -> None:
    service = await start_service("weightsync", common_settings)
    client = Client(service.target)
    weights = [make_model(size=50_000)]
    for seed in range(3):
        weights.append(step(weights[-1], seed))
    publisher = Publisher(store, client.commit, "run", num_shards=3)
    puller = Puller(store, client.plan)
    puller.seed(weights[0])

    assert await client.open_epoch() == 1
    await publisher.publish_anchor(v(0), weights[0])
    await publisher.publish_delta(v(1), weights[1])
    pulled = await puller.pull("run")
    assert pulled is not None
    puller.accept(pulled)
    assert same(puller.weights or {}, weights[1])

    await client.close()
    service.child.signal(signal.SIGKILL)
    client = Client((await start_service("weightsync", common_settings)).target)
    publisher._commit = client.commit
    puller._plan = client.plan
    for number in (2, 3):
        await publisher.publish_delta(v(number), weights[number])
    pulled = await puller.pull("run")
    assert pulled is not None
    assert same(pulled.weights, weights[3])
    assert pulled.fetched_bytes < sum(t.data.nbytes for t in weights[0].values()) / 5
    fresh = Puller(store, client.plan)
    from_nothing = await fresh.pull("run")
    assert from_nothing is not None
    assert same(from_nothing.weights, weights[3])
    assert await announced(common_settings) == [(1, 0), (1, 1), (1, 2), (1, 3)]
    await client.close()


async def test_two_instances_let_one_of_two_trainers_publish(
    common_settings: CommonSettings, store: BlobStore, start_service: Any
) -> None:
    clients = [Client((await start_service("weightsync", common_settings)).target) for _ in range(2)]
    base = make_model()
    publishers = [Publisher(store, client.commit, "run") for client in clients]
    assert await clients[0].open_epoch() == 1
    await publishers[0].publish_anchor(v(0), base)
    with pytest.raises(ConflictError):
        await publishers[1].publish_anchor(v(0), step(base, 1))
    assert await clients[1].open_epoch() == 2
    await publishers[1].publish_anchor(v(0, 2), step(base, 1))
    with pytest.raises(FencedError):
        await publishers[0].publish_delta(v(1), step(base, 2))
    assert await announced(common_settings) == [(1, 0), (2, 0)]
    for client in clients:
        await client.close()
