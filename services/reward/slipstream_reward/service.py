"""Consumes `rollouts`, has every group scored, writes `samples`."""

import logging
import random
import tempfile
from pathlib import Path

import grpc.aio

from slipstream import telemetry, topics
from slipstream.bus.stage import Stage
from slipstream.errors import PoisonMessageError, RetryableError
from slipstream.service import Context
from slipstream.v1.reward_pb2 import ScoredGroup
from slipstream.v1.rollout_pb2 import RolloutGroup
from slipstream_reward.local import LocalScorer
from slipstream_reward.pool import WorkerPool
from slipstream_reward.remote import RemoteScorer
from slipstream_reward.scorer import Scorer, void
from slipstream_reward.settings import RewardSettings

_log = logging.getLogger(__name__)


class RewardScorer:
    """The reward service. Holds no state."""

    def __init__(self, context: Context[RewardSettings]) -> None:
        self._context = context
        settings = context.settings
        self._directory = tempfile.TemporaryDirectory(prefix="slipstream-reward-")
        directory = Path(self._directory.name)
        self._pool = WorkerPool(
            settings.workers,
            directory,
            context.clock,
            load_timeout_s=settings.load_timeout_s,
            memory_bytes=settings.worker_memory_mb * 1024**2,
        )
        self._remote = RemoteScorer(context.clock, random.Random(), retry_s=settings.retry_s)
        self._scorer = Scorer(LocalScorer(self._pool, context.blobs, directory), self._remote, context.clock)
        self._stage = Stage(
            *(context.bus, context.blobs, context.clock, context.common.namespace),
            name="reward",
            source=topics.ROLLOUTS,
            sink=topics.SAMPLES,
            handle=self._score,
            void=lambda prompt, reason: void(RolloutGroup(prompt=prompt), reason),
            max_groups=settings.max_groups,
            member=settings.replica_id or None,
        )
        meter = telemetry.meter()
        self._count = meter.create_counter("slipstream.reward.groups", description="groups by outcome")
        self._duration = meter.create_histogram("slipstream.reward.duration", unit="s")

    def register(self, server: grpc.aio.Server) -> list[str]:
        return []

    async def start(self) -> None:
        await self._pool.start()

    async def run(self) -> None:
        await self._stage.run(self._context.stopping)

    async def close(self) -> None:
        await self._pool.close()
        await self._remote.close()
        self._directory.cleanup()

    async def _score(self, group: RolloutGroup) -> ScoredGroup:
        try:
            scored = await self._scorer.score(group)
        except RetryableError:
            raise
        except Exception as error:
            # A fault of ours on this very group would stop every replica, one after the other, for ever.
            _log.exception("group %s cannot be scored", group.prompt.group_id)
            raise PoisonMessageError(f"internal error: {error!r}") from error
        self._count.add(1, {"outcome": "void" if scored.void_reason else "scored"})
        self._duration.record(scored.duration_s)
        return scored
