"""WeightSyncService: commit, announce, plan, list, pin, watch. All state is in the store."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from slipstream import topics
from slipstream.bus.events import ensure_topics, parse, publish
from slipstream.errors import IntegrityError, NotFoundError, PoisonMessageError, RetryableError
from slipstream.service import Context
from slipstream.v1 import weight_sync_service_pb2 as pb
from slipstream.v1.weight_sync_service_pb2_grpc import (
    WeightSyncServiceServicer,
    add_WeightSyncServiceServicer_to_server,
)
from slipstream.v1.weights_pb2 import Manifest, VersionAnnounced
from slipstream.weights.manifest import order, size_of, version_key, version_str
from slipstream.weights.plan import plan
from slipstream_weightsync.catalog import Catalog
from slipstream_weightsync.settings import WeightsyncSettings

_log = logging.getLogger(__name__)
_REPAIR_PAUSE_S = 5.0


class WeightSync(WeightSyncServiceServicer):
    """One instance serves any number of runs; several instances may run at once."""

    def __init__(self, context: Context[WeightsyncSettings]) -> None:
        self._context = context
        self._catalog = Catalog(context.blobs)

    def register(self, server: grpc.aio.Server) -> list[str]:
        add_WeightSyncServiceServicer_to_server(self, server)
        return [pb.DESCRIPTOR.services_by_name["WeightSyncService"].full_name]

    async def start(self) -> None:
        await self._context.blobs.ensure_bucket()
        await ensure_topics(self._context.bus, self._context.common)

    async def run(self) -> None:
        stopping = asyncio.create_task(self._context.stopping.wait())
        repair = asyncio.create_task(self._announce_missing())
        try:
            await asyncio.wait({stopping, repair}, return_when=asyncio.FIRST_COMPLETED)
            if repair.done():
                repair.result()
            await stopping
        finally:
            repair.cancel()
            stopping.cancel()

    async def close(self) -> None:
        pass

    async def OpenEpoch(self, request: pb.OpenEpochRequest, context: Any) -> pb.OpenEpochResponse:
        epoch = await self._catalog.open_epoch(request.run_id)
        _log.info("run %s enters epoch %d", request.run_id, epoch)
        return pb.OpenEpochResponse(epoch=epoch)

    async def CommitVersion(self, request: pb.CommitVersionRequest, context: Any) -> pb.CommitVersionResponse:
        key, known = await self._catalog.commit(request.manifest)
        # Announced also when it was there before: the first attempt may have ended between the two.
        await self._announce(request.manifest)
        return pb.CommitVersionResponse(manifest_key=key, already_committed=known)

    async def PlanUpdate(self, request: pb.PlanUpdateRequest, context: Any) -> pb.PlanUpdateResponse:
        have = request.have if request.HasField("have") else None
        target = request.target if request.HasField("target") else None
        manifests = plan(
            await self._catalog.towards(request.run_id, have, target),
            have,
            target,
        )
        return pb.PlanUpdateResponse(manifests=manifests, size_bytes=sum(map(size_of, manifests)))

    async def ListVersions(self, request: pb.ListVersionsRequest, context: Any) -> pb.ListVersionsResponse:
        manifests, pins = await asyncio.gather(
            self._catalog.all(request.run_id), self._catalog.pins(request.run_id)
        )
        return pb.ListVersionsResponse(
            versions=[
                pb.VersionInfo(
                    version=m.version,
                    kind=m.kind,
                    size_bytes=size_of(m),
                    pinned=order(m.version) in pins,
                    created_unix_s=m.created_unix_s,
                )
                for m in manifests
            ]
        )

    async def PinVersion(self, request: pb.PinVersionRequest, context: Any) -> pb.PinVersionResponse:
        await self._catalog.pin(request.run_id, request.version, request.pinned)
        return pb.PinVersionResponse()

    async def WatchVersions(
        self, request: pb.WatchVersionsRequest, context: Any
    ) -> AsyncIterator[pb.WatchVersionsResponse]:
        """The newest version comes from the store, later ones from the topic; none comes twice."""
        topic = topics.VERSIONS.full_name(self._context.common.namespace)
        consumer = await self._context.bus.assign([topic], offsets="latest")
        try:
            seen: dict[str, tuple[int, int]] = {}
            for run_id in [request.run_id] if request.run_id else await self._catalog.runs():
                if newest := await self._catalog.newest(run_id):
                    seen[run_id] = order(newest)
                    manifest = await self._catalog.get(run_id, newest)
                    yield pb.WatchVersionsResponse(announced=announcement(manifest))
            while not self._context.stopping.is_set():
                for record in await consumer.poll():
                    try:
                        announced = await parse(record, topics.VERSIONS)
                    except PoisonMessageError as error:
                        _log.warning("%s", error)
                        continue
                    newer = order(announced.version) > seen.get(announced.run_id, (0, 0))
                    if newer and request.run_id in ("", announced.run_id):
                        seen[announced.run_id] = order(announced.version)
                        yield pb.WatchVersionsResponse(announced=announced)
        finally:
            await consumer.close()

    async def _announce_missing(self) -> None:
        """Makes up for announcements that a crash between creating a manifest and announcing it lost."""
        while True:
            try:
                announced = await self._announced()
                for run_id in await self._catalog.runs():
                    newest = await self._catalog.newest(run_id)
                    if newest is not None and order(newest) > announced.get(run_id, (0, 0)):
                        await self._announce(await self._catalog.get(run_id, newest))
                return
            except (RetryableError, IntegrityError, NotFoundError) as error:
                _log.warning("cannot look for versions that were not announced: %s; trying again", error)
                await self._context.clock.sleep(_REPAIR_PAUSE_S)

    async def _announced(self) -> dict[str, tuple[int, int]]:
        """Newest version of every run that the topic tells of."""
        topic = topics.VERSIONS.full_name(self._context.common.namespace)
        newest: dict[str, tuple[int, int]] = {}
        consumer = await self._context.bus.assign([topic], offsets="earliest")
        try:
            ends = await consumer.end_offsets()
            while any(offset < ends[tp] for tp, offset in consumer.positions().items()):
                for record in await consumer.poll(max_records=1000):
                    try:
                        said = await parse(record, topics.VERSIONS)
                    except PoisonMessageError:
                        continue
                    newest[said.run_id] = max(order(said.version), newest.get(said.run_id, (0, 0)))
        finally:
            await consumer.close()
        return newest

    async def _announce(self, manifest: Manifest) -> None:
        bus, namespace = self._context.bus, self._context.common.namespace
        await publish(bus, namespace, topics.VERSIONS, announcement(manifest))
        _log.info("run %s is at version %s", manifest.run_id, version_str(manifest.version))


def announcement(manifest: Manifest) -> VersionAnnounced:
    """What is said about a manifest on the topic `versions`."""
    return VersionAnnounced(
        run_id=manifest.run_id,
        version=manifest.version,
        manifest_key=version_key(manifest.run_id, manifest.version),
        kind=manifest.kind,
        size_bytes=size_of(manifest),
    )
