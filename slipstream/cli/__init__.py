"""The `slipstream` command. A subcommand's module is imported when it is asked for: each starts fast."""

import asyncio
import importlib
from typing import Any

import typer
from typer.core import TyperGroup

from slipstream.errors import ConfigError, FencedError, SlipstreamError

_COMMANDS = {
    "up": ("slipstream.cli.local", "up"),
    "down": ("slipstream.cli.local", "down"),
    "status": ("slipstream.cli.status", "status"),
    "run": ("slipstream.cli.run", "run"),
    "doctor": ("slipstream.cli.doctor", "doctor"),
    "init": ("slipstream.cli.local", "init"),
    "model": ("slipstream.cli.local", "model"),
    "delta": ("slipstream.cli.delta", "delta"),
}
_EXIT_CODES: tuple[tuple[type[SlipstreamError], int], ...] = ((ConfigError, 2), (FencedError, 3))


class _Group(TyperGroup):
    """Finds commands by name and turns our errors into a red message and an exit code. Other errors are
    bugs and keep their traceback."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return None
        module, name = _COMMANDS[cmd_name]
        found = getattr(importlib.import_module(module), name)
        if isinstance(found, typer.Typer):
            group = typer.main.get_group(found)
            group.name = cmd_name
            return group
        alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        alone.command(cmd_name)(found)
        return typer.main.get_command(alone)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SlipstreamError as error:
            _show(error)
            code = next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), 1)
            raise typer.Exit(code) from None
        except (KeyboardInterrupt, asyncio.CancelledError):
            raise typer.Exit(130) from None


def _show(error: SlipstreamError) -> None:
    from rich.console import Console

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"error: {error}", style="red", markup=False)


app = typer.Typer(
    cls=_Group,
    name="slipstream",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def main() -> None:
    """Asynchronous RL post-training of language models."""
