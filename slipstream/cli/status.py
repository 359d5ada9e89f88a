"""`slipstream status`."""

import asyncio
import os
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from slipstream import logs
from slipstream.errors import SlipstreamError
from slipstream.local import health, home_directory, layout, state
from slipstream.rpc import call, make_channel
from slipstream.settings import CommonSettings, load
from slipstream.v1.common_pb2 import Version
from slipstream.v1.monitor_service_pb2 import GetRunStatusRequest, GetRunStatusResponse
from slipstream.v1.monitor_service_pb2_grpc import MonitorServiceStub
from slipstream.v1.train_pb2 import GateState
from slipstream.v1.weights_pb2 import ReplicaState, ReplicaStatus

_COLOURS = {"serving": "green", "not serving": "yellow", "unreachable": "red"}
_METRICS = (("reward", "reward/mean"), ("loss", "loss"), ("delta bytes", "publish/delta_bytes"))


def status() -> None:
    """One screen: services, versions per replica, lag, topics, last step."""
    logs.configure("slipstream", "ERROR")
    live = state.read_live(home_directory())
    own = {name: value for name, value in os.environ.items() if name.startswith("SLIPSTREAM_")}
    settings = load(CommonSettings, {**(live["environment"] if live else {}), **own})
    raise typer.Exit(asyncio.run(_show_status(Console(highlight=False), settings, live)))


async def _show_status(console: Console, settings: CommonSettings, live: dict[str, Any] | None) -> int:
    """Prints the screen; returns 0 when every service serves, else 1."""
    targets = _targets(settings, live)
    states = dict(zip(targets, await asyncio.gather(*map(health.check, targets.values())), strict=True))
    where = (
        f"local stack, {live['status']}, process {live['pid']}"
        if live
        else "no local stack in this directory (`slipstream up` starts one)"
    )
    console.print(where)
    console.print(_services(targets, states))
    if states["monitor"] != "serving":
        console.print("the monitor does not answer, so nothing is known of runs")
        return 1
    try:
        run = await _run_status(settings.monitor_target)
    except SlipstreamError as error:
        console.print(f"the monitor could not say: {error}")
        return 1
    _show_run(console, run)
    return 0 if all(each == "serving" for each in states.values()) else 1


def _targets(settings: CommonSettings, live: dict[str, Any] | None) -> dict[str, str]:
    fixed = {
        "trainer": settings.trainer_target,
        "weightsync": settings.weightsync_target,
        "monitor": settings.monitor_target,
    }
    if live is None:
        return {"rollout": settings.rollout_target, **fixed}
    others = {
        name: f"{layout.HOST}:{port}"
        for name, port in live["ports"].items()
        if name == "reward" or name.startswith("rollout-")
    }
    return {**others, **fixed}


async def _run_status(target: str) -> GetRunStatusResponse:
    async with make_channel(target) as channel:
        answer: GetRunStatusResponse = await call(
            target, MonitorServiceStub(channel).GetRunStatus, GetRunStatusRequest(), timeout_s=5
        )
        return answer


def _services(targets: dict[str, str], states: dict[str, str]) -> Table:
    table = _table("service", "address", "state")
    for name, target in targets.items():
        table.add_row(name, target, f"[{_COLOURS[states[name]]}]{states[name]}[/]")
    return table


def _show_run(console: Console, run: GetRunStatusResponse) -> None:
    if not run.run_id:
        console.print("no run yet: `slipstream run RECIPE`")
    else:
        step = run.last_step
        gate = GateState.Name(run.gate).removeprefix("GATE_STATE_").lower().replace("unspecified", "ok")
        console.print(f"run {run.run_id}: step {step.step}, version {_version(step.version)}, gate {gate}")
        figures = [f"{label} {step.metrics[key]:.4g}" for label, key in _METRICS if key in step.metrics]
        if step.groups:
            figures.append(f"largest lag {max(group.lag for group in step.groups)}")
        if figures:
            console.print("last step: " + ", ".join(figures))
    if run.replicas:
        console.print(_replicas(run))
    topics = _table("topic", "messages", "to read")
    for topic in run.topics:
        topics.add_row(topic.topic, str(topic.messages), "-" if topic.behind < 0 else str(topic.behind))
    console.print(topics)


def _replicas(run: GetRunStatusResponse) -> Table:
    table = _table("replica", "state", "run", "version", "lag", "running", "done", "lost", "pause")
    for each in run.replicas:
        table.add_row(
            each.replica_id,
            ReplicaState.Name(each.state).removeprefix("REPLICA_STATE_").lower(),
            each.run_id or "-",
            _version(each.version),
            _lag(each, run),
            str(each.groups_running),
            str(each.groups_done),
            str(each.requests_lost),
            f"{each.swap.pause_ms:.1f} ms" if each.HasField("swap") else "-",
        )
    return table


def _lag(replica: ReplicaStatus, run: GetRunStatusResponse) -> str:
    newest = run.last_step.version
    if replica.run_id != run.run_id or replica.version.epoch != newest.epoch:
        return "-"
    return str(newest.number - replica.version.number)


def _version(version: Version) -> str:
    return f"{version.epoch}-{version.number}"


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column)
    return table
