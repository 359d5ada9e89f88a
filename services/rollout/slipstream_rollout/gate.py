"""Lets groups of one run at a time into the engine."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from slipstream.clock import Clock
from slipstream.v1.common_pb2 import Version


class RunGate:
    """First come, first in. A group of another run waits until the engine is empty, and those behind it
    wait too, so that no run is kept out for ever."""

    def __init__(
        self,
        ensure: Callable[[str, Version | None], Awaitable[None]],
        clock: Clock,
    ) -> None:
        """
        Args:
            ensure: brings the engine to a run, and there to a version or one after it; to another run
                only while no group is inside.
        """
        self._ensure, self._clock = ensure, clock
        self._door = asyncio.Lock()
        self._empty = asyncio.Event()
        self._empty.set()
        self._run_id = ""
        self._busy_s, self._filled = 0.0, 0.0
        self.inside = 0
        """Groups in the engine."""

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one group was in the engine."""
        return self._busy_s + (self._clock.monotonic() - self._filled if self.inside else 0.0)

    @contextlib.asynccontextmanager
    async def enter(self, run_id: str, min_version: Version | None = None) -> AsyncIterator[None]:
        """Waits for the engine to hold a version of the run, which stays so for the body.

        Args:
            run_id: empty for whatever the engine holds.
            min_version: oldest version that will do; None for any.
        """
        async with self._door:
            if run_id:
                if run_id != self._run_id:
                    await self._empty.wait()
                await self._ensure(run_id, min_version)
                self._run_id = run_id
            if not self.inside:
                self._filled = self._clock.monotonic()
            self.inside += 1
            self._empty.clear()
        try:
            yield
        finally:
            self.inside -= 1
            if not self.inside:
                self._busy_s += self._clock.monotonic() - self._filled
                self._empty.set()
