"""What a person sees while a recipe runs, and the table at its end."""

import math
import re
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from slipstream.recipe.watch import RunWatch
from slipstream.v1.common_pb2 import Version
from slipstream.v1.trainer_service_pb2 import OpenRunResponse
from slipstream.weights.manifest import version_str

_MAX_REASONS = 20


def human_bytes(count: float) -> str:
    """`1.9 MB`; decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def _number(value: float | None, form: str = ".3g", unit: str = "") -> str:
    return "-" if value is None or not math.isfinite(value) else f"{value:{form}}{unit}"


class RunDisplay:
    """A live bar and figures on a terminal; one line per step elsewhere."""

    def __init__(self, console: Console, watch: RunWatch, run_id: str, total_steps: int) -> None:
        self._console, self._watch, self._run_id = console, watch, run_id
        self.began_at = 0
        """Step that this process began at."""
        self.version: Version | None = None
        """Newest version known."""
        self._reasons: set[str] = set()
        self._bar = Progress(
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self._task = self._bar.add_task("steps", total=total_steps)
        self._metrics: dict[str, float] = {}
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=2, transient=True)

    def __enter__(self) -> "RunDisplay":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def opened(self, answer: OpenRunResponse) -> None:
        if self.version is None:
            self.began_at = answer.step
        self.version = answer.version
        self._bar.reset(self._task, completed=answer.step)
        if answer.step:
            self._console.print(f"{self._run_id} goes on from step {answer.step}")

    def complained(self, subject: str, reason: str) -> None:
        # Each reason once: a reward that is wrong is wrong a thousand times.
        reason = reason.strip() or "no reason given"
        kind = re.sub(r"\d+", "#", reason)
        if kind not in self._reasons and len(self._reasons) < _MAX_REASONS:
            self._reasons.add(kind)
            self._console.print(f"{subject}: {reason}", style="yellow", markup=False)

    def stepped(self, step: int, version: Version, metrics: Mapping[str, float]) -> None:
        self.version = version
        self._metrics = dict(metrics)
        self._bar.update(self._task, completed=step)
        if not self._console.is_terminal:
            figures = "  ".join(f"{name} {value}" for name, value in self._figures())
            self._console.print(f"step {step}/{self._bar.tasks[0].total:.0f}  {figures}", soft_wrap=True)

    def _figures(self) -> list[tuple[str, str]]:
        m = self._metrics
        size, ratio = m.get("publish/delta_bytes"), m.get("publish/ratio")
        return [
            ("reward", _number(m.get("reward/mean"), ".3f")),
            ("lag", _number(m.get("lag/max"), ".0f")),
            ("k3@lag0", _number(m.get("k3/lag0"), ".2e")),
            ("delta", f"{human_bytes(size)} ({ratio:.0f}x)" if size and ratio else "-"),
            ("pause", _number(self._watch.last_pause_ms, ".1f", " ms")),
            ("tokens/s", _number(self._watch.tokens_per_s, ".0f")),
            ("step time", _number(m.get("time/step_s"), ".1f", " s")),
        ]

    def _render(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        for name, value in self._figures():
            table.add_column()
            _ = name, value
        table.add_row(*(f"[dim]{name}[/dim]" for name, _ in self._figures()))
        table.add_row(*(value for _, value in self._figures()))
        where = ", ".join(
            f"{name} at {version_str(s.version)}" for name, s in sorted(self._watch.newest.items())
        )
        waiting = "" if self._metrics else "[dim]waiting for the first step[/dim]"
        return Group(self._bar, table, f"[dim]{where}[/dim]" if where else waiting)


_ROWS = (
    ("mean reward, first five steps", "reward_mean_first_5", ".3f"),
    ("mean reward, last five steps", "reward_mean_last_5", ".3f"),
    ("largest lag", "max_lag", ".0f"),
    ("mismatch k3 at lag 0, mean", "mismatch_k3_lag0_mean", ".2e"),
    ("mismatch k3 at lag 0, largest", "mismatch_k3_lag0_max", ".2e"),
    ("swap pause p50 (ms)", "swap_pause_ms_p50", ".1f"),
    ("swap pause p95 (ms)", "swap_pause_ms_p95", ".1f"),
    ("groups trained", "groups_trained", ".0f"),
    ("groups void", "groups_void", ".0f"),
    ("groups dropped", "groups_dropped", ".0f"),
    ("requests lost", "requests_lost", ".0f"),
    ("tokens generated per second", "tokens_generated_per_s", ".0f"),
    ("tokens trained per second", "tokens_trained_per_s", ".0f"),
    ("wall seconds", "wall_s", ".0f"),
)


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The summary for people."""
    table = Table(
        title=f"{summary['run_id']}: {summary['steps']} steps", title_justify="left", show_header=False
    )
    for label, key, form in _ROWS:
        table.add_row(label, _number(summary[key], form))
    size, ratio = summary["delta_bytes_mean"], summary["delta_ratio_to_full_bf16"]
    if size:
        table.add_row("delta, mean", f"{human_bytes(size)}, {ratio:.0f} times smaller than full bf16")
    for name, version in summary["versions"].items():
        table.add_row(f"version on {name}", version)
    return table
