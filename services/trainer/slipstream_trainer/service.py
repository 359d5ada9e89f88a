"""The trainer's gRPC surface: one loop holds one run; every call is checked against the lease."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc.aio
import torch

from slipstream.bus.events import ensure_topics
from slipstream.errors import ConflictError, RetryableError, SlipstreamError
from slipstream.service import Context
from slipstream.v1 import trainer_service_pb2 as pb
from slipstream.v1.reward_pb2 import SCORE_STATUS_OK
from slipstream.v1.rollout_pb2 import FINISH_REASON_LENGTH
from slipstream.v1.trainer_service_pb2_grpc import (
    TrainerServiceServicer,
    add_TrainerServiceServicer_to_server,
)
from slipstream_trainer.batches import Arrived, Taken
from slipstream_trainer.lease import Lease
from slipstream_trainer.model import Policy, find_model
from slipstream_trainer.opening import WeightSync, open_run
from slipstream_trainer.run import Run
from slipstream_trainer.settings import TrainerSettings

_log = logging.getLogger(__name__)
_NEXT_BATCH_S = 20.0
_HEARTBEAT_S = 5.0
T = TypeVar("T")


class TrainerService(TrainerServiceServicer):
    """Implements `slipstream.service.Service`."""

    def __init__(self, context: Context[TrainerSettings]) -> None:
        self._context, self._settings = context, context.settings
        find_model(self._settings.model)  # a wrong path is said at once, whatever else is up
        self._lease = Lease()
        self._run: Run | None = None
        self._phase = "idle"
        self._busy = asyncio.Lock()
        self._fatal: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # One thread owns the model: torch work never overlaps and never blocks the event loop.
        self._executor = ThreadPoolExecutor(
            1, "torch", initializer=_set_threads, initargs=(self._settings.threads,)
        )
        self._policy: Policy | None = None
        self._weightsync: WeightSync | None = None

    def register(self, server: grpc.aio.Server) -> list[str]:
        add_TrainerServiceServicer_to_server(self, server)
        return [pb.DESCRIPTOR.services_by_name["TrainerService"].full_name]

    async def start(self) -> None:
        """Loads the model."""
        await ensure_topics(self._context.bus, self._context.common)
        settings = self._settings
        self._weightsync = WeightSync(self._context.common.weightsync_target, self._context.clock)
        self._policy = await asyncio.get_running_loop().run_in_executor(
            self._executor, lambda: Policy(settings.model, device=settings.device, compute=settings.compute)
        )
        _log.info(
            "%s: %d parameters, computing in %s on %s",
            self._policy.path,
            self._policy.num_parameters,
            str(self._policy.compute).removeprefix("torch."),
            self._policy.device,
        )

    async def run(self) -> None:
        """Serves until told to stop; raises what makes going on pointless."""
        stopping: asyncio.Future[bool] = asyncio.ensure_future(self._context.stopping.wait())
        both: list[asyncio.Future[Any]] = [stopping, self._fatal]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if self._fatal.done():
            self._fatal.result()
        async with self._busy:  # what is in hand is finished
            pass

    async def close(self) -> None:
        await self._drop_run()
        if self._weightsync:
            await self._weightsync.close()
        self._fatal.cancel()
        # A daemon-like end: work that a second signal interrupts is not waited for.
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def OpenRun(
        self, request: pb.OpenRunRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.OpenRunResponse]:
        holder = self._lease.acquire(request.run_id, request.client)
        try:
            async with self._busy:
                await self._drop_run()
                run, recipe_state = await self._working("opening", self._open(request))
                self._run = run
            _log.info("run %s is held by %s", request.run_id, request.client or "an unnamed client")
            yield self._opened(run, holder.session_id, recipe_state)
            while not self._context.stopping.is_set():
                await asyncio.sleep(_HEARTBEAT_S)
                yield self._opened(run, holder.session_id, b"")
        finally:
            self._lease.release(holder)
            _log.info("run %s is free", request.run_id)

    async def _open(self, request: pb.OpenRunRequest) -> tuple[Run, bytes]:
        assert self._policy is not None
        assert self._weightsync is not None
        return await open_run(
            request.run_id,
            request.config,
            policy=self._policy,
            executor=self._executor,
            bus=self._context.bus,
            blobs=self._context.blobs,
            namespace=self._context.common.namespace,
            clock=self._context.clock,
            settings=self._settings,
            weightsync=self._weightsync,
        )

    def _opened(self, run: Run, session_id: str, recipe_state: bytes) -> pb.OpenRunResponse:
        return pb.OpenRunResponse(
            session_id=session_id,
            step=run.step,
            version=run.version,
            recipe_state=recipe_state,
            num_parameters=run.policy.num_parameters,
        )

    async def _drop_run(self) -> None:
        run, self._run = self._run, None
        if run:
            await run.inbox.consumer.close()

    async def NextBatch(
        self, request: pb.NextBatchRequest, context: grpc.aio.ServicerContext
    ) -> pb.NextBatchResponse:
        async with self._busy:
            run = self._held(request.session_id)
            work = run.next_batch(request.num_groups, _NEXT_BATCH_S, lambda: self._check(request.session_id))
            groups, waited = await self._working("waiting", work)
        return pb.NextBatchResponse(groups=[_summary(g) for g in groups], wait_s=waited)

    async def ForwardBackward(
        self, request: pb.ForwardBackwardRequest, context: grpc.aio.ServicerContext
    ) -> pb.ForwardBackwardResponse:
        async with self._busy:
            run = self._held(request.session_id)
            advantages = {s.sample_id: s.advantage for s in request.samples}
            work = run.forward_backward(advantages, request.loss.name, dict(request.loss.params))
            return pb.ForwardBackwardResponse(metrics=await self._working("forward_backward", work))

    async def OptimStep(
        self, request: pb.OptimStepRequest, context: grpc.aio.ServicerContext
    ) -> pb.OptimStepResponse:
        async with self._busy:
            run = self._held(request.session_id)
            work = run.optim_step(request.step, request.learning_rate, request.max_grad_norm)
            return pb.OptimStepResponse(metrics=await self._working("optim_step", work))

    async def Publish(
        self, request: pb.PublishRequest, context: grpc.aio.ServicerContext
    ) -> pb.PublishResponse:
        async with self._busy:
            run = self._held(request.session_id)
            metrics = await self._working("publish", run.publish(dict(request.metrics)))
            return pb.PublishResponse(version=run.version, metrics=metrics)

    async def Save(self, request: pb.SaveRequest, context: grpc.aio.ServicerContext) -> pb.SaveResponse:
        async with self._busy:
            run = self._held(request.session_id)
            began = self._context.clock.monotonic()
            name = await self._working("save", run.save(request.recipe_state))
            return pb.SaveResponse(name=name, seconds=self._context.clock.monotonic() - began)

    async def GetTrainerStatus(
        self, request: pb.GetTrainerStatusRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetTrainerStatusResponse:
        holder, run = self._lease.holder, self._run
        return pb.GetTrainerStatusResponse(
            run_id=holder.run_id if holder else "",
            client=holder.client if holder else "",
            step=run.step if run else 0,
            version=run.version if run else None,
            model=str(self._policy.path) if self._policy else self._settings.model,
            phase=self._phase,
        )

    def _check(self, session_id: str) -> None:
        self._lease.check(session_id)
        if self._context.stopping.is_set():
            raise RetryableError("the trainer is stopping")

    def _held(self, session_id: str) -> Run:
        self._check(session_id)
        if self._run is None:
            raise SlipstreamError("the run is not open yet; wait for the first message of OpenRun")
        return self._run

    async def _working(self, phase: str, work: Coroutine[Any, Any, T]) -> T:
        """Does `work` to its end even when the caller goes away: half a step is worse than a whole one."""
        self._phase = phase
        task = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if phase in ("waiting", "opening"):
                task.cancel()
            await asyncio.wait([task])
            raise
        except ConflictError as error:  # FencedError too: this trainer may not go on with the run
            if not self._fatal.done():
                self._fatal.set_exception(error)
            raise
        finally:
            self._phase = "idle"


def _summary(taken: Taken) -> pb.GroupSummary:
    samples = _samples(taken.arrived) if taken.arrived else []
    return pb.GroupSummary(record=taken.record, samples=samples)


def _samples(arrived: Arrived) -> list[pb.SampleSummary]:
    pairs = zip(arrived.group.rollout.completions, arrived.group.scores, strict=True)
    return [
        pb.SampleSummary(
            sample_id=completion.sample_id,
            scored=score.status == SCORE_STATUS_OK,
            reward=score.value,
            parts=score.parts,
            num_tokens=len(completion.token_ids),
            truncated=completion.finish_reason == FINISH_REASON_LENGTH,
            error=score.error,
        )
        for completion, score in pairs
    ]


def _set_threads(count: int) -> None:
    if count:
        torch.set_num_threads(count)
