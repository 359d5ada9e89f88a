"""A producer and a consumer that outlive their connections: they replace what failed or got stuck.

Nothing here knows Kafka's client; `bus.kafka` hands in how to connect, and translates errors.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from slipstream.bus.base import MAX_RECORD_BYTES, Record, TopicPartition
from slipstream.bus.host import Host
from slipstream.bus.outage import pauses
from slipstream.bus.spans import too_large
from slipstream.errors import ConfigError, RetryableError, SlipstreamError

LOOK_S = 5.0
"""Seconds without news after which the broker is asked whether it is there."""
STUCK_S = 30.0
"""Seconds after which a reader that returns nothing, although there is something, is replaced."""

_log = logging.getLogger(__name__)


class Writer(Protocol):
    """One connection for writing."""

    async def send(
        self, topic: str, value: bytes, key: bytes | None, headers: Mapping[str, bytes]
    ) -> tuple[int, int]:
        """Writes a record; returns (partition, offset) when it is durable.

        Raises:
            ConfigError: the broker will never take it.
            RetryableError: this connection has failed for good.
        """
        ...

    async def stop(self) -> None:
        """Ends the connection, giving up what it has in hand."""
        ...


class _Link:
    """A writer, and how those who wait for it hear that it is given up."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class SupervisedProducer:
    """Implements `slipstream.bus.Producer`. Replaces a writer that failed, or that has held a record for
    longer than `timeout_s`, and sends again what was not acknowledged."""

    def __init__(self, host: Host, connect: Callable[[], Awaitable[Writer]], timeout_s: float) -> None:
        """
        Args:
            connect: raises RetryableError while the broker is away, having noted that.
        """
        self._host, self._connect, self._timeout_s = host, connect, timeout_s
        self._link: _Link | None = None
        self._opening = asyncio.Lock()

    async def send(
        self, topic: str, value: bytes, *, key: str | None = None, headers: Mapping[str, bytes] | None = None
    ) -> tuple[int, int]:
        if len(value) > MAX_RECORD_BYTES:
            raise too_large(topic, len(value))
        encoded = None if key is None else key.encode()
        for pause in pauses():
            await self._host.require([topic])
            link = await self._open()
            try:
                sent = await self._attempt(link, link.writer.send(topic, value, encoded, headers or {}))
            except ConfigError as error:
                self._give_up(link, error)
                raise
            except (RetryableError, TimeoutError) as error:
                self._give_up(link, error)
                self._host.doubt(topic)
                await self._host.clock.sleep(pause)
            else:
                self._host.outage.up()
                return sent
        raise AssertionError("unreachable")

    async def _attempt(self, link: _Link, sending: Coroutine[Any, Any, tuple[int, int]]) -> tuple[int, int]:
        delivery = asyncio.ensure_future(sending)
        either: list[asyncio.Future[Any]] = [delivery, link.broken]
        try:
            async with asyncio.timeout(self._timeout_s):
                for patience in (LOOK_S, None):
                    await asyncio.wait(either, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
                    if delivery.done():
                        return delivery.result()
                    if link.broken.done():
                        raise RetryableError("the producer was replaced")
                    await self._host.look()
            raise AssertionError("unreachable")
        finally:
            delivery.cancel()

    async def _open(self) -> _Link:
        async with self._opening:
            for pause in pauses():
                if self._link:
                    break
                try:
                    self._link = _Link(await self._connect())
                except RetryableError:
                    await self._host.clock.sleep(pause)
            assert self._link is not None
            return self._link

    def _give_up(self, link: _Link, error: BaseException) -> None:
        if link is not self._link:
            return
        self._link = None
        link.broken.set_result(None)
        _log.debug("replacing the producer after %r", error)
        self._host.later(link.writer.stop())

    async def close(self) -> None:
        """Ends the producer; what it has in hand is given up."""
        link, self._link = self._link, None
        if link:
            link.broken.set_result(None)
            await link.writer.stop()


class Reader(Protocol):
    """One connection for reading."""

    def assignment(self) -> frozenset[TopicPartition]:
        """Partitions that it reads now."""
        ...

    async def read(self, max_records: int, timeout_s: float) -> list[Record]:
        """Next records; empty after `timeout_s`, or earlier.

        Raises:
            IntegrityError: records are gone.
            ConfigError: we may not read.
            RetryableError: this connection has failed for good.
        """
        ...

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Stores offsets; those of partitions that are no longer owned are ignored.

        Raises:
            RetryableError: the broker did not answer.
        """
        ...

    async def stop(self) -> None:
        """Leaves the group and ends the connection. Bounded in time."""
        ...


Positions = dict[TopicPartition, int]


class SupervisedConsumer:
    """Implements `slipstream.bus.Consumer`. Replaces a reader that failed or got stuck."""

    def __init__(
        self,
        host: Host,
        topics: Sequence[str],
        connect: Callable[[Positions], Awaitable[Reader]],
        *,
        group: str | None = None,
        begin: Mapping[TopicPartition, int] | None = None,
    ) -> None:
        """
        Args:
            connect: makes a reader that keeps the positions it is given up to date where the group decides
                on them; raises RetryableError while the broker is away, having noted that.
            begin: first offset per partition, outside a group.
        """
        self._host, self._topics, self._connect = host, list(topics), connect
        self.group = group
        self._reader: Reader | None = None
        self._next: Positions = dict(begin or {})
        self._pauses = pauses()
        self._news = self._looked = host.clock.monotonic()
        self._closed = False

    async def poll(self, *, max_records: int = 100, timeout_s: float = 1.0) -> list[Record]:
        if self._closed:
            raise SlipstreamError(f"the consumer of {', '.join(self._topics)} is closed")
        clock = self._host.clock
        deadline = clock.monotonic() + timeout_s
        while True:
            records = await self._read(max_records, max(0.0, deadline - clock.monotonic()))
            for record in records:
                self._next[record.tp] = record.offset + 1
            await self._watch(bool(records))
            if records or clock.monotonic() >= deadline:
                return records

    async def _read(self, max_records: int, timeout_s: float) -> list[Record]:
        try:
            if self._reader is None:
                self._reader = await self._connect(self._next)
            records = await self._reader.read(max_records, timeout_s)
            self._pauses = pauses()
            return records
        except RetryableError as error:
            _log.debug("replacing a consumer of %s after %r", self._topics, error)
            self._discard()
            await self._host.clock.sleep(min(next(self._pauses), timeout_s))
            return []

    async def _watch(self, got_some: bool) -> None:
        """Notices an outage, and a reader that stopped reading without an error."""
        now = self._host.clock.monotonic()
        if got_some:
            self._news = self._looked = now
            self._host.outage.up()
        elif now - self._looked >= LOOK_S:
            self._looked = now
            with contextlib.suppress(RetryableError):
                ends = await self.end_offsets()
                if not any(end > self._next.get(tp, end) for tp, end in ends.items()):
                    self._news = now
                elif now - self._news >= STUCK_S:
                    _log.warning("a consumer of %s got stuck; replacing it", ", ".join(self._topics))
                    self._news = now
                    self._discard()

    def _discard(self) -> None:
        reader, self._reader = self._reader, None
        if reader:
            self._host.later(reader.stop())

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        if self.group is None:
            raise ConfigError("a consumer outside any group has no offsets to commit")
        for pause in pauses():
            owned = self.owned()
            mine = {tp: offset for tp, offset in offsets.items() if tp in owned}
            if not mine or self._reader is None:
                return
            try:
                return await self._reader.commit(mine)
            except RetryableError as error:
                _log.debug("commit of %s failed: %r", mine, error)
                await self._host.look()
                await self._host.clock.sleep(pause)

    def owned(self) -> frozenset[TopicPartition]:
        if self.group is None:
            return frozenset(self._next)
        return self._reader.assignment() if self._reader else frozenset()

    def positions(self) -> dict[TopicPartition, int]:
        owned = self.owned()
        return {tp: offset for tp, offset in self._next.items() if tp in owned}

    async def end_offsets(self) -> dict[TopicPartition, int]:
        owned = self.owned()
        spans = await self._host.topic_offsets(self._topics)
        return {tp: end for tp, (_, end) in spans.items() if tp in owned}

    async def close(self) -> None:
        self._closed = True
        self._host.forget(self)
        reader, self._reader = self._reader, None
        if reader:
            await reader.stop()
