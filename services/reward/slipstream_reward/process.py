"""One worker process as the service sees it: starting it, asking it, killing it."""

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.errors import RetryableError, RewardError
from slipstream.recipe.call import LoadError

_OUTPUT_BYTES = 4096
_MAX_FRAME_BYTES = 64 * 1024 * 1024
_EXIT_S = 5.0


@dataclass(frozen=True)
class Function:
    """A recipe's reward function: a bundle fetched to `zip_path`, a module in it, a name in that."""

    zip_path: Path
    module: str
    name: str


class WorkerGone(RewardError):
    """The worker died in the middle of a call, by what the recipe did or by want of memory."""


class Worker:
    """A running worker. Not for concurrent use; after any exception but LoadError it must be killed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._output = bytearray()
        self._drain = asyncio.create_task(self._read_output())
        self.function: Function | None = None
        """What it has loaded."""
        self.kind = ""

    @classmethod
    async def start(cls, directory: Path, memory_bytes: int = 0) -> "Worker":
        """Starts a process in `directory`; it gets ready while it is waiting for its first request.

        Args:
            memory_bytes: address space it may take; 0 sets no limit.

        Raises:
            RetryableError: the machine has no room for one more process.
        """
        command = [sys.executable, "-P", "-X", "faulthandler", "-m", "slipstream_reward.worker"]
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                str(memory_bytes),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=directory,
                env=worker_environment(os.environ),
                start_new_session=True,
            )
        except OSError as error:
            raise RetryableError(f"cannot start a reward worker: {error}") from None
        return cls(process)

    async def load(self, function: Function, timeout_s: float) -> None:
        """Imports the function.

        Raises:
            LoadError: it cannot be loaded. The worker may have imported half of it and must be killed.
        """
        request = {"zip": str(function.zip_path), "module": function.module, "function": function.name}
        try:
            answer = await self._ask({"load": request}, timeout_s)
        except TimeoutError:
            raise LoadError(f"importing {function.module}.py took more than {timeout_s:g} s") from None
        except WorkerGone as error:
            raise LoadError(f"importing {function.module}.py: {error}") from None
        if "error" in answer:
            raise LoadError(str(answer["error"]))
        self.function, self.kind = function, str(answer["kind"])

    async def score(
        self, prompt: Mapping[str, Any], completions: Sequence[Mapping[str, Any]], timeout_s: float
    ) -> list[dict[str, Any]]:
        """One result per completion: `value` and `parts`, or `error`.

        Raises:
            TimeoutError: no answer in time.
            WorkerGone: it died; says how, and what it printed last.
        """
        request = {"prompt": prompt, "completions": completions, "timeout_s": timeout_s}
        # An async function's own limit is kept inside the worker, so that one late call costs no other.
        grace_s = 1.0 if self.kind == "async" else 0.0
        results = (await self._ask({"score": request}, timeout_s + grace_s)).get("results")
        if not isinstance(results, list) or len(results) != len(completions):
            raise WorkerGone("the worker's answer makes no sense")
        return results

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    @property
    def output(self) -> str:
        """The end of what the recipe printed since the last call began."""
        return self._output.decode(errors="replace").strip()

    async def kill(self) -> None:
        """Kills the process and whatever it has started; returns when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        # Children that moved to a session of their own may hold the pipe open.
        self._drain.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._drain
        await self._process.wait()
        # Frees the pipes even then; asyncio has no public way to.
        self._process._transport.close()  # type: ignore[attr-defined]

    async def _ask(self, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._output.clear()
        body = json.dumps(message).encode()
        async with asyncio.timeout(timeout_s):
            try:
                self._process.stdin.write(len(body).to_bytes(4, "big") + body)
                await self._process.stdin.drain()
                length = int.from_bytes(await self._process.stdout.readexactly(4), "big")
                if length > _MAX_FRAME_BYTES:
                    raise WorkerGone(f"the worker's answer of {length} bytes is too long")
                answer = await self._process.stdout.readexactly(length)
            except (asyncio.IncompleteReadError, ConnectionError):
                raise WorkerGone(await self._cause_of_death()) from None
        try:
            return dict(json.loads(answer))
        except ValueError:
            raise WorkerGone("the worker's answer makes no sense") from None

    async def _cause_of_death(self) -> str:
        try:
            async with asyncio.timeout(_EXIT_S):
                code = await self._process.wait()
                await asyncio.wait([self._drain], timeout=0.5)
        except TimeoutError:
            return "the worker closed its pipes"
        if code == -signal.SIGKILL:
            cause = "the worker was killed (SIGKILL: out of memory?)"
        elif code < 0:
            cause = f"the worker died of {_signal_name(-code)}"
        else:
            cause = f"the worker exited with code {code}"
        # faulthandler's traceback, innermost frame first.
        if frame := re.search(r'File "[^"]*\.zip/([^"]+)", line (\d+) in (\w+)', self.output):
            cause += f" ({frame[1]}:{frame[2]} in {frame[3]})"
        elif self.output:
            cause += f"; it printed: {self.output[-300:]}"
        return cause

    async def _read_output(self) -> None:
        assert self._process.stderr is not None
        while chunk := await self._process.stderr.read(_OUTPUT_BYTES):
            self._output += chunk
            del self._output[:-_OUTPUT_BYTES]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def worker_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a worker: ours without the platform's settings, which hold its credentials."""
    env = {key: value for key, value in environ.items() if not key.startswith("SLIPSTREAM_")}
    # There is a worker per core already: a number library's thread per core would only get in the way.
    env.setdefault("OMP_NUM_THREADS", "1")
    return env
