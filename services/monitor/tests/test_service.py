"""The whole service over the log in memory, asked through gRPC and HTTP."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import httpx
import pytest
from slipstream_monitor.service import Monitor
from slipstream_monitor.settings import MonitorSettings

from slipstream import topics
from slipstream.blobs import BlobStore
from slipstream.blobs.memory import MemoryStore
from slipstream.bus import TopicPartition
from slipstream.bus.events import ensure_topics, publish
from slipstream.bus.memory import MemoryBus, MemoryLog
from slipstream.clock import SystemClock
from slipstream.errors import RetryableError
from slipstream.rpc import make_channel, make_server
from slipstream.service import Context
from slipstream.settings import CommonSettings, load
from slipstream.v1.common_pb2 import Version
from slipstream.v1.monitor_service_pb2 import GetAlignmentRequest, GetRunStatusRequest, WatchStepsRequest
from slipstream.v1.monitor_service_pb2_grpc import MonitorServiceStub
from slipstream.v1.train_pb2 import GroupRecord, StepRecord
from tests.support.page_demo import run

TOPICS = {topic.message: topic for topic in topics.ALL}


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    async with MemoryBus(MemoryLog()) as bus:
        await ensure_topics(bus, load(CommonSettings, {}))
        yield bus


@asynccontextmanager
async def monitor(
    bus: MemoryBus, blobs: BlobStore | None = None
) -> AsyncIterator[tuple[Monitor, MonitorServiceStub]]:
    """A running monitor and a stub to call it."""
    own = load(
        MonitorSettings, {"SLIPSTREAM_MONITOR_PAGE_PORT": "0", "SLIPSTREAM_MONITOR_DEPTH_INTERVAL_S": "0.05"}
    )
    stopping = asyncio.Event()
    context = Context(
        "monitor", load(CommonSettings, {}), own, bus, blobs or MemoryStore(), SystemClock(), stopping
    )
    service, server = Monitor(context), make_server()
    assert service.register(server) == ["slipstream.v1.MonitorService"]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await service.start()
    work = asyncio.create_task(service.run())
    channel = make_channel(f"127.0.0.1:{port}")
    try:
        yield service, MonitorServiceStub(channel)
        assert not work.done()
    finally:
        stopping.set()
        async with asyncio.timeout(5):
            await work
            await service.close()
            await channel.close()
            await server.stop(1)


async def send(bus: MemoryBus, messages: Any, blobs: BlobStore | None = None) -> None:
    for message, _ in messages:
        await publish(bus, "slipstream", TOPICS[type(message)], message, blobs=blobs)


async def caught_up(service: Monitor, bus: MemoryBus) -> None:
    """Returns when everything on the watched topics was read or skipped."""
    async with asyncio.timeout(10):
        while True:
            consumer = service._consumer
            if consumer and consumer.positions() == await consumer.end_offsets():
                await asyncio.sleep(0.1)
                return
            await asyncio.sleep(0.01)


async def has_step(stub: MonitorServiceStub, step: int) -> None:
    """Returns when the newest run's last step is this one."""
    for _ in range(200):
        if (await stub.GetRunStatus(GetRunStatusRequest())).last_step.step == step:
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"step {step} did not come")


async def test_status_alignment_and_topics_of_a_run(bus: MemoryBus) -> None:
    async with monitor(bus) as (service, stub):
        await send(bus, run("arithmetic", 4))
        await caught_up(service, bus)
        status = await stub.GetRunStatus(GetRunStatusRequest())
        assert (status.run_id, status.last_step.step, list(status.runs)) == ("arithmetic", 4, ["arithmetic"])
        assert [(r.replica_id, r.version.number, r.swap.version.number) for r in status.replicas] == [
            ("rollout-0", 4, 4),
            ("rollout-1", 4, 4),
        ]
        assert {t.topic: t.messages for t in status.topics}["slipstream.steps.v1"] == 4
        mismatch = await stub.GetAlignment(GetAlignmentRequest(run_id="arithmetic"))
        assert [[s.lag for s in step.by_lag] for step in mismatch.steps] == [
            [0],
            [0, 1],
            [0, 1, 2],
            [0, 1, 2],
        ]
        assert all(160 <= s.num_tokens < 480 for step in mismatch.steps for s in step.by_lag)


async def test_an_unknown_run_is_not_found_and_no_run_is_an_empty_answer(bus: MemoryBus) -> None:
    async with monitor(bus) as (_, stub):
        with pytest.raises(grpc.aio.AioRpcError, match="seen nothing of run nope") as error:
            await stub.GetRunStatus(GetRunStatusRequest(run_id="nope"))
        assert error.value.code() is grpc.StatusCode.NOT_FOUND
        assert (await stub.GetRunStatus(GetRunStatusRequest())).run_id == ""
        assert not (await stub.GetAlignment(GetAlignmentRequest())).steps


async def test_watching_gives_the_known_steps_and_then_each_as_it_comes(bus: MemoryBus) -> None:
    async with monitor(bus) as (service, stub):
        messages = list(run("arithmetic", 3))
        await send(bus, messages[:-20])
        await caught_up(service, bus)
        stream = stub.WatchSteps(WatchStepsRequest(run_id="arithmetic"))
        async with asyncio.timeout(10):
            seen = [(await stream.read()).step.step for _ in range(2)]
            await send(bus, [*run("other", 2), *messages[-20:]])
            seen.append((await stream.read()).step.step)
        assert seen == [1, 2, 3]
        stream.cancel()


async def test_a_restart_rebuilds_the_windows_from_the_log(bus: MemoryBus) -> None:
    await send(bus, run("arithmetic", 3))
    answers = []
    for _ in range(2):
        async with monitor(bus) as (service, stub):
            await caught_up(service, bus)
            await asyncio.sleep(0.2)
            answers.append(
                [
                    await stub.GetRunStatus(GetRunStatusRequest()),
                    await stub.GetAlignment(GetAlignmentRequest()),
                ]
            )
    assert answers[0] == answers[1]
    assert answers[0][0].last_step.step == 3


async def test_what_cannot_be_read_is_counted_logged_once_and_passed_over(
    bus: MemoryBus, caplog: pytest.LogCaptureFixture
) -> None:
    name = topics.STEPS.full_name("slipstream")
    headers = {"ce_type": b"slipstream.v1.StepRecord"}
    for value in (b"\xff\xff", b"foreign"):
        await bus.producer.send(name, value, key="x")
        await bus.producer.send(name, value, key="x", headers=headers)
    await publish(bus, "slipstream", topics.STEPS, StepRecord(run_id="r", step=-1))
    async with monitor(bus) as (service, stub):
        await send(bus, run("arithmetic", 1))
        await caught_up(service, bus)
        assert (await stub.GetRunStatus(GetRunStatusRequest())).last_step.step == 1
        assert service.feed.skipped == {name: 5}
        assert len([r for r in caplog.records if "is skipped" in r.getMessage()]) == 1
        url = f"http://127.0.0.1:{service.page_port}/metrics"
        async with httpx.AsyncClient(trust_env=False) as client:
            assert f'slipstream_monitor_skipped_total{{topic="{name}"}} 5.0' in (await client.get(url)).text


async def test_a_large_record_is_fetched_from_the_store(bus: MemoryBus) -> None:
    blobs = MemoryStore()
    groups = [GroupRecord(group_id=f"r/{i:060d}") for i in range(6000)]
    await publish(bus, "slipstream", topics.STEPS, StepRecord(run_id="r", step=1, groups=groups), blobs=blobs)
    assert blobs.objects
    async with monitor(bus, blobs) as (service, stub):
        await caught_up(service, bus)
        assert len((await stub.GetRunStatus(GetRunStatusRequest())).last_step.groups) == 6000


async def test_retention_that_overtook_the_monitor_does_not_stop_it(
    bus: MemoryBus, caplog: pytest.LogCaptureFixture
) -> None:
    async with monitor(bus) as (service, stub):
        await send(bus, run("arithmetic", 2))
        await caught_up(service, bus)
        bus.log.set_available(False)
        await asyncio.sleep(0)
        bus.log.available = True
        for step in (3, 4):
            bus.log.append("slipstream.steps.v1", b"", b"arithmetic", {})
            bus.log.delete_records(TopicPartition("slipstream.steps.v1", 0), step)
        last = StepRecord(run_id="arithmetic", step=9, version=Version(epoch=1, number=9))
        await publish(bus, "slipstream", topics.STEPS, last)
        await has_step(stub, 9)
        assert any("reading again from the earliest record" in r.getMessage() for r in caplog.records)


async def test_a_broker_that_is_away_is_logged_once_and_waited_for(
    bus: MemoryBus, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with monitor(bus) as (service, stub):
        bus.log.set_available(False)
        await asyncio.sleep(0.4)
        assert (await stub.GetRunStatus(GetRunStatusRequest())).run_id == ""
        bus.log.set_available(True)
        await send(bus, run("arithmetic", 1))
        await caught_up(service, bus)
        assert (await stub.GetRunStatus(GetRunStatusRequest())).last_step.step == 1
    assert len([r for r in caplog.records if "topic lengths are not known" in r.getMessage()]) == 1


async def test_a_store_that_is_away_holds_the_monitor_up_for_moments_only(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Away(MemoryStore):
        async def get(self, key: str) -> bytes:
            raise RetryableError("the store is away")

    monkeypatch.setattr("slipstream_monitor.service._FETCH_ATTEMPTS", 2)
    groups = [GroupRecord(group_id=f"r/{i:060d}") for i in range(6000)]
    await publish(
        bus, "slipstream", topics.STEPS, StepRecord(run_id="r", step=1, groups=groups), blobs=MemoryStore()
    )
    await publish(bus, "slipstream", topics.STEPS, StepRecord(run_id="r", step=2))
    async with monitor(bus, Away()) as (_, stub):
        await has_step(stub, 2)


async def test_backlogs_come_from_the_groups_and_from_the_trainers_own_offsets(bus: MemoryBus) -> None:
    for topic in (topics.PROMPTS, topics.SAMPLES):
        for i in range(8):
            await bus.producer.send(topic.full_name("slipstream"), b"", key=str(i))
    consumer = await bus.subscribe(["slipstream.prompts.v1"], group="slipstream.rollout")
    await consumer.poll()
    await consumer.commit({tp: offset for tp, offset in consumer.positions().items() if tp.partition == 0})
    done = consumer.positions()[TopicPartition("slipstream.prompts.v1", 0)]
    await publish(bus, "slipstream", topics.STEPS, StepRecord(run_id="r", step=1, offsets={0: 0, 1: 1}))
    async with monitor(bus) as (service, stub):
        await caught_up(service, bus)
        await asyncio.sleep(0.2)
        status = await stub.GetRunStatus(GetRunStatusRequest())
        behind = {t.topic: t.behind for t in status.topics}
        assert behind["slipstream.prompts.v1"] == 8 - done
        assert behind["slipstream.samples.v1"] == 7
        assert behind["slipstream.rollouts.v1"] == -1
