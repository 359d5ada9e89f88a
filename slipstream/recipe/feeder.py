"""Publishes prompts, never more than the staleness bound allows."""

import asyncio
import json
import logging
from collections.abc import Sequence

from slipstream import topics
from slipstream.bus import Bus
from slipstream.bus.events import parse, publish
from slipstream.errors import PoisonMessageError
from slipstream.pacing import max_outstanding
from slipstream.recipe.loader import Recipe
from slipstream.recipe.types import Prompt
from slipstream.v1.common_pb2 import Version
from slipstream.v1.rollout_pb2 import ChatMessage, ChatPrompt, PromptGroup, RewardSpec

_log = logging.getLogger(__name__)


class Feeder:
    """Keeps as many groups outstanding as `slipstream.pacing` allows: published, and neither trained, void
    nor dropped.

    Publishing stops when the groups still needed for the run's last step are out; each void or
    dropped group makes room for one more.
    """

    def __init__(
        self,
        bus: Bus,
        namespace: str,
        run_id: str,
        recipe: Recipe,
        rewards: Sequence[RewardSpec],
        *,
        published: int,
    ) -> None:
        self._bus, self._namespace, self._run_id = bus, namespace, run_id
        self._recipe, self._rewards = recipe, rewards
        self._limit = max_outstanding(recipe.settings.max_lag, recipe.settings.groups_per_step)
        self._change = asyncio.Event()
        self.published = published
        """Groups published so far; also the next sequence number."""
        self.finished = 0
        """Groups trained, void or dropped."""
        self.needed = 0
        """Groups that the steps still to be made need."""
        self.version = Version()
        """The newest version, which new groups are sampled by, or by one after it."""

    @property
    def outstanding(self) -> int:
        return self.published - self.finished

    def update(self, *, finished: int, needed: int, version: Version) -> None:
        """Says how many groups are finished in all, how many the rest of the run needs, and which version
        is the newest that replicas can get."""
        self.finished, self.needed, self.version = finished, needed, version
        self._change.set()

    async def run(self) -> None:
        """Publishes until cancelled."""
        prompts = self._recipe.prompts_from(self.published)
        while True:
            self._change.clear()
            while self.outstanding < min(self._limit, self.needed):
                group = self._group(next(prompts))
                await publish(self._bus, self._namespace, topics.PROMPTS, group)
                self.published += 1
            await self._change.wait()

    def _group(self, prompt: Prompt) -> PromptGroup:
        settings = self._recipe.settings
        group = PromptGroup(
            run_id=self._run_id,
            group_id=f"{self._run_id}/{self.published}",
            sequence=self.published,
            num_samples=settings.group_size,
            sampling=settings.sampling_params(),
            metadata_json=json.dumps(prompt.metadata),
            rewards=self._rewards,
            min_version=self.version,
        )
        if prompt.messages:
            chat = [ChatMessage(role=m["role"], content=m["content"]) for m in prompt.messages]
            group.chat.CopyFrom(ChatPrompt(messages=chat))
        else:
            group.text = prompt.text
        return group


async def count_published(bus: Bus, namespace: str, run_id: str) -> int:
    """Groups of a run that are in the log already, so that a resumed run does not publish them twice."""
    name = topics.PROMPTS.full_name(namespace)
    consumer = await bus.assign([name], offsets="earliest")
    try:
        ends, count = await consumer.end_offsets(), 0
        while any(consumer.positions()[tp] < end for tp, end in ends.items()):
            for record in await consumer.poll(max_records=500):
                try:
                    group = await parse(record, topics.PROMPTS)
                except PoisonMessageError:
                    continue
                if group.run_id == run_id:
                    count = max(count, group.sequence + 1)
        return count
    finally:
        await consumer.close()
