"""What to train on next: reads `samples`, orders, deduplicates, checks lag, accounts for every group."""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from slipstream.blobs import BlobStore
from slipstream.bus import Bus, Consumer, Record, TopicPartition
from slipstream.bus.events import parse, send_dead_letter
from slipstream.bus.outage import Outage
from slipstream.clock import Clock
from slipstream.errors import PoisonMessageError, RetryableError
from slipstream.pacing import Origin, Window, lag
from slipstream.topics import SAMPLES
from slipstream.v1.reward_pb2 import SCORE_STATUS_OK, ScoredGroup
from slipstream.v1.rollout_pb2 import Completion
from slipstream.v1.train_pb2 import (
    GROUP_OUTCOME_DROPPED,
    GROUP_OUTCOME_TRAINED,
    GROUP_OUTCOME_VOID,
    GroupRecord,
)

DEAD_LETTER_GROUP = "trainer"


@dataclass(frozen=True)
class Arrived:
    """A group where it stands in the log."""

    group: ScoredGroup
    partition: int
    offset: int

    @property
    def sequence(self) -> int:
        return int(self.group.rollout.prompt.sequence)

    @property
    def group_id(self) -> str:
        return str(self.group.rollout.prompt.group_id)


@dataclass(frozen=True)
class Taken:
    """What became of a group; `arrived` is set when it is to be trained on."""

    record: GroupRecord
    arrived: Arrived | None = None


def token_lags(completion: Completion, lineage: Sequence[Origin], step: int) -> list[int]:
    """Lag of each token of a completion, in optimizer steps."""
    return [
        value
        for span in completion.spans
        for value in [lag(lineage, span.version.epoch, span.version.number, step)] * (span.end - span.start)
    ]


def problem(group: ScoredGroup, vocab_size: int) -> str:
    """Why a group cannot be trained on however fresh it is; empty when it can."""
    rollout = group.rollout
    if len(rollout.completions) != rollout.prompt.num_samples or len(group.scores) != len(
        rollout.completions
    ):
        return (
            f"{rollout.prompt.num_samples} completions asked for, {len(rollout.completions)} sampled, "
            f"{len(group.scores)} scored"
        )
    if not rollout.prompt_token_ids:
        return "the prompt has no tokens"
    if not math.isfinite(rollout.prompt.sampling.temperature) or rollout.prompt.sampling.temperature <= 0:
        return f"sampling temperature {rollout.prompt.sampling.temperature}: no log-probs to compare with"
    if not _in_vocabulary(rollout.prompt_token_ids, vocab_size):
        return f"prompt tokens outside the vocabulary of {vocab_size}"
    for completion, score in zip(rollout.completions, group.scores, strict=True):
        if reason := _completion_problem(completion, vocab_size):
            return f"{completion.sample_id}: {reason}"
        if score.status == SCORE_STATUS_OK and not math.isfinite(score.value):
            return f"{completion.sample_id}: reward is {score.value}"
    if all(score.status != SCORE_STATUS_OK for score in group.scores):
        return "no completion could be scored"
    return ""


def _completion_problem(completion: Completion, vocab_size: int) -> str:
    count = len(completion.token_ids)
    if count == 0:
        return "no tokens"
    if len(completion.logprobs) != count:
        return f"{count} tokens but {len(completion.logprobs)} log-probs"
    if not all(map(math.isfinite, completion.logprobs)):
        return "log-probs are not finite"
    if not _in_vocabulary(completion.token_ids, vocab_size):
        return f"tokens outside the vocabulary of {vocab_size}"
    place = 0
    for span in completion.spans:
        if span.start != place or span.end <= span.start:
            break
        place = span.end
    return "" if place == count else f"version spans do not tile the {count} tokens"


def _in_vocabulary(ids: Iterable[int], vocab_size: int) -> bool:
    return all(0 <= token < vocab_size for token in ids)


@dataclass
class Inbox:
    """The run's scored groups, released in windowed first-in-first-out order."""

    consumer: Consumer
    bus: Bus
    blobs: BlobStore
    namespace: str
    run_id: str
    max_lag: int
    vocab_size: int
    window: Window[Arrived]
    clock: Clock
    _void: list[Arrived] = field(default_factory=list)
    _unread: deque[Record] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.outage = Outage("something that the trainer needs", self.clock)

    async def read(self, timeout_s: float) -> None:
        """Takes in what has arrived; waits up to `timeout_s` when nothing has.

        May be cancelled at any point: the next call goes on from there.
        """
        if not self._unread:
            self._unread.extend(await self.consumer.poll(max_records=64, timeout_s=timeout_s))
        while self._unread:
            try:
                await self._take_in(self._unread[0])
            except RetryableError as error:
                self.outage.down(str(error))
                # No longer: the loop is answered in time, and asks again.
                await self.clock.sleep(timeout_s)
                return
            self.outage.up()
            self._unread.popleft()

    async def _take_in(self, record: Record) -> None:
        try:
            group: ScoredGroup = await parse(record, SAMPLES, blobs=self.blobs)
        except PoisonMessageError as error:
            await send_dead_letter(self.bus, self.namespace, DEAD_LETTER_GROUP, record, error)
        else:
            self._sort(Arrived(group, record.partition, record.offset))

    def _sort(self, arrived: Arrived) -> None:
        prompt = arrived.group.rollout.prompt
        if prompt.run_id != self.run_id:
            return
        if arrived.group.void_reason:
            if self.window.skip(prompt.sequence):
                self._void.append(arrived)
        else:
            self.window.add(prompt.sequence, arrived)

    def take(self, lineage: Sequence[Origin], step: int) -> Taken | None:
        """The next group's fate, None when none is due: void ones first, as the loop must replace them."""
        if self._void:
            arrived = self._void.pop(0)
            return Taken(_record(arrived, GROUP_OUTCOME_VOID, arrived.group.void_reason))
        released = self.window.take()
        return None if released is None else self._judge(released[1], lineage, step)

    def _judge(self, arrived: Arrived, lineage: Sequence[Origin], step: int) -> Taken:
        if reason := problem(arrived.group, self.vocab_size):
            return Taken(_record(arrived, GROUP_OUTCOME_VOID, reason))
        spans = [span for c in arrived.group.rollout.completions for span in c.spans]
        lags = [(lag(lineage, s.version.epoch, s.version.number, step), s.version) for s in spans]
        oldest, version = max(lags, key=lambda pair: pair[0])
        newest, future = min(lags, key=lambda pair: pair[0])
        name = f"{lineage[-1].epoch}-{step}"
        if newest < 0:
            reason = f"sampled by {future.epoch}-{future.number}, which {name} does not know"
            return Taken(_record(arrived, GROUP_OUTCOME_DROPPED, reason, newest))
        if oldest > self.max_lag:
            reason = (
                f"lag {oldest} exceeds the bound {self.max_lag}: oldest token sampled by "
                f"{version.epoch}-{version.number}, trainer at {name}"
            )
            return Taken(_record(arrived, GROUP_OUTCOME_DROPPED, reason, oldest))
        return Taken(_record(arrived, GROUP_OUTCOME_TRAINED, "", oldest), arrived)

    def fresh(self, lineage: Sequence[Origin], step: int) -> Arrived | None:
        """A group that waits and was sampled by the current version alone; None when there is none."""
        for arrived in self.window.waiting.values():
            spans = [span for c in arrived.group.rollout.completions for span in c.spans]
            at_zero = all(lag(lineage, s.version.epoch, s.version.number, step) == 0 for s in spans)
            if at_zero and not problem(arrived.group, self.vocab_size):
                return arrived
        return None

    def resume_offsets(self, unfinished: Iterable[Arrived]) -> dict[int, int]:
        """Next offset to read per partition so that every group not finished is read again.

        Args:
            unfinished: groups taken but not yet part of a step.
        """
        offsets = {tp.partition: offset for tp, offset in self.consumer.positions().items()}
        pending: list[Arrived | Record] = [
            *self.window.waiting.values(),
            *self._void,
            *self._unread,
            *unfinished,
        ]
        for each in pending:
            offsets[each.partition] = min(offsets[each.partition], each.offset)
        return offsets

    def consumed(self, unfinished: Iterable[Arrived]) -> tuple[int, list[int]]:
        """(head, released above it) of the window, as a checkpoint keeps it."""
        return self.window.consumed([a.sequence for a in (*self._void, *unfinished)])


async def open_consumer(bus: Bus, namespace: str, offsets: dict[int, int] | None) -> Consumer:
    """Reads `samples` from given offsets, or, for a new run, from the end as of now."""
    topic = SAMPLES.full_name(namespace)
    if offsets is None:
        return await bus.assign(
            [topic], offsets={tp: end for tp, (_, end) in (await bus.topic_offsets([topic])).items()}
        )
    return await bus.assign([topic], offsets={TopicPartition(topic, p): o for p, o in offsets.items()})


def _record(arrived: Arrived, outcome: int, reason: str, lag_: int = 0) -> GroupRecord:
    rollout = arrived.group.rollout
    rewards = [s.value for s in arrived.group.scores if s.status == SCORE_STATUS_OK]
    return GroupRecord(
        group_id=arrived.group_id,
        sequence=arrived.sequence,
        outcome=outcome,  # type: ignore[arg-type]
        reason=reason,
        lag=lag_,
        mean_reward=sum(rewards) / len(rewards) if rewards else 0.0,
        num_tokens=sum(len(c.token_ids) for c in rollout.completions),
    )
