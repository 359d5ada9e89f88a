"""What every bus promises, on the log in memory and on a real Kafka."""

import asyncio
import contextlib
import functools
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from slipstream.bus import Bus, Consumer, NewTopic, Record, TopicPartition
from slipstream.bus.base import MAX_RECORD_BYTES
from slipstream.bus.kafka import KafkaBus
from slipstream.bus.memory import MemoryBus, MemoryLog
from slipstream.bus.partition import partition_of
from slipstream.errors import ConfigError, IntegrityError, SlipstreamError
from slipstream.settings import CommonSettings
from tests.support.kafka_admin import delete_records

Connect = Callable[[], Awaitable[Bus]]


class Buses:
    """Connections to one log, and what a test does to the log behind their back."""

    def __init__(self, connect: Callable[[], Bus], expire: Callable[[TopicPartition, int], Awaitable[None]]):
        self._connect, self.expire = connect, expire
        self._stack = contextlib.AsyncExitStack()

    async def connect(self) -> Bus:
        return await self._stack.enter_async_context(self._connect())

    async def close(self) -> None:
        await self._stack.aclose()


@pytest.fixture(params=["memory", pytest.param("kafka", marks=pytest.mark.integration)])
def a_log(request: pytest.FixtureRequest) -> Buses:
    if request.param == "memory":
        log = MemoryLog()

        async def expire(tp: TopicPartition, before: int) -> None:
            log.delete_records(tp, before)

        return Buses(lambda: MemoryBus(log), expire)
    bootstrap = request.getfixturevalue("servers").kafka.bootstrap
    settings = CommonSettings(kafka_bootstrap=bootstrap)
    return Buses(lambda: KafkaBus(settings), functools.partial(delete_records, bootstrap))


@pytest.fixture
async def buses(a_log: Buses) -> AsyncIterator[Buses]:
    yield a_log
    await a_log.close()


@pytest.fixture
async def bus(buses: Buses) -> Bus:
    return await buses.connect()


@pytest.fixture
async def topic(bus: Bus) -> str:
    name = f"test-{uuid.uuid4().hex[:10]}"
    await bus.create_topics([NewTopic(name, 4)])
    return name


@pytest.fixture
async def single(bus: Bus) -> str:
    """A topic with one partition."""
    name = f"test-{uuid.uuid4().hex[:10]}"
    await bus.create_topics([NewTopic(name, 1)])
    return name


def a_group() -> str:
    return f"group-{uuid.uuid4().hex[:10]}"


async def take(consumer: Consumer, count: int, timeout_s: float = 30.0) -> list[Record]:
    """Reads at least `count` records."""
    records: list[Record] = []
    async with asyncio.timeout(timeout_s):
        while len(records) < count:
            records += await consumer.poll(timeout_s=0.2)
    return records


async def until_owned(count: int, *consumers: Consumer) -> list[Record]:
    """Polls until the consumers own `count` partitions each; returns what came meanwhile."""
    records: list[Record] = []
    async with asyncio.timeout(40):
        while any(len(c.owned()) != count for c in consumers):
            for consumer in consumers:
                records += await consumer.poll(timeout_s=0.1)
    return records


def values(records: list[Record]) -> list[bytes]:
    return [r.value for r in records]


def after(records: list[Record]) -> dict[TopicPartition, int]:
    """Offsets to commit once these records are handled."""
    return {r.tp: r.offset + 1 for r in records}


async def test_a_record_comes_back_as_it_was(bus: Bus, topic: str) -> None:
    headers = {"a": b"1", "empty": b"", "binary": bytes(range(256))}
    before = time.time()
    partition, offset = await bus.producer.send(topic, b"\x00\xff", key="käy", headers=headers)
    (record,) = await take(await bus.assign([topic], offsets="earliest"), 1)
    assert (record.topic, record.partition, record.offset) == (topic, partition, offset)
    assert (record.key, record.value, dict(record.headers)) == ("käy".encode(), b"\x00\xff", headers)
    assert before - 1 <= record.timestamp_ms / 1000 <= time.time() + 1


async def test_a_record_without_key_and_value_comes_back(bus: Bus, topic: str) -> None:
    await bus.producer.send(topic, b"")
    (record,) = await take(await bus.assign([topic], offsets="earliest"), 1)
    assert record.key is None
    assert record.value == b""
    assert record.headers == {}


async def test_equal_keys_go_to_kafkas_partition_and_stay_in_order(bus: Bus, topic: str) -> None:
    for number in range(60):
        key = f"run/{number % 7}"
        partition, _ = await bus.producer.send(topic, str(number).encode(), key=key)
        assert partition == partition_of(key.encode(), 4)
    records = await take(await bus.assign([topic], offsets="earliest"), 60)
    for rest in range(7):
        assert [int(r.value) for r in records if int(r.value) % 7 == rest] == list(range(rest, 60, 7))


async def test_concurrent_sends_all_arrive_once(bus: Bus, topic: str) -> None:
    sent = await asyncio.gather(*(bus.producer.send(topic, str(i).encode(), key=str(i)) for i in range(500)))
    assert len(set(sent)) == 500
    records = await take(await bus.assign([topic], offsets="earliest"), 500)
    assert sorted(int(r.value) for r in records) == list(range(500))


async def test_creating_a_topic_twice_keeps_its_records(bus: Bus, topic: str) -> None:
    await bus.producer.send(topic, b"kept")
    await bus.create_topics([NewTopic(topic, 4), NewTopic(f"{topic}-b", 2)])
    offsets = await bus.topic_offsets([topic, f"{topic}-b"])
    assert len(offsets) == 6
    assert sum(end for _, end in offsets.values()) == 1


async def test_a_topic_that_does_not_exist_is_named(bus: Bus) -> None:
    for attempt in (
        bus.producer.send("missing", b""),
        bus.subscribe(["missing"], group="g"),
        bus.assign(["missing"], offsets="earliest"),
    ):
        with pytest.raises(ConfigError, match="no topic missing"):
            await attempt
    assert await bus.topic_offsets(["missing"]) == {}


async def test_a_record_that_is_too_large_is_refused_and_the_next_is_sent(bus: Bus, single: str) -> None:
    with pytest.raises(ConfigError, match=f"{single}.*cannot take a record of"):
        await bus.producer.send(single, bytes(MAX_RECORD_BYTES + 1))
    assert await bus.producer.send(single, b"small") == (0, 0)


async def test_a_poll_is_bounded_in_records_and_time(bus: Bus, topic: str) -> None:
    consumer = await bus.assign([topic], offsets="earliest")
    started = time.monotonic()
    assert await consumer.poll(timeout_s=0.3) == []
    assert 0.25 <= time.monotonic() - started < 3.0
    for number in range(20):
        await bus.producer.send(topic, str(number).encode(), key=str(number))
    total = 0
    while total < 20:
        records = await consumer.poll(max_records=3, timeout_s=5)
        assert 0 < len(records) <= 3
        total += len(records)


async def test_a_waiting_poll_wakes_for_a_new_record(bus: Bus, topic: str) -> None:
    consumer = await bus.assign([topic], offsets="latest")
    await consumer.poll(timeout_s=0.2)
    waiting = asyncio.create_task(consumer.poll(timeout_s=20))
    await asyncio.sleep(0.2)
    started = time.monotonic()
    await bus.producer.send(topic, b"new")
    assert values(await waiting) == [b"new"]
    assert time.monotonic() - started < 5


async def test_assign_begins_where_it_is_told(bus: Bus, single: str) -> None:
    for number in range(5):
        await bus.producer.send(single, str(number).encode())
    tp = TopicPartition(single, 0)
    earliest = await bus.assign([single], offsets="earliest")
    unnamed = await bus.assign([single], offsets={})
    third = await bus.assign([single], offsets={tp: 3})
    latest = await bus.assign([single], offsets="latest")
    assert values(await take(earliest, 5)) == values(await take(unnamed, 5)) == [b"0", b"1", b"2", b"3", b"4"]
    assert third.positions() == {tp: 3}
    assert values(await take(third, 2)) == [b"3", b"4"]
    await bus.producer.send(single, b"5")
    assert values(await take(latest, 1)) == [b"5"]


async def test_positions_meet_the_end_when_all_is_read(bus: Bus, topic: str) -> None:
    for number in range(10):
        await bus.producer.send(topic, b"", key=str(number))
    consumer = await bus.assign([topic], offsets="earliest")
    ends = await consumer.end_offsets()
    assert sum(ends.values()) == 10
    assert consumer.owned() == frozenset(ends)
    await take(consumer, 10)
    assert consumer.positions() == ends


async def test_an_offset_outside_the_log_is_refused(buses: Buses, bus: Bus, single: str) -> None:
    tp = TopicPartition(single, 0)
    for number in range(10):
        await bus.producer.send(single, str(number).encode())
    await buses.expire(tp, 4)
    with pytest.raises(IntegrityError, match=f"{single}, partition 0: records 2 to 3 are gone"):
        await bus.assign([single], offsets={tp: 2})
    with pytest.raises(IntegrityError, match="offset 11 is past the end, 10"):
        await bus.assign([single], offsets={tp: 11})
    assert (await bus.topic_offsets([single])) == {tp: (4, 10)}
    assert values(await take(await bus.assign([single], offsets="earliest"), 6))[0] == b"4"


async def test_records_that_vanish_under_a_reader_are_reported_and_never_skipped(
    buses: Buses, bus: Bus, single: str
) -> None:
    tp = TopicPartition(single, 0)
    await bus.producer.send(single, b"0")
    reader = await bus.assign([single], offsets="earliest")
    await take(reader, 1)
    member = await bus.subscribe([single], group=a_group())
    await member.commit(after(await take(member, 1)))
    await member.close()
    group_reader = await bus.subscribe([single], group=member_group(member))
    for number in range(1, 6):
        await bus.producer.send(single, str(number).encode())
    # Neither reader polls while retention passes them.
    await buses.expire(tp, 4)
    for consumer in (reader, group_reader):
        for _ in range(2):
            with pytest.raises(IntegrityError, match="are gone"):
                await take(consumer, 100, timeout_s=20)


def member_group(consumer: Consumer) -> str:
    return str(getattr(consumer, "group", ""))


async def test_two_groups_read_everything_each(bus: Bus, topic: str) -> None:
    for number in range(8):
        await bus.producer.send(topic, b"", key=str(number))
    for _ in range(2):
        consumer = await bus.subscribe([topic], group=a_group())
        assert len(await take(consumer, 8)) == 8


async def test_a_group_goes_on_after_what_was_committed(buses: Buses, bus: Bus, single: str) -> None:
    group = a_group()
    for number in range(6):
        await bus.producer.send(single, str(number).encode())
    first = await bus.subscribe([single], group=group)
    records = await take(first, 6)
    await first.commit(after(records[:4]))
    assert await bus.group_offsets(group) == {TopicPartition(single, 0): 4}
    await first.close()
    second = await (await buses.connect()).subscribe([single], group=group)
    assert values(await take(second, 2)) == [b"4", b"5"]


async def test_an_unknown_group_has_no_offsets(bus: Bus) -> None:
    assert await bus.group_offsets(a_group()) == {}


async def test_what_was_not_committed_comes_again(buses: Buses, bus: Bus, single: str) -> None:
    group = a_group()
    await bus.producer.send(single, b"once more")
    first = await bus.subscribe([single], group=group)
    await take(first, 1)
    await first.close()
    second = await (await buses.connect()).subscribe([single], group=group)
    assert values(await take(second, 1)) == [b"once more"]


async def test_members_share_partitions_and_take_over_from_one_that_leaves(
    buses: Buses, bus: Bus, topic: str
) -> None:
    group = a_group()
    first = await bus.subscribe([topic], group=group)
    await until_owned(4, first)
    second = await (await buses.connect()).subscribe([topic], group=group)
    await until_owned(2, first, second)
    assert not first.owned() & second.owned()
    for number in range(20):
        await bus.producer.send(topic, str(number).encode(), key=str(number))
    got = set(values(await second.poll(timeout_s=2)))
    await second.close()
    # Nothing was committed: all that the leaver read comes again.
    async with asyncio.timeout(40):
        seen: set[bytes] = set()
        while len(seen) < 20:
            seen |= set(values(await first.poll(timeout_s=0.2)))
    assert got <= seen
    assert len(first.owned()) == 4


async def test_a_commit_for_a_lost_partition_is_ignored(buses: Buses, bus: Bus, topic: str) -> None:
    group = a_group()
    first = await bus.subscribe([topic], group=group)
    await until_owned(4, first)
    for number in range(20):
        await bus.producer.send(topic, b"", key=str(number))
    records = await take(first, 20)
    second = await (await buses.connect()).subscribe([topic], group=group)
    await until_owned(2, first, second)
    await first.commit(after(records))
    committed = await bus.group_offsets(group)
    assert {tp for tp, offset in committed.items() if offset} <= first.owned()


async def test_a_static_member_comes_back_to_its_partitions(buses: Buses, bus: Bus, topic: str) -> None:
    group = a_group()
    first = await bus.subscribe([topic], group=group, member="one")
    second = await (await buses.connect()).subscribe([topic], group=group, member="two")
    await until_owned(2, first, second)
    before = first.owned()
    await first.close()
    again = await (await buses.connect()).subscribe([topic], group=group, member="one")
    await until_owned(2, again, second)
    assert again.owned() == before


async def test_a_closed_consumer_cannot_be_used(bus: Bus, topic: str) -> None:
    consumer = await bus.subscribe([topic], group=a_group())
    await consumer.close()
    await consumer.close()
    with pytest.raises(SlipstreamError, match="closed"):
        await consumer.poll()


async def test_a_reader_outside_groups_cannot_commit(bus: Bus, topic: str) -> None:
    consumer = await bus.assign([topic], offsets="earliest")
    with pytest.raises(ConfigError, match="outside any group"):
        await consumer.commit({TopicPartition(topic, 0): 1})
