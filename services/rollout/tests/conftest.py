"""A replica over the log and the store in memory, with a tiny real model."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from slipstream_rollout.service import RolloutService
from slipstream_rollout.settings import RolloutSettings

from slipstream import topics
from slipstream.blobs.memory import MemoryStore
from slipstream.bus.events import ensure_topics, parse, publish
from slipstream.bus.memory import MemoryBus, MemoryLog
from slipstream.clock import SystemClock
from slipstream.delta.tensors import Weights, load_checkpoint
from slipstream.rpc import make_server
from slipstream.service import Context
from slipstream.settings import CommonSettings, load
from slipstream.v1.common_pb2 import Version
from slipstream.v1.rollout_pb2 import PromptGroup, RolloutGroup, SamplingParams, TokenPrompt
from slipstream.v1.weight_sync_service_pb2 import PlanUpdateResponse
from slipstream.v1.weight_sync_service_pb2_grpc import (
    WeightSyncServiceServicer,
    add_WeightSyncServiceServicer_to_server,
)
from slipstream.v1.weights_pb2 import Manifest, ReplicaStatus, VersionAnnounced
from slipstream.weights.plan import plan
from slipstream.weights.publisher import Publisher
from tests.support.tiny_model import make_tiny_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Checkpoints of one architecture with different weights; the first is the base model."""
    root = tmp_path_factory.mktemp("models")
    return [make_tiny_model(root / str(seed), seed) for seed in range(3)]


@pytest.fixture(scope="session")
def weights(models: list[Path]) -> list[Weights]:
    return [load_checkpoint(directory) for directory in models]


class Versions(WeightSyncServiceServicer):
    """What weightsync knows and answers, for any number of runs."""

    def __init__(self, blobs: MemoryStore) -> None:
        self._blobs = blobs
        self._publishers: dict[str, Publisher] = {}
        self.manifests: list[Manifest] = []

    async def publish(self, run_id: str, number: int, weights: Weights) -> Version:
        """Publishes version 1-number of a run: an anchor if it is the first, else a delta."""

        async def commit(manifest: Manifest) -> None:
            self.manifests.append(manifest)

        version = Version(epoch=1, number=number)
        publisher = self._publishers.setdefault(run_id, Publisher(self._blobs, commit, run_id))
        if publisher.version is None:
            await publisher.publish_anchor(version, weights)
        else:
            await publisher.publish_delta(version, weights)
        return version

    async def PlanUpdate(self, request: Any, context: Any) -> PlanUpdateResponse:
        have = request.have if request.HasField("have") else None
        target = request.target if request.HasField("target") else None
        mine = [m for m in self.manifests if m.run_id == request.run_id]
        return PlanUpdateResponse(manifests=plan(mine, have, target))


class Replica:
    """A running replica and what is around it."""

    def __init__(self, log: MemoryLog, blobs: MemoryStore, versions: Versions, model: Path) -> None:
        self.log, self.blobs, self.versions, self._model = log, blobs, versions, model
        self.bus = MemoryBus(log)
        self.stopping = asyncio.Event()

    async def start(self, **settings: Any) -> None:
        self._weightsync = make_server()
        add_WeightSyncServiceServicer_to_server(self.versions, self._weightsync)
        port = self._weightsync.add_insecure_port("127.0.0.1:0")
        await self._weightsync.start()
        self.common = load(
            CommonSettings,
            {"SLIPSTREAM_NAMESPACE": "test", "SLIPSTREAM_WEIGHTSYNC_TARGET": f"127.0.0.1:{port}"},
        )
        values = {
            "model": self._model,
            "engine": "torch",
            "replica_id": "rollout-0",
            "max_model_len": 400,
            "heartbeat_s": 0.1,
        } | settings
        env = {f"SLIPSTREAM_ROLLOUT_{name.upper()}": str(value) for name, value in values.items()}
        self.context = Context(
            "rollout",
            self.common,
            load(RolloutSettings, env),
            self.bus,
            self.blobs,
            SystemClock(),
            self.stopping,
        )
        self.service = RolloutService(self.context)
        await self.bus.start()
        await ensure_topics(self.bus, self.common)
        self._server = make_server()
        self.service.register(self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")
        await self._server.start()
        await self.service.start()
        self.running = asyncio.ensure_future(self.service.run())

    async def stop(self) -> None:
        self.stopping.set()
        await asyncio.wait_for(self.running, 20)

    async def kill(self) -> None:
        """Ends the work as a crash would: nothing is finished, nothing committed."""
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)

    async def close(self) -> None:
        if not self.running.done():
            await self.kill()
        await self._server.stop(0)
        await self._weightsync.stop(0)
        await self.service.close()
        await self.bus.close()

    def channel(self) -> grpc.aio.Channel:
        return grpc.aio.insecure_channel(f"127.0.0.1:{self.port}")

    async def ask(self, prompt: PromptGroup) -> None:
        await publish(self.bus, "test", topics.PROMPTS, prompt)

    async def announce(self, run_id: str, version: Version) -> None:
        await publish(self.bus, "test", topics.VERSIONS, VersionAnnounced(run_id=run_id, version=version))

    async def rollouts(self, count: int, timeout_s: float = 20) -> dict[str, RolloutGroup]:
        """Rollouts of the first `count` groups, by group id; fewer when no more came in time."""
        found = await self._read(topics.ROLLOUTS, count, timeout_s, lambda m: m.prompt.group_id)
        return {m.prompt.group_id: m for m in found}

    async def statuses(self, count: int, timeout_s: float = 20) -> list[ReplicaStatus]:
        return await self._read(topics.REPLICAS, count, timeout_s, id)

    async def _read(
        self, topic: topics.Topic, count: int, timeout_s: float, distinct: Callable[[Any], Any]
    ) -> list[Any]:
        consumer = await self.bus.assign([topic.full_name("test")], offsets="earliest")
        found: list[Any] = []
        deadline = asyncio.get_running_loop().time() + timeout_s
        while len({distinct(m) for m in found}) < count and asyncio.get_running_loop().time() < deadline:
            records = await consumer.poll(timeout_s=0.05)
            found += [await parse(record, topic, blobs=self.blobs) for record in records]
        await consumer.close()
        return found

    async def committed(self) -> int:
        """Prompts that will not be delivered again."""
        return sum((await self.bus.group_offsets("test.rollout")).values())


@pytest.fixture
async def replica(models: list[Path]) -> AsyncIterator[Replica]:
    """Not started; `await replica.start()`."""
    blobs = MemoryStore()
    replica = Replica(MemoryLog(), blobs, Versions(blobs), models[0])
    yield replica
    await replica.close()


@pytest.fixture
def prompt() -> Callable[..., PromptGroup]:
    """Makes prompt groups: prompt("run", 3, num_samples=2, max_tokens=5)."""

    def make(run_id: str, sequence: int, **changes: Any) -> PromptGroup:
        sampling = SamplingParams(
            temperature=changes.pop("temperature", 1.0),
            max_tokens=changes.pop("max_tokens", 8),
            seed=changes.pop("seed", 7),
        )
        values: dict[str, Any] = {
            "num_samples": 3,
            "tokens": TokenPrompt(token_ids=[1, 20, 30, 40]),
        } | changes
        return PromptGroup(
            run_id=run_id,
            group_id=f"{run_id}/{sequence}",
            sequence=sequence,
            sampling=sampling,
            **values,
        )

    return make
