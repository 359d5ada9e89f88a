"""A broker that dies, hangs, comes late or refuses: nothing acknowledged is lost; people are told once."""

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from pydantic import SecretStr

from slipstream.bus import NewTopic, Record, TopicPartition
from slipstream.bus.kafka import KafkaBus
from slipstream.errors import ConfigError, RetryableError
from slipstream.local import ports
from slipstream.settings import CommonSettings
from tests.integration.conftest import Broker
from tests.support.kafka_admin import create_topic

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


class Writers:
    """Tasks that each send one record after another and note what was acknowledged."""

    def __init__(self, bus: KafkaBus, topic: str, count: int = 8) -> None:
        self.acked: list[bytes] = []
        self._bus, self._topic, self._stop = bus, topic, False
        self._tasks = [asyncio.create_task(self._write(number)) for number in range(count)]

    async def _write(self, writer: int) -> None:
        number = 0
        while not self._stop:
            value = f"{writer}-{number}".encode()
            await self._bus.producer.send(self._topic, value, key=str(writer))
            self.acked.append(value)
            number += 1
            await asyncio.sleep(0.005)

    async def until_more(self, timeout_s: float = 60.0) -> None:
        """Waits until each writer had an acknowledgement since now."""
        goal = len(self.acked) + len(self._tasks)
        async with asyncio.timeout(timeout_s):
            while len(self.acked) < goal:
                await asyncio.sleep(0.05)

    async def stop(self) -> list[bytes]:
        self._stop = True
        async with asyncio.timeout(60):
            await asyncio.gather(*self._tasks)
        return self.acked


async def everything(bus: KafkaBus, topic: str) -> list[Record]:
    """All records of a topic."""
    consumer = await bus.assign([topic], offsets="earliest")
    ends, records = await consumer.end_offsets(), list[Record]()
    async with asyncio.timeout(60):
        while any(consumer.positions()[tp] < end for tp, end in ends.items()):
            records += await consumer.poll(max_records=1000)
    return records


def check_order(values: list[bytes]) -> None:
    """First copies of each writer's records are in the order in which they were sent."""
    seen: dict[str, int] = {}
    for value in values:
        writer, number = value.decode().split("-")
        assert int(number) <= seen.get(writer, -1) + 1
        seen[writer] = max(seen.get(writer, -1), int(number))


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "slipstream.bus.outage"]


@pytest.fixture
async def bus(broker: Broker, caplog: pytest.LogCaptureFixture) -> AsyncIterator[KafkaBus]:
    caplog.set_level(logging.INFO, "slipstream")
    async with KafkaBus(CommonSettings(kafka_bootstrap=broker.bootstrap)) as made:
        yield made


@pytest.fixture
async def topic(bus: KafkaBus) -> str:
    name = f"faults-{uuid.uuid4().hex[:10]}"
    await bus.create_topics([NewTopic(name, 1)])
    return name


async def test_a_killed_broker_loses_and_repeats_nothing(
    broker: Broker, bus: KafkaBus, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    member = await bus.subscribe([topic], group=f"{topic}-readers")
    writers = Writers(bus, topic)
    await writers.until_more()
    assert await member.poll(timeout_s=30)
    await broker.kill()
    await asyncio.sleep(6)
    await broker.start()
    await writers.until_more()
    acked = await writers.stop()
    values = [r.value for r in await everything(bus, topic)]
    assert sorted(values) == sorted(acked)
    check_order(values)
    assert len(told(caplog)) == 2
    assert f"Kafka at {broker.bootstrap} does not answer" in told(caplog)[0]
    assert "answers again" in told(caplog)[1]
    # The consumer of before the outage goes on.
    async with asyncio.timeout(60):
        while member.positions().get(TopicPartition(topic, 0), 0) < len(values):
            await member.poll()
    await member.commit(member.positions())
    assert await bus.group_offsets(f"{topic}-readers") == {TopicPartition(topic, 0): len(values)}


async def test_a_producer_that_waits_too_long_is_replaced_and_loses_nothing(
    broker: Broker, bus: KafkaBus, topic: str
) -> None:
    async with KafkaBus(CommonSettings(kafka_bootstrap=broker.bootstrap), send_timeout_s=2.0) as hasty:
        writers = Writers(hasty, topic)
        await writers.until_more()
        await broker.kill()
        await asyncio.sleep(6)
        await broker.start()
        await writers.until_more()
        acked = await writers.stop()
    values = [r.value for r in await everything(bus, topic)]
    assert set(acked) <= set(values)
    check_order(values)


async def test_a_frozen_broker_holds_up_and_loses_nothing(
    broker: Broker, bus: KafkaBus, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with KafkaBus(CommonSettings(kafka_bootstrap=broker.bootstrap), send_timeout_s=3.0) as hasty:
        writers = Writers(hasty, topic)
        await writers.until_more()
        broker.freeze()
        try:
            await asyncio.sleep(1)
            done = len(writers.acked)
            await asyncio.sleep(14)
            assert len(writers.acked) == done
            assert len([line for line in told(caplog) if "does not answer" in line]) == 1
        finally:
            broker.thaw()
        await writers.until_more()
        acked = await writers.stop()
    assert set(acked) <= {r.value for r in await everything(bus, topic)}


async def test_a_broker_that_comes_late_is_waited_for(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "slipstream")
    topic = f"late-{uuid.uuid4().hex[:10]}"
    await broker.kill()
    bus = KafkaBus(CommonSettings(kafka_bootstrap=broker.bootstrap))
    with pytest.raises(RetryableError, match=f"Kafka at {broker.bootstrap} does not answer"):
        await bus.ping()
    starting = asyncio.create_task(bus.start())
    await asyncio.sleep(1.5)
    assert not starting.done()
    await broker.start()
    async with asyncio.timeout(20):
        await starting
    await bus.create_topics([NewTopic(topic, 1)])
    assert await bus.producer.send(topic, b"1") == (0, 0)
    assert [line.split("(")[0].split("after")[0] for line in told(caplog)] == [
        f"Kafka at {broker.bootstrap} does not answer ",
        f"Kafka at {broker.bootstrap} answers again ",
    ]
    await bus.close()


async def test_a_refused_record_does_not_wedge_the_producer(
    broker: Broker, bus: KafkaBus, topic: str
) -> None:
    narrow = f"{topic}-narrow"
    await create_topic(broker.bootstrap, narrow, {"max.message.bytes": "2000"})
    assert await bus.producer.send(narrow, b"before") == (0, 0)
    with pytest.raises(ConfigError, match=f"{narrow}: the broker cannot take a record of 50000 bytes"):
        # zstd must not make it fit.
        await bus.producer.send(narrow, bytes(i * i * 7919 % 251 ^ i % 13 for i in range(50_000)))
    async with asyncio.timeout(20):
        assert await bus.producer.send(narrow, b"after") == (0, 1)


async def test_closing_is_quick_when_the_broker_is_gone(broker: Broker, bus: KafkaBus, topic: str) -> None:
    member = await bus.subscribe([topic], group=f"{topic}-readers")
    await bus.producer.send(topic, b"1")
    await member.poll(timeout_s=30)
    await broker.kill()
    sending = asyncio.create_task(bus.producer.send(topic, b"2"))
    await asyncio.sleep(0.5)
    started = time.monotonic()
    await bus.close()
    assert time.monotonic() - started < 25
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    await broker.start()


async def test_a_poll_during_an_outage_returns_nothing_in_time(
    broker: Broker, bus: KafkaBus, topic: str
) -> None:
    fresh = KafkaBus(CommonSettings(kafka_bootstrap=broker.bootstrap))
    reader = await fresh.assign([topic], offsets="earliest")
    await broker.kill()
    started = time.monotonic()
    for _ in range(3):
        assert await reader.poll(timeout_s=0.2) == []
    assert time.monotonic() - started < 20
    await broker.start()
    await bus.producer.send(topic, b"1")
    async with asyncio.timeout(30):
        while not (records := await reader.poll()):
            pass
    assert [r.value for r in records] == [b"1"]
    await fresh.close()


async def test_wrong_credentials_are_a_configuration_error(tmp_path: Path) -> None:
    (port,) = ports.free(1)
    topic = "guarded"
    plain = "org.apache.kafka.common.security.plain.PlainLoginModule"
    secure = Broker(tmp_path / "kafka")
    base = secure.server.properties()
    address = f"SASL_PLAINTEXT://127.0.0.1:{port}"
    secure.server = type(secure.server)(
        secure.server.directory,
        port=secure.server.port,
        controller_port=secure.server.controller_port,
        extra={
            "listeners": f"{base['listeners']},{address}",
            "advertised.listeners": f"{base['advertised.listeners']},{address}",
            "inter.broker.listener.name": "PLAINTEXT",
            "listener.security.protocol.map": (
                f"{base['listener.security.protocol.map']},SASL_PLAINTEXT:SASL_PLAINTEXT"
            ),
            "sasl.enabled.mechanisms": "PLAIN",
            "listener.name.sasl_plaintext.plain.sasl.jaas.config": f'{plain} required user_me="right";',
        },
    )
    await secure.start()

    def settings(password: str) -> CommonSettings:
        return CommonSettings(
            kafka_bootstrap=f"127.0.0.1:{port}",
            kafka_security="SASL_PLAINTEXT",
            kafka_sasl_mechanism="PLAIN",
            kafka_username="me",
            kafka_password=SecretStr(password),
        )

    try:
        async with KafkaBus(settings("right")) as bus:
            await bus.create_topics([NewTopic(topic, 1)])
            assert await bus.producer.send(topic, b"1") == (0, 0)
            assert len(await everything(bus, topic)) == 1
        bus = KafkaBus(settings("wrong"))
        with pytest.raises(ConfigError, match=r"refuses us.*SLIPSTREAM_KAFKA_USERNAME"):
            await bus.start()
        await bus.close()
    finally:
        secure.close()
