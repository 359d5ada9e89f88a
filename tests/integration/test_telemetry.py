"""Traces through Kafka headers and gRPC metadata, received by a real OTLP collector; nothing when off."""

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest
from opentelemetry.trace import SpanKind

from slipstream import rpc, telemetry, topics
from slipstream.bus import Bus, open_bus
from slipstream.bus.events import ensure_topics, publish
from slipstream.bus.memory import MemoryBus
from slipstream.settings import CommonSettings
from slipstream.v1.reward_service_pb2 import ScoreRequest, ScoreResponse
from slipstream.v1.reward_service_pb2_grpc import (
    RewardServiceServicer,
    RewardServiceStub,
    add_RewardServiceServicer_to_server,
)
from slipstream.v1.rollout_pb2 import PromptGroup
from tests.support.collector import Collector, collecting


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as made:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", made.endpoint)
        yield made


@pytest.fixture(params=["memory", pytest.param("kafka", marks=pytest.mark.integration)])
def common(request: pytest.FixtureRequest) -> CommonSettings | None:
    return request.getfixturevalue("common_settings") if request.param == "kafka" else None


@pytest.fixture
async def bus(common: CommonSettings | None) -> AsyncIterator[Bus]:
    settings = common or CommonSettings(namespace="t")
    async with open_bus(settings) if common else MemoryBus() as made:
        await ensure_topics(made, settings)
        yield made


class Scorer(RewardServiceServicer):
    """Publishes nothing; notes the trace that it was called in."""

    def __init__(self) -> None:
        self.seen: list[dict[str, str]] = []

    async def Score(self, request: ScoreRequest, context: grpc.aio.ServicerContext) -> ScoreResponse:
        self.seen.append(telemetry.inject())
        if request.request_id == "fail":
            raise ValueError("no")
        if request.request_id == "hang":
            await asyncio.sleep(60)
        return ScoreResponse()


async def test_a_trace_goes_from_a_producer_through_a_consumer_to_a_called_service(
    collector: Collector, bus: Bus, common: CommonSettings | None
) -> None:
    namespace = common.namespace if common else "t"
    name = topics.PROMPTS.full_name(namespace)
    with telemetry.session("test"):
        scorer = Scorer()
        server = rpc.make_server()
        add_RewardServiceServicer_to_server(scorer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        await publish(bus, namespace, topics.PROMPTS, PromptGroup(group_id="g"))
        consumer = await bus.assign([name], offsets="earliest")
        records = await consumer.poll(timeout_s=20)
        async with rpc.make_channel(f"127.0.0.1:{port}") as channel:
            with telemetry.consume(name, records[0].headers):
                await rpc.call("scorer", RewardServiceStub(channel).Score, ScoreRequest(), timeout_s=10)
        await server.stop(None)
    sent, processed = collector.named(f"send {name}"), collector.named(f"process {name}")
    client, served = [
        next(s for s in collector.spans if s.name == "slipstream.v1.RewardService/Score" and s.kind == kind)
        for kind in (SpanKind.CLIENT.value + 1, SpanKind.SERVER.value + 1)
    ]
    assert len({span.trace_id for span in (sent, processed, client, served)}) == 1
    assert processed.parent_span_id == sent.span_id
    assert [link.span_id for link in processed.links] == [sent.span_id]
    assert client.parent_span_id == processed.span_id
    assert served.parent_span_id == client.span_id
    assert scorer.seen[0]["traceparent"].split("-")[1] == sent.trace_id.hex()
    assert collector.services == {"slipstream-test"}


async def test_a_batch_links_to_each_producer(collector: Collector) -> None:
    bus = MemoryBus()
    await ensure_topics(bus, CommonSettings(namespace="t"))
    name = topics.PROMPTS.full_name("t")
    with telemetry.session("test"):
        for number in range(3):
            await publish(bus, "t", topics.PROMPTS, PromptGroup(group_id=str(number)))
        records = await (await bus.assign([name], offsets="earliest")).poll()
        with telemetry.consume_batch("train step", [r.headers for r in records]):
            pass
    step = collector.named("train step")
    assert {link.span_id for link in step.links} == {
        span.span_id for span in collector.spans if span.name == f"send {name}"
    }
    assert len(step.links) == 3


async def test_a_failed_call_is_a_failed_span(collector: Collector) -> None:
    with telemetry.session("test"):
        server = rpc.make_server()
        add_RewardServiceServicer_to_server(Scorer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with rpc.make_channel(f"127.0.0.1:{port}") as channel:
            stub = RewardServiceStub(channel)
            with pytest.raises(Exception, match="no"):
                await rpc.call("scorer", stub.Score, ScoreRequest(request_id="fail"), timeout_s=10)
        await server.stop(None)
    assert {span.status.code for span in collector.spans} == {2}


async def test_a_call_can_be_cancelled_while_it_is_traced(collector: Collector) -> None:
    with telemetry.session("test"):
        server = rpc.make_server()
        add_RewardServiceServicer_to_server(Scorer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with rpc.make_channel(f"127.0.0.1:{port}") as channel:
            call = asyncio.ensure_future(
                rpc.call("s", RewardServiceStub(channel).Score, ScoreRequest(request_id="hang"), timeout_s=50)
            )
            await asyncio.sleep(0.5)
            started = time.monotonic()
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert time.monotonic() - started < 5
        await server.stop(None)


def test_metrics_arrive(collector: Collector) -> None:
    with telemetry.session("test"):
        telemetry.meter().create_counter("slipstream.test.groups").add(3)
    assert "slipstream.test.groups" in collector.metrics


def test_a_collector_that_is_away_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    started = time.monotonic()
    with telemetry.session("test"), telemetry.tracer().start_as_current_span("work"):
        pass
    assert time.monotonic() - started < 15


def test_without_an_endpoint_nothing_is_traced_and_the_sdk_is_not_loaded() -> None:
    code = """
import os, sys
os.environ.pop("OTEL_EXPORTER_OTLP_ENDPOINT", None)
from slipstream import rpc, service, telemetry
with telemetry.session("test"):
    assert not telemetry.enabled()
    with telemetry.produce("t", "id", "key") as span:
        assert not span.is_recording()
        assert telemetry.inject() == {}
    telemetry.meter().create_counter("c").add(1)
loaded = [m for m in sys.modules if m.startswith(("opentelemetry.sdk", "opentelemetry.exporter"))]
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
