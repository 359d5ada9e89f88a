"""Follows a run's steps and replicas on their topics."""

import asyncio
from collections.abc import Sequence
from typing import Any

from slipstream import topics
from slipstream.bus import Bus
from slipstream.bus.events import parse
from slipstream.errors import PoisonMessageError
from slipstream.v1.common_pb2 import Version
from slipstream.v1.train_pb2 import StepRecord
from slipstream.v1.weights_pb2 import ReplicaStatus


class RunWatch:
    """Steps of a run since its beginning, and its replicas' statuses since this watch began."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self.steps: list[StepRecord] = []
        self.replicas: list[ReplicaStatus] = []
        self.newest: dict[str, ReplicaStatus] = {}
        self.last_pause_ms: float | None = None
        self._changed = asyncio.Event()

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens sampled per second over the last statuses of all replicas; None before there are two."""
        rates = [rate for name in self.newest if (rate := self._rate(name)) is not None]
        return sum(rates) if rates else None

    def _rate(self, replica_id: str) -> float | None:
        window = [s for s in self.replicas[-60:] if s.replica_id == replica_id]
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
                        self._take(await parse(record, topic))
                    except PoisonMessageError:
                        continue
        finally:
            await consumer.close()

    def _take(self, message: Any) -> None:
        if message.run_id != self._run_id:
            return
        if isinstance(message, StepRecord):
            self.steps.append(message)
        else:
            self.replicas.append(message)
            self.newest[message.replica_id] = message
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
