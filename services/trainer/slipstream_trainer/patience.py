"""Waiting for what is away."""

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from slipstream.clock import Clock
from slipstream.errors import RetryableError

_log = logging.getLogger(__name__)
T = TypeVar("T")


async def patiently(work: Callable[[], Awaitable[T]], clock: Clock, what: str) -> T:
    """Does `work`, again and again with growing pauses while a dependency is away."""
    pause = 0.5
    while True:
        try:
            return await work()
        except RetryableError as error:
            _log.warning("%s: %s; trying again in %.0f s", what, error, pause)
        await clock.sleep(pause)
        pause = min(pause * 2, 15.0)
