"""Servers that outlive one test: they run on an event loop of their own, in a thread."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class BackgroundLoop:
    """An event loop in a thread, for coroutines called from synchronous fixtures and from tests."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="servers", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 120.0) -> T:
        """Runs to the end, blocking the caller."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    async def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs to the end, from a coroutine on another loop."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        """Ends the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
