"""The whole platform on one machine: Kafka, the S3 server and the services, supervised.

    async with LocalStack(StackOptions(model="smollm2-135m-instruct")) as stack:
        ...  # stack.environment leads clients to it

When a process ends that should not, the body of the `async with` is cancelled and the statement raises an
error that names it and shows the end of its log. Whatever happens, nothing that was started outlives it.
"""

import asyncio
import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from slipstream.blobs import open_store
from slipstream.bus import open_bus
from slipstream.bus.events import ensure_topics
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.local import checks, environment, health, jars, layout, models, paths, ports, state
from slipstream.local.process import Child
from slipstream.local.servers import Credentials, JavaServer, KafkaServer, S3Server
from slipstream.settings import CommonSettings, load

_SERVICE_READY_S = 300.0
_GRACE_S = 25.0
# Room for two copies of a small model's weights; a smaller RAM disk is not used.
_SHM_NEEDED = 4 * 1024**3


@dataclass(frozen=True)
class StackOptions:
    """What can be chosen; empty values mean the default."""

    home: Path | None = None
    """State directory: logs, data, checkpoints. Default SLIPSTREAM_HOME or `.slipstream`."""
    port_base: int | None = None
    """First of the ports; default 17100."""
    model: str = ""
    """Directory or name; default SmolLM2-135M-Instruct."""
    engine: str = ""
    """`vllm` or `torch`; default vllm where it is installed."""
    replicas: int = 1
    """Rollout processes."""
    device: str = "auto"
    """The trainer's device."""
    fresh: bool = False
    """Begin without the log, the store and the checkpoints of earlier runs; they are deleted."""
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """Where the user's SLIPSTREAM_ settings come from. One that names a Kafka or a store is used
    instead of starting one."""


class Says(Protocol):
    """A console."""

    def print(self, text: str, /) -> None: ...


class LocalStack:
    """Starts on entry, stops on exit."""

    def __init__(self, options: StackOptions | None = None, console: Says | None = None) -> None:
        self.options = options or StackOptions()
        self.home = paths.home(self.options.home, self.options.env)
        self.ports = layout.Ports(self.options.port_base or layout.DEFAULT_PORT_BASE, self.options.replicas)
        self.environment: dict[str, str] = {}
        self.failure: SlipstreamError | None = None
        self._console = console
        self._lock = state.HomeLock(self.home)
        self._servers: list[JavaServer] = []
        self._services: dict[str, Child] = {}
        self._watchers: list[asyncio.Task[None]] = []
        self._owner: asyncio.Task[Any] | None = None
        self._work: Path | None = None

    @property
    def page_url(self) -> str:
        """Address of the monitor's web page."""
        return f"http://{layout.HOST}:{self.ports.page}"

    async def __aenter__(self) -> Self:
        self._owner = asyncio.current_task()
        try:
            await self.start()
        except BaseException:
            await self.stop()
            self._raise_failure()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self.failure is not None:
            if self._owner is not None:
                self._owner.uncancel()
            raise self.failure from None

    async def start(self) -> None:
        """Starts everything and returns when all of it serves.

        Raises:
            ConfigError: something is missing, taken or wrong on this machine; says how to mend it.
            SlipstreamError: a process ended or did not become healthy.
        """
        load(CommonSettings, self.options.env)
        if self.options.engine not in ("", "vllm", "torch"):
            raise ConfigError(f"engine {self.options.engine!r}: use vllm or torch")
        engine = self.options.engine or ("vllm" if checks.engine_kind() else "torch")
        self._preflight(engine)
        self._lock.acquire()
        await self._clear_leftovers()
        ports.require_free(
            self.ports.named(), "stop what uses it, or choose others with --port-base (PORT_BASE=)"
        )
        if self.options.fresh:
            await asyncio.to_thread(self._delete_data)
        self._publish("starting")
        model = await self._model()
        credentials = Credentials()
        self.environment = layout.client_variables(
            self.ports, credentials.access_key, credentials.secret_key, self.options.env
        )
        await self._start_servers(credentials)
        await self._start_services(model, engine)
        self.environment["SLIPSTREAM_PAGE_URL"] = self.page_url
        self._publish("ready")

    async def stop(self) -> None:
        """Stops everything; services first, so that they can still write. Runs to its end even when the
        caller is cancelled meanwhile."""
        stopping = asyncio.ensure_future(self._stop())
        while not stopping.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.shield(stopping)
        stopping.result()

    def log_of(self, process: str) -> Path:
        """Where a process's output goes."""
        return self.home / "logs" / f"{process}.log"

    def _preflight(self, engine: str) -> None:
        findings = [checks.python(), *checks.all_packages()]
        if engine == "vllm":
            findings += checks.engine()
        checks.require(findings)

    async def _clear_leftovers(self) -> None:
        stale = state.read(self.home)
        if stale is None:
            return
        state.kill_leftovers(stale.get("processes", {}))
        if work := stale.get("work"):
            shutil.rmtree(work, ignore_errors=True)
        await asyncio.to_thread(ports.wait_free, self.ports.named().values(), 5.0)

    def _delete_data(self) -> None:
        for name in ("kafka", "s3", "checkpoints"):
            shutil.rmtree(self.home / name, ignore_errors=True)

    async def _model(self) -> Path:
        name = self.options.model or models.DEFAULT
        if not models.is_prepared(name, paths.cache(self.options.env)):
            self._say(f"preparing the model {name} (once)")
        return await models.prepare(name, paths.cache(self.options.env))

    async def _start_servers(self, credentials: Credentials) -> None:
        cache, user = paths.cache(self.options.env), self.options.env
        logs = paths.make_dir(self.home / "logs")
        if "SLIPSTREAM_KAFKA_BOOTSTRAP" not in user:
            kafka = KafkaServer(
                self.home / "kafka",
                port=self.ports.kafka,
                controller_port=self.ports.controller,
                cache=cache,
                log=logs / "kafka.log",
            )
            self._servers.append(kafka)
        if "SLIPSTREAM_STORE_URL" not in user:
            s3 = S3Server(
                self.home / "s3",
                port=self.ports.s3,
                credentials=credentials,
                cache=cache,
                log=logs / "s3.log",
            )
            self._servers.append(s3)
        for server in self._servers:
            if lacking := await asyncio.to_thread(jars.missing, server.jars_name, cache):
                self._say(f"fetching {server.name}: {len(lacking)} jars (once)")
        if self._servers:
            self._say("starting " + " and ".join(each.name for each in self._servers))
        async with _plain_errors(), asyncio.TaskGroup() as group:
            for server in self._servers:
                group.create_task(server.start())
        for server in self._servers:
            self._watch(server.child)
        await self._create_topics_and_bucket()

    async def _create_topics_and_bucket(self) -> None:
        common = load(CommonSettings, self.environment)
        store = open_store(common)
        try:
            await store.ensure_bucket()
        finally:
            await store.close()
        async with open_bus(common) as bus:
            await ensure_topics(bus, common)

    async def _start_services(self, model: Path, engine: str) -> None:
        names = ", ".join(self.ports.processes())
        self._say(f"starting services on {engine} (takes a minute or two): {names}")
        work = self._work = _work_directory(self.home)
        for name in self.ports.processes():
            variables = layout.process_variables(
                name,
                self.ports,
                self.environment,
                model=model,
                engine=engine,
                device=self.options.device,
                home=self.home,
                work=work,
            )
            command = [sys.executable, "-m", layout.module_of(name)]
            self.log_of(name).unlink(missing_ok=True)
            child = await Child.start(
                name, command, log=self.log_of(name), env=environment.for_child(variables)
            )
            self._services[name] = child
            self._watch(child)
        self._publish("starting")
        async with _plain_errors(), asyncio.TaskGroup() as group:
            for name, child in self._services.items():
                target = f"{layout.HOST}:{self.ports.service(name)}"
                group.create_task(health.until_serving(target, child, _SERVICE_READY_S))

    def _watch(self, child: Child) -> None:
        self._watchers.append(asyncio.create_task(self._watch_one(child)))

    async def _watch_one(self, child: Child) -> None:
        await child.wait()
        if self.failure is None:
            self.failure = child.failure()
            if self._owner is not None:
                self._owner.cancel()

    async def _stop(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        self._watchers.clear()
        await asyncio.gather(*(child.stop(_GRACE_S) for child in self._services.values()))
        self._services.clear()
        await asyncio.gather(*(server.stop() for server in self._servers))
        self._servers.clear()
        if self._work is not None:
            shutil.rmtree(self._work, ignore_errors=True)
            self._work = None
        self._lock.release()

    def _publish(self, status: str) -> None:
        running = {name: child.pid for name, child in self._services.items()}
        running |= {server.name: server.child.pid for server in self._servers if server.is_running}
        self._lock.write(
            {
                "pid": os.getpid(),
                "supervisor": state.identity(os.getpid()),
                "status": status,
                "started_unix": time.time(),
                "page": self.page_url,
                "ports": self.ports.named(),
                "processes": {name: state.identity(pid) for name, pid in running.items()},
                "work": str(self._work) if self._work else None,
                "environment": self.environment,
            }
        )

    def _say(self, text: str) -> None:
        if self._console is not None:
            self._console.print(text)


def client_environment(home: Path) -> dict[str, str] | None:
    """Variables that lead clients to the stack that is up in `home`; None when none is ready there."""
    live = state.read_live(home)
    if live is None or live["status"] != "ready":
        return None
    return dict(live["environment"])


def _work_directory(home: Path) -> Path:
    """Scratch space for weights on their way into an engine: the RAM disk if it is large enough."""
    shm = Path("/dev/shm")
    roomy = shm.is_dir() and os.access(shm, os.W_OK) and shutil.disk_usage(shm).free >= _SHM_NEEDED
    return Path(tempfile.mkdtemp(prefix="slipstream-", dir=shm if roomy else home))


@contextlib.asynccontextmanager
async def _plain_errors() -> Any:
    """Raises the first error of a TaskGroup instead of the group."""
    try:
        yield
    except BaseExceptionGroup as group:
        ours = [each for each in group.exceptions if isinstance(each, SlipstreamError)]
        raise next(iter(ours), group.exceptions[0]) from None
