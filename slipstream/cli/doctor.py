"""`slipstream doctor`: what is missing or misconfigured, in words, with the mend."""

import asyncio
import os
from typing import Annotated

import typer
from rich.console import Console

from slipstream import logs
from slipstream.blobs import open_store
from slipstream.bus import open_bus
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.local import checks, home_directory, layout, models, paths, state
from slipstream.local.checks import Finding
from slipstream.settings import CommonSettings, load

_SIGNS = {"ok": "[green]ok  [/]", "warn": "[yellow]warn[/]", "fail": "[red]FAIL[/]"}
_REACH_S = 5.0


def doctor(
    model: Annotated[str, typer.Option(help="Model directory or name.")] = models.DEFAULT,
    port_base: Annotated[int, typer.Option(help="First of the ports.")] = layout.DEFAULT_PORT_BASE,
) -> None:
    """Says what is missing or misconfigured, with the mend. Exit code 1 when something must be mended."""
    logs.configure("slipstream", "CRITICAL")
    console = Console(highlight=False, soft_wrap=True)
    findings = [*_machine(model, port_base), *asyncio.run(_deployment())]
    for each in findings:
        console.print(f"{_SIGNS[each.state]}  ", end="")
        console.print(each.what, markup=False)
        if each.mend:
            console.print(f"      -> {each.mend}", markup=False)
    failed = sum(each.state == "fail" for each in findings)
    warned = sum(each.state == "warn" for each in findings)
    console.print(f"{failed} to mend, {warned} to know" if failed or warned else "all is well")
    raise typer.Exit(1 if failed else 0)


def _machine(model: str, port_base: int) -> list[Finding]:
    home, cache = home_directory(), paths.cache()
    findings = [checks.python(), *checks.all_packages(), *checks.engine(), *checks.java(cache)]
    if not state.is_held(home):
        findings.append(checks.free_ports(layout.Ports(port_base).named()))
    return [
        *findings,
        checks.model(model, cache),
        checks.disk(home),
        checks.memory(),
        checks.settings(),
    ]


async def _deployment() -> list[Finding]:
    """Whether what clients would use can be reached: the stack that is up, or what the settings name."""
    live = state.read_live(home_directory())
    own = {name: value for name, value in os.environ.items() if name.startswith("SLIPSTREAM_")}
    named = any(name in own for name in ("SLIPSTREAM_KAFKA_BOOTSTRAP", "SLIPSTREAM_STORE_URL"))
    if live is None and not named:
        return [Finding("ok", "no stack is up and no Kafka or store is named: `slipstream up` starts them")]
    try:
        settings = load(CommonSettings, {**(live["environment"] if live else {}), **own})
    except ConfigError:
        return []  # said already
    return [await _kafka(settings), await _store(settings)]


async def _kafka(settings: CommonSettings) -> Finding:
    address = settings.kafka_bootstrap
    try:
        async with asyncio.timeout(_REACH_S), open_bus(settings) as bus:
            await bus.ping()
    except ConfigError as error:
        return Finding(
            "fail", f"Kafka at {address} refuses: {error}", "check SLIPSTREAM_KAFKA_USERNAME and _PASSWORD"
        )
    except (SlipstreamError, TimeoutError):
        return Finding("fail", f"Kafka at {address} does not answer", "check SLIPSTREAM_KAFKA_BOOTSTRAP")
    return Finding("ok", f"Kafka at {address} answers")


async def _store(settings: CommonSettings) -> Finding:
    address = f"{settings.store_url}, bucket {settings.store_bucket}"
    store = open_store(settings)
    try:
        async with asyncio.timeout(_REACH_S):
            await store.ping()
    except ConfigError as error:
        return Finding(
            "fail",
            f"store at {address} refuses: {error}",
            "check SLIPSTREAM_STORE_ACCESS_KEY, _SECRET_KEY, _BUCKET (`slipstream init` makes the bucket)",
        )
    except (SlipstreamError, TimeoutError):
        return Finding("fail", f"store at {address} does not answer", "check SLIPSTREAM_STORE_URL")
    finally:
        await store.close()
    return Finding("ok", f"store at {address} answers and accepts the credentials")
