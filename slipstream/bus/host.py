"""What a bus over a network does whatever the client library: wait, look, tell, check, clean up."""

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from slipstream.bus.base import Consumer, TopicPartition
from slipstream.bus.outage import Outage, pauses
from slipstream.clock import Clock
from slipstream.errors import ConfigError, RetryableError

CLOSE_S = 5.0
_NEW_TOPIC_S = 3.0
"""Seconds that brokers may take to know a topic that was just created."""

T = TypeVar("T")


class Host(ABC):
    """Base of such a bus; owns the connections made by it."""

    def __init__(self, server: str, clock: Clock) -> None:
        """
        Args:
            server: name and address, for messages.
        """
        self.clock = clock
        self.outage = Outage(server, clock)
        self._consumers: set[Consumer] = set()
        self._known: set[str] = set()
        self._looking = False
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def ping(self) -> None:
        """Asks whether the server is there; raises RetryableError when it is not."""

    @abstractmethod
    async def partitions(self, topics: Sequence[str]) -> list[TopicPartition]:
        """Partitions of those topics that exist."""

    @abstractmethod
    async def topic_offsets(self, topics: Sequence[str]) -> dict[TopicPartition, tuple[int, int]]:
        """See `Bus`."""

    async def close(self) -> None:
        """Ends what is left, in a bounded time."""
        await asyncio.gather(*(consumer.close() for consumer in list(self._consumers)))
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def start(self) -> None:
        await self.wait_out(self.ping)

    async def wait_out(self, call: Callable[[], Awaitable[T]]) -> T:
        """Tries until the server answers."""
        for pause in pauses():
            try:
                return await call()
            except RetryableError:
                await self.clock.sleep(pause)
        raise AssertionError("unreachable")

    async def look(self) -> bool:
        """Asks whether the server is there, in order to log it; True when it is."""
        if not self._looking:
            self._looking = True
            try:
                with contextlib.suppress(RetryableError):
                    await self.ping()
            finally:
                self._looking = False
        return not self.outage.lasting

    async def require(self, topics: Sequence[str]) -> None:
        """Checks that topics exist, each once per process; gives the server a moment to know a new one.

        Raises:
            ConfigError: one does not.
        """
        deadline = self.clock.monotonic() + _NEW_TOPIC_S
        for pause in pauses(cap=0.5):
            missing = sorted(set(topics) - self._known)
            if not missing:
                return
            there = await self.wait_out(lambda: self.partitions(missing))  # noqa: B023
            self._known |= {tp.topic for tp in there}
            if self._known.issuperset(topics):
                return
            if self.clock.monotonic() > deadline:
                names = ", ".join(missing)
                raise ConfigError(f"{self.outage.server} has no topic {names}; create the topics first")
            await self.clock.sleep(pause)

    def doubt(self, topic: str) -> None:
        """The topic may be gone: `require` asks again."""
        self._known.discard(topic)

    def keep(self, consumer: Consumer) -> None:
        """Closes a consumer with the bus, unless it is closed before."""
        self._consumers.add(consumer)

    def forget(self, consumer: Consumer) -> None:
        """A consumer was closed."""
        self._consumers.discard(consumer)

    def later(self, closing: Coroutine[Any, Any, Any]) -> None:
        """Runs a clean-up that nobody waits for."""
        task = asyncio.create_task(closing)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()


async def bounded(closing: Coroutine[Any, Any, Any]) -> bool:
    """Awaits a clean-up that may hang or fail, even with a cancellation that is not ours; True when it went
    well."""
    task = asyncio.ensure_future(closing)
    try:
        await asyncio.wait([task], timeout=CLOSE_S)
    finally:
        task.cancel()
    return task.done() and not task.cancelled() and task.exception() is None
