"""The state, shared between those who fill it and those who wait for it to change."""

import asyncio
import contextlib
from collections import Counter

from slipstream.clock import Clock
from slipstream.v1.monitor_service_pb2 import TopicStatus
from slipstream_monitor.state import MonitorState


class Feed:
    """State plus a way to wait for changes without queues: a slow reader skips, it holds up nobody."""

    def __init__(self, state: MonitorState, clock: Clock) -> None:
        self.state = state
        self.clock = clock
        self.topics: list[TopicStatus] = []
        self.skipped: Counter[str] = Counter()
        """Messages that could not be read, by topic."""
        self.closing = False
        self._changed = asyncio.Event()

    def notify(self) -> None:
        """Wakes all who wait."""
        self._changed.set()
        self._changed = asyncio.Event()

    def close(self) -> None:
        """Tells all who wait to end."""
        self.closing = True
        self.notify()

    async def changed(self, timeout_s: float) -> None:
        """Returns at the next change, or after `timeout_s`, or at once when closing."""
        if self.closing:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), timeout_s)
