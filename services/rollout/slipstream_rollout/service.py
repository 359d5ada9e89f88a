"""The rollout replica: prompts in, rollouts out, weights swapped in between."""

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

import grpc.aio

from slipstream import topics
from slipstream.bus.events import ensure_topics, publish
from slipstream.bus.stage import Stage
from slipstream.delta.tensors import load_checkpoint
from slipstream.errors import ConfigError, NotFoundError
from slipstream.rpc import call, make_channel
from slipstream.service import Context
from slipstream.v1.common_pb2 import Version
from slipstream.v1.rollout_pb2 import PromptGroup, RolloutGroup
from slipstream.v1.rollout_service_pb2 import (
    DESCRIPTOR,
    DrainRequest,
    DrainResponse,
    GenerateRequest,
    GenerateResponse,
    GetReplicaStatusRequest,
    GetReplicaStatusResponse,
)
from slipstream.v1.rollout_service_pb2_grpc import (
    RolloutServiceServicer,
    add_RolloutServiceServicer_to_server,
)
from slipstream.v1.weight_sync_service_pb2 import PlanUpdateRequest
from slipstream.v1.weight_sync_service_pb2_grpc import WeightSyncServiceStub
from slipstream.v1.weights_pb2 import Manifest, ReplicaState, ReplicaStatus, SwapReport
from slipstream.weights.puller import Puller
from slipstream_rollout.engine import Engine, EngineLostError, find_model
from slipstream_rollout.gate import RunGate
from slipstream_rollout.sampler import Sampler, min_version
from slipstream_rollout.settings import RolloutSettings
from slipstream_rollout.tokens import Tokens
from slipstream_rollout.updates import Updates

_log = logging.getLogger(__name__)


def open_engine(settings: RolloutSettings, directory: Path) -> Engine:
    """The engine that the settings name, not yet started."""
    if settings.engine == "torch":
        from slipstream_rollout.engine_torch import TorchEngine

        return TorchEngine(directory, max_model_len=settings.max_model_len, compute=settings.compute)
    # vLLM reads these when it is imported; what the user has set stands.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # a fork of a gRPC server hangs
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", settings.threads)
    if settings.threads == "nobind":
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # on shared cores, spinning starves the others
    from slipstream_rollout.engine_vllm import VllmEngine

    return VllmEngine(directory, settings)


class RolloutService(RolloutServiceServicer):
    """One replica."""

    def __init__(self, context: Context[RolloutSettings]) -> None:
        self._context, self._settings = context, context.settings
        self._bus, self._clock = context.bus, context.clock
        self._namespace = context.common.namespace
        self._started = self._clock.monotonic()
        self._updates: Updates | None = None
        self._stop_intake = asyncio.Event()
        self._drained = asyncio.Event()
        self._engine: Engine | None = None
        self._channel: grpc.aio.Channel | None = None

    def register(self, server: grpc.aio.Server) -> list[str]:
        add_RolloutServiceServicer_to_server(self, server)
        return [DESCRIPTOR.services_by_name["RolloutService"].full_name]

    async def start(self) -> None:
        settings = self._settings
        directory = await asyncio.to_thread(find_model, settings.model)
        await ensure_topics(self._bus, self._context.common)
        await self._publish_status()
        self._channel = make_channel(self._context.common.weightsync_target)
        self._weightsync = WeightSyncServiceStub(self._channel)
        self._engine = await asyncio.to_thread(open_engine, settings, directory)
        await self._engine.start()
        _log.info("engine %s holds %s", self._engine.name, directory)
        puller = Puller(self._context.blobs, self._plan)
        puller.seed(await asyncio.to_thread(load_checkpoint, directory))
        tokens = await asyncio.to_thread(Tokens, directory)
        self._sampler = Sampler(self._engine, tokens, settings.replica_id)
        updates = Updates(
            self._engine,
            puller,
            self._clock,
            self._report_swap,
            poll_s=settings.poll_versions_s,
            version_wait_s=settings.version_wait_s,
        )
        self._gate = RunGate(updates.ensure, self._clock)
        self._stage = Stage(
            *(self._bus, self._context.blobs, self._clock, self._namespace),
            name="rollout",
            source=topics.PROMPTS,
            sink=topics.ROLLOUTS,
            handle=self._sample,
            void=self._sampler.void,
            max_groups=settings.max_concurrent_groups,
            member=settings.replica_id,
        )
        self._updates = updates

    async def run(self) -> None:
        assert self._updates is not None  # start() has returned
        side = [
            asyncio.ensure_future(self._heartbeats()),
            asyncio.ensure_future(self._updates.run()),
            asyncio.ensure_future(self._updates.listen(self._bus, self._namespace)),
        ]
        main = asyncio.ensure_future(self._work())
        try:
            await asyncio.wait({main, *side}, return_when=asyncio.FIRST_COMPLETED)
            for task in (main, *side):
                if task.done():
                    task.result()
        finally:
            for task in (main, *side):
                task.cancel()
            await asyncio.gather(main, *side, return_exceptions=True)

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()
        if self._channel is not None:
            await self._channel.close()

    async def _work(self) -> None:
        """Takes prompts until drained or stopped; a drained replica stays up for Generate and status."""

        async def stop_intake() -> None:
            await self._context.stopping.wait()
            self._stop_intake.set()

        stopping = asyncio.ensure_future(stop_intake())
        try:
            await self._stage.run(self._stop_intake)
            self._drained.set()
            await self._publish_status()
            await stopping
        finally:
            stopping.cancel()

    async def _sample(self, prompt: PromptGroup) -> RolloutGroup:
        try:
            async with self._gate.enter(prompt.run_id, min_version(prompt)):
                return await self._sampler.sample(prompt)
        except (ConfigError, NotFoundError, EngineLostError) as error:
            _log.warning("group %s is void: %s", prompt.group_id, error)
            return self._sampler.void(prompt, str(error))

    async def _heartbeats(self) -> None:
        while True:
            await self._publish_status()
            await self._clock.sleep(self._settings.heartbeat_s)

    async def _report_swap(self, swap: SwapReport) -> None:
        await self._publish_status(swap)

    async def _publish_status(self, swap: SwapReport | None = None) -> None:
        await publish(self._bus, self._namespace, topics.REPLICAS, self._status(swap))

    async def _plan(self, run_id: str, have: Version | None, target: Version | None) -> list[Manifest]:
        request = PlanUpdateRequest(run_id=run_id, have=have, target=target)
        where = self._context.common.weightsync_target
        answer = await call(where, self._weightsync.PlanUpdate, request, timeout_s=10)
        return list(answer.manifests)

    def _status(self, swap: SwapReport | None = None) -> ReplicaStatus:
        status = ReplicaStatus(
            replica_id=self._settings.replica_id,
            state=ReplicaState.REPLICA_STATE_STARTING,
            engine=self._settings.engine,
            uptime_s=self._clock.monotonic() - self._started,
            swap=swap,
        )
        if self._updates is None:
            status.detail = "loading the model"
            return status
        draining = self._stop_intake.is_set()
        status.state = ReplicaState.REPLICA_STATE_DRAINING if draining else ReplicaState.REPLICA_STATE_SERVING
        status.run_id, status.detail = self._updates.run_id, self._updates.trouble
        if self._updates.version is not None:
            status.version.CopyFrom(self._updates.version)
        status.groups_running = self._gate.inside
        status.groups_done = self._sampler.groups_done
        status.tokens_generated = self._sampler.tokens_generated
        status.requests_lost = self._sampler.requests_lost
        status.busy_s = self._gate.busy_s
        return status

    # gRPC

    async def Generate(self, request: GenerateRequest, context: Any) -> GenerateResponse:
        async with self._gate.enter(request.prompt.run_id, min_version(request.prompt)):
            return GenerateResponse(rollout=await self._sampler.sample(request.prompt))

    async def GetReplicaStatus(
        self, request: GetReplicaStatusRequest, context: Any
    ) -> GetReplicaStatusResponse:
        return GetReplicaStatusResponse(status=self._status())

    async def Drain(self, request: DrainRequest, context: Any) -> DrainResponse:
        self._stop_intake.set()
        await self._drained.wait()
        return DrainResponse()
