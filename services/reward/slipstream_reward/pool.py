"""A pool of worker processes: who gets which, and what becomes of the ones that hang or crash."""

import asyncio
import contextlib
import logging
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.clock import Clock
from slipstream.recipe.call import LoadError
from slipstream_reward.process import Function, Worker, WorkerGone
from slipstream_reward.sparing import Sparing

_log = logging.getLogger(__name__)

# A crash may be an accident (the kernel was short of memory), so the call gets one more try elsewhere.
_ATTEMPTS = 2
_REMEMBER_FAILURE_S = 30.0


class WorkerPool:
    """Up to `size` workers; callers wait their turn, first come, first served."""

    def __init__(
        self, size: int, directory: Path, clock: Clock, *, load_timeout_s: float, memory_bytes: int = 0
    ) -> None:
        self._clock = clock
        self._directory, self._load_timeout_s, self._memory_bytes = directory, load_timeout_s, memory_bytes
        self._size = size
        self._turn = asyncio.Semaphore(size)
        self._lent = 0
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self._kinds: dict[Function, str] = {}
        self._failed: dict[Function, tuple[str, float]] = {}
        self._learning: defaultdict[Function, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._sparing = Sparing(clock)

    async def start(self) -> None:
        """Starts all processes, so that the first groups find them ready."""
        self._idle += [await self._new() for _ in range(self._size)]

    async def close(self) -> None:
        """Kills all processes."""
        workers = [*self._idle, *self._busy]
        self._idle.clear()
        self._busy.clear()
        await asyncio.gather(*(worker.kill() for worker in workers))

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers there are."""
        return [worker.pid for worker in (*self._idle, *self._busy)]

    async def kind(self, function: Function) -> str:
        """How the function wants to be called: `completion`, `group` or `async`.

        Raises:
            LoadError: it cannot be loaded.
        """
        # A recipe that hangs when it is imported must hold up one worker, and not again for each group.
        async with self._learning[function]:
            if function in self._kinds:
                return self._kinds[function]
            reason, until = self._failed.get(function, ("", 0.0))
            if reason and self._clock.monotonic() < until:
                raise LoadError(reason)
            try:
                async with self._worker(function) as worker:
                    return worker.kind
            except LoadError as error:
                self._failed[function] = str(error), self._clock.monotonic() + _REMEMBER_FAILURE_S
                raise

    async def score(
        self,
        function: Function,
        prompt: Mapping[str, Any],
        completions: Sequence[Mapping[str, Any]],
        timeout_s: float,
    ) -> list[dict[str, Any]]:
        """Calls the function in a worker; one result per completion, `value` and `parts` or `error`."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                async with self._worker(function) as worker:
                    results = await worker.score(prompt, completions, timeout_s)
                    failed = worker.output and any("error" in each for each in results)
                    if failed and self._sparing.due(str(function)):
                        _log.warning("%s.py printed: %s", function.module, worker.output[-1000:])
                    return results
            except TimeoutError:
                if self._sparing.due("timeout"):
                    _log.warning("%s: the reward did not return within %g s", prompt["group_id"], timeout_s)
                return [{"error": f"did not return within {timeout_s:g} s"}] * len(completions)
            except LoadError as error:
                return [{"error": str(error)}] * len(completions)
            except WorkerGone as error:
                if self._sparing.due(str(error)):
                    _log.warning("%s: %s", prompt["group_id"], error)
                if attempt == _ATTEMPTS:
                    return [{"error": str(error)}] * len(completions)
        raise AssertionError("unreachable")

    @contextlib.asynccontextmanager
    async def _worker(self, function: Function) -> AsyncIterator[Worker]:
        """Lends a worker that has the function loaded; one that leaves with an exception is killed."""
        async with self._turn, self._counted():
            worker = await self._take(function)
            self._busy.add(worker)
            try:
                if worker.function is None:
                    await worker.load(function, self._load_timeout_s)
                    self._kinds[function] = worker.kind
                yield worker
            except BaseException:
                self._busy.discard(worker)
                await asyncio.shield(worker.kill())
                raise
            if worker in self._busy:
                self._busy.remove(worker)
                self._idle.append(worker)

    @contextlib.asynccontextmanager
    async def _counted(self) -> AsyncIterator[None]:
        self._lent += 1
        try:
            yield
        finally:
            self._lent -= 1

    async def _take(self, function: Function) -> Worker:
        for wanted in (function, None):
            for worker in reversed(self._idle):
                if worker.function == wanted and worker.alive:
                    self._idle.remove(worker)
                    return worker
        # No room left for one more: the one that has been idle longest, on another bundle or dead, goes.
        if len(self._idle) + self._lent > self._size:
            await self._idle.pop(0).kill()
        return await self._new()

    async def _new(self) -> Worker:
        return await Worker.start(self._directory, self._memory_bytes)


def default_size() -> int:
    """One worker per core that this process may use."""
    return max(1, len(os.sched_getaffinity(0)))
