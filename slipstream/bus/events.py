"""Typed events: protobuf values with CloudEvents headers in binary mode.

| header | content |
|---|---|
| `ce_id` | id of the event; the same when the same event is published again |
| `ce_type` | full name of the protobuf message |
| `ce_source`, `ce_time`, `ce_specversion`, `content-type` | as CloudEvents says |
| `traceparent` | W3C trace context of the producer, when it traces |
| `ce_dataref`, `ce_datasize` | key and length of the value in the object store, when it is large |
"""

import asyncio
import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from google.protobuf.message import DecodeError, Message

from slipstream import telemetry, topics
from slipstream.blobs.base import BlobStore, blob_key, get_blob, put_blob
from slipstream.bus.base import Bus, NewTopic, Record
from slipstream.errors import ConfigError, IntegrityError, NotFoundError, PoisonMessageError
from slipstream.settings import CommonSettings
from slipstream.topics import Topic
from slipstream.v1.common_pb2 import BlobRef

INLINE_BYTES = 256 * 1024
"""Values above this size go to the object store."""


async def ensure_topics(bus: Bus, common: CommonSettings) -> None:
    """Creates the topics that do not exist yet."""
    await bus.create_topics(
        [NewTopic(t.full_name(common.namespace), t.partitions, t.retention_ms) for t in topics.ALL]
    )


async def publish(
    bus: Bus,
    namespace: str,
    topic: Topic,
    message: Message,
    *,
    blobs: BlobStore | None = None,
    event_id: str | None = None,
) -> tuple[int, int]:
    """Publishes a message on its topic; returns (partition, offset) when it is durable.

    Args:
        blobs: where a large value goes. Needed wherever a message can exceed 256 KiB.
        event_id: id of the event; by default made from topic, key and content.

    Raises:
        ConfigError: the topic does not exist, or the value is too large and there is no `blobs`.
        RetryableError: the value is large and the object store is away.
    """
    if not isinstance(message, topic.message):
        raise ConfigError(
            f"{topic.name} carries {topic.message.DESCRIPTOR.name}, not {type(message).__name__}"
        )
    name, key = topic.full_name(namespace), topic.key(message)
    value = message.SerializeToString(deterministic=True)
    digest = await _sha256(value)
    event = event_id or hashlib.sha256(f"{name}\0{key}\0{digest}".encode()).hexdigest()
    with telemetry.produce(name, event, key):
        headers = {
            "ce_specversion": b"1.0",
            "ce_id": event.encode(),
            "ce_source": f"/{namespace}/{telemetry.service_name()}".encode(),
            "ce_type": message.DESCRIPTOR.full_name.encode(),
            "ce_time": datetime.now(UTC).isoformat().encode(),
            "content-type": b"application/protobuf",
            **{k: v.encode() for k, v in telemetry.inject().items()},
        }
        if len(value) > INLINE_BYTES:
            headers |= await _claim(blobs, name, value, digest)
            value = b""
        return await bus.producer.send(name, value, key=key, headers=headers)


async def _sha256(value: bytes) -> str:
    if len(value) > INLINE_BYTES:
        return (await asyncio.to_thread(hashlib.sha256, value)).hexdigest()
    return hashlib.sha256(value).hexdigest()


async def _claim(blobs: BlobStore | None, name: str, value: bytes, digest: str) -> dict[str, bytes]:
    if blobs is None:
        raise ConfigError(
            f"{name}: a message of {len(value)} bytes needs the object store (limit {INLINE_BYTES}); "
            f"call publish(..., blobs=...)"
        )
    ref = await put_blob(blobs, value, sha256=digest)
    return {"ce_dataref": ref.key.encode(), "ce_datasize": str(ref.size_bytes).encode()}


async def parse(record: Record, topic: Topic, *, blobs: BlobStore | None = None) -> Any:
    """The message in a record, of type `topic.message`; fetches the value where it is in the object store.

    Raises:
        PoisonMessageError: not an event of this topic, damaged, or its value is gone from the store.
        RetryableError: the object store is away.
    """
    expected = topic.message.DESCRIPTOR.full_name
    found = _text(record.headers, "ce_type")
    if found != expected:
        what = f"ce_type {found}" if found else "no ce_type"
        raise PoisonMessageError(f"{_place(record)}: {what}, expected {expected}")
    value = record.value
    if "ce_dataref" in record.headers:
        value = await _redeem(record, blobs)
    try:
        return topic.message.FromString(value)
    except DecodeError as error:
        raise PoisonMessageError(f"{_place(record)} is no {expected}: {error}") from None


async def _redeem(record: Record, blobs: BlobStore | None) -> bytes:
    if blobs is None:
        raise ConfigError(f"{_place(record)} is in the object store; call parse(..., blobs=...)")
    key, size = _text(record.headers, "ce_dataref"), _text(record.headers, "ce_datasize")
    sha256 = key.rpartition("/")[2]
    if key != blob_key(sha256) or not size.isdecimal():
        raise PoisonMessageError(f"{_place(record)}: {key!r} of {size!r} bytes is no reference")
    try:
        return await get_blob(blobs, BlobRef(key=key, sha256=sha256, size_bytes=int(size)))
    except (NotFoundError, IntegrityError) as error:
        raise PoisonMessageError(f"{_place(record)}: {error}") from error


async def send_dead_letter(
    bus: Bus, namespace: str, group: str, record: Record, error: BaseException, *, attempts: int = 1
) -> tuple[int, int]:
    """Puts aside a record that a consumer group cannot handle; commit its offset afterwards.

    The value and the headers are untouched; `dead_*` headers say where it is from and why. The topic is
    created when it is missing. Returns (partition, offset) there.
    """
    name = topics.dead_letter_name(namespace, group)
    await bus.create_topics([NewTopic(name, 1, topics.DEAD_LETTER_RETENTION_MS)])
    headers = {
        **record.headers,
        "dead_topic": record.topic.encode(),
        "dead_partition": str(record.partition).encode(),
        "dead_offset": str(record.offset).encode(),
        "dead_key": record.key or b"",
        "dead_error_type": type(error).__name__.encode(),
        "dead_error": str(error)[:1000].encode(),
        "dead_attempts": str(attempts).encode(),
        "dead_time": datetime.now(UTC).isoformat().encode(),
    }
    key = None if record.key is None else record.key.decode(errors="replace")
    return await bus.producer.send(name, record.value, key=key, headers=headers)


def _text(headers: Mapping[str, bytes], name: str) -> str:
    return headers.get(name, b"").decode(errors="replace")


def _place(record: Record) -> str:
    return f"{record.topic}, partition {record.partition}, offset {record.offset}"
