"""A trainer with the real weightsync service, both over gRPC, on a log and a store in memory."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slipstream_trainer.service import TrainerService
from slipstream_trainer.settings import TrainerSettings
from typing_extensions import Buffer

from slipstream.blobs.memory import MemoryStore
from slipstream.bus.events import publish
from slipstream.bus.memory import MemoryBus, MemoryLog
from slipstream.clock import SystemClock
from slipstream.errors import RetryableError
from slipstream.rpc import make_channel, make_server
from slipstream.service import Context, Service
from slipstream.settings import CommonSettings
from slipstream.topics import SAMPLES, Topic
from slipstream.v1 import trainer_service_pb2 as pb
from slipstream.v1.common_pb2 import Version
from slipstream.v1.reward_pb2 import SCORE_STATUS_OK, Score, ScoredGroup
from slipstream.v1.rollout_pb2 import Completion, PromptGroup, RolloutGroup, SamplingParams, VersionSpan
from slipstream.v1.trainer_service_pb2_grpc import TrainerServiceStub

RUN = "toy"


def scored_group(
    sequence: int,
    completions: Sequence[Sequence[int]] = ((10, 11, 2), (12, 13, 14, 2)),
    *,
    prompt: Sequence[int] = (1, 20, 21),
    logprobs: Sequence[Sequence[float]] | None = None,
    rewards: Sequence[float] = (1.0, 0.0),
    version: tuple[int, int] = (1, 0),
    run_id: str = RUN,
    void: str = "",
) -> ScoredGroup:
    """A group as the reward service writes it."""
    group_id = f"{run_id}/{sequence}"
    rollout = RolloutGroup(
        prompt=PromptGroup(
            run_id=run_id,
            group_id=group_id,
            sequence=sequence,
            num_samples=len(completions),
            sampling=SamplingParams(temperature=1.0, max_tokens=8),
        ),
        prompt_token_ids=prompt,
        replica_id="r0",
    )
    if void:
        return ScoredGroup(rollout=rollout, void_reason=void)
    for index, tokens in enumerate(completions):
        span = VersionSpan(version=Version(epoch=version[0], number=version[1]), start=0, end=len(tokens))
        rollout.completions.append(
            Completion(
                sample_id=f"{group_id}/{index}",
                token_ids=tokens,
                logprobs=logprobs[index] if logprobs else [-4.0] * len(tokens),
                spans=[span],
            )
        )
    scores = [Score(status=SCORE_STATUS_OK, value=r, parts={"right": r}) for r in rewards]
    return ScoredGroup(rollout=rollout, scores=scores)


class FrailStore(MemoryStore):
    """A store that can be away."""

    away = False

    async def put(self, key: str, data: Buffer) -> None:
        if self.away:
            raise RetryableError("the store in memory does not answer")
        await super().put(key, data)

    async def get(self, key: str) -> bytes:
        if self.away:
            raise RetryableError("the store in memory does not answer")
        return await super().get(key)


@dataclass
class Cluster:
    """What outlives a trainer: log, store, weightsync, disk."""

    log: MemoryLog
    store: "FrailStore"
    common: CommonSettings
    model_dir: Path
    checkpoint_dir: Path
    bus: MemoryBus = field(init=False)

    def __post_init__(self) -> None:
        self.bus = MemoryBus(self.log)

    async def feed(self, *groups: ScoredGroup) -> None:
        for group in groups:
            await publish(self.bus, self.common.namespace, SAMPLES, group, blobs=self.store)

    def read(self, topic: Topic) -> list[Any]:
        name = topic.full_name(self.common.namespace)
        parts = [self.log.partitions[tp] for tp in self.log.of([name])]
        return [topic.message.FromString(r.value) for part in parts for r in part.records]

    def context(self, name: str, settings: Any) -> Context[Any]:
        bus = MemoryBus(self.log)
        return Context(name, self.common, settings, bus, self.store, SystemClock(), asyncio.Event())

    @asynccontextmanager
    async def trainer(self, **settings: Any) -> AsyncIterator["Trainer"]:
        """A running trainer process, as it were."""
        options = {
            "model": str(self.model_dir),
            "checkpoint_dir": self.checkpoint_dir,
            "device": "cpu",
            "threads": 1,
        }
        context = self.context("trainer", TrainerSettings(**{**options, **settings}))
        service = TrainerService(context)
        async with serving(service) as target:
            running = asyncio.ensure_future(service.run())
            channel = make_channel(target)
            try:
                yield Trainer(TrainerServiceStub(channel), context, running)
            finally:
                context.stopping.set()
                await channel.close()
                await asyncio.wait([running], timeout=10)
                if not running.cancelled() and running.done():
                    running.exception()


@dataclass
class Trainer:
    """A trainer to talk to."""

    stub: TrainerServiceStub
    context: Context[TrainerSettings]
    running: "asyncio.Future[None]"

    @asynccontextmanager
    async def open(self, run_id: str = RUN, client: str = "me", **config: Any) -> AsyncIterator["Loop"]:
        settings = pb.RunConfig(**{"max_lag": 2, "groups_per_step": 2, **config})
        stream = self.stub.OpenRun(pb.OpenRunRequest(run_id=run_id, config=settings, client=client))
        try:
            yield Loop(self.stub, await stream.read())
        finally:
            stream.cancel()


@dataclass
class Loop:
    """A recipe's loop in short."""

    stub: TrainerServiceStub
    opened: pb.OpenRunResponse

    async def next(self, num_groups: int = 2) -> list[pb.GroupSummary]:
        request = pb.NextBatchRequest(session_id=self.opened.session_id, num_groups=num_groups)
        return list((await self.stub.NextBatch(request, timeout=30)).groups)

    async def gradient(
        self, advantages: dict[str, float], name: str = "grpo", **params: float
    ) -> dict[str, float]:
        request = pb.ForwardBackwardRequest(
            session_id=self.opened.session_id,
            samples=[pb.SampleAdvantage(sample_id=k, advantage=v) for k, v in advantages.items()],
            loss=pb.LossConfig(name=name, params=params),
        )
        return dict((await self.stub.ForwardBackward(request)).metrics)

    async def optim(
        self, step: int, learning_rate: float = 1e-2, max_grad_norm: float = 1.0
    ) -> dict[str, float]:
        request = pb.OptimStepRequest(
            session_id=self.opened.session_id,
            step=step,
            learning_rate=learning_rate,
            max_grad_norm=max_grad_norm,
        )
        return dict((await self.stub.OptimStep(request)).metrics)

    async def publish(self, **metrics: float) -> pb.PublishResponse:
        request = pb.PublishRequest(session_id=self.opened.session_id, metrics=metrics)
        response: pb.PublishResponse = await self.stub.Publish(request)
        return response

    async def save(self, recipe_state: bytes = b"") -> str:
        request = pb.SaveRequest(session_id=self.opened.session_id, recipe_state=recipe_state)
        return str((await self.stub.Save(request)).name)

    async def step(self, number: int, num_groups: int = 2) -> list[pb.GroupSummary]:
        """A whole step: rewards 1 and 0 become advantages 1 and -1."""
        groups: list[pb.GroupSummary] = []
        while len(samples := [s for g in groups for s in g.samples]) < 2 * num_groups:
            groups += await self.next(num_groups - len(samples) // 2)
        await self.gradient({s.sample_id: 2 * s.reward - 1 for s in samples})
        await self.optim(number)
        await self.publish()
        return groups


@asynccontextmanager
async def serving(service: Service) -> AsyncIterator[str]:
    server = make_server()
    service.register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await service.start()
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0.1)
        await service.close()
