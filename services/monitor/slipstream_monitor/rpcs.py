"""MonitorService over the feed."""

from collections.abc import AsyncIterator
from typing import Any

from slipstream.errors import NotFoundError
from slipstream.v1.monitor_service_pb2 import (
    GetAlignmentRequest,
    GetAlignmentResponse,
    GetRunStatusRequest,
    GetRunStatusResponse,
    StepAlignment,
    WatchStepsRequest,
    WatchStepsResponse,
)
from slipstream.v1.monitor_service_pb2_grpc import MonitorServiceServicer
from slipstream.v1.weights_pb2 import ReplicaStatus
from slipstream_monitor.feed import Feed
from slipstream_monitor.state import Replica, Run
from slipstream_monitor.views import shown_replicas

_WAIT_S = 5.0


class MonitorServicer(MonitorServiceServicer):
    """Answers from memory; nothing here waits for Kafka."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    async def GetRunStatus(self, request: GetRunStatusRequest, context: Any) -> GetRunStatusResponse:
        """Status of a run; of nothing but replicas and topics while no run is known and none is named."""
        run = self._find(request.run_id)
        last = run.steps.newest if run else None
        return GetRunStatusResponse(
            run_id=run.run_id if run else "",
            last_step=last.record if last else None,
            replicas=[_with_swap(r) for r in shown_replicas(self._feed.state, self._feed.clock.unix())],
            topics=self._feed.topics,
            gate=run.gate if run else None,
            runs=self._feed.state.run_ids(),
        )

    async def GetAlignment(self, request: GetAlignmentRequest, context: Any) -> GetAlignmentResponse:
        """Mismatch per step and lag, merged over groups as `alignment.py` says."""
        run = self._find(request.run_id)
        entries = sorted(run.mismatch.entries.items()) if run else []
        return GetAlignmentResponse(
            steps=[
                StepAlignment(
                    step=step,
                    by_lag=[e.sums[lag].stats() for lag in sorted(e.sums) if e.sums[lag].num_tokens],
                )
                for step, e in entries
            ]
        )

    async def WatchSteps(self, request: WatchStepsRequest, context: Any) -> AsyncIterator[WatchStepsResponse]:
        """First the steps that are known, then each as it comes. The run may begin later."""
        seen = -1
        while not self._feed.closing:
            for step in self._feed.state.steps_after(seen, request.run_id):
                seen = step.serial
                yield WatchStepsResponse(step=step.record)
            await self._feed.changed(_WAIT_S)

    def _find(self, run_id: str) -> Run | None:
        run = self._feed.state.find(run_id)
        if run is None and run_id:
            known = ", ".join(self._feed.state.run_ids()) or "none"
            raise NotFoundError(f"the monitor has seen nothing of run {run_id}; runs seen: {known}")
        return run


def _with_swap(replica: Replica) -> ReplicaStatus:
    status = ReplicaStatus()
    status.CopyFrom(replica.status)
    if replica.last_swap:
        status.swap.CopyFrom(replica.last_swap)
    return status
