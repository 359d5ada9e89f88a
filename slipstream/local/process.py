"""A child process that does not outlive its parent, with its output in a file."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from slipstream.errors import ConfigError, SlipstreamError

# Runs before the command, in its process: asks the kernel for a signal when the parent dies (1 is
# PR_SET_PDEATHSIG), then checks that this has not happened already. A stub instead of preexec_fn, because
# running Python between fork and exec can hang a process that has threads.
_STUB = (
    "import ctypes,os,sys;"
    "ctypes.CDLL(None).prctl(1,int(sys.argv[2]));"
    "os.getppid()==int(sys.argv[1]) or os._exit(1);"
    "os.execvp(sys.argv[3],sys.argv[3:])"
)


class Child:
    """One running child, leader of its own process group."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process

    @classmethod
    async def start(
        cls, name: str, command: Sequence[str], *, log: Path, env: Mapping[str, str], cwd: Path | None = None
    ) -> "Child":
        """Starts a command; must be called on the process's main thread, whose life the child's is tied to.

        Args:
            log: gets stdout and stderr, appended.

        Raises:
            ConfigError: the command cannot be run.
        """
        stub = [sys.executable, "-I", "-S", "-c", _STUB, str(os.getpid()), str(int(signal.SIGTERM))]
        try:
            with log.open("ab") as output:
                process = await asyncio.create_subprocess_exec(
                    *stub,
                    *command,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=dict(env),
                    cwd=cwd,
                    start_new_session=True,
                )
        except OSError as error:
            raise ConfigError(f"cannot start {name}: {error}") from None
        return cls(name, process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.returncode

    async def wait(self) -> int:
        """Waits for the end; returns the exit code."""
        return await self._process.wait()

    def signal(self, number: int) -> None:
        """Sends a signal to the child alone; nothing happens when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def stop(self, grace_s: float) -> bool:
        """Asks the child to end, then kills its whole group. Returns whether it ended by itself in time."""
        asked = True
        if self.returncode is None:
            self.signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(self.wait(), grace_s)
            except TimeoutError:
                asked = False
        # Also after a clean end: what the child started and forgot is in the group still.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        await self.wait()
        return asked

    def failure(self) -> SlipstreamError:
        """Says how the child ended, or that it still runs, and shows the end of its log."""
        code = self.returncode
        if code is None:
            how = "still runs"
        else:
            how = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
            how = f"ended with {how}"
        return SlipstreamError(f"{self.name} {how}; the end of {self.log}:\n{tail(self.log)}")


def tail(path: Path, lines: int = 15) -> str:
    """The last lines of a text file; empty when it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 200 * lines))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
