"""The monitor: reads five topics, keeps windows, answers. It only ever watches: nobody waits for it."""

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import grpc.aio

from slipstream import topics
from slipstream.bus import Consumer, Record, TopicPartition
from slipstream.bus.events import parse
from slipstream.errors import IntegrityError, RetryableError, SlipstreamError
from slipstream.service import Context
from slipstream.v1.monitor_service_pb2 import DESCRIPTOR
from slipstream.v1.monitor_service_pb2_grpc import add_MonitorServiceServicer_to_server
from slipstream_monitor.depth import depths, reader_group
from slipstream_monitor.feed import Feed
from slipstream_monitor.page import make_app
from slipstream_monitor.rpcs import MonitorServicer
from slipstream_monitor.settings import MonitorSettings
from slipstream_monitor.state import MonitorState
from slipstream_monitor.web import WebServer

_log = logging.getLogger(__name__)

WATCHED = (topics.VERSIONS, topics.REPLICAS, topics.STEPS, topics.ALIGNMENT, topics.ALERTS)
_BATCH = 500
_FETCH_ATTEMPTS = 5


class Monitor:
    """The service, as `slipstream.service.Service` asks for."""

    def __init__(self, context: Context[MonitorSettings]) -> None:
        self._context = context
        settings = context.settings
        self.feed = Feed(MonitorState(settings.max_steps, settings.max_runs), context.clock)
        self._web = WebServer(
            make_app(self.feed), settings.host, settings.page_port, "SLIPSTREAM_MONITOR_PAGE_PORT"
        )
        self._topics = {t.full_name(context.common.namespace): t for t in WATCHED}
        self._consumer: Consumer | None = None
        self.page_port = 0

    def register(self, server: grpc.aio.Server) -> list[str]:
        self.page_port = self._web.bind()
        add_MonitorServiceServicer_to_server(MonitorServicer(self.feed), server)
        return [DESCRIPTOR.services_by_name["MonitorService"].full_name]

    async def start(self) -> None:
        await self._open()
        await self._web.start()
        _log.info("page at http://%s:%d", self._context.settings.host, self.page_port)

    async def run(self) -> None:
        """Reads until asked to stop."""
        work = [asyncio.ensure_future(each) for each in (self._consume(), self._measure())]
        stop = asyncio.ensure_future(self._context.stopping.wait())
        try:
            done, _ = await asyncio.wait([*work, stop], return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            self.feed.close()
            for task in (*work, stop):
                task.cancel()
            await asyncio.gather(*work, stop, return_exceptions=True)

    async def close(self) -> None:
        self.feed.close()
        await self._web.close()
        await self._leave()

    async def _open(self) -> None:
        self._consumer = await self._context.bus.assign(list(self._topics), offsets="earliest")

    async def _leave(self) -> None:
        if self._consumer:
            await self._consumer.close()
            self._consumer = None

    async def _consume(self) -> None:
        while True:
            try:
                if self._consumer is None:
                    await self._open()
                assert self._consumer is not None
                records = await self._consumer.poll(max_records=_BATCH, timeout_s=1.0)
            except IntegrityError as error:
                # Retention overtook a monitor that was away for long. What is gone is gone from its windows
                # too; the rest is read again, and repeats change nothing.
                _log.warning("%s; reading again from the earliest record", error)
                await self._leave()
                await self._context.clock.sleep(1.0)
                continue
            for record in records:
                await self._take(record)
            if records:
                self.feed.notify()

    async def _take(self, record: Record) -> None:
        try:
            message = await self._parse(record)
            self.feed.state.apply(message, record.timestamp_ms)
        except Exception as error:
            # Whatever one message holds, it must not take the page away, now and after every restart.
            self.feed.skipped[record.topic] += 1
            if self.feed.skipped[record.topic] == 1:
                _log.warning(
                    "%s, partition %d, offset %d is skipped: %s; further ones on this topic are only counted",
                    record.topic,
                    record.partition,
                    record.offset,
                    error or type(error).__name__,
                )

    async def _parse(self, record: Record) -> Any:
        """The message; waits a little, not for ever, for an object store that is away."""
        topic = self._topics[record.topic]
        for _ in range(_FETCH_ATTEMPTS - 1):
            with contextlib.suppress(RetryableError):
                return await parse(record, topic, blobs=self._context.blobs)
            await self._context.clock.sleep(1.0)
        return await parse(record, topic, blobs=self._context.blobs)

    async def _measure(self) -> None:
        """Looks at the length of the topics now and then."""
        misses = 0
        while True:
            try:
                await self._look()
                misses = 0
            except SlipstreamError as error:
                misses += 1
                # One miss is nothing: a broker that has just started does not know its groups yet.
                if misses == 2:
                    _log.warning("topic lengths are not known: %s", error)
            await self._context.clock.sleep(self._context.settings.depth_interval_s)

    async def _look(self) -> None:
        bus, namespace = self._context.bus, self._context.common.namespace
        offsets = await bus.topic_offsets([topic.full_name(namespace) for topic in topics.ALL])
        committed: dict[str, Mapping[TopicPartition, int]] = {}
        for topic in topics.ALL:
            if group := reader_group(topic, namespace):
                committed[topic.full_name(namespace)] = await bus.group_offsets(group)
        committed[topics.SAMPLES.full_name(namespace)] = self._trained()
        measured = depths(namespace, offsets, committed)
        if measured != self.feed.topics:
            self.feed.topics = measured
            self.feed.notify()

    def _trained(self) -> dict[TopicPartition, int]:
        """Where the newest run's trainer stands in `samples`; it keeps its offsets itself."""
        run = self.feed.state.find()
        last = run.steps.newest if run else None
        name = topics.SAMPLES.full_name(self._context.common.namespace)
        return {TopicPartition(name, p): offset for p, offset in last.record.offsets.items()} if last else {}
