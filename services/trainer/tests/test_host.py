"""A recipe's run against a trainer that is stopped, full or starved: what the loop on the other end sees."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from slipstream_trainer import checkpoint
from slipstream_trainer.service import TrainerService
from slipstream_trainer.settings import TrainerSettings

from slipstream.bus.events import parse
from slipstream.bus.memory import MemoryBus
from slipstream.clock import SystemClock
from slipstream.errors import ConfigError, SlipstreamError, StoreFullError
from slipstream.recipe import Prompt, Settings
from slipstream.recipe.host import Host
from slipstream.recipe.loader import Loop, Recipe
from slipstream.recipe.run import Run
from slipstream.settings import CommonSettings, load
from slipstream.topics import PROMPTS
from slipstream.v1.common_pb2 import Version
from slipstream.v1.rollout_pb2 import PromptGroup
from slipstream.v1.trainer_service_pb2 import OpenRunResponse
from tests.support.trainer import RUN, Cluster, scored_group, serving

SETTINGS = Settings(steps=5, groups_per_step=2, group_size=2, max_lag=1, save_every=0)


@dataclass
class Heard:
    """What a person would have seen."""

    opened_at: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def opened(self, answer: OpenRunResponse) -> None:
        self.opened_at.append(answer.step)
        self._changed.set()

    def stepped(self, step: int, version: Version, metrics: Mapping[str, float]) -> None:
        self.steps.append(step)
        self._changed.set()

    def complained(self, subject: str, reason: str) -> None:
        self.complaints.append(f"{subject}: {reason}")

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not true():
                self._changed.clear()
                await self._changed.wait()


def prompts(rng: random.Random) -> Iterator[Prompt]:
    while True:
        yield Prompt(text="a")


def fresh(prompt: PromptGroup) -> Any:
    """Sampled by the oldest version that may."""
    oldest = prompt.min_version
    return scored_group(prompt.sequence, version=(oldest.epoch, oldest.number))


@dataclass
class Rig:
    """A trainer that can be stopped and started at one address, and a pipeline that answers at once."""

    cluster: Cluster
    common: CommonSettings
    service: TrainerService
    stopping: asyncio.Event

    async def host(self, heard: Heard, settings: Settings = SETTINGS, loop: Loop | None = None) -> None:
        recipe = Recipe(Path("toy.py"), settings, prompts, None, (), loop)
        host = Host(recipe, RUN, self.common, SystemClock(), heard)
        await host.attempt(MemoryBus(self.cluster.log), [])


@asynccontextmanager
async def pipeline(cluster: Cluster, answer: Callable[[PromptGroup], Any]) -> AsyncIterator[None]:
    """Turns prompts into scored groups."""

    async def work() -> None:
        consumer = await cluster.bus.subscribe([PROMPTS.full_name(cluster.common.namespace)], group="all")
        while True:
            for record in await consumer.poll(timeout_s=0.02):
                await cluster.feed(answer(await parse(record, PROMPTS)))

    task = asyncio.create_task(work())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def rig(cluster: Cluster) -> AsyncIterator[Rig]:
    options = {"model": str(cluster.model_dir), "checkpoint_dir": cluster.checkpoint_dir}
    context = cluster.context("trainer", TrainerSettings(**options, device="cpu", threads=1))
    service = TrainerService(context)
    async with serving(service) as target:
        running = asyncio.ensure_future(service.run())
        variables = {"SLIPSTREAM_TRAINER_TARGET": target}
        yield Rig(cluster, load(CommonSettings, variables), service, context.stopping)
        context.stopping.set()
        await asyncio.wait([running], timeout=10)


async def interrupted(work: Awaitable[None], heard: Heard, step: int) -> None:
    """Runs until a step is made, then stops as by Ctrl-C."""
    task = asyncio.ensure_future(work)
    await heard.until(lambda: step in heard.steps)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_run_interrupted_before_its_first_checkpoint_begins_anew(cluster: Cluster) -> None:
    heard = Heard()
    async with rig(cluster) as each, pipeline(cluster, fresh):
        await interrupted(each.host(heard), heard, 3)
        heard.steps.clear()
        await asyncio.wait_for(each.host(heard), 60)
    assert heard.opened_at == [0, 0]
    assert heard.steps == [1, 2, 3, 4, 5]


async def test_a_full_disk_at_a_save_is_said_and_the_run_goes_on(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, full = checkpoint.save, [True, True]

    def sometimes(*args: Any, **options: Any) -> str:
        if full:
            full.pop()
            raise StoreFullError("no room for a checkpoint")
        return save(*args, **options)

    monkeypatch.setattr(checkpoint, "save", sometimes)
    heard = Heard()
    async with rig(cluster) as each, pipeline(cluster, fresh):
        await asyncio.wait_for(each.host(heard, SETTINGS.model_copy(update={"save_every": 1})), 60)
        assert heard.steps == [1, 2, 3, 4, 5]
        assert [c.split(",")[0] for c in heard.complaints] == ["step 1 is not saved", "step 2 is not saved"]
        # The last step must be saved, or the run could never be gone on with.
        full.append(True)
        settings = SETTINGS.model_copy(update={"steps": 6})
        with pytest.raises(StoreFullError, match="no room for a checkpoint"):
            await asyncio.wait_for(each.host(heard, settings), 60)


async def test_a_trainer_that_is_stopped_politely_is_away_not_wrong(cluster: Cluster) -> None:
    heard = Heard()
    async with rig(cluster) as each:
        task = asyncio.ensure_future(each.host(heard))
        await heard.until(lambda: bool(heard.opened_at))
        await asyncio.sleep(0.2)
        each.stopping.set()
        with pytest.raises(SlipstreamError) as raised:
            await asyncio.wait_for(task, 30)
    assert type(raised.value).__name__ == "RetryableError"


@pytest.mark.parametrize("wanted", [(4,), (2, 2)])
async def test_more_groups_than_may_be_out_are_refused(cluster: Cluster, wanted: tuple[int, ...]) -> None:
    async def loop(run: Run) -> None:
        for count in wanted:
            await run.next_batch(count)

    settings = SETTINGS.model_copy(update={"max_lag": 0})
    async with rig(cluster) as each, pipeline(cluster, fresh):
        with pytest.raises(ConfigError, match="at most 2 are out at once: raise groups_per_step"):
            await asyncio.wait_for(each.host(Heard(), settings, loop), 30)


async def test_a_run_whose_groups_all_come_to_nothing_ends_with_the_reason(cluster: Cluster) -> None:
    def void(prompt: PromptGroup) -> Any:
        return scored_group(prompt.sequence, void="rollout: a prompt of 9000 tokens")

    async with rig(cluster) as each, pipeline(cluster, void):
        with pytest.raises(SlipstreamError, match=r"20 groups in a row .* a prompt of 9000 tokens"):
            await asyncio.wait_for(each.host(Heard()), 60)
