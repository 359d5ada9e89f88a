"""Where a local stack keeps its files."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError, StoreFullError


def home(path: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None) -> Path:
    """State directory: `path`, else SLIPSTREAM_HOME, else `.slipstream` in the current directory."""
    env = os.environ if environ is None else environ
    return Path(path or env.get("SLIPSTREAM_HOME") or ".slipstream").absolute()


def cache(environ: Mapping[str, str] | None = None) -> Path:
    """What is costly to make and the same for every stack: SLIPSTREAM_CACHE, else `~/.cache/slipstream`."""
    env = os.environ if environ is None else environ
    if named := env.get("SLIPSTREAM_CACHE"):
        return Path(named).absolute()
    base = env.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "slipstream"


def make_dir(path: Path) -> Path:
    """Creates a directory and its parents.

    Raises:
        ConfigError: it cannot be made; the message says why.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot create the directory {path}: {error.strerror}") from None
    return path


def write_json(path: Path, value: Any) -> None:
    """Replaces a file atomically; only its owner can read it."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=2)
        os.replace(name, path)
    except OSError as error:
        raise StoreFullError(f"cannot write {path}: {error.strerror}") from None
