"""Time as an argument, so that tests can hold it still."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Source of time. Durations come from `monotonic`, labels for people from `unix`."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary origin, never going back."""
        ...

    def unix(self) -> float:
        """Seconds since the Unix epoch."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Suspends the caller."""
        ...


class SystemClock:
    """The machine's clock."""

    def monotonic(self) -> float:
        return time.monotonic()

    def unix(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
