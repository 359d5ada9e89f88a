"""Whole deployments for end-to-end tests: the run's Kafka and S3 server, and the services as processes."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.local import environment, health, ports
from slipstream.local.process import Child
from slipstream.settings import CommonSettings, load

SERVICES = ("weightsync", "monitor", "reward", "trainer", "rollout")


@dataclass
class Deployment:
    """Five services, healthy."""

    settings: CommonSettings
    variables: dict[str, str]
    """Environment that leads clients to it."""
    directory: Path
    services: dict[str, Child]
    own: dict[str, dict[str, str]]
    """Each service's environment beyond `variables`."""

    async def start(self, *names: str) -> None:
        """Starts services and waits until all of them serve."""
        for name in names:
            child = await Child.start(
                name,
                [sys.executable, "-m", f"slipstream_{name}"],
                log=self.directory / f"{name}.log",
                env=environment.for_child({**self.variables, **self.own[name]}),
            )
            self.services[name] = child
        targets = {name: f"127.0.0.1:{self.own[name][f'SLIPSTREAM_{name.upper()}_PORT']}" for name in names}
        await asyncio.gather(*(health.until_serving(targets[n], self.services[n], 240) for n in names))

    async def kill(self, name: str) -> None:
        """SIGKILL, as a machine that loses power."""
        await self.services.pop(name).stop(0)

    def log(self, name: str) -> str:
        """All that a service has written since it was started last."""
        return (self.directory / f"{name}.log").read_text("utf-8", "replace")

    async def run(self, recipe: Path, *options: str, timeout_s: float = 240) -> "Finished":
        """`slipstream run RECIPE OPTIONS`, to its end."""
        process = await self.spawn(recipe, *options)
        async with asyncio.timeout(timeout_s):
            output, _ = await process.communicate()
        return Finished(process.returncode or 0, output.decode(), self.home / "runs")

    async def spawn(self, recipe: Path, *options: str) -> asyncio.subprocess.Process:
        """Starts `slipstream run RECIPE OPTIONS`."""
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "slipstream.cli",
            "run",
            str(recipe),
            *options,
            env=environment.for_child({**self.variables, "SLIPSTREAM_HOME": str(self.home)}),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )

    @property
    def home(self) -> Path:
        return self.directory / "home"


@dataclass(frozen=True)
class Finished:
    """A `slipstream run` that has ended."""

    code: int
    output: str
    runs: Path

    def summary(self, run_id: str) -> dict[str, Any]:
        """What it wrote."""
        result: dict[str, Any] = json.loads((self.runs / run_id / "summary.json").read_text())
        return result


@contextlib.asynccontextmanager
async def deployment(
    settings: CommonSettings, directory: Path, model: Path, *, engine: str = "torch", **extra: str
) -> AsyncIterator[Deployment]:
    """All five services on free ports until the block ends.

    Args:
        extra: further settings of services, each for the one that its name says.
    """
    free = dict(zip((*SERVICES, "page"), ports.free(len(SERVICES) + 1), strict=True))
    own = {name: {f"SLIPSTREAM_{name.upper()}_PORT": str(free[name])} for name in SERVICES}
    own["monitor"]["SLIPSTREAM_MONITOR_PAGE_PORT"] = str(free["page"])
    own["trainer"] |= {
        "SLIPSTREAM_TRAINER_MODEL": str(model),
        "SLIPSTREAM_TRAINER_CHECKPOINT_DIR": str(directory / "checkpoints"),
    }
    own["rollout"] |= {
        "SLIPSTREAM_ROLLOUT_MODEL": str(model),
        "SLIPSTREAM_ROLLOUT_ENGINE": engine,
        "SLIPSTREAM_ROLLOUT_REPLICA_ID": "rollout-0",
        "SLIPSTREAM_ROLLOUT_WORK_DIR": str(directory / "work"),
    }
    own["reward"] |= {"SLIPSTREAM_REWARD_REPLICA_ID": "reward-0"}
    variables = environment.of_settings(settings) | {
        f"SLIPSTREAM_{name.upper()}_TARGET": f"127.0.0.1:{free[name]}"
        for name in ("rollout", "trainer", "weightsync", "monitor")
    }
    # Only the settings that the processes share are read from here.
    load(CommonSettings, variables)
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}
    own = {name: {**threads, **variables_} for name, variables_ in own.items()}
    for name, value in extra.items():
        own[name.split("_")[1].lower()][name] = value
    running = Deployment(settings, variables, directory, {}, own)
    try:
        await running.start(*SERVICES)
        yield running
    finally:
        await asyncio.gather(*(child.stop(20) for child in running.services.values()))


async def until_line(process: asyncio.subprocess.Process, pattern: str, timeout_s: float = 120) -> str:
    """Reads output until a line matches; returns it."""
    assert process.stdout is not None
    seen = ""
    async with asyncio.timeout(timeout_s):
        while line := (await process.stdout.readline()).decode():
            seen += line
            if re.search(pattern, line):
                return line
    raise AssertionError(f"no line matched {pattern!r} in:\n{seen}")


async def interrupt(process: asyncio.subprocess.Process, number: int = signal.SIGINT) -> str:
    """Sends a signal and waits for the end; returns the rest of the output."""
    process.send_signal(number)
    output, _ = await process.communicate()
    return output.decode()
