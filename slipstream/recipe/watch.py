"""Follows a run's steps and replicas on their topics."""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

from slipstream import topics
from slipstream.bus import Bus
from slipstream.bus.events import parse
from slipstream.errors import PoisonMessageError
from slipstream.v1.common_pb2 import Version
from slipstream.v1.train_pb2 import StepRecord
from slipstream.v1.weights_pb2 import ReplicaStatus

_RECENT = 30
"""Statuses over which a replica's tokens per second are taken: about a minute."""


class RunWatch:
    """Steps of a run since its beginning, and what its replicas said since this watch began."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self.steps: list[StepRecord] = []
        self._kept: list[ReplicaStatus] = []
        self._recent: dict[str, deque[ReplicaStatus]] = {}
        self.last_pause_ms: float | None = None
        self._changed = asyncio.Event()

    @property
    def newest(self) -> dict[str, ReplicaStatus]:
        """Each replica's last status."""
        return {name: statuses[-1] for name, statuses in self._recent.items()}

    @property
    def replicas(self) -> list[ReplicaStatus]:
        """Each replica's first and last status, and all that report a swap, in the order of the log."""
        return [*self._kept, *(s for s in self.newest.values() if not s.HasField("swap"))]

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens sampled per second over the last statuses of all replicas; None before there are two."""
        rates = [rate for name in self._recent if (rate := self._rate(name)) is not None]
        return sum(rates) if rates else None

    def _rate(self, replica_id: str) -> float | None:
        window = self._recent[replica_id]
        if len(window) < 2 or window[-1].uptime_s <= window[0].uptime_s:
            return None
        tokens = window[-1].tokens_generated - window[0].tokens_generated
        return tokens / (window[-1].uptime_s - window[0].uptime_s)

    async def follow(self, bus: Bus, namespace: str) -> None:
        """Reads until cancelled."""
        await asyncio.gather(
            self._read(bus, topics.STEPS, namespace, "earliest"),
            self._read(bus, topics.REPLICAS, namespace, "latest"),
        )

    async def _read(self, bus: Bus, topic: topics.Topic, namespace: str, start: str) -> None:
        consumer = await bus.assign([topic.full_name(namespace)], offsets=start)
        try:
            while True:
                for record in await consumer.poll():
                    try:
                        self.take(await parse(record, topic))
                    except PoisonMessageError:
                        continue
        finally:
            await consumer.close()

    def take(self, message: Any) -> None:
        """A status or a step, of this run or another."""
        if message.run_id != self._run_id:
            return
        if isinstance(message, StepRecord):
            self.steps.append(message)
        else:
            if message.replica_id not in self._recent or message.HasField("swap"):
                self._kept.append(message)
            self._recent.setdefault(message.replica_id, deque(maxlen=_RECENT)).append(message)
            if message.HasField("swap"):
                self.last_pause_ms = message.swap.pause_ms
        self._changed.set()

    async def caught_up(self, version: Version, step: int, timeout_s: float) -> bool:
        """Waits until the step's record is here and every known replica serves the version."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._at(self.newest.values(), version, step):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _at(self, replicas: Any, version: Version, step: int) -> bool:
        statuses: Sequence[ReplicaStatus] = list(replicas)
        return (
            bool(statuses)
            and all(status.version == version for status in statuses)
            and any(record.step == step for record in self.steps)
        )
