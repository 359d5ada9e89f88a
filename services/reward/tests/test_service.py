"""The whole service over the log and the store in memory, with real worker processes."""

import asyncio
import contextlib
import textwrap
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from slipstream_reward.service import RewardScorer
from slipstream_reward.settings import RewardSettings

from slipstream import topics
from slipstream.blobs import put_blob
from slipstream.blobs.memory import MemoryStore
from slipstream.bus import Record
from slipstream.bus.events import ensure_topics, parse, publish
from slipstream.bus.memory import MemoryBus, MemoryLog
from slipstream.clock import SystemClock
from slipstream.errors import RetryableError
from slipstream.recipe.bundle import bundle
from slipstream.service import Context
from slipstream.settings import CommonSettings, load
from slipstream.v1.common_pb2 import BlobRef
from slipstream.v1.reward_pb2 import SCORE_STATUS_ERROR, SCORE_STATUS_OK, ScoredGroup
from slipstream.v1.rollout_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    Completion,
    GrpcReward,
    PromptGroup,
    PythonReward,
    RewardSpec,
    RolloutGroup,
)

NAMESPACE = "slipstream"
COMMON = load(CommonSettings, {"SLIPSTREAM_NAMESPACE": NAMESPACE})
RIGHT = "def reward(prompt, completion): return float(completion.text == prompt.metadata['answer'])"


class Rig:
    """One log and one store; services that come and go."""

    def __init__(self, directory: Path) -> None:
        self.log, self.store = MemoryLog(), MemoryStore()
        self.bus = MemoryBus(self.log)
        self._directory = directory

    @contextlib.asynccontextmanager
    async def service(self, **settings: Any) -> AsyncIterator["asyncio.Task[None]"]:
        """A service until the block ends; then it stops as after SIGTERM."""
        stopping, bus = asyncio.Event(), MemoryBus(self.log)
        context = Context(
            "reward",
            COMMON,
            RewardSettings(workers=2, **settings),
            bus,
            self.store,
            SystemClock(),
            stopping,
        )
        service = RewardScorer(context)
        await service.start()
        task = asyncio.create_task(service.run())
        try:
            yield task
            stopping.set()
            done, _ = await asyncio.wait({task}, timeout=20)
            assert done, "the service does not stop"
            if not task.cancelled():
                task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await service.close()
            await bus.close()

    async def reward(self, source: str = RIGHT, **fields: Any) -> RewardSpec:
        """A Python reward whose bundle is in the store."""
        path = self._directory / "recipe.py"
        path.write_text(textwrap.dedent(source))
        ref = await put_blob(self.store, bundle(path))
        python = PythonReward(bundle=ref, module="recipe", function="reward")
        return RewardSpec(**{"name": "reward", "timeout_s": 20.0, "python": python, **fields})

    async def roll(self, number: int, spec: RewardSpec | None, *texts: str, **fields: Any) -> None:
        """Publishes the rollout of a group."""
        await publish(self.bus, NAMESPACE, topics.ROLLOUTS, rollout(number, spec, *texts, **fields))

    async def foreign(self, value: bytes, **arguments: Any) -> None:
        await self.bus.producer.send(topics.ROLLOUTS.full_name(NAMESPACE), value, **arguments)

    def records(self, topic: str) -> list[Record]:
        return [r for tp in self.log.of([topic]) for r in self.log.partitions[tp].records]

    @property
    def samples(self) -> list[Record]:
        return self.records(topics.SAMPLES.full_name(NAMESPACE))

    @property
    def dead(self) -> list[Record]:
        return self.records(topics.dead_letter_name(NAMESPACE, "reward"))

    async def scored(self, count: int) -> dict[str, ScoredGroup]:
        """The first `count` scored groups, by id."""
        await until(lambda: len(self.samples) >= count)
        parsed = [await parse(r, topics.SAMPLES, blobs=self.store) for r in self.samples]
        return {group.rollout.prompt.group_id: group for group in parsed}

    async def one(self, spec: RewardSpec, *texts: str, **fields: Any) -> ScoredGroup:
        """What becomes of one group."""
        await self.roll(0, spec, *texts, **fields)
        async with self.service():
            return (await self.scored(1))["demo/0"]

    async def all_committed(self) -> bool:
        ends = {tp: end for tp, (_, end) in self.log.spans([topics.ROLLOUTS.full_name(NAMESPACE)]).items()}
        committed = await self.bus.group_offsets(f"{NAMESPACE}.reward")
        return all(committed.get(tp, 0) == end for tp, end in ends.items())


def rollout(number: int, spec: RewardSpec | None, *texts: str, **fields: Any) -> RolloutGroup:
    group_id = f"demo/{number}"
    prompt = PromptGroup(
        run_id="demo",
        group_id=group_id,
        sequence=number,
        text="2+2?",
        num_samples=len(texts),
        metadata_json='{"answer": "4"}',
        rewards=[spec] if spec else [],
    )
    completions = [
        Completion(sample_id=f"{group_id}/{i}", text=text, token_ids=[5, 6], finish_reason=FINISH_REASON_STOP)
        for i, text in enumerate(texts)
    ]
    group = RolloutGroup(prompt=prompt, completions=completions)
    group.MergeFrom(RolloutGroup(**fields))
    return group


@pytest.fixture
async def rig(tmp_path: Path) -> Rig:
    rig = Rig(tmp_path)
    await ensure_topics(rig.bus, COMMON)
    return rig


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout_s: float = 30) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value if isinstance(value, bool) else await value:
            return
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.02)


async def test_every_group_is_scored_and_its_offset_committed(rig: Rig) -> None:
    spec = await rig.reward()
    for number in range(20):
        await rig.roll(number, spec, "4", str(number))
    async with rig.service():
        groups = await rig.scored(20)
        await until(rig.all_committed)
    assert groups.keys() == {f"demo/{i}" for i in range(20)}
    for number in range(20):
        scored = groups[f"demo/{number}"]
        assert [s.value for s in scored.scores] == [1.0, float(number == 4)]
        assert all(s.status == SCORE_STATUS_OK for s in scored.scores)
        assert scored.scores[0].parts == {"reward": 1.0}
        assert scored.rollout == rollout(number, spec, "4", str(number))
        assert scored.duration_s > 0
        assert not scored.void_reason
    assert [r.key for r in rig.samples] == [
        g.rollout.prompt.group_id.encode() for r in rig.samples for g in [ScoredGroup.FromString(r.value)]
    ]


async def test_truncation_is_told(rig: Rig) -> None:
    spec = await rig.reward("def reward(prompt, completion): return -1 if completion.truncated else 1")
    group = rollout(0, spec, "4", "4")
    group.completions[1].finish_reason = FINISH_REASON_LENGTH
    await publish(rig.bus, NAMESPACE, topics.ROLLOUTS, group)
    async with rig.service():
        assert [s.value for s in (await rig.scored(1))["demo/0"].scores] == [1, -1]


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("raise ValueError('no idea')", "ValueError: no idea (recipe.py:3 in reward)"),
        ("return float('nan')", "returned nan, expected a finite number"),
        ("return None", "returned None"),
        ("import time; time.sleep(60)", "did not return within 2 s"),
        ("import os; os._exit(1)", "the worker exited with code 1"),
    ],
)
async def test_a_failed_reward_is_an_error_and_the_others_count(
    rig: Rig, statement: str, reason: str
) -> None:
    source = f"def reward(prompt, completion):\n  if completion.text == 'bad':\n    {statement}\n  return 1"
    scored = await rig.one(await rig.reward(source, timeout_s=2.0), "4", "bad", "5")
    assert [s.status for s in scored.scores] == [SCORE_STATUS_OK, SCORE_STATUS_ERROR, SCORE_STATUS_OK]
    assert [s.value for s in scored.scores] == [1, 0, 1]
    assert reason in scored.scores[1].error
    assert not scored.void_reason


async def test_a_group_without_any_score_is_void_with_the_first_reason(rig: Rig) -> None:
    scored = await rig.one(await rig.reward("def reward(prompt, completion): return 1 / 0"), "4", "5")
    assert scored.void_reason == (
        "reward: no completion could be scored: ZeroDivisionError: division by zero (recipe.py:1 in reward)"
    )
    assert not scored.scores
    assert len(scored.rollout.completions) == 2


async def test_a_void_rollout_stays_void(rig: Rig) -> None:
    scored = await rig.one(await rig.reward(), void_reason="rollout: too long a prompt")
    assert scored.void_reason == "rollout: too long a prompt"


MISSING = BlobRef(key=f"blobs/sha256/ab/{'ab' * 32}", sha256="ab" * 32, size_bytes=9)


@pytest.mark.parametrize(
    ("python", "reason"),
    [
        ({"bundle": MISSING}, "is not in the store"),
        ({"module": "other"}, "the bundle has no module other"),
        ({"function": "other"}, "recipe.py has no function other"),
        ({"bundle": BlobRef(key="../x", sha256="../x", size_bytes=1)}, "is not one that can be loaded"),
        ({"bundle": BlobRef(key="x", sha256="a" * 64, size_bytes=2**40)}, "is not one that can be loaded"),
    ],
)
async def test_a_function_that_cannot_be_had_makes_the_group_void(
    rig: Rig, python: dict[str, Any], reason: str
) -> None:
    spec = await rig.reward()
    for name, value in python.items():
        if name == "bundle":
            spec.python.bundle.CopyFrom(value)
        else:
            setattr(spec.python, name, value)
    assert reason in (await rig.one(spec, "4")).void_reason


async def test_a_damaged_bundle_makes_the_group_void(rig: Rig) -> None:
    spec = await rig.reward()
    rig.store.objects[spec.python.bundle.key] = b"x" * spec.python.bundle.size_bytes
    assert "the recipe's bundle is damaged" in (await rig.one(spec, "4")).void_reason


async def test_a_group_that_is_not_whole_is_void(rig: Rig) -> None:
    group = rollout(0, await rig.reward(), "4", "5")
    group.prompt.num_samples = 3
    await publish(rig.bus, NAMESPACE, topics.ROLLOUTS, group)
    async with rig.service():
        scored = (await rig.scored(1))["demo/0"]
    assert scored.void_reason == "reward: the rollout has 2 completions, 3 expected"


async def test_foreign_bytes_go_to_the_dead_letters_and_the_partition_goes_on(rig: Rig) -> None:
    spec = await rig.reward()
    await rig.foreign(b"\xff not protobuf", key="demo/0", headers={"ce_type": b"slipstream.v1.RolloutGroup"})
    await rig.foreign(b"hello", key="whoever")
    await rig.foreign(b"", headers={"ce_type": b"slipstream.v1.RolloutGroup"})
    await rig.roll(1, spec, "4")
    async with rig.service():
        groups = await rig.scored(2)
        await until(rig.all_committed)
    assert {bytes(r.value) for r in rig.dead} == {b"\xff not protobuf", b"hello", b""}
    assert all(r.headers["dead_topic"] == b"slipstream.rollouts.v1" for r in rig.dead)
    # The key of the first names a group that a run waits for; that of the second does not.
    assert groups.keys() == {"demo/0", "demo/1"}
    assert groups["demo/0"].void_reason.startswith("reward: slipstream.rollouts.v1, partition")
    assert groups["demo/0"].rollout.prompt.run_id == "demo"
    assert groups["demo/1"].scores[0].value == 1


async def test_what_was_in_hand_when_it_died_is_scored_again_as_the_same_event(
    rig: Rig, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    spec = await rig.reward(f"""
        import os, time
        def reward(prompt, completion):
            while prompt.group_id == "demo/0" and not os.path.exists({str(gate)!r}):
                time.sleep(0.02)
            return 1
    """)
    # One partition: the later groups are finished behind one that is not.
    tp = next(iter(rig.log.of([topics.ROLLOUTS.full_name(NAMESPACE)])))
    for other in rig.log.of([tp.topic])[1:]:
        del rig.log.partitions[other]
    for number in range(4):
        await rig.roll(number, spec, "4")
    async with rig.service() as task:
        await rig.scored(3)
        await asyncio.sleep(0.5)
        task.cancel()
    assert not await rig.bus.group_offsets(f"{NAMESPACE}.reward")
    gate.touch()
    async with rig.service():
        await rig.scored(7)
        await until(rig.all_committed)
    events = {(record.key, record.headers["ce_id"]) for record in rig.samples}
    assert len(events) == 4
    assert {key for key, _ in events} == {f"demo/{i}".encode() for i in range(4)}


async def test_stopping_finishes_what_is_in_hand(rig: Rig) -> None:
    spec = await rig.reward("import time\ndef reward(prompt, completion):\n  time.sleep(1)\n  return 1")
    await rig.roll(0, spec, "4")
    async with rig.service():
        await asyncio.sleep(0.5)
        assert not rig.samples
    assert len(rig.samples) == 1
    assert await rig.all_committed()


async def test_a_store_that_is_away_is_waited_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec, get = await rig.reward(), rig.store.get
    tries = 0

    async def away(key: str) -> bytes:
        nonlocal tries
        tries += 1
        if tries <= 3:
            raise RetryableError("the store at 127.0.0.1:9000 refuses connections")
        return await get(key)

    monkeypatch.setattr(rig.store, "get", away)
    assert (await rig.one(spec, "4")).scores[0].value == 1
    lines = [r.getMessage() for r in caplog.records if "127.0.0.1:9000" in r.getMessage()]
    assert len(lines) == 1


async def test_a_fault_of_our_own_voids_the_group_and_keeps_the_message(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("oops")

    monkeypatch.setattr("slipstream_reward.scorer.check", fail)
    scored = await rig.one(await rig.reward(), "4")
    assert scored.void_reason == "reward: internal error: KeyError('oops')"
    assert [r.headers["dead_error_type"] for r in rig.dead] == [b"PoisonMessageError"]


async def test_a_large_group_travels_through_the_store(rig: Rig) -> None:
    spec = await rig.reward("def reward(prompt, completion): return len(completion.text)")
    large = rollout(0, spec, "x" * 300_000, "y")
    await publish(rig.bus, NAMESPACE, topics.ROLLOUTS, large, blobs=rig.store)
    async with rig.service():
        scored = (await rig.scored(1))["demo/0"]
    assert [s.value for s in scored.scores] == [300_000, 1]
    assert rig.samples[0].value == b""


async def test_a_python_and_a_remote_reward_are_added_up(rig: Rig) -> None:
    spec = await rig.reward(name="right", weight=2.0)
    away = RewardSpec(name="judge", weight=0.5, timeout_s=1, grpc=GrpcReward(target="127.0.0.1:1"))
    group = rollout(0, spec, "4")
    group.prompt.rewards.append(away)
    await publish(rig.bus, NAMESPACE, topics.ROLLOUTS, group)
    async with rig.service(retry_s=0.5):
        scored = (await rig.scored(1))["demo/0"]
    assert scored.void_reason.startswith("reward: judge: 127.0.0.1:1: UNAVAILABLE")


async def test_two_services_share_the_work(rig: Rig) -> None:
    spec = await rig.reward()
    async with rig.service(), rig.service():
        for number in range(30):
            await rig.roll(number, spec, "4")
        groups = await rig.scored(30)
        await until(rig.all_committed)
    assert len(groups) == 30
