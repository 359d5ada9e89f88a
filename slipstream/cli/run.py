"""`slipstream run RECIPE`."""

import asyncio
import contextlib
import json
import os
import re
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from slipstream import logs
from slipstream.bus import open_bus
from slipstream.cli.progress import RunDisplay, summary_table
from slipstream.clock import SystemClock
from slipstream.errors import ConfigError
from slipstream.local import LocalStack, StackOptions, client_environment, home_directory
from slipstream.recipe.host import Host
from slipstream.recipe.loader import Recipe, load_recipe
from slipstream.recipe.run import Progress
from slipstream.recipe.summary import summarize
from slipstream.recipe.watch import RunWatch
from slipstream.settings import CommonSettings, load

_CAUGHT_UP_S = 60.0


def run(
    recipe: Annotated[Path, typer.Argument(help="Recipe file.")],
    run_id: Annotated[str, typer.Option("--run", help="Name of the run; an existing one goes on.")] = "",
    steps: Annotated[int | None, typer.Option(help="Optimizer steps, instead of the recipe's.")] = None,
    summary: Annotated[Path | None, typer.Option(help="Also write the summary to this file.")] = None,
    up: Annotated[
        bool, typer.Option("--up", help="Start the local stack for this run, and stop it after.")
    ] = False,
    model: Annotated[str, typer.Option(help="With --up: model name or directory.")] = "",
    engine: Annotated[str, typer.Option(help="With --up: vllm or torch.")] = "",
    port_base: Annotated[int | None, typer.Option(help="With --up: first of the ports to use.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="With --up: forget all earlier runs.")] = False,
) -> None:
    """Runs a recipe on whatever is up, from its last checkpoint if it has one."""
    logs.configure("slipstream", "WARNING")
    loaded = load_recipe(recipe, {"steps": steps} if steps is not None else None)
    name = run_id or loaded.name
    if not re.fullmatch(r"[a-z0-9][a-z0-9._-]{0,99}", name):
        raise ConfigError(
            f"run name {name!r}: use 1 to 100 of a-z 0-9 . _ -, beginning with a letter or digit"
        )
    console = Console(highlight=False, soft_wrap=True)
    options = StackOptions(model=model, engine=engine, port_base=port_base, fresh=fresh) if up else None
    # What is begun afresh each time has nothing to go on from.
    hint = "" if fresh else "; the same command goes on from the last checkpoint"
    code = asyncio.run(_interruptible(_main(loaded, name, options, summary, console), console, hint))
    raise typer.Exit(code)


async def _interruptible(work: Any, console: Console, hint: str) -> int:
    """Turns SIGINT and SIGTERM into an orderly cancellation; says how to go on."""
    task: asyncio.Task[int] = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    stopped: list[int] = []

    def stop(number: int) -> None:
        if not stopped:
            console.print(f"\nstopping{hint}")
            task.cancel()
        stopped.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        console.print("stopped")
        return 128 + stopped[0] if stopped else 1


async def _main(
    recipe: Recipe, run_id: str, options: StackOptions | None, summary: Path | None, console: Console
) -> int:
    async with contextlib.AsyncExitStack() as stack:
        if options is not None:
            local = await stack.enter_async_context(LocalStack(options, console=console))
            environment: dict[str, str] | None = local.environment
        else:
            environment = client_environment(home_directory())
            if environment is None and "SLIPSTREAM_KAFKA_BOOTSTRAP" not in os.environ:
                raise ConfigError(
                    f"no stack is up in {home_directory()} and SLIPSTREAM_KAFKA_BOOTSTRAP names no other: "
                    "`slipstream up --detach` starts one, `slipstream run --up` one for this run alone"
                )
        page = (environment or {}).get("SLIPSTREAM_PAGE_URL")
        common = load(CommonSettings, {**(environment or {}), **_own_settings(os.environ)})
        if page:
            console.print(f"page: [bold]{page}[/bold]")
        return await _run(recipe, run_id, common, summary, console)


def _own_settings(environ: Any) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith("SLIPSTREAM_")}


async def _run(
    recipe: Recipe, run_id: str, common: CommonSettings, summary: Path | None, console: Console
) -> int:
    clock, watch = SystemClock(), RunWatch(run_id)
    display = RunDisplay(console, watch, run_id, recipe.settings.steps)
    host = Host(recipe, run_id, common, clock, display)
    began = clock.monotonic()
    async with open_bus(common) as bus:
        following = asyncio.create_task(watch.follow(bus, common.namespace))
        try:
            with display:
                progress: Progress = await host.run()
                wall_s = clock.monotonic() - began
                caught_up = display.version is not None and await watch.caught_up(
                    display.version, recipe.settings.steps, _CAUGHT_UP_S
                )
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
    own_summary = home_directory() / "runs" / run_id / "summary.json"
    if display.began_at >= recipe.settings.steps and own_summary.exists():
        console.print(
            f"{run_id} is finished, its summary is in {own_summary}; "
            "--steps N goes on, --run NAME begins another"
        )
        return 0
    if not caught_up:
        console.print(
            f"[yellow]not every replica reached the last version within {_CAUGHT_UP_S:.0f} s[/yellow]"
        )
    result = summarize(
        run_id,
        watch.steps,
        watch.replicas,
        published=progress.published,
        wall_s=wall_s,
        resumed_from=display.began_at,
    )
    console.print(summary_table(result))
    for path in filter(None, (own_summary, summary)):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=2) + "\n")
        console.print(f"written: {path}")
    return 0
