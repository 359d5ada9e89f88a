"""Apache Kafka through aiokafka; the only file that imports it.

aiokafka's defaults lose data (acks=1, automatic commits, a jump to the end of the log for a new group), and
its idempotent producer never works again after one batch failed for good: the batch has used up sequence
numbers that the broker still waits for. So all settings are stated here, and a supervisor replaces a
producer that failed or that holds a record for too long, and sends the record again.
"""

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRebalanceListener
from aiokafka import TopicPartition as KafkaPartition
from aiokafka import errors as kafka_errors
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin import NewTopic as KafkaTopic
from aiokafka.conn import create_conn

from slipstream.bus.base import MAX_RECORD_BYTES, NewTopic, Record, TopicPartition
from slipstream.bus.outage import Outage, pauses
from slipstream.bus.spans import beginnings, check_span, too_large
from slipstream.clock import Clock, SystemClock
from slipstream.errors import ConfigError, IntegrityError, RetryableError, SlipstreamError
from slipstream.settings import CommonSettings

_HEADER_BYTES = 48 * 1024
_REQUEST_S = 20.0
_ANSWER_S = 10.0
_CLOSE_S = 5.0
_LOOK_S = 5.0
"""Seconds without news after which the broker is asked whether it is there."""
_STUCK_S = 30.0
"""Seconds after which a consumer that returns nothing, although there is something, is replaced."""
_NEW_TOPIC_S = 5.0
"""Seconds that brokers may take to know a topic that was just created."""

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


class KafkaBus:
    """Implements `slipstream.bus.Bus`."""

    def __init__(
        self, settings: CommonSettings, *, send_timeout_s: float = 30.0, clock: Clock | None = None
    ) -> None:
        """
        Args:
            send_timeout_s: a producer that has not delivered a record after this time is replaced.
        """
        self._settings = settings
        self._connection = _connection(settings)
        self.clock = clock or SystemClock()
        self.outage = Outage(f"Kafka at {settings.kafka_bootstrap}", self.clock)
        self._admin: AIOKafkaAdminClient | None = None
        self._reader: AIOKafkaConsumer | None = None
        self._opening = asyncio.Lock()
        self._looking = False
        self._known: set[str] = set()
        self._producer = _Producer(self, send_timeout_s)
        self._consumers: set[_Consumer] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def producer(self) -> "_Producer":
        return self._producer

    async def start(self) -> None:
        for pause in pauses():
            try:
                return await self.ping()
            except RetryableError:
                await self.clock.sleep(pause)

    async def close(self) -> None:
        await asyncio.gather(*(consumer.close() for consumer in list(self._consumers)))
        await self._producer.close()
        self._forget_clients()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=2 * _CLOSE_S)

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

    async def require(self, topics: Sequence[str]) -> None:
        """Checks that topics exist (each once per process).

        Raises:
            ConfigError: one does not.
        """
        missing = set(topics) - self._known
        for pause in pauses(cap=1.0):
            if not missing:
                return
            try:
                there = await self._partitions(sorted(missing))
            except RetryableError:
                await self.clock.sleep(pause)
                continue
            self._known |= {tp.topic for tp in there}
            missing -= self._known
            if missing and pause >= 1.0:
                raise ConfigError(
                    f"{self.outage.server} has no topic {', '.join(sorted(missing))}; create the topics first"
                )
            if missing:
                await self.clock.sleep(pause)

    async def _partitions(self, topics: Sequence[str]) -> list[TopicPartition]:
        described = await self._ask(lambda admin, _: admin.describe_topics(list(topics)))
        return [
            TopicPartition(topic["topic"], part["partition"])
            for topic in described
            if not topic["error_code"]
            for part in topic["partitions"]
        ]

    async def topic_offsets(self, topics: Sequence[str]) -> dict[TopicPartition, tuple[int, int]]:
        parts = [KafkaPartition(*tp) for tp in await self._partitions(topics)]
        first = await self._ask(lambda _, reader: reader.beginning_offsets(parts))
        end = await self._ask(lambda _, reader: reader.end_offsets(parts))
        return {TopicPartition(*tp): (first[tp], end[tp]) for tp in parts}

    async def group_offsets(self, group: str) -> dict[TopicPartition, int]:
        found = await self._ask(lambda admin, _: admin.list_consumer_group_offsets(group))
        return {TopicPartition(*tp): entry.offset for tp, entry in found.items() if entry.offset >= 0}

    async def subscribe(self, topics: Sequence[str], *, group: str, member: str | None = None) -> "_Consumer":
        await self.require(topics)
        return self._keep(_GroupConsumer(self, topics, group, member))

    async def assign(
        self, topics: Sequence[str], *, offsets: Mapping[TopicPartition, int] | str
    ) -> "_Consumer":
        await self.require(topics)
        spans = await self._wait_out(lambda: self.topic_offsets(topics))
        begin = beginnings(spans, offsets)
        return self._keep(_AssignedConsumer(self, topics, begin))

    def _keep(self, consumer: "_Consumer") -> "_Consumer":
        self._consumers.add(consumer)
        return consumer

    def forget(self, consumer: "_Consumer") -> None:
        """A consumer was closed."""
        self._consumers.discard(consumer)

    def options(self, name: str) -> dict[str, Any]:
        """Arguments that all clients share."""
        return {**self._connection, "client_id": f"{self._settings.namespace}-{name}"}

    async def look(self) -> bool:
        """Asks whether the broker is there, in order to log it; True when it is."""
        if self._looking:
            return not self.outage.lasting
        self._looking = True
        try:
            await self.ping()
            return True
        except RetryableError:
            return False
        finally:
            self._looking = False

    async def unreachable(self, reason: BaseException) -> RetryableError:
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

    async def _wait_out(self, call: Callable[[], Awaitable[T]]) -> T:
        for pause in pauses():
            try:
                return await call()
            except RetryableError:
                await self.clock.sleep(pause)
        raise AssertionError("unreachable")

    async def _ask(self, call: Callable[[Any, Any], Awaitable[Any]]) -> Any:
        """Makes a request with the shared admin client and reader; replaces them when it fails."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                admin, reader = await self._clients()
                answer = await call(admin, reader)
        except _AWAY as error:
            self._forget_clients()
            raise await self.unreachable(error) from None
        self.outage.up()
        return answer

    async def _clients(self) -> tuple[Any, Any]:
        async with self._opening:
            if self._admin is None or self._reader is None:
                self._admin = AIOKafkaAdminClient(**self.options("admin"))
                self._reader = AIOKafkaConsumer(
                    group_id=None, enable_auto_commit=False, **self.options("reader")
                )
                await self._admin.start()
                await self._reader.start()
            return self._admin, self._reader

    def _forget_clients(self) -> None:
        admin, self._admin = self._admin, None
        reader, self._reader = self._reader, None
        if admin:
            self.later(admin.close())
        if reader:
            self.later(reader.stop())

    def later(self, closing: Coroutine[Any, Any, Any]) -> None:
        """Runs a clean-up that nobody waits for, for a bounded time."""
        task = asyncio.create_task(_bounded(closing))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()


async def _bounded(closing: Coroutine[Any, Any, Any]) -> None:
    # aiokafka's stop() can wait for a broker for ever, and fails when what it stops has failed already.
    with contextlib.suppress(Exception):
        await asyncio.wait_for(closing, _CLOSE_S)


def _connection(settings: CommonSettings) -> dict[str, Any]:
    security = settings.kafka_security
    options: dict[str, Any] = {
        "bootstrap_servers": settings.kafka_bootstrap,
        "security_protocol": security,
        "request_timeout_ms": int(_REQUEST_S * 1000),
    }
    if security.endswith("SSL"):
        try:
            options["ssl_context"] = ssl.create_default_context(cafile=settings.kafka_ca_file or None)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"SLIPSTREAM_KAFKA_CA_FILE={settings.kafka_ca_file}: {error}") from None
    if security.startswith("SASL"):
        options["sasl_mechanism"] = settings.kafka_sasl_mechanism
        options["sasl_plain_username"] = settings.kafka_username
        options["sasl_plain_password"] = settings.kafka_password.get_secret_value()
    return options


class _Link:
    """One aiokafka producer, and how those who wait for it hear that it is given up."""

    def __init__(self, client: AIOKafkaProducer) -> None:
        self.client = client
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class _Producer:
    """Implements `slipstream.bus.Producer`: an idempotent producer under a supervisor."""

    def __init__(self, bus: KafkaBus, send_timeout_s: float) -> None:
        self._bus, self._timeout_s = bus, send_timeout_s
        self._link: _Link | None = None
        self._opening = asyncio.Lock()

    async def send(
        self, topic: str, value: bytes, *, key: str | None = None, headers: Mapping[str, bytes] | None = None
    ) -> tuple[int, int]:
        if len(value) > MAX_RECORD_BYTES:
            raise too_large(topic, len(value))
        await self._bus.require([topic])
        arguments = {
            "topic": topic,
            "value": value,
            "key": None if key is None else key.encode(),
            "headers": list((headers or {}).items()),
        }
        for pause in pauses():
            link = await self._open()
            try:
                sent = await self._attempt(link, arguments)
            except _NEVER as error:
                if not isinstance(error, kafka_errors.MessageSizeTooLargeError):
                    self._give_up(link, error)
                raise too_large(topic, len(value), error) from None
            except _AWAY as error:
                self._give_up(link, error)
                await self._bus.clock.sleep(pause)
            else:
                self._bus.outage.up()
                return sent.partition, sent.offset
        raise AssertionError("unreachable")

    async def _attempt(self, link: _Link, arguments: Mapping[str, Any]) -> Any:
        async with asyncio.timeout(self._timeout_s):
            delivery = await link.client.send(**arguments)
            for patience in (_LOOK_S, None):
                await asyncio.wait(
                    {delivery, link.broken}, timeout=patience, return_when=asyncio.FIRST_COMPLETED
                )
                if delivery.done():
                    return delivery.result()
                if link.broken.done():
                    delivery.cancel()
                    raise kafka_errors.ProducerClosed
                await self._bus.look()
        raise AssertionError("unreachable")

    async def _open(self) -> _Link:
        async with self._opening:
            if self._link:
                return self._link
            for pause in pauses():
                client = AIOKafkaProducer(
                    enable_idempotence=True,
                    acks="all",
                    linger_ms=5,
                    max_batch_size=256 * 1024,
                    max_request_size=MAX_RECORD_BYTES + _HEADER_BYTES,
                    compression_type="zstd",
                    **self._bus.options("producer"),
                )
                try:
                    await asyncio.wait_for(client.start(), _ANSWER_S)
                except _AWAY as error:
                    self._bus.later(_stop_producer(client))
                    await self._bus.unreachable(error)
                    await self._bus.clock.sleep(pause)
                except BaseException:
                    self._bus.later(_stop_producer(client))
                    raise
                else:
                    self._link = _Link(client)
                    return self._link
        raise AssertionError("unreachable")

    def _give_up(self, link: _Link, error: BaseException) -> None:
        if link is not self._link:
            return
        self._link = None
        link.broken.set_result(None)
        _log.debug("replacing the producer after %r", error)
        self._bus.later(_stop_producer(link.client))

    async def close(self) -> None:
        """Ends the producer; records in hand are given up after a while."""
        link, self._link = self._link, None
        if link:
            link.broken.set_result(None)
            await _bounded(_stop_producer(link.client))


async def _stop_producer(client: AIOKafkaProducer) -> None:
    # The sender is ended first: left alone, it would deliver its records once the broker is back, after
    # the next producer has sent them.
    sender = client._sender.sender_task
    if sender is not None:
        sender.cancel()
    try:
        await asyncio.wait_for(client.stop(), _CLOSE_S / 2)
    finally:
        await client.client.close()


class _Consumer:
    """Implements `slipstream.bus.Consumer`. Holds an aiokafka consumer and replaces it when it fails."""

    def __init__(self, bus: KafkaBus, topics: Sequence[str]) -> None:
        self._bus, self._topics = bus, list(topics)
        self._client: AIOKafkaConsumer | None = None
        self._next: dict[TopicPartition, int] = {}
        self._news = bus.clock.monotonic()
        self._looked = self._news
        self._pauses = pauses()
        self._closed = False

    async def _open(self) -> AIOKafkaConsumer:
        raise NotImplementedError

    async def _learn(self, client: AIOKafkaConsumer) -> None:
        """Finds the positions of partitions that were just assigned."""

    async def poll(self, *, max_records: int = 100, timeout_s: float = 1.0) -> list[Record]:
        if self._closed:
            raise SlipstreamError(f"the consumer of {', '.join(self._topics)} is closed")
        try:
            if self._client is None:
                self._client = await self._open()
                self._pauses = pauses()
            # getmany waits for a rebalance without a limit of its own.
            async with asyncio.timeout(timeout_s + _LOOK_S):
                await self._learn(self._client)
                batches = await self._client.getmany(
                    timeout_ms=int(timeout_s * 1000), max_records=max_records
                )
        except (kafka_errors.NoOffsetForPartitionError, TimeoutError, kafka_errors.IllegalStateError):
            batches = {}
        except kafka_errors.OffsetOutOfRangeError as error:
            await self._report_gap(error)
        except kafka_errors.TopicAuthorizationFailedError as error:
            raise ConfigError(f"{self._bus.outage.server} does not let us read {error}") from None
        except (kafka_errors.KafkaError, OSError) as error:
            await self._replace(error)
            await self._bus.clock.sleep(min(next(self._pauses), max(timeout_s, 0.05)))
            return []
        records = [_record(entry) for batch in batches.values() for entry in batch]
        for record in records:
            self._next[record.tp] = record.offset + 1
        await self._watch(bool(records))
        return records

    async def _watch(self, got_some: bool) -> None:
        now = self._bus.clock.monotonic()
        if got_some:
            self._news = self._looked = now
            self._bus.outage.up()
        elif now - self._looked >= _LOOK_S:
            with contextlib.suppress(RetryableError):
                ends = await self.end_offsets()
                behind = any(end > self._next.get(tp, end) for tp, end in ends.items())
                if not behind:
                    self._news = self._bus.clock.monotonic()
                elif now - self._news >= _STUCK_S:
                    _log.warning("a consumer of %s got stuck; replacing it", ", ".join(self._topics))
                    self._discard()
                    self._news = self._bus.clock.monotonic()
            self._looked = self._bus.clock.monotonic()

    async def _report_gap(self, error: Any) -> None:
        spans = await self._bus.topic_offsets(self._topics)
        for tp, offset in error.args[0].items():
            check_span(TopicPartition(*tp), offset, spans[TopicPartition(*tp)])
        raise IntegrityError(f"{', '.join(self._topics)}: {error}")

    async def _replace(self, error: BaseException) -> None:
        _log.debug("replacing a consumer of %s after %r", self._topics, error)
        self._discard()
        if isinstance(error, kafka_errors.KafkaConnectionError | OSError):
            await self._bus.unreachable(error)
        else:
            await self._bus.look()

    def _discard(self) -> None:
        client, self._client = self._client, None
        if client:
            self._bus.later(client.stop())

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        raise ConfigError("a consumer outside any group has no offsets to commit")

    def owned(self) -> frozenset[TopicPartition]:
        if self._client is None:
            return frozenset()
        return frozenset(TopicPartition(*tp) for tp in self._client.assignment())

    def positions(self) -> dict[TopicPartition, int]:
        owned = self.owned()
        return {tp: offset for tp, offset in self._next.items() if tp in owned}

    async def end_offsets(self) -> dict[TopicPartition, int]:
        owned = self.owned()
        spans = await self._bus.topic_offsets(self._topics)
        return {tp: end for tp, (_, end) in spans.items() if tp in owned}

    async def close(self) -> None:
        self._closed = True
        client, self._client = self._client, None
        self._bus.forget(self)
        if client:
            await _bounded(client.stop())

    async def _start(self, **options: Any) -> AIOKafkaConsumer:
        client = AIOKafkaConsumer(
            enable_auto_commit=False,
            auto_offset_reset="none",
            isolation_level="read_committed",
            max_partition_fetch_bytes=4 * MAX_RECORD_BYTES,
            session_timeout_ms=45_000,
            heartbeat_interval_ms=3_000,
            max_poll_interval_ms=600_000,
            **options,
            **self._bus.options("consumer"),
        )
        try:
            await asyncio.wait_for(client.start(), _ANSWER_S)
        except BaseException:
            self._bus.later(client.stop())
            raise
        return client


class _AssignedConsumer(_Consumer):
    """Reads all partitions from offsets that the caller keeps."""

    def __init__(self, bus: KafkaBus, topics: Sequence[str], begin: Mapping[TopicPartition, int]) -> None:
        super().__init__(bus, topics)
        self._next.update(begin)

    async def _open(self) -> AIOKafkaConsumer:
        client = await self._start(group_id=None)
        client.assign([KafkaPartition(*tp) for tp in self._next])
        for tp, offset in self._next.items():
            client.seek(KafkaPartition(*tp), offset)
        return client

    def owned(self) -> frozenset[TopicPartition]:
        return frozenset(self._next)


class _GroupConsumer(_Consumer):
    """A member of a consumer group."""

    def __init__(self, bus: KafkaBus, topics: Sequence[str], group: str, member: str | None) -> None:
        super().__init__(bus, topics)
        self.group, self._member = group, member

    async def _open(self) -> AIOKafkaConsumer:
        client = await self._start(group_id=self.group, group_instance_id=self._member)
        client.subscribe(self._topics, listener=_Forget(self._next))
        return client

    async def _learn(self, client: AIOKafkaConsumer) -> None:
        new = [tp for tp in client.assignment() if TopicPartition(*tp) not in self._next]
        if not new:
            return
        first = await client.beginning_offsets(new)
        for tp in new:
            committed = await client.committed(tp)
            if committed is None:
                client.seek(tp, first[tp])
            elif committed < first[tp]:
                check_span(TopicPartition(*tp), committed, (first[tp], committed))
            self._next[TopicPartition(*tp)] = first[tp] if committed is None else committed

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> None:
        for pause in pauses():
            owned = self.owned()
            mine = {KafkaPartition(*tp): offset for tp, offset in offsets.items() if tp in owned}
            if not mine or self._client is None:
                return
            try:
                return await asyncio.wait_for(self._client.commit(mine), _ANSWER_S)
            except (kafka_errors.CommitFailedError, kafka_errors.IllegalStateError) as error:
                # The group has moved on; the new owner gets these records again.
                _log.debug("commit of %s ignored: %r", mine, error)
                return
            except _AWAY as error:
                await self._bus.look()
                _log.debug("commit of %s failed: %r", mine, error)
            await self._bus.clock.sleep(pause)


class _Forget(ConsumerRebalanceListener):  # type: ignore[misc]
    """Positions are learnt anew after each rebalance."""

    def __init__(self, positions: dict[TopicPartition, int]) -> None:
        self._positions = positions

    def on_partitions_revoked(self, revoked: Any) -> None:
        self._positions.clear()

    def on_partitions_assigned(self, assigned: Any) -> None:
        self._positions.clear()


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
