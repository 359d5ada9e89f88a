"""Events: ids, headers, claim checks, damaged and foreign records, dead letters."""

import dataclasses

import pytest

from slipstream import topics
from slipstream.blobs.base import put_blob
from slipstream.blobs.memory import MemoryStore
from slipstream.bus import Record
from slipstream.bus.events import INLINE_BYTES, ensure_topics, parse, publish, send_dead_letter
from slipstream.bus.memory import MemoryBus
from slipstream.errors import ConfigError, PoisonMessageError
from slipstream.settings import CommonSettings
from slipstream.v1.rollout_pb2 import PromptGroup
from slipstream.v1.train_pb2 import Alert

NAME = topics.PROMPTS.full_name("ns")


async def a_bus() -> MemoryBus:
    bus = MemoryBus()
    await ensure_topics(bus, CommonSettings(namespace="ns"))
    return bus


async def read(bus: MemoryBus, name: str = NAME) -> list[Record]:
    consumer = await bus.assign([name], offsets="earliest")
    return await consumer.poll(timeout_s=0)


def group(number: int = 0, text: str = "2 + 2 =") -> PromptGroup:
    return PromptGroup(run_id="run", group_id=f"run/{number}", sequence=number, text=text)


async def test_all_topics_are_created_and_creating_them_again_changes_nothing() -> None:
    bus = await a_bus()
    await publish(bus, "ns", topics.PROMPTS, group())
    await ensure_topics(bus, CommonSettings(namespace="ns"))
    offsets = await bus.topic_offsets([t.full_name("ns") for t in topics.ALL])
    assert len(offsets) == sum(t.partitions for t in topics.ALL)
    assert len(await read(bus)) == 1


async def test_what_is_published_is_read_back() -> None:
    bus = await a_bus()
    await publish(bus, "ns", topics.PROMPTS, group(3))
    (record,) = await read(bus)
    assert await parse(record, topics.PROMPTS) == group(3)
    assert record.key == b"run/3"


async def test_headers_follow_cloudevents() -> None:
    bus = await a_bus()
    await publish(bus, "ns", topics.PROMPTS, group())
    (record,) = await read(bus)
    assert record.headers["ce_specversion"] == b"1.0"
    assert record.headers["ce_type"] == b"slipstream.v1.PromptGroup"
    assert record.headers["ce_source"] == b"/ns/slipstream"
    assert record.headers["content-type"] == b"application/protobuf"
    assert "traceparent" not in record.headers


async def test_the_same_event_has_the_same_id_and_another_has_another() -> None:
    bus = await a_bus()
    for message in (group(), group(), group(text="3 + 3 =")):
        await publish(bus, "ns", topics.PROMPTS, message)
    first, again, other = (r.headers["ce_id"] for r in await read(bus))
    assert first == again != other


async def test_a_given_id_is_kept() -> None:
    bus = await a_bus()
    await publish(bus, "ns", topics.PROMPTS, group(), event_id="mine")
    assert (await read(bus))[0].headers["ce_id"] == b"mine"


async def test_a_message_of_another_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="prompts carries PromptGroup, not Alert"):
        await publish(await a_bus(), "ns", topics.PROMPTS, Alert())


async def test_a_large_value_travels_through_the_store() -> None:
    bus, blobs = await a_bus(), MemoryStore()
    large = group(text="x" * (INLINE_BYTES + 1))
    await publish(bus, "ns", topics.PROMPTS, large, blobs=blobs)
    (record,) = await read(bus)
    assert record.value == b""
    assert len(blobs.objects) == 1
    assert await parse(record, topics.PROMPTS, blobs=blobs) == large


async def test_a_large_value_without_a_store_is_refused() -> None:
    bus = await a_bus()
    with pytest.raises(ConfigError, match="needs the object store"):
        await publish(bus, "ns", topics.PROMPTS, group(text="x" * INLINE_BYTES))
    assert await read(bus) == []


async def test_a_large_value_that_is_gone_or_damaged_is_poison() -> None:
    bus, blobs = await a_bus(), MemoryStore()
    await publish(bus, "ns", topics.PROMPTS, group(text="x" * INLINE_BYTES), blobs=blobs)
    (record,) = await read(bus)
    (key,) = blobs.objects
    blobs.objects[key] = blobs.objects[key][:-1] + b"?"
    with pytest.raises(PoisonMessageError, match="content hash"):
        await parse(record, topics.PROMPTS, blobs=blobs)
    await blobs.delete(key)
    with pytest.raises(PoisonMessageError, match="does not exist"):
        await parse(record, topics.PROMPTS, blobs=blobs)


async def test_a_reference_to_another_object_is_poison() -> None:
    blobs = MemoryStore()
    await blobs.put("runs/secret", b"1")
    ref = await put_blob(blobs, b"2")
    headers = {"ce_type": b"slipstream.v1.PromptGroup", "ce_dataref": b"runs/secret", "ce_datasize": b"1"}
    for extra in ({}, {"ce_dataref": ref.key.encode(), "ce_datasize": b"-1"}):
        record = Record(NAME, 0, 0, b"k", b"", headers | extra)
        with pytest.raises(PoisonMessageError, match="is no reference"):
            await parse(record, topics.PROMPTS, blobs=blobs)


@pytest.mark.parametrize(
    ("headers", "value", "why"),
    [
        ({}, b"\xff\xfe", "no ce_type"),
        ({"ce_type": b"slipstream.v1.Alert"}, b"", "ce_type slipstream.v1.Alert"),
        ({"ce_type": b"slipstream.v1.PromptGroup"}, b"\xff\xfe\xfd", "is no slipstream.v1.PromptGroup"),
    ],
)
async def test_foreign_bytes_are_poison_and_the_message_says_where(
    headers: dict[str, bytes], value: bytes, why: str
) -> None:
    record = Record(NAME, 2, 17, None, value, headers)
    with pytest.raises(PoisonMessageError, match=rf"ns.prompts.v1, partition 2, offset 17.*{why}"):
        await parse(record, topics.PROMPTS)


async def test_a_dead_letter_keeps_the_bytes_and_says_why() -> None:
    bus = await a_bus()
    poison = Record(NAME, 1, 5, b"key\xff", b"\x00\xff\xfe", {"ce_id": b"abc"})
    await send_dead_letter(bus, "ns", "reward", poison, PoisonMessageError("broken"), attempts=3)
    (letter,) = await read(bus, "ns.reward.dead.v1")
    assert letter.value == poison.value
    assert letter.headers["ce_id"] == b"abc"
    found = {k: v for k, v in letter.headers.items() if k.startswith("dead_") and k != "dead_time"}
    assert found == {
        "dead_topic": NAME.encode(),
        "dead_partition": b"1",
        "dead_offset": b"5",
        "dead_key": b"key\xff",
        "dead_error_type": b"PoisonMessageError",
        "dead_error": b"broken",
        "dead_attempts": b"3",
    }


async def test_a_topic_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(ConfigError, match="no topic"):
        await publish(MemoryBus(), "ns", topics.PROMPTS, group())


def test_records_know_their_partition() -> None:
    record = Record("t", 3, 0, None, b"")
    assert dataclasses.replace(record, offset=9).tp == ("t", 3)
