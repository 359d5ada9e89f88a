"""The state directory of a local stack: who holds it, and what others may know of it.

The supervisor holds an exclusive lock on `lock` while it lives, so that a state left by a killed one is
known to be stale. `stack.json` is written by the supervisor alone.
"""

import contextlib
import fcntl
import json
import os
import signal
from pathlib import Path
from typing import IO, Any

from slipstream.errors import ConfigError
from slipstream.local import paths


class HomeLock:
    """Exclusive use of a state directory by this process."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._file: IO[str] | None = None

    def acquire(self) -> None:
        """Takes the lock.

        Raises:
            ConfigError: a stack runs in this directory.
        """
        paths.make_dir(self.home)
        file = (self.home / "lock").open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.close()
            pid = (read(self.home) or {}).get("pid", "unknown")
            raise ConfigError(
                f"a stack runs already in {self.home} (process {pid}): `slipstream status` shows it, "
                "`slipstream down` stops it; SLIPSTREAM_HOME names another directory"
            ) from None
        self._file = file

    def release(self) -> None:
        """Gives it back and removes `stack.json`."""
        if self._file is None:
            return
        (self.home / "stack.json").unlink(missing_ok=True)
        self._file.close()
        self._file = None

    def write(self, state: dict[str, Any]) -> None:
        """Publishes what others may know. Mode 0600: it holds the store's credentials."""
        paths.write_json(self.home / "stack.json", state)


def is_held(home: Path) -> bool:
    """Whether a supervisor lives in this directory."""
    try:
        with (home / "lock").open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def read(home: Path) -> dict[str, Any] | None:
    """What the last supervisor wrote, stale or not."""
    try:
        state: dict[str, Any] = json.loads((home / "stack.json").read_bytes())
    except (OSError, ValueError):
        return None
    return state


def read_live(home: Path) -> dict[str, Any] | None:
    """State of the stack that runs in this directory; None when there is none."""
    return read(home) if is_held(home) else None


def identity(pid: int) -> dict[str, int]:
    """A process id with its start time, so that a later process of that id is not taken for it."""
    return {"pid": pid, "started_ticks": _started_ticks(pid)}


def is_alive(known: dict[str, int]) -> bool:
    """Whether the very process of an `identity` still runs."""
    with contextlib.suppress(OSError):
        return _started_ticks(known["pid"]) == known["started_ticks"]
    return False


def kill_leftovers(processes: dict[str, dict[str, int]]) -> list[str]:
    """Ends what a killed supervisor has left; returns the names."""
    ended = []
    for name, known in processes.items():
        with contextlib.suppress(OSError):
            if is_alive(known):
                os.killpg(known["pid"], signal.SIGKILL)
                ended.append(name)
    return ended


def _started_ticks(pid: int) -> int:
    """Clock ticks from boot to the start of a process (proc(5), field 22 of stat)."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
