"""The page over real HTTP."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from slipstream_monitor.feed import Feed
from slipstream_monitor.page import PAGE, make_app
from slipstream_monitor.state import MonitorState
from slipstream_monitor.web import WebServer

from slipstream.clock import SystemClock
from slipstream.errors import ConfigError
from slipstream.v1.train_pb2 import Alert, GateState, StepRecord
from tests.support.page_demo import fill, run, topic_lengths

STEPS = 5


@pytest.fixture
def feed() -> Feed:
    clock = SystemClock()
    feed = Feed(MonitorState(), clock)
    feed.topics = topic_lengths("ns", STEPS)
    fill(feed, run("first", 2, start_ms=int(clock.unix() * 1000) - 200_000))
    fill(feed, run("second", STEPS, start_ms=int(clock.unix() * 1000) - 60_000))
    return feed


@pytest.fixture
async def client(feed: Feed) -> AsyncIterator[httpx.AsyncClient]:
    web = WebServer(make_app(feed), "127.0.0.1", 0, "PORT")
    port = web.bind()
    await web.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:
        yield client
    feed.close()
    await web.close()


async def test_the_page_and_everything_it_names_are_served(client: httpx.AsyncClient) -> None:
    page = await client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in page.headers["content-security-policy"]
    for path in PAGE.rglob("*"):
        if path.is_file():
            answer = await client.get(f"/static/{path.relative_to(PAGE)}")
            assert answer.content == path.read_bytes(), path
    assert (await client.get("/static/../settings.py")).status_code == 404


def test_the_page_needs_nothing_from_elsewhere() -> None:
    for path in PAGE.glob("*.*"):
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text, path
        assert "https://" not in text, path


async def test_a_run_as_json(client: httpx.AsyncClient) -> None:
    assert (await client.get("/api/runs")).json() == {"runs": ["first", "second"]}
    newest = (await client.get("/api/run")).json()
    assert newest["overview"]["run"]["id"] == "second"
    assert newest["series"]["steps"]["step"] == list(range(1, STEPS + 1))
    assert (await client.get("/api/run", params={"run": "first"})).json()["overview"]["run"]["step"] == 2
    unknown = await client.get("/api/run", params={"run": "nope"})
    assert (unknown.status_code, unknown.json()) == (404, {"error": "no run nope is known"})


async def test_no_run_at_all_is_an_empty_page(feed: Feed, client: httpx.AsyncClient) -> None:
    feed.state.runs.clear()
    shown = (await client.get("/api/run")).json()
    assert (shown["overview"]["run"], shown["series"]) == (None, None)


async def test_events_bring_everything_first_and_then_what_changed(
    feed: Feed, client: httpx.AsyncClient
) -> None:
    async with client.stream("GET", "/api/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.aiter_lines()
        first = await event(lines)
        assert (first["full"], len(first["series"]["steps"]["step"])) == (True, STEPS)
        fill(feed, iter([(Alert(run_id="second", state=GateState.GATE_STATE_HOLD, reason="k3"), 2**42)]))
        second = await event(lines)
        assert (second["full"], second["series"]["mismatch"], second["series"]["swaps"]) == (False, [], [])
        assert second["overview"]["run"]["gate"] == "hold"


async def test_events_start_anew_when_a_newer_run_opens_or_a_trainer_goes_back(
    feed: Feed, client: httpx.AsyncClient
) -> None:
    async with client.stream("GET", "/api/events") as stream:
        lines = stream.aiter_lines()
        await event(lines)
        fill(feed, run("third", 2, start_ms=2**42))
        shown = await event(lines)
        assert (shown["full"], shown["source"]) == (True, ["third", 0])
        [resumed] = [m for m, _ in run("third", 1) if isinstance(m, StepRecord)]
        resumed.version.epoch = 2
        fill(feed, iter([(resumed, 2**42 + 1)]))
        shown = await event(lines)
        assert (shown["full"], shown["series"]["steps"]["step"]) == (True, [1])


async def test_a_stream_for_a_run_that_is_not_there_yet_waits_for_it(
    feed: Feed, client: httpx.AsyncClient
) -> None:
    async with client.stream("GET", "/api/events", params={"run": "later"}) as stream:
        lines = stream.aiter_lines()
        assert (await event(lines))["series"] is None
        fill(feed, run("later", 1))
        assert (await event(lines))["source"] == ["later", 0]


async def test_closing_ends_open_streams(feed: Feed) -> None:
    web = WebServer(make_app(feed), "127.0.0.1", 0, "PORT")
    port = web.bind()
    await web.start()
    async with (
        httpx.AsyncClient(trust_env=False) as client,
        client.stream("GET", f"http://127.0.0.1:{port}/api/events") as stream,
    ):
        lines = stream.aiter_lines()
        await event(lines)
        feed.close()
        async with asyncio.timeout(2):
            await web.close()
            assert [line async for line in lines if line] == []


async def event(lines: AsyncIterator[str]) -> dict:  # type: ignore[type-arg]
    async with asyncio.timeout(10):
        async for line in lines:
            if line.startswith("data: "):
                return dict(json.loads(line.removeprefix("data: ")))
    raise AssertionError("the stream ended")


async def test_prometheus_metrics_parse_and_name_what_matters(client: httpx.AsyncClient) -> None:
    answer = await client.get("/metrics")
    samples = {
        (s.name, *s.labels.values()): s.value
        for family in text_string_to_metric_families(answer.text)
        for s in family.samples
    }
    assert samples["slipstream_step", "second"] == STEPS
    assert samples["slipstream_gate", "second", "ok"] == 1
    assert samples["slipstream_gate", "second", "hold"] == 0
    assert samples["slipstream_topic_behind", "ns.prompts.v1"] == 8
    assert samples["slipstream_replica_requests_lost_total", "rollout-0"] == 0
    assert samples["slipstream_mismatch_k3", "0", "second"] > 0


async def test_health(client: httpx.AsyncClient) -> None:
    assert (await client.get("/healthz")).text == "ok\n"


async def test_a_taken_port_names_the_variable_to_change(feed: Feed) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} of 127.0.0.1.*SLIPSTREAM_MONITOR_PAGE_PORT"):
            WebServer(make_app(feed), "127.0.0.1", port, "SLIPSTREAM_MONITOR_PAGE_PORT").bind()


def test_vendored_charts_come_with_their_licence() -> None:
    assert "MIT" in (PAGE / "vendor" / "uplot.LICENSE").read_text()
    assert "v1.6.32" in (PAGE / "vendor" / "uplot.iife.min.js").read_text()[:200]
