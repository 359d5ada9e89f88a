"""Says once that a server is away, and once that it is back."""

import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from slipstream.clock import Clock
from slipstream.errors import RetryableError

_log = logging.getLogger(__name__)

T = TypeVar("T")


def pauses(first: float = 0.1, cap: float = 5.0) -> Iterator[float]:
    """Seconds to wait before attempt 2, 3, ...: doubling up to `cap`, without end."""
    for attempt in itertools.count():
        yield min(first * 2 ** min(attempt, 16), cap)


class Outage:
    """State of one server as its clients see it."""

    def __init__(self, server: str, clock: Clock) -> None:
        """
        Args:
            server: name and address, the beginning of each message.
        """
        self.server = server
        self._clock = clock
        self._since: float | None = None

    @property
    def lasting(self) -> bool:
        """Whether the server is known to be away."""
        return self._since is not None

    def down(self, reason: str) -> None:
        """The server did not answer; only the first call of an outage is logged."""
        if self._since is None:
            self._since = self._clock.monotonic()
            _log.warning("%s does not answer (%s); trying again until it does", self.server, reason)

    async def wait_out(self, call: Callable[[], Awaitable[T]]) -> T:
        """Makes a call again, with growing pauses, for as long as it raises RetryableError."""
        for pause in pauses(first=0.2, cap=10.0):
            try:
                result = await call()
            except RetryableError as error:
                self.down(str(error))
            else:
                self.up()
                return result
            await self._clock.sleep(pause)
        raise AssertionError("unreachable")

    def up(self) -> None:
        """The server answered."""
        if self._since is not None:
            _log.info("%s answers again after %.1f s", self.server, self._clock.monotonic() - self._since)
            self._since = None
