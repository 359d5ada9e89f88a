"""What is trained on, what is dropped and why, and where reading goes on."""

import asyncio
import math

import pytest
from slipstream_trainer.batches import DEAD_LETTER_GROUP, Inbox, open_consumer, problem, token_lags
from slipstream_trainer.gradient import Chosen

from slipstream.blobs.memory import MemoryStore
from slipstream.bus.events import ensure_topics, publish
from slipstream.bus.memory import MemoryBus
from slipstream.clock import SystemClock
from slipstream.errors import RetryableError
from slipstream.pacing import Origin, Window
from slipstream.settings import CommonSettings, load
from slipstream.topics import SAMPLES, dead_letter_name
from slipstream.v1.common_pb2 import Version
from slipstream.v1.reward_pb2 import SCORE_STATUS_ERROR, ScoredGroup
from slipstream.v1.rollout_pb2 import VersionSpan
from slipstream.v1.train_pb2 import GROUP_OUTCOME_DROPPED, GROUP_OUTCOME_TRAINED, GROUP_OUTCOME_VOID
from tests.support.trainer import RUN, scored_group

SPACE = "slipstream"
LINEAGE = [Origin(1, 0)]


async def inbox(*groups: ScoredGroup, window: Window | None = None, max_lag: int = 2) -> Inbox:  # type: ignore[type-arg]
    bus, blobs = MemoryBus(), MemoryStore()
    await ensure_topics(bus, load(CommonSettings, {"SLIPSTREAM_NAMESPACE": SPACE}))
    for group in groups:
        await publish(bus, SPACE, SAMPLES, group, blobs=blobs)
    consumer = await open_consumer(bus, SPACE, {})
    made = Inbox(consumer, bus, blobs, SPACE, RUN, max_lag, 128, window or Window(4), SystemClock())
    await made.read(0.01)
    return made


def drain(box: Inbox, step: int = 0) -> list[tuple[int, int, str]]:
    taken = iter(lambda: box.take(LINEAGE, step), None)
    return [(t.record.sequence, t.record.outcome, t.record.reason) for t in taken]


async def test_groups_come_oldest_first_and_once_however_often_they_are_delivered() -> None:
    box = await inbox(*(scored_group(s) for s in (2, 0, 2, 1, 0)))
    assert [s for s, _, _ in drain(box)] == [0, 1, 2]
    await publish(box.bus, SPACE, SAMPLES, scored_group(1))
    await box.read(0.01)
    assert drain(box) == []


async def test_reading_ends_in_time_while_the_store_is_away_and_goes_on_from_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def away(*_: object, **__: object) -> None:
        raise RetryableError("the store does not answer")

    box = await inbox()
    await publish(box.bus, SPACE, SAMPLES, scored_group(0))
    with monkeypatch.context() as patch:
        patch.setattr("slipstream_trainer.batches.parse", away)
        for _ in range(2):
            await asyncio.wait_for(box.read(0.05), 1)
    assert drain(box) == []
    await box.read(0.01)
    assert drain(box) == [(0, GROUP_OUTCOME_TRAINED, "")]


async def test_groups_of_other_runs_are_passed_over() -> None:
    box = await inbox(scored_group(0, run_id="other"), scored_group(0))
    assert drain(box) == [(0, GROUP_OUTCOME_TRAINED, "")]


async def test_a_void_group_is_reported_at_once_with_its_reason() -> None:
    box = await inbox(scored_group(3, void="reward timed out"), window=Window(1))
    assert drain(box) == [(3, GROUP_OUTCOME_VOID, "reward timed out")]


async def test_what_exceeds_the_bound_is_dropped_and_says_by_how_much() -> None:
    box = await inbox(scored_group(0, version=(1, 3)), scored_group(1, version=(1, 2)))
    kept, dropped = drain(box, step=5)
    assert kept == (0, GROUP_OUTCOME_TRAINED, "")
    assert dropped[:2] == (1, GROUP_OUTCOME_DROPPED)
    assert dropped[2] == "lag 3 exceeds the bound 2: oldest token sampled by 1-2, trainer at 1-5"


async def test_the_oldest_span_of_the_oldest_completion_counts() -> None:
    group = scored_group(0, version=(1, 5))
    spans = group.rollout.completions[1].spans
    del spans[:]
    spans.append(VersionSpan(version=Version(epoch=1, number=1), start=0, end=1))
    spans.append(VersionSpan(version=Version(epoch=1, number=5), start=1, end=4))
    assert token_lags(group.rollout.completions[1], LINEAGE, 5) == [4, 0, 0, 0]
    box = await inbox(group)
    taken = box.take(LINEAGE, 5)
    assert taken is not None
    assert (taken.record.outcome, taken.record.lag) == (GROUP_OUTCOME_DROPPED, 4)


async def test_tokens_of_a_version_still_to_come_are_dropped() -> None:
    box = await inbox(scored_group(0, version=(2, 0)))
    ((_, outcome, reason),) = drain(box)
    assert outcome == GROUP_OUTCOME_DROPPED
    assert "sampled by 2-0" in reason


def broken() -> list[tuple[str, ScoredGroup]]:
    cases: dict[str, ScoredGroup] = {}
    group = cases["3 completions asked for, 2 sampled"] = scored_group(0)
    group.rollout.prompt.num_samples = 3
    group = cases["2 sampled, 1 scored"] = scored_group(0)
    del group.scores[1:]
    group = cases["the prompt has no tokens"] = scored_group(0, prompt=())
    group = cases["sampling temperature 0.0"] = scored_group(0)
    group.rollout.prompt.sampling.temperature = 0
    cases["prompt tokens outside the vocabulary of 128"] = scored_group(0, prompt=(1, 128))
    cases["toy/0/1: tokens outside the vocabulary"] = scored_group(0, ((5,), (-1, 5)))
    cases["toy/0/1: no tokens"] = scored_group(0, ((5,), ()))
    cases["toy/0/0: log-probs are not finite"] = scored_group(0, logprobs=((-1, math.nan, -1), (-1,) * 4))
    cases["toy/0/0: 3 tokens but 2 log-probs"] = scored_group(0, logprobs=((-1, -1), (-1,) * 4))
    cases["toy/0/1: reward is inf"] = scored_group(0, rewards=(1.0, math.inf))
    group = cases["toy/0/0: version spans do not tile the 3 tokens"] = scored_group(0)
    group.rollout.completions[0].spans[0].end = 2
    group = cases["no completion could be scored"] = scored_group(0)
    for score in group.scores:
        score.status = SCORE_STATUS_ERROR
    return list(cases.items())


@pytest.mark.parametrize(("reason", "group"), broken(), ids=[name for name, _ in broken()])
async def test_a_group_that_cannot_be_trained_on_is_void_and_says_why(
    reason: str, group: ScoredGroup
) -> None:
    assert reason in problem(group, 128)
    ((_, outcome, found),) = drain(await inbox(group))
    assert outcome == GROUP_OUTCOME_VOID
    assert reason in found


async def test_a_failed_score_leaves_the_rest_of_the_group_usable() -> None:
    group = scored_group(0)
    group.scores[0].status = SCORE_STATUS_ERROR
    group.scores[0].value = math.nan
    assert problem(group, 128) == ""


async def test_foreign_bytes_go_to_the_dead_letters_and_nothing_else_is_lost() -> None:
    box = await inbox()
    await box.bus.producer.send(SAMPLES.full_name(SPACE), b"\xffnot ours", key="x")
    await publish(box.bus, SPACE, SAMPLES, scored_group(0))
    await box.read(0.05)
    await box.read(0.05)
    assert drain(box) == [(0, GROUP_OUTCOME_TRAINED, "")]
    name = dead_letter_name(SPACE, DEAD_LETTER_GROUP)
    ((first, end),) = (await box.bus.topic_offsets([name])).values()
    assert end - first == 1


async def test_reading_goes_on_so_that_waiting_void_and_untrained_groups_come_again() -> None:
    groups = [scored_group(s, void="gone" if s == 5 else "") for s in range(8)]
    box = await inbox(*groups, window=Window(3))
    done = [box.take(LINEAGE, 0)]
    assert done[0] is not None
    assert done[0].record.sequence == 5  # reported
    trained, in_hand = box.take(LINEAGE, 0), box.take(LINEAGE, 0)
    assert trained is not None
    assert in_hand is not None
    assert in_hand.arrived is not None
    offsets = box.resume_offsets([in_hand.arrived])
    head, above = box.consumed([in_hand.arrived])
    assert (head, above) == (1, [5])

    again = Inbox(
        await open_consumer(box.bus, SPACE, offsets),
        box.bus,
        box.blobs,
        SPACE,
        RUN,
        2,
        128,
        Window(3, head, set(above)),
        SystemClock(),
    )
    await again.read(0.01)
    assert [s for s, _, _ in drain(again)] == [1, 2, 3, 4, 6, 7]


def test_a_chosen_sample_carries_prompt_tokens_and_temperature() -> None:
    from slipstream_trainer.batches import Arrived

    group = scored_group(0)
    group.rollout.prompt.sampling.temperature = 0.5
    sample = Chosen(Arrived(group, 0, 0), 1, 1.0).sample
    assert (list(sample.prompt), list(sample.completion)) == ([1, 20, 21], [12, 13, 14, 2])
    assert sample.temperature == 0.5
