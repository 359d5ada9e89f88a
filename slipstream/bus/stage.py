"""One stage of the pipeline: groups of one topic in, groups of the next out, each at least once.

A record's offset is committed once its result, or the reason for having none, is in the log; whatever was
in hand when the process died is delivered again.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message

from slipstream import telemetry
from slipstream.blobs.base import BlobStore
from slipstream.bus.base import Bus, Consumer, Record
from slipstream.bus.events import parse, publish, send_dead_letter
from slipstream.bus.offsets import OffsetTracker
from slipstream.bus.outage import Outage
from slipstream.clock import Clock
from slipstream.errors import PoisonMessageError
from slipstream.topics import Topic
from slipstream.v1.rollout_pb2 import PromptGroup

_log = logging.getLogger(__name__)

Out = TypeVar("Out", bound=Message)


class Stage(Generic[Out]):
    """Handles a bounded number of groups at once."""

    def __init__(
        self,
        bus: Bus,
        blobs: BlobStore,
        clock: Clock,
        namespace: str,
        *,
        name: str,
        source: Topic,
        sink: Topic,
        handle: Callable[[Any], Awaitable[Out]],
        void: Callable[[PromptGroup, str], Out],
        max_groups: int,
        member: str | None = None,
    ) -> None:
        """
        Args:
            name: of the stage; with the namespace it names the consumer group.
            handle: makes a message of `sink` from one of `source`. It is called again after a
                RetryableError, with growing pauses; a PoisonMessageError sets the record aside; anything
                else ends the stage.
            void: makes the message that tells the trainer that a group has no result, and why.
            member: stable name of this process: killed and back, it goes on at once with its partitions.
        """
        self._bus, self._blobs, self._namespace = bus, blobs, namespace
        self._name, self._source, self._sink = name, source, sink
        self._handle, self._void = handle, void
        self._max_groups, self._member = max_groups, member
        self._offsets = OffsetTracker()
        self._tasks: set[asyncio.Task[None]] = set()
        self._outage = Outage(f"something that the {name} stage needs", clock)

    async def run(self, stop: asyncio.Event) -> None:
        """Works until `stop` is set, then finishes what it has. Cancelled, it leaves the records in hand
        uncommitted."""
        consumer = await self._bus.subscribe(
            [self._source.full_name(self._namespace)],
            group=f"{self._namespace}.{self._name}",
            member=self._member,
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
        """Begins with as many groups as there is room for."""
        room = self._max_groups - len(self._tasks)
        if not room:
            await asyncio.wait(self._tasks, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            return
        records = await consumer.poll(max_records=room, timeout_s=0.2)
        self._offsets.retain(consumer.owned())
        for record in records:
            if self._offsets.begin(record):
                self._tasks.add(asyncio.create_task(self._process(record)))

    async def _settle(self, consumer: Consumer) -> None:
        """Commits what is finished; an unexpected failure ends the stage."""
        for task in [t for t in self._tasks if t.done()]:
            self._tasks.discard(task)
            task.result()
        if ready := self._offsets.take():
            await consumer.commit(ready)

    async def _process(self, record: Record) -> None:
        with telemetry.consume(record.topic, record.headers):
            try:
                group = await self._outage.wait_out(lambda: self._parse(record))
                result = await self._outage.wait_out(lambda: self._handle(group))
            except PoisonMessageError as error:
                await self._set_aside(record, error)
            else:
                await self._publish(record, result)
            self._offsets.done(record)

    async def _parse(self, record: Record) -> Any:
        group = await parse(record, self._source, blobs=self._blobs)
        # Foreign bytes can be a valid message by chance, above all no bytes.
        if not self._source.key(group).rpartition("/")[0]:
            raise PoisonMessageError(f"{_place(record)}: the message names no group")
        return group

    async def _set_aside(self, record: Record, error: PoisonMessageError) -> None:
        """Sends a record to the dead letters. When the key names a group, the group is void, so that its
        run does not wait for it."""
        _log.warning("put aside as a dead letter: %s", error)
        await self._outage.wait_out(
            lambda: send_dead_letter(self._bus, self._namespace, self._name, record, error)
        )
        group_id = (record.key or b"").decode(errors="replace")
        run_id, _, sequence = group_id.rpartition("/")
        if run_id and sequence.isdecimal():
            prompt = PromptGroup(run_id=run_id, group_id=group_id, sequence=int(sequence))
            await self._publish(record, self._void(prompt, str(error)))

    async def _publish(self, record: Record, result: Out) -> None:
        # Made from the event that it follows from: handled again after a crash, it is the same event.
        cause = record.headers.get("ce_id", _place(record).encode())
        event_id = hashlib.sha256(self._sink.name.encode() + b"\0" + cause).hexdigest()
        await self._outage.wait_out(
            lambda: publish(
                self._bus, self._namespace, self._sink, result, blobs=self._blobs, event_id=event_id
            )
        )


def _place(record: Record) -> str:
    return f"{record.topic}, partition {record.partition}, offset {record.offset}"
