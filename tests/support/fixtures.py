"""The real Kafka and S3 server, once per test run, and services as processes.

`servers` starts both on free ports when the first test asks; `common_settings` gives each test a namespace
and a bucket of its own; `deployment` has the topics too; `start_service` runs a service until the test ends.
"""

import asyncio
import logging
import os
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
import pytest_asyncio

from slipstream import logs
from slipstream.blobs import open_store
from slipstream.bus import open_bus
from slipstream.bus.events import ensure_topics
from slipstream.local import environment, health, ports
from slipstream.local.process import Child
from slipstream.local.servers import KafkaServer, S3Server
from slipstream.settings import CommonSettings, load

T = TypeVar("T")


@dataclass(frozen=True)
class Servers:
    """The run's two servers."""

    kafka: KafkaServer
    s3: S3Server


def run_now(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine from a synchronous fixture without touching the tests' own event loops."""
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        return runner.run(work)


@pytest.fixture(autouse=True)
def _process_wide_state() -> Iterator[None]:
    """Puts back what commands and services that run inside a test change for the whole process."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    levels = {name: logging.getLogger(name).level for name in (*logs.QUIET, "aiokafka", "urllib3")}
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
    for name, value in levels.items():
        logging.getLogger(name).setLevel(value)


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Kafka and S3, running. Tests that kill a server start their own."""
    base = tmp_path_factory.mktemp("servers")
    broker, controller, store = ports.free(3)
    kafka = KafkaServer(base / "kafka", port=broker, controller_port=controller)
    s3 = S3Server(base / "s3", port=store)
    with asyncio.Runner(loop_factory=asyncio.new_event_loop) as runner:
        try:
            runner.run(kafka.start())
            runner.run(s3.start())
            yield Servers(kafka, s3)
        finally:
            runner.run(s3.stop())
            runner.run(kafka.stop())


@pytest.fixture(scope="session")
def kafka_bootstrap(servers: Servers) -> str:
    """Address of the run's Kafka."""
    return servers.kafka.bootstrap


@pytest.fixture
def common_settings(servers: Servers) -> CommonSettings:
    """Settings for the run's servers, with a namespace and an existing bucket that no other test uses."""
    return own_place(servers)


def own_place(servers: Servers) -> CommonSettings:
    """A new namespace and bucket on the run's servers. Not from within an event loop."""
    name = f"t{uuid.uuid4().hex[:12]}"
    credentials = servers.s3.credentials
    settings = load(
        CommonSettings,
        {
            "SLIPSTREAM_NAMESPACE": name,
            "SLIPSTREAM_KAFKA_BOOTSTRAP": servers.kafka.bootstrap,
            "SLIPSTREAM_STORE_URL": servers.s3.url,
            "SLIPSTREAM_STORE_BUCKET": name,
            "SLIPSTREAM_STORE_ACCESS_KEY": credentials.access_key,
            "SLIPSTREAM_STORE_SECRET_KEY": credentials.secret_key,
        },
    )
    run_now(_make_bucket(settings))
    return settings


async def _make_bucket(settings: CommonSettings) -> None:
    store = open_store(settings)
    try:
        await store.ensure_bucket()
    finally:
        await store.close()


@pytest.fixture
def deployment(common_settings: CommonSettings) -> CommonSettings:
    """`common_settings` with all topics created."""
    make_topics(common_settings)
    return common_settings


def make_topics(settings: CommonSettings) -> None:
    """Creates all topics. Not from within an event loop."""
    run_now(_make_topics(settings))


async def _make_topics(settings: CommonSettings) -> None:
    async with open_bus(settings) as bus:
        await ensure_topics(bus, settings)


@dataclass(frozen=True)
class RunningService:
    """A service process that serves."""

    target: str
    """gRPC address."""
    child: Child

    def log_text(self) -> str:
        """Everything the process has written so far."""
        return self.child.log.read_text("utf-8", "replace")


StartService = Callable[..., Awaitable[RunningService]]


@pytest_asyncio.fixture
async def start_service(tmp_path: Path) -> AsyncIterator[StartService]:
    """`await start_service("reward", settings, env={...}, timeout_s=60)` runs `python -m slipstream_reward`
    until the test ends, and returns when its gRPC health says that it serves."""
    children: list[Child] = []

    async def start(
        name: str,
        settings: CommonSettings,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
        wait: bool = True,
    ) -> RunningService:
        (port,) = ports.free(1)
        variables = {
            **environment.of_settings(settings),
            f"SLIPSTREAM_{name.upper()}_PORT": str(port),
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
            **(env or {}),
        }
        child = await Child.start(
            name,
            [sys.executable, "-m", f"slipstream_{name}"],
            log=tmp_path / f"{name}-{len(children)}.log",
            env=environment.for_child(variables),
        )
        children.append(child)
        running = RunningService(f"127.0.0.1:{port}", child)
        if wait:
            await health.until_serving(running.target, child, timeout_s)
        return running

    yield start
    await asyncio.gather(*(child.stop(10) for child in children))
