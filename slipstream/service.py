"""Runs one service as one process: settings, logging, telemetry, signals, gRPC, drain, exit code.

Order: bind the port (so that a taken port is found at once), connect to Kafka and the store, `start`,
become healthy, `run`. On SIGTERM or SIGINT: unhealthy, `stopping` is set, `run` finishes what it has in
hand within `drain_s`, the server stops, `close`, connections end. A second signal ends the process at once.

Exit codes: 0 stopped as asked, 1 failed, 2 wrong settings, 3 fenced by a newer owner.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from slipstream import logs, telemetry
from slipstream.blobs import BlobStore, open_store
from slipstream.bus import Bus, open_bus
from slipstream.clock import Clock, SystemClock
from slipstream.errors import ConfigError, FencedError, SlipstreamError
from slipstream.rpc import make_server
from slipstream.settings import CommonSettings, ServiceSettings, load

_log = logging.getLogger(__name__)

S = TypeVar("S", bound=ServiceSettings)


@dataclass
class Context(Generic[S]):
    """What the runner hands to a service."""

    name: str
    common: CommonSettings
    settings: S
    bus: Bus
    blobs: BlobStore
    clock: Clock
    stopping: asyncio.Event
    """Set when the service is to finish what it has in hand and return from `run`."""


class Service(Protocol):
    """What a service implements."""

    def register(self, server: grpc.aio.Server) -> list[str]:
        """Adds its gRPC services; returns their full names (for health and reflection)."""
        ...

    async def start(self) -> None:
        """Gets ready. The process is healthy when this returns."""
        ...

    async def run(self) -> None:
        """Works until `stopping` is set. Returning earlier or raising ends the process."""
        ...

    async def close(self) -> None:
        """Frees what `start` took. Called in any case."""
        ...


def main(name: str, settings_cls: type[S], factory: Callable[[Context[S]], Service]) -> None:
    """Entry point of a service's `__main__`. Does not return."""
    sys.exit(_main(name, settings_cls, factory))


def _main(name: str, settings_cls: type[S], factory: Callable[[Context[S]], Service]) -> int:
    try:
        common, settings = load(CommonSettings), load(settings_cls)
        logs.configure(name, common.log_level, common.log_format)
        asyncio.run(serve(name, common, settings, factory))
    except ConfigError as error:
        return _fail(name, str(error), 2)
    except FencedError as error:
        return _fail(name, str(error), 3)
    except SlipstreamError as error:
        return _fail(name, str(error), 1)
    except KeyboardInterrupt:
        return 130
    except Exception:
        _log.critical("%s failed", name, exc_info=True)
        return 1
    return 0


def _fail(name: str, message: str, code: int) -> int:
    if logging.getLogger().handlers:
        _log.critical("%s", message)
    else:
        print(f"{name}: {message}", file=sys.stderr)
    return code


async def serve(
    name: str, common: CommonSettings, settings: S, factory: Callable[[Context[S]], Service]
) -> None:
    """Runs a service until a signal or a fatal error."""
    stopping, ready = asyncio.Event(), asyncio.Event()
    with _signals(stopping), telemetry.session(name):
        bus = open_bus(common)
        blobs = open_store(common)
        context = Context(name, common, settings, bus, blobs, SystemClock(), stopping)
        service = factory(context)
        server, healthy = make_server(ready), health.aio.HealthServicer()
        names = service.register(server)
        _add_health(server, healthy, names)
        port = _bind(server, name, settings)
        # The servicer calls everything healthy from the first moment on.
        for each in ("", *names):
            await healthy.set(each, health_pb2.HealthCheckResponse.NOT_SERVING)
        try:
            # The servicer takes the whole server for healthy until told otherwise.
            await healthy.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
            await server.start()
            if await _start(context, service):
                ready.set()
                for each in ("", *names):
                    await healthy.set(each, health_pb2.HealthCheckResponse.SERVING)
                _log.info("ready on %s:%d", settings.host, port)
                await _until_stopped(service, stopping, settings.drain_s)
        finally:
            await healthy.enter_graceful_shutdown()
            await server.stop(2.0)
            await service.close()
            await bus.close()
            await blobs.close()


async def _start(context: Context[S], service: Service) -> bool:
    """Connects and starts; False when a signal came first."""

    async def start() -> None:
        await context.bus.start()
        await service.start()

    return await _unless_stopped(start(), context.stopping)


async def _unless_stopped(work: Awaitable[None], stopping: asyncio.Event) -> bool:
    task = asyncio.ensure_future(work)
    signal_task = asyncio.ensure_future(stopping.wait())
    await asyncio.wait({task, signal_task}, return_when=asyncio.FIRST_COMPLETED)
    signal_task.cancel()
    if task.done():
        task.result()
        return True
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    return False


async def _until_stopped(service: Service, stopping: asyncio.Event, drain_s: float) -> None:
    task = asyncio.ensure_future(service.run())
    if await _unless_stopped(asyncio.shield(task), stopping):
        if not stopping.is_set():
            raise SlipstreamError("the service ended without being asked to")
        return
    _log.info("stopping")
    done, _ = await asyncio.wait({task}, timeout=drain_s)
    if not done:
        _log.warning("still busy after %.0f s; work in hand will be delivered again", drain_s)
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


def _add_health(server: grpc.aio.Server, servicer: "health.aio.HealthServicer", names: list[str]) -> None:
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)


def _bind(server: grpc.aio.Server, name: str, settings: ServiceSettings) -> int:
    try:
        return int(server.add_insecure_port(f"{settings.host}:{settings.port}"))
    except RuntimeError:
        variable = f"SLIPSTREAM_{name.upper()}_PORT"
        raise ConfigError(
            f"port {settings.port} on {settings.host} is taken; choose another with {variable}"
        ) from None


@contextlib.contextmanager
def _signals(stopping: asyncio.Event) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if stopping.is_set():
            os._exit(130)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
