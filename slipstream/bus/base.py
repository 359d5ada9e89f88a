"""The log that the services talk through: what every implementation promises.

Delivery is at least once. Records with equal keys go to one partition and stay in order. A consumer
either belongs to a group (offsets kept by the broker, committed by hand) or is assigned to all
partitions of its topics at offsets that the caller keeps.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Protocol, Self

MAX_RECORD_BYTES = 1_000_000
"""Largest value of a record; just below what a broker takes unless told otherwise. Events put values above
256 KiB into the object store."""


class TopicPartition(NamedTuple):
    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class Record:
    """A record as it was read."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes
    headers: Mapping[str, bytes] = field(default_factory=dict)
    timestamp_ms: int = 0

    @property
    def tp(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


@dataclass(frozen=True)
class NewTopic:
    """A topic to be created."""

    name: str
    partitions: int = 1
    retention_ms: int = 7 * 24 * 3600 * 1000


class Producer(Protocol):
    """Writes records. `send` returns only when the record is durable."""

    async def send(
        self, topic: str, value: bytes, *, key: str | None = None, headers: Mapping[str, bytes] | None = None
    ) -> tuple[int, int]:
        """Appends one record; returns (partition, offset). The offset is -1 where the broker only says that
        it has the record already.

        Keeps trying with growing pauses while the broker is away.

        Raises:
            ConfigError: the topic does not exist or the record can never be accepted.
        """
        ...


class Consumer(Protocol):
    """Reads records."""

    async def poll(self, *, max_records: int = 100, timeout_s: float = 1.0) -> list[Record]:
        """Next records, in order per partition; empty when none came within `timeout_s`.

        Waits out a broker that is away, and logs which one.

        Raises:
            IntegrityError: records between the last offset and the log's start are gone.
        """
        ...

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        """Group consumers: stores the next offset to read per partition. Partitions that this
        member no longer owns are ignored (their records will be delivered to the new owner)."""
        ...

    def owned(self) -> frozenset[TopicPartition]:
        """Partitions that this consumer reads now."""
        ...

    def positions(self) -> dict[TopicPartition, int]:
        """Next offset to be returned by `poll`, per owned partition."""
        ...

    async def end_offsets(self) -> dict[TopicPartition, int]:
        """One past the last record, per owned partition."""
        ...

    async def close(self) -> None:
        """Leaves the group and frees the connection. Bounded in time."""
        ...


class Bus(Protocol):
    """A connection to the log."""

    async def start(self) -> None:
        """Connects; waits for the broker with growing pauses, logging its address."""
        ...

    async def close(self) -> None:
        """Closes all producers and consumers made by this bus. Bounded in time."""
        ...

    async def ping(self) -> None:
        """One cheap round trip.

        Raises:
            RetryableError: the broker does not answer; the message names it.
        """
        ...

    async def create_topics(self, topics: Sequence[NewTopic]) -> None:
        """Creates those topics that do not exist."""
        ...

    async def topic_offsets(self, topics: Sequence[str]) -> dict[TopicPartition, tuple[int, int]]:
        """(first offset, one past the last) of every partition of `topics`."""
        ...

    async def group_offsets(self, group: str) -> dict[TopicPartition, int]:
        """Committed next offset per partition of a consumer group; empty when unknown."""
        ...

    @property
    def producer(self) -> Producer:
        """The bus's one producer; safe for concurrent use."""
        ...

    async def subscribe(self, topics: Sequence[str], *, group: str, member: str | None = None) -> Consumer:
        """Joins a consumer group, beginning at the earliest record where nothing is committed.

        Args:
            member: stable name of this member (static membership); None for a dynamic one.
        """
        ...

    async def assign(self, topics: Sequence[str], *, offsets: Mapping[TopicPartition, int] | str) -> Consumer:
        """Reads all partitions of `topics` outside any group.

        Args:
            offsets: where to begin, per partition (those not named begin at the earliest), or
                `"earliest"` / `"latest"` for all.
        """
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None: ...
