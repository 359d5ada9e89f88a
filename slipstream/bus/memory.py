"""The log within one process, for tests and simulations; behaves as Kafka does through `bus.kafka`."""

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from slipstream.bus.base import MAX_RECORD_BYTES, NewTopic, Record, TopicPartition
from slipstream.bus.partition import partition_of
from slipstream.bus.spans import beginnings, check_span, too_large
from slipstream.clock import Clock, SystemClock
from slipstream.errors import ConfigError, RetryableError, SlipstreamError


class _Partition:
    def __init__(self) -> None:
        self.first = 0
        self.records: list[Record] = []

    @property
    def span(self) -> tuple[int, int]:
        return self.first, self.first + len(self.records)


SESSION_S = 45.0
"""A static member that left keeps its partitions for this long, as a member that may come back."""


class _Group:
    def __init__(self) -> None:
        self.committed: dict[TopicPartition, int] = {}
        self.members: list[_GroupConsumer] = []
        self.generation = 0

    def join(self, consumer: "_GroupConsumer") -> None:
        self.generation += 1
        for place, member in enumerate(self.members):
            if consumer.member is not None and member.member == consumer.member:
                self.members[place] = consumer
                return
        self.members.append(consumer)

    def leave(self, consumer: "_GroupConsumer") -> None:
        if consumer in self.members:
            self.members.remove(consumer)
            self.generation += 1

    def expire(self, now: float) -> None:
        for member in list(self.members):
            if member.left_at is not None and now - member.left_at > SESSION_S:
                self.leave(member)


class MemoryLog:
    """Topics and groups that several `MemoryBus` connections share."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self.partitions: dict[TopicPartition, _Partition] = {}
        self.groups: dict[str, _Group] = {}
        self.available = True
        """False: the broker is away."""
        self._changed = asyncio.Event()
        self._unkeyed = itertools.count()

    def notify(self) -> None:
        """Wakes all who wait for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, timeout_s: float) -> bool:
        """Waits for a change; False when none came."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def set_available(self, available: bool) -> None:
        """Takes the broker away or brings it back."""
        self.available = available
        self.notify()

    def create(self, topic: NewTopic) -> None:
        if not self.of([topic.name]):
            self.partitions |= {TopicPartition(topic.name, i): _Partition() for i in range(topic.partitions)}

    def of(self, topics: Sequence[str]) -> list[TopicPartition]:
        """All partitions of topics, in order."""
        return sorted(tp for tp in self.partitions if tp.topic in topics)

    def require(self, topics: Sequence[str]) -> list[TopicPartition]:
        for topic in topics:
            if not self.of([topic]):
                raise ConfigError(f"the log in memory has no topic {topic}; create the topics first")
        return self.of(topics)

    def append(self, topic: str, value: bytes, key: bytes | None, headers: Mapping[str, bytes]) -> Record:
        count = len(self.require([topic]))
        number = next(self._unkeyed) % count if key is None else partition_of(key, count)
        part = self.partitions[TopicPartition(topic, number)]
        timestamp = int(self.clock.unix() * 1000)
        record = Record(topic, number, part.span[1], key, value, dict(headers), timestamp)
        part.records.append(record)
        self.notify()
        return record

    def delete_records(self, tp: TopicPartition, before: int) -> None:
        """What retention does: the log of a partition now begins at `before`."""
        part = self.partitions[tp]
        del part.records[: before - part.first]
        part.first = before

    def spans(self, topics: Sequence[str]) -> dict[TopicPartition, tuple[int, int]]:
        return {tp: self.partitions[tp].span for tp in self.of(topics)}


class MemoryBus:
    """Implements `slipstream.bus.Bus`."""

    def __init__(self, log: MemoryLog | None = None) -> None:
        self.log = log or MemoryLog()
        self._producer = _Producer(self.log)
        self._consumers: list[_Consumer] = []

    @property
    def producer(self) -> "_Producer":
        return self._producer

    async def start(self) -> None:
        while not self.log.available:
            await self.log.changed(60.0)

    async def close(self) -> None:
        for consumer in self._consumers:
            await consumer.close()

    async def ping(self) -> None:
        if not self.log.available:
            raise RetryableError("the log in memory does not answer")

    async def create_topics(self, topics: Sequence[NewTopic]) -> None:
        await self.ping()
        for topic in topics:
            self.log.create(topic)

    async def topic_offsets(self, topics: Sequence[str]) -> dict[TopicPartition, tuple[int, int]]:
        await self.ping()
        return self.log.spans(topics)

    async def group_offsets(self, group: str) -> dict[TopicPartition, int]:
        await self.ping()
        return dict(self.log.groups[group].committed) if group in self.log.groups else {}

    async def subscribe(self, topics: Sequence[str], *, group: str, member: str | None = None) -> "_Consumer":
        await self.start()
        self.log.require(topics)
        return self._keep(_GroupConsumer(self.log, topics, group, member))

    async def assign(
        self, topics: Sequence[str], *, offsets: Mapping[TopicPartition, int] | str
    ) -> "_Consumer":
        await self.start()
        self.log.require(topics)
        return self._keep(_AssignedConsumer(self.log, topics, beginnings(self.log.spans(topics), offsets)))

    def _keep(self, consumer: "_Consumer") -> "_Consumer":
        self._consumers.append(consumer)
        return consumer

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()


class _Producer:
    def __init__(self, log: MemoryLog) -> None:
        self._log = log

    async def send(
        self, topic: str, value: bytes, *, key: str | None = None, headers: Mapping[str, bytes] | None = None
    ) -> tuple[int, int]:
        if len(value) > MAX_RECORD_BYTES:
            raise too_large(topic, len(value))
        while not self._log.available:
            await self._log.changed(60.0)
        # A real broker is never there within the same step of the event loop.
        await asyncio.sleep(0)
        record = self._log.append(topic, value, None if key is None else key.encode(), headers or {})
        return record.partition, record.offset


class _Consumer:
    def __init__(self, log: MemoryLog, topics: Sequence[str]) -> None:
        self._log, self._topics = log, list(topics)
        self._next: dict[TopicPartition, int] = {}
        self._closed = False

    def _refresh(self) -> None:
        """Takes note of a rebalance."""

    async def poll(self, *, max_records: int = 100, timeout_s: float = 1.0) -> list[Record]:
        if self._closed:
            raise SlipstreamError(f"the consumer of {', '.join(self._topics)} is closed")
        deadline = self._log.clock.monotonic() + timeout_s
        while True:
            await asyncio.sleep(0)
            if self._log.available and (records := self._read(max_records)):
                return records
            if not await self._log.changed(deadline - self._log.clock.monotonic()):
                return []

    def _read(self, max_records: int) -> list[Record]:
        self._refresh()
        records: list[Record] = []
        for tp, offset in self._next.items():
            part = self._log.partitions[tp]
            check_span(tp, offset, part.span)
            start = offset - part.first
            records += part.records[start : start + max_records - len(records)]
        for record in records:
            self._next[record.tp] = record.offset + 1
        return records

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        raise ConfigError("a consumer outside any group has no offsets to commit")

    def owned(self) -> frozenset[TopicPartition]:
        self._refresh()
        return frozenset(self._next)

    def positions(self) -> dict[TopicPartition, int]:
        self._refresh()
        return dict(self._next)

    async def end_offsets(self) -> dict[TopicPartition, int]:
        if not self._log.available:
            raise RetryableError("the log in memory does not answer")
        return {tp: self._log.partitions[tp].span[1] for tp in self.owned()}

    async def close(self) -> None:
        self._closed = True


class _AssignedConsumer(_Consumer):
    def __init__(self, log: MemoryLog, topics: Sequence[str], begin: Mapping[TopicPartition, int]) -> None:
        super().__init__(log, topics)
        self._next.update(begin)


class _GroupConsumer(_Consumer):
    def __init__(self, log: MemoryLog, topics: Sequence[str], group: str, member: str | None) -> None:
        super().__init__(log, topics)
        self.group, self.member = group, member
        self.left_at: float | None = None
        self._group = log.groups.setdefault(group, _Group())
        self._generation = -1
        self._group.join(self)
        log.notify()

    def _refresh(self) -> None:
        group = self._group
        group.expire(self._log.clock.monotonic())
        if self._generation == group.generation:
            return
        self._generation = group.generation
        self._next = {}
        for number, tp in enumerate(self._log.of(self._topics)):
            if group.members and group.members[number % len(group.members)] is self:
                self._next[tp] = group.committed.get(tp, self._log.partitions[tp].first)

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        await asyncio.sleep(0)
        self._refresh()
        self._group.committed |= {tp: offset for tp, offset in offsets.items() if tp in self._next}

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self.member is None:
            self._group.leave(self)
        else:
            self.left_at = self._log.clock.monotonic()
        self._log.notify()
