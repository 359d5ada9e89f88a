"""The `slipstream` command."""

import asyncio
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from slipstream.cli import doctor, local
from slipstream.cli.delta import delta
from slipstream.cli.run import run
from slipstream.errors import ConfigError, FencedError, SlipstreamError

_EXIT_CODES: tuple[tuple[type[SlipstreamError], int], ...] = ((ConfigError, 2), (FencedError, 3))


class _Group(TyperGroup):
    """Turns our errors into a red message and an exit code; others are bugs and keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except SlipstreamError as error:
            Console(stderr=True, highlight=False, soft_wrap=True).print(
                f"error: {error}", style="red", markup=False
            )
            code = next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), 1)
            raise typer.Exit(code) from None
        except (KeyboardInterrupt, asyncio.CancelledError):
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Group,
    name="slipstream",
    help="Asynchronous RL post-training of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(local.up)
app.command()(local.down)
app.command()(local.status)
app.command()(run)
app.command()(doctor.doctor)
app.command()(local.init)
app.add_typer(local.model, name="model")
app.add_typer(delta, name="delta")
