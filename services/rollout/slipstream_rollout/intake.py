"""From the topic `prompts` to the topic `rollouts`."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from slipstream import topics
from slipstream.bus import Consumer, Record
from slipstream.bus.events import parse, publish, send_dead_letter
from slipstream.bus.offsets import OffsetTracker
from slipstream.errors import ConfigError, NotFoundError, PoisonMessageError, RetryableError
from slipstream.service import Context
from slipstream.v1.rollout_pb2 import PromptGroup, RolloutGroup
from slipstream_rollout.engine import EngineLostError
from slipstream_rollout.gate import RunGate
from slipstream_rollout.sampler import Sampler, min_version

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Intake:
    """Samples the groups of the topic, a bounded number at once, and commits a prompt's offset only when
    its rollout, or the reason for having none, is in the log."""

    def __init__(self, context: Context[Any], gate: RunGate, sampler: Sampler, *, max_groups: int) -> None:
        self._bus, self._blobs, self._clock = context.bus, context.blobs, context.clock
        namespace = self._namespace = context.common.namespace
        self._group = f"{namespace}.rollout"
        self._gate, self._sampler, self._max_groups = gate, sampler, max_groups
        self._tasks: set[asyncio.Task[None]] = set()
        self._offsets = OffsetTracker()

    async def run(self, stop: asyncio.Event) -> None:
        """Works until `stop` is set, then finishes what it has. Cancelled, it leaves the prompts in hand
        uncommitted: they will be delivered again."""
        # As a static member, a replica that was killed and is back goes on at once with its partitions.
        consumer = await self._bus.subscribe(
            [topics.PROMPTS.full_name(self._namespace)], group=self._group, member=self._sampler.replica_id
        )
        try:
            while not stop.is_set():
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
        """Starts as many groups as there is room for."""
        room = self._max_groups - len(self._tasks)
        if not room:
            await asyncio.wait(self._tasks, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            return
        records = await consumer.poll(max_records=room, timeout_s=0.2)
        self._offsets.retain(consumer.owned())
        for record in records:
            if self._offsets.begin(record):
                self._tasks.add(asyncio.ensure_future(self._handle(record)))

    async def _settle(self, consumer: Consumer) -> None:
        """Commits what is finished; a group's unexpected failure ends the service."""
        for task in [t for t in self._tasks if t.done()]:
            self._tasks.discard(task)
            task.result()
        ready = self._offsets.take()
        if ready:
            await consumer.commit(ready)

    async def _handle(self, record: Record) -> None:
        try:
            prompt = await self._insist(lambda: parse(record, topics.PROMPTS, blobs=self._blobs))
            if not prompt.run_id or not prompt.group_id:
                raise PoisonMessageError("the prompt names no run or no group")
        except PoisonMessageError as error:
            await self._poison(record, error)
        else:
            await self._sample(prompt)
        self._offsets.done(record)

    async def _sample(self, prompt: PromptGroup) -> None:
        try:
            async with self._gate.enter(prompt.run_id, min_version(prompt)):
                rollout = await self._sampler.sample(prompt)
        except (ConfigError, NotFoundError, EngineLostError) as error:
            _log.warning("group %s is void: %s", prompt.group_id, error)
            rollout = self._sampler.void(prompt, f"rollout: {error}")
        await self._publish(rollout)

    async def _poison(self, record: Record, error: PoisonMessageError) -> None:
        """Sets a message aside that is no prompt group; the trainer is told if its key names the group."""
        _log.warning("a prompt cannot be read: %s", error)
        await send_dead_letter(self._bus, self._namespace, self._group, record, error)
        group_id = (record.key or b"").decode(errors="replace")
        run_id, _, sequence = group_id.rpartition("/")
        if run_id and sequence.isdecimal():
            prompt = PromptGroup(run_id=run_id, group_id=group_id, sequence=int(sequence))
            rollout = self._sampler.void(prompt, f"rollout: the prompt message cannot be read: {error}")
            await self._publish(rollout)

    async def _publish(self, rollout: RolloutGroup) -> None:
        await self._insist(
            lambda: publish(self._bus, self._namespace, topics.ROLLOUTS, rollout, blobs=self._blobs)
        )

    async def _insist(self, work: Callable[[], Awaitable[T]]) -> T:
        """Repeats while a dependency is away, with growing pauses; nothing is committed meanwhile."""
        pause_s = 0.5
        while True:
            try:
                return await work()
            except RetryableError as error:
                _log.warning("trying again in %.1f s: %s", pause_s, error)
            await self._clock.sleep(pause_s)
            pause_s = min(2 * pause_s, 15.0)
