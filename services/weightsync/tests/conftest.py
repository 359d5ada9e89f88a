"""Weightsync over gRPC, with the log and the store in memory."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import pytest_asyncio
from slipstream_weightsync.service import WeightSync
from slipstream_weightsync.settings import WeightsyncSettings

from slipstream import topics
from slipstream.blobs.base import BlobStore
from slipstream.blobs.memory import MemoryStore
from slipstream.bus.base import Bus
from slipstream.bus.events import parse
from slipstream.bus.memory import MemoryBus, MemoryLog
from slipstream.clock import SystemClock
from slipstream.rpc import call, make_channel, make_server
from slipstream.service import Context
from slipstream.settings import CommonSettings, load
from slipstream.v1 import weight_sync_service_pb2 as pb
from slipstream.v1.common_pb2 import Version
from slipstream.v1.weight_sync_service_pb2_grpc import WeightSyncServiceStub
from slipstream.v1.weights_pb2 import Manifest, VersionAnnounced


class Weightsync:
    """One running instance, and a client for it."""

    def __init__(self, bus: Bus, blobs: BlobStore, common: CommonSettings) -> None:
        self.bus, self.blobs, self.common = bus, blobs, common

    async def start(self) -> None:
        self.stopping = asyncio.Event()
        settings = load(WeightsyncSettings, {})
        context = Context(
            "weightsync", self.common, settings, self.bus, self.blobs, SystemClock(), self.stopping
        )
        self.service = WeightSync(context)
        self._server = make_server()
        self.service.register(self._server)
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        await self.service.start()
        self._running = asyncio.ensure_future(self.service.run())
        self.channel = make_channel(self.target)
        self.stub = WeightSyncServiceStub(self.channel)

    async def stop(self) -> None:
        self.stopping.set()
        await self._running
        await self.channel.close()
        await self._server.stop(0)
        await self.service.close()

    async def _call(self, method: Any, request: Any) -> Any:
        return await call(self.target, method, request, timeout_s=20)

    async def open_epoch(self, run_id: str = "run") -> int:
        return int((await self._call(self.stub.OpenEpoch, pb.OpenEpochRequest(run_id=run_id))).epoch)

    async def commit(self, manifest: Manifest) -> pb.CommitVersionResponse:
        return await self._call(self.stub.CommitVersion, pb.CommitVersionRequest(manifest=manifest))

    async def plan(self, run_id: str, have: Version | None, target: Version | None) -> list[Manifest]:
        request = pb.PlanUpdateRequest(run_id=run_id, have=have, target=target)
        return list((await self._call(self.stub.PlanUpdate, request)).manifests)

    async def versions(self, run_id: str = "run") -> list[pb.VersionInfo]:
        return list(
            (await self._call(self.stub.ListVersions, pb.ListVersionsRequest(run_id=run_id))).versions
        )

    async def pin(self, version: Version, pinned: bool = True) -> None:
        await self._call(
            self.stub.PinVersion, pb.PinVersionRequest(run_id="run", version=version, pinned=pinned)
        )

    async def announced(self) -> list[VersionAnnounced]:
        """All that the topic `versions` tells so far."""
        topic = topics.VERSIONS.full_name(self.common.namespace)
        consumer = await self.bus.assign([topic], offsets="earliest")
        try:
            ends, records = await consumer.end_offsets(), []
            while any(offset < ends[tp] for tp, offset in consumer.positions().items()):
                records += await consumer.poll()
            return [await parse(record, topics.VERSIONS) for record in records]
        finally:
            await consumer.close()


Start = Callable[[], Awaitable[Weightsync]]


@pytest.fixture
def blobs() -> MemoryStore:
    return MemoryStore()


@pytest_asyncio.fixture
async def start(blobs: MemoryStore) -> AsyncIterator[Start]:
    """Starts instances that share one store and one log."""
    log, running = MemoryLog(), []
    common = load(CommonSettings, {"SLIPSTREAM_NAMESPACE": "test"})

    async def one() -> Weightsync:
        bus = MemoryBus(log)
        await bus.start()
        instance = Weightsync(bus, blobs, common)
        await instance.start()
        running.append(instance)
        return instance

    yield one
    for instance in running:
        if not instance.stopping.is_set():
            await instance.stop()
        await instance.bus.close()


@pytest_asyncio.fixture
async def weightsync(start: Start) -> Weightsync:
    return await start()
