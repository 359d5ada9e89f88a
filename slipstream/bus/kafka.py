"""Apache Kafka through aiokafka; the only file that imports it.

aiokafka's defaults lose data (acks=1, automatic commits, a jump to the end of the log for a new group), and
its idempotent producer never works again after one batch failed for good: the batch has used up sequence
numbers that the broker still waits for. So all settings are stated here, and a supervisor replaces a
producer that failed or that holds a record for too long, and sends the record again.
"""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener
from aiokafka import TopicPartition as KafkaPartition
from aiokafka import errors as kafka_errors
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin import NewTopic as KafkaTopic
from aiokafka.conn import create_conn

from slipstream.bus.base import MAX_RECORD_BYTES, NewTopic, Record, TopicPartition
from slipstream.bus.host import Host, bounded
from slipstream.bus.security import connection
from slipstream.bus.spans import beginnings, check_span, too_large
from slipstream.bus.supervisor import LOOK_S, Positions, SupervisedConsumer, SupervisedProducer
from slipstream.clock import Clock, SystemClock
from slipstream.errors import ConfigError, IntegrityError, RetryableError
from slipstream.settings import CommonSettings

_HEADER_BYTES = 48 * 1024
_REQUEST_S = 15.0
_ANSWER_S = 10.0
_START_S = 4 * _REQUEST_S
"""Longer than all steps of a client's start may take: cancelled in one, it leaves a connection open."""

_AWAY = (kafka_errors.KafkaError, OSError, TimeoutError)
_NEVER = (
    kafka_errors.MessageSizeTooLargeError,
    kafka_errors.RecordTooLargeError,
    kafka_errors.InvalidTopicError,
    kafka_errors.TopicAuthorizationFailedError,
    kafka_errors.ClusterAuthorizationFailedError,
)
_REFUSED = (
    kafka_errors.SaslAuthenticationFailed,
    kafka_errors.AuthenticationFailedError,
    kafka_errors.UnsupportedSaslMechanismError,
    kafka_errors.IllegalSaslStateError,
    ssl.SSLCertVerificationError,
)

_log = logging.getLogger(__name__)

T = TypeVar("T")


class KafkaBus(Host):
    """Implements `slipstream.bus.Bus`."""

    def __init__(
        self, settings: CommonSettings, *, send_timeout_s: float = 30.0, clock: Clock | None = None
    ) -> None:
        """
        Args:
            send_timeout_s: a producer that has not delivered a record after this time is replaced.
        """
        super().__init__(f"Kafka at {settings.kafka_bootstrap}", clock or SystemClock())
        self._settings = settings
        self._connection = {**connection(settings), "request_timeout_ms": int(_REQUEST_S * 1000)}
        self._admin: AIOKafkaAdminClient | None = None
        self._reader: AIOKafkaConsumer | None = None
        self._opening = asyncio.Lock()
        self._producer = SupervisedProducer(self, self._open_producer, send_timeout_s)

    @property
    def producer(self) -> SupervisedProducer:
        return self._producer

    async def close(self) -> None:
        await self._producer.close()
        self._forget_clients()
        await super().close()

    async def ping(self) -> None:
        await self._ask(lambda admin, _: admin.describe_cluster())

    async def create_topics(self, topics: Sequence[NewTopic]) -> None:
        replicas = self._settings.kafka_replication
        config = {"min.insync.replicas": str(2 if replicas > 2 else 1)}
        request = [
            KafkaTopic(
                name=topic.name,
                num_partitions=topic.partitions,
                replication_factor=replicas,
                topic_configs={**config, "retention.ms": str(topic.retention_ms)},
            )
            for topic in topics
        ]
        answer = await self._ask(lambda admin, _: admin.create_topics(request))
        for name, code, *detail in answer.topic_errors:
            error = kafka_errors.for_code(code)
            if error in (kafka_errors.NoError, kafka_errors.TopicAlreadyExistsError):
                continue
            kind = RetryableError if error.retriable else ConfigError
            text = detail[0] if detail and detail[0] else error.description
            hint = "; see SLIPSTREAM_KAFKA_REPLICATION" if "eplication" in text else ""
            raise kind(f"{self.outage.server} cannot create topic {name}: {text}{hint}")
        await self.require([topic.name for topic in topics])

    async def partitions(self, topics: Sequence[str]) -> list[TopicPartition]:
        described = await self._ask(lambda admin, _: admin.describe_topics(list(topics)))
        return [
            TopicPartition(topic["topic"], part["partition"])
            for topic in described
            if not topic["error_code"]
            for part in topic["partitions"]
        ]

    async def topic_offsets(self, topics: Sequence[str]) -> dict[TopicPartition, tuple[int, int]]:
        parts = [KafkaPartition(*tp) for tp in await self.partitions(topics)]
        first = await self._ask(lambda _, reader: reader.beginning_offsets(parts))
        end = await self._ask(lambda _, reader: reader.end_offsets(parts))
        return {TopicPartition(*tp): (first[tp], end[tp]) for tp in parts}

    async def group_offsets(self, group: str) -> dict[TopicPartition, int]:
        found = await self._ask(lambda admin, _: admin.list_consumer_group_offsets(group))
        return {TopicPartition(*tp): entry.offset for tp, entry in found.items() if entry.offset >= 0}

    async def subscribe(
        self, topics: Sequence[str], *, group: str, member: str | None = None
    ) -> SupervisedConsumer:
        async def connect(positions: Positions) -> "_Reader":
            client = await self._open_consumer(group_id=group, group_instance_id=member)
            client.subscribe(topics, listener=_Forget(positions))
            return _Reader(self, topics, client, positions)

        await self.require(topics)
        consumer = SupervisedConsumer(self, topics, connect, group=group)
        self.keep(consumer)
        return consumer

    async def assign(
        self, topics: Sequence[str], *, offsets: Mapping[TopicPartition, int] | str
    ) -> SupervisedConsumer:
        async def connect(positions: Positions) -> "_Reader":
            client = await self._open_consumer(group_id=None)
            client.assign([KafkaPartition(*tp) for tp in positions])
            for tp, offset in positions.items():
                client.seek(KafkaPartition(*tp), offset)
            return _Reader(self, topics, client, positions)

        await self.require(topics)
        begin = beginnings(await self.wait_out(lambda: self.topic_offsets(topics)), offsets)
        consumer = SupervisedConsumer(self, topics, connect, begin=begin)
        self.keep(consumer)
        return consumer

    async def _open_producer(self) -> "_Writer":
        client = AIOKafkaProducer(
            enable_idempotence=True,
            acks="all",
            linger_ms=5,
            max_batch_size=256 * 1024,
            max_request_size=MAX_RECORD_BYTES + _HEADER_BYTES,
            compression_type="zstd",
            **self._options("producer"),
        )
        return await self._started(client, _Writer(self, client))

    async def _open_consumer(self, **options: Any) -> AIOKafkaConsumer:
        client = AIOKafkaConsumer(
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level="read_committed",
            max_partition_fetch_bytes=4 * MAX_RECORD_BYTES,
            session_timeout_ms=45_000,
            # Below the request timeout, because the answer to a join comes when all members have joined.
            rebalance_timeout_ms=10_000,
            heartbeat_interval_ms=3_000,
            max_poll_interval_ms=600_000,
            **options,
            **self._options("consumer"),
        )
        return await self._started(client, client)

    async def _started(self, client: Any, made: T) -> T:
        try:
            async with asyncio.timeout(_START_S):
                await client.start()
        except _AWAY as error:
            self.later(self.end(client))
            raise await self._unreachable(error) from None
        except BaseException:
            self.later(self.end(client))
            raise
        return made

    def _options(self, name: str) -> dict[str, Any]:
        return {**self._connection, "client_id": f"{self._settings.namespace}-{name}"}

    async def _unreachable(self, reason: BaseException) -> RetryableError:
        """Notes an outage. Where security is on, asks why: aiokafka does not say.

        Raises:
            ConfigError: the broker is there and refuses the credentials, or its certificate is not trusted.
        """
        if self._settings.kafka_security != "PLAINTEXT":
            for address in self._settings.kafka_bootstrap.split(","):
                await self._try_credentials(address.strip())
        text = str(reason) or type(reason).__name__
        self.outage.down(text)
        return RetryableError(f"{self.outage.server} does not answer: {text}")

    async def _try_credentials(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        options = {k: v for k, v in self._connection.items() if k != "bootstrap_servers"}
        try:
            async with asyncio.timeout(_ANSWER_S):
                (await create_conn(host, int(port), **options)).close()
        except _REFUSED as error:
            raise ConfigError(
                f"Kafka at {address} refuses us ({error}); check SLIPSTREAM_KAFKA_USERNAME, _PASSWORD, "
                f"_SASL_MECHANISM, _SECURITY and _CA_FILE"
            ) from None
        except _AWAY:
            return

    async def _ask(self, call: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        """Makes a request with the shared admin client and reader; replaces them when it fails."""
        try:
            async with asyncio.timeout(_START_S):
                admin, reader = await self._clients()
            async with asyncio.timeout(_ANSWER_S):
                answer = await call(admin, reader)
        except _AWAY as error:
            self._forget_clients()
            raise await self._unreachable(error) from None
        self.outage.up()
        return answer

    async def _clients(self) -> tuple[Any, Any]:
        async with self._opening:
            if self._admin is None or self._reader is None:
                self._admin = AIOKafkaAdminClient(**self._options("admin"))
                self._reader = AIOKafkaConsumer(
                    group_id=None, enable_auto_commit=False, **self._options("reader")
                )
                await self._admin.start()
                await self._reader.start()
            return self._admin, self._reader

    def _forget_clients(self) -> None:
        admin, self._admin = self._admin, None
        reader, self._reader = self._reader, None
        if admin:
            self.later(bounded(admin.close()))
        if reader:
            self.later(self.end(reader))

    async def end(self, client: AIOKafkaConsumer | AIOKafkaProducer) -> None:
        """Ends a client in a bounded time. Its stop() waits for ever for a broker that is away, or fails half
        way: the connections are ended apart."""
        connections = client.client if isinstance(client, AIOKafkaProducer) else client._client
        clean = await bounded(client.stop())
        await bounded(connections.close())
        if not clean:
            self.later(_end_stragglers(connections))


class _Writer:
    """An idempotent aiokafka producer."""

    def __init__(self, bus: KafkaBus, client: AIOKafkaProducer) -> None:
        self._bus, self._client = bus, client

    async def send(
        self, topic: str, value: bytes, key: bytes | None, headers: Mapping[str, bytes]
    ) -> tuple[int, int]:
        try:
            sent = await self._client.send_and_wait(topic, value, key, headers=list(headers.items()))
        except _NEVER as error:
            raise too_large(topic, len(value), error) from None
        except _AWAY as error:
            raise RetryableError(f"{topic}: {error!r}") from None
        return sent.partition, sent.offset

    async def stop(self) -> None:
        # The sender is ended first: left alone, it would deliver its records once the broker is back, after
        # the next producer has sent them.
        sender = self._client._sender.sender_task
        if sender is not None:
            sender.cancel()
        await self._bus.end(self._client)


class _Reader:
    """An aiokafka consumer, in a group or not."""

    def __init__(self, bus: KafkaBus, topics: Sequence[str], client: AIOKafkaConsumer, next_: Positions):
        self._bus, self._topics, self._client, self._next = bus, topics, client, next_

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(TopicPartition(*tp) for tp in self._client.assignment())

    async def read(self, max_records: int, timeout_s: float) -> list[Record]:
        try:
            # getmany waits for a rebalance without a limit of its own.
            async with asyncio.timeout(timeout_s + LOOK_S):
                await self._learn()
                got = await self._client.getmany(timeout_ms=int(timeout_s * 1000), max_records=max_records)
        except kafka_errors.OffsetOutOfRangeError as error:
            raise await self._gap(error) from None
        except kafka_errors.TopicAuthorizationFailedError as error:
            raise ConfigError(f"{self._bus.outage.server} does not let us read {error}") from None
        except (kafka_errors.NoOffsetForPartitionError, kafka_errors.IllegalStateError, TimeoutError):
            # A rebalance came in between, or goes on.
            await self._bus.clock.sleep(min(0.02, timeout_s))
            return []
        except (kafka_errors.KafkaError, OSError) as error:
            await self._bus.look()
            raise RetryableError(f"{self._topics}: {error!r}") from None
        return [_record(entry) for batch in got.values() for entry in batch]

    async def _learn(self) -> None:
        """Finds where to begin in partitions that the group has just given us."""
        new = [tp for tp in self._client.assignment() if TopicPartition(*tp) not in self._next]
        if not new:
            return
        first = await self._client.beginning_offsets(new)
        for tp in new:
            committed = await self._client.committed(tp)
            if committed is None:
                self._client.seek(tp, first[tp])
            elif committed < first[tp]:
                check_span(TopicPartition(*tp), committed, (first[tp], committed))
            self._next[TopicPartition(*tp)] = first[tp] if committed is None else committed

    async def _gap(self, error: Any) -> IntegrityError:
        spans = await self._bus.topic_offsets(self._topics)
        for tp, offset in error.args[0].items():
            check_span(TopicPartition(*tp), offset, spans[TopicPartition(*tp)])
        return IntegrityError(f"{', '.join(self._topics)}: {error}")

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._client.commit({KafkaPartition(*tp): offset for tp, offset in offsets.items()})
        except (kafka_errors.CommitFailedError, kafka_errors.IllegalStateError) as error:
            # The group has moved on; the new owner gets these records again.
            _log.debug("commit of %s ignored: %r", offsets, error)
        except _AWAY as error:
            raise RetryableError(f"commit: {error!r}") from None

    async def stop(self) -> None:
        await self._bus.end(self._client)


class _Forget(ConsumerRebalanceListener):  # type: ignore[misc]
    """Positions are learnt anew after each rebalance."""

    def __init__(self, positions: Positions) -> None:
        self._positions = positions

    def on_partitions_revoked(self, revoked: Any) -> None:
        self._positions.clear()

    def on_partitions_assigned(self, assigned: Any) -> None:
        self._positions.clear()


async def _end_stragglers(connections: Any) -> None:
    """Ends connections that were being made while the others were ended."""
    try:
        await asyncio.sleep(_REQUEST_S)
    finally:
        await bounded(connections.close())


def _record(entry: Any) -> Record:
    return Record(
        topic=entry.topic,
        partition=entry.partition,
        offset=entry.offset,
        key=entry.key,
        value=entry.value or b"",
        headers=dict(entry.headers),
        timestamp_ms=entry.timestamp,
    )
