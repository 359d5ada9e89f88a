"""`slipstream delta`: lossless deltas between safetensors files.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | the output cannot be written |
| 2 | wrong usage |
| 10 | OLD is not the file that the delta was made from |
| 11 | a file is damaged, or is no safetensors or delta file |
| 12 | a tensor is missing or extra |
| 13 | a tensor has another shape or type |
| 14 | a file is missing or cannot be read |

An error is one line on stderr. The output is written under another name and then renamed: it is whole or
not there.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from slipstream.delta.container import DeltaInfo, TensorSetError, TensorTypeError
from slipstream.delta.files import Sizes, apply_file, encode_file, inspect_file
from slipstream.errors import ConfigError, IntegrityError, NotFoundError, SlipstreamError, WrongBaseError

_EXIT_CODES: tuple[tuple[type[SlipstreamError], int], ...] = (
    (WrongBaseError, 10),
    (IntegrityError, 11),
    (TensorSetError, 12),
    (TensorTypeError, 13),
    (NotFoundError, 14),
    (ConfigError, 2),
)

_EPILOG = (
    "Exit codes: 0 done, 1 cannot write, 2 wrong usage, 10 wrong base, 11 damaged file, "
    "12 tensor missing or extra, 13 shape or type changed, 14 file missing."
)

delta = typer.Typer(
    help="Make and apply lossless deltas between safetensors files.", epilog=_EPILOG, no_args_is_help=True
)

Old = Annotated[Path, typer.Argument(metavar="OLD.safetensors", help="File that the delta starts from.")]
New = Annotated[Path, typer.Argument(metavar="NEW.safetensors", help="File that the delta leads to.")]
Delta = Annotated[Path, typer.Argument(metavar="DELTA", help="Delta file.")]
Out = Annotated[Path, typer.Argument(metavar="OUT", help="File to write; replaced if it is there.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@delta.command(epilog=_EPILOG)
def encode(old: Old, new: New, out: Out, codec: Annotated[str, typer.Option()] = "xor-zstd") -> None:
    """Write the delta from OLD to NEW."""
    with _exit_codes():
        sizes = encode_file(old, new, out, codec)
    typer.echo(f"{out}: {_describe(sizes)}")


@delta.command(epilog=_EPILOG)
def apply(old: Old, delta: Delta, out: Out) -> None:
    """Write the file that DELTA leads to from OLD, byte for byte the NEW file of `encode`."""
    with _exit_codes():
        sizes = apply_file(old, delta, out)
    typer.echo(f"{out}: {sizes.tensors} tensors, {sizes.changed} changed, all digests right")


@delta.command(epilog=_EPILOG)
def info(delta: Delta, as_json: AsJson = False) -> None:
    """Show what DELTA holds, after checking it."""
    with _exit_codes():
        found, sizes = inspect_file(delta)
    if as_json:
        typer.echo(json.dumps(_as_json(found, sizes)))
        return
    table = Table("tensor", "type", "shape", "codec", "bytes", box=None, pad_edge=False)
    for entry, (_, length) in zip(found.entries, found.spans, strict=True):
        shape = " x ".join(map(str, entry.shape)) or "scalar"
        table.add_row(entry.name, entry.dtype, shape, entry.codec if length else "", f"{length:,}")
    Console(highlight=False, markup=False).print(table)
    typer.echo(_describe(sizes))


def _as_json(found: DeltaInfo, sizes: Sizes) -> dict[str, Any]:
    return {
        "full_bytes": sizes.full_bytes,
        "delta_bytes": sizes.delta_bytes,
        "tensors": [
            {
                "name": entry.name,
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "codec": entry.codec,
                "bytes": length,
                "before": entry.digest_before,
                "after": entry.digest_after,
            }
            for entry, (_, length) in zip(found.entries, found.spans, strict=True)
        ],
    }


def _describe(sizes: Sizes) -> str:
    return (
        f"{sizes.delta_bytes:,} bytes for {sizes.full_bytes:,} bytes of weights "
        f"({sizes.ratio:.1f} times smaller), {sizes.changed} of {sizes.tensors} tensors changed"
    )


@contextmanager
def _exit_codes() -> Iterator[None]:
    try:
        yield
    except SlipstreamError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(_exit_code(error)) from None


def _exit_code(error: SlipstreamError) -> int:
    return next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), 1)
