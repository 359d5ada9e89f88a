"""`slipstream up`, `down`, `status`, `init` and `model prepare`."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from slipstream import logs
from slipstream.blobs import open_store
from slipstream.bus import open_bus
from slipstream.bus.events import ensure_topics
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.local import LocalStack, StackOptions, home_directory, layout, models, paths, state
from slipstream.local.process import tail
from slipstream.settings import CommonSettings, load

_START_S = 900.0
_STOP_S = 60.0

model = typer.Typer(help="Models.", no_args_is_help=True)


def up(
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when it is ready.")] = False,
    model: Annotated[str, typer.Option(help="Model directory or name.")] = models.DEFAULT,
    engine: Annotated[str, typer.Option(help="vllm or torch; default vllm where it is installed.")] = "",
    replicas: Annotated[int, typer.Option(min=1, max=64, help="Rollout processes.")] = 1,
    device: Annotated[str, typer.Option(help="The trainer's device: auto, cpu, cuda, cuda:1, ...")] = "auto",
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Delete log, store and checkpoints of earlier runs first.")
    ] = False,
    port_base: Annotated[
        int, typer.Option(min=1024, max=65000, help="First of the ports.")
    ] = layout.DEFAULT_PORT_BASE,
) -> None:
    """Starts Kafka, the S3 server and the services on this machine.

    SLIPSTREAM_KAFKA_BOOTSTRAP or SLIPSTREAM_STORE_URL, where set, is used instead of starting one.
    """
    logs.configure("slipstream", "WARNING")
    console = Console(highlight=False, soft_wrap=True)
    options = StackOptions(
        model=model, engine=engine, replicas=replicas, device=device, port_base=port_base, fresh=fresh
    )
    if detach:
        _up_detached(options, console)
    else:
        raise typer.Exit(asyncio.run(_up(options, console)))


async def _up(options: StackOptions, console: Console) -> int:
    """Runs until SIGINT or SIGTERM, at any moment of the start too."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    asked: list[int] = []

    def stop(number: int) -> None:
        if not asked:
            console.print("stopping")
            task.cancel()
        asked.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        async with LocalStack(options, console) as stack:
            console.print(f"ready; page: {stack.page_url}   logs: {stack.home / 'logs'}   Ctrl-C stops")
            await asyncio.Event().wait()
    except asyncio.CancelledError:
        if not asked:
            raise
    return 0


def _up_detached(options: StackOptions, console: Console) -> None:
    home = home_directory()
    log = paths.make_dir(home / "logs") / "stack.log"
    command = [sys.executable, "-m", "slipstream.cli", "up", "--port-base", str(options.port_base)]
    command += ["--model", options.model, "--engine", options.engine, "--device", options.device]
    command += ["--replicas", str(options.replicas), *(["--fresh"] if options.fresh else [])]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        ready = _until_ready(home, process, console, log)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    console.print(f"ready; page: {ready}   logs: {log.parent}   `slipstream down` stops it")


def _until_ready(home: Path, process: "subprocess.Popen[bytes]", console: Console, log: Path) -> str:
    """Shows what the supervisor says until the stack is ready; returns the page's address."""
    shown, deadline = 0, time.monotonic() + _START_S
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        text = log.read_text("utf-8", "replace")
        live = state.read_live(home)
        if live is not None and live["pid"] == process.pid and live["status"] == "ready":
            return str(live["page"])
        if ended:
            kind = ConfigError if process.returncode == 2 else SlipstreamError
            raise kind(text[shown:].strip().removeprefix("error: ") or f"see {log}")
        if lines := text[shown : text.rfind("\n") + 1]:
            shown += len(lines)
            if not lines.startswith("ready"):
                console.print(lines.rstrip())
        time.sleep(0.2)
    raise SlipstreamError(f"not ready after {_START_S:.0f} s; the end of {log}:\n{tail(log)}")


def down() -> None:
    """Stops the local stack."""
    console, home = Console(highlight=False, soft_wrap=True), home_directory()
    live = state.read_live(home)
    if live is None:
        stale = state.read(home)
        left = state.kill_leftovers(stale.get("processes", {})) if stale else []
        (home / "stack.json").unlink(missing_ok=True)
        console.print(f"ended what was left: {', '.join(left)}" if left else f"nothing runs in {home}")
        return
    supervisor = live["supervisor"]
    os.kill(supervisor["pid"], signal.SIGTERM)
    deadline = time.monotonic() + _STOP_S
    while state.is_alive(supervisor) and time.monotonic() < deadline:
        time.sleep(0.1)
    if state.is_alive(supervisor):
        os.kill(supervisor["pid"], signal.SIGKILL)
        state.kill_leftovers((state.read(home) or live).get("processes", {}))
        (home / "stack.json").unlink(missing_ok=True)
        console.print(f"the supervisor did not end within {_STOP_S:.0f} s; killed it and its children")
        return
    console.print("stopped")


def init() -> None:
    """Creates the topics and the bucket on the Kafka and store that the settings name."""
    logs.configure("slipstream", "INFO")
    asyncio.run(_init(load(CommonSettings)))
    Console().print("topics and bucket are in place")


async def _init(settings: CommonSettings) -> None:
    store = open_store(settings)
    try:
        await store.ensure_bucket()
    finally:
        await store.close()
    async with open_bus(settings) as bus:
        await ensure_topics(bus, settings)


@model.command("prepare")
def prepare(
    name: Annotated[str, typer.Argument(help="Model directory or name.")] = models.DEFAULT,
    output: Annotated[Path | None, typer.Option(help="Also put it into this directory.")] = None,
) -> None:
    """Makes or fetches a model, once; prints its directory."""
    print(asyncio.run(models.prepare(name, paths.cache(), output)))
