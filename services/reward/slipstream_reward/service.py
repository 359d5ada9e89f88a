"""Consumes `rollouts`, has every group scored, writes `samples`."""

import asyncio
import hashlib
import logging
import random
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import grpc.aio

from slipstream import telemetry, topics
from slipstream.bus import Consumer, Record
from slipstream.bus.events import parse, publish, send_dead_letter
from slipstream.bus.offsets import OffsetTracker
from slipstream.bus.outage import Outage, pauses
from slipstream.errors import PoisonMessageError, RetryableError
from slipstream.service import Context
from slipstream.v1.reward_pb2 import ScoredGroup
from slipstream.v1.rollout_pb2 import PromptGroup, RolloutGroup
from slipstream_reward.local import LocalScorer
from slipstream_reward.pool import WorkerPool
from slipstream_reward.remote import RemoteScorer
from slipstream_reward.scorer import Scorer, void
from slipstream_reward.settings import RewardSettings

_log = logging.getLogger(__name__)

T = TypeVar("T")


class RewardScorer:
    """The reward service. Holds no state: a record's offset is committed once its score, or the reason for
    having none, is in the log; whatever was in hand when it died is delivered again."""

    def __init__(self, context: Context[RewardSettings]) -> None:
        self._context = context
        self._bus, self._blobs, self._namespace = context.bus, context.blobs, context.common.namespace
        settings = context.settings
        self._directory = tempfile.TemporaryDirectory(prefix="slipstream-reward-")
        directory = Path(self._directory.name)
        self._pool = WorkerPool(
            settings.workers,
            directory,
            context.clock,
            load_timeout_s=settings.load_timeout_s,
            memory_bytes=settings.worker_memory_mb * 1024**2,
        )
        self._remote = RemoteScorer(context.clock, random.Random(), retry_s=settings.retry_s)
        self._scorer = Scorer(LocalScorer(self._pool, context.blobs, directory), self._remote, context.clock)
        self._offsets = OffsetTracker()
        self._tasks: set[asyncio.Task[None]] = set()
        self._outage = Outage("something that scoring needs", context.clock)
        meter = telemetry.meter()
        self._count = meter.create_counter("slipstream.reward.groups", description="groups by outcome")
        self._duration = meter.create_histogram("slipstream.reward.duration", unit="s")

    def register(self, server: grpc.aio.Server) -> list[str]:
        return []

    async def start(self) -> None:
        await self._pool.start()

    async def close(self) -> None:
        await self._pool.close()
        await self._remote.close()
        self._directory.cleanup()

    async def run(self) -> None:
        topic, group = topics.ROLLOUTS.full_name(self._namespace), f"{self._namespace}.reward"
        consumer = await self._bus.subscribe(
            [topic], group=group, member=self._context.settings.replica_id or None
        )
        try:
            while not self._context.stopping.is_set():
                await self._take(consumer)
                await self._settle(consumer)
            while self._tasks:
                await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
                await self._settle(consumer)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await consumer.close()

    async def _take(self, consumer: Consumer) -> None:
        """Begins with as many groups as there is room for."""
        room = self._context.settings.max_groups - len(self._tasks)
        if not room:
            await asyncio.wait(self._tasks, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            return
        records = await consumer.poll(max_records=room, timeout_s=0.2)
        self._offsets.retain(consumer.owned())
        for record in records:
            if self._offsets.begin(record):
                self._tasks.add(asyncio.create_task(self._handle(record)))

    async def _settle(self, consumer: Consumer) -> None:
        """Commits what is finished."""
        for task in [t for t in self._tasks if t.done()]:
            self._tasks.discard(task)
            task.result()
        if ready := self._offsets.take():
            await consumer.commit(ready)

    async def _handle(self, record: Record) -> None:
        with telemetry.consume(record.topic, record.headers):
            try:
                group = await self._patiently(lambda: self._parse(record))
            except PoisonMessageError as error:
                await self._set_aside(record, error)
            else:
                await self._score(record, group)
            self._offsets.done(record)

    async def _parse(self, record: Record) -> RolloutGroup:
        group: RolloutGroup = await parse(record, topics.ROLLOUTS, blobs=self._blobs)
        if not group.prompt.run_id or not group.prompt.group_id:
            # Foreign bytes can be a valid message by chance, above all no bytes.
            raise PoisonMessageError(f"{_place(record)}: the rollout names no group")
        return group

    async def _score(self, record: Record, group: RolloutGroup) -> None:
        try:
            scored = await self._patiently(lambda: self._scorer.score(group))
        except Exception as error:
            # A fault of ours on this very group would stop every replica, one after the other, for ever.
            _log.exception("group %s cannot be scored", group.prompt.group_id)
            await self._dead_letter(record, error)
            scored = void(group, f"internal error: {error!r}")
        await self._publish(record, scored)

    async def _set_aside(self, record: Record, error: PoisonMessageError) -> None:
        """Sends foreign bytes to the dead letters. When the key names a group, the group is void, so that
        its run does not wait for it."""
        _log.warning("put aside as a dead letter: %s", error)
        await self._dead_letter(record, error)
        group_id = (record.key or b"").decode(errors="replace")
        run_id, _, sequence = group_id.rpartition("/")
        if run_id and sequence.isdecimal():
            prompt = PromptGroup(run_id=run_id, group_id=group_id, sequence=int(sequence))
            scored = void(RolloutGroup(prompt=prompt), f"the rollout cannot be read: {error}")
            await self._publish(record, scored)

    async def _dead_letter(self, record: Record, error: BaseException) -> None:
        await self._patiently(lambda: send_dead_letter(self._bus, self._namespace, "reward", record, error))

    async def _publish(self, record: Record, scored: ScoredGroup) -> None:
        self._count.add(1, {"outcome": "void" if scored.void_reason else "scored"})
        self._duration.record(scored.duration_s)
        # Made from the rollout's event, so that scoring it again after a crash is the same event.
        source = record.headers.get("ce_id", _place(record).encode())
        event_id = hashlib.sha256(b"scored\0" + source).hexdigest()
        await self._patiently(
            lambda: publish(
                *(self._bus, self._namespace, topics.SAMPLES, scored), blobs=self._blobs, event_id=event_id
            )
        )

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Makes a call again, with growing pauses, for as long as the store is away."""
        for pause in pauses(first=0.2, cap=10.0):
            try:
                result = await call()
            except RetryableError as error:
                self._outage.down(str(error))
            else:
                self._outage.up()
                return result
            await self._context.clock.sleep(pause)
        raise AssertionError("unreachable")


def _place(record: Record) -> str:
    return f"{record.topic}, partition {record.partition}, offset {record.offset}"
