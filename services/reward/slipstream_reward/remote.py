"""Rewards in any language: calls a RewardService, with a deadline and retries."""

import hashlib
import logging
import random
from typing import Any

import grpc
import grpc.aio

from slipstream import rpc, telemetry
from slipstream.clock import Clock
from slipstream.v1.reward_service_pb2 import ScoreItem, ScoreRequest, ScoreResponse
from slipstream.v1.reward_service_pb2_grpc import RewardServiceStub
from slipstream.v1.rollout_pb2 import RewardSpec, RolloutGroup
from slipstream_reward.scoring import Outcome, VoidGroup, outcome_of, prompt_text, timeout_of

_log = logging.getLogger(__name__)

_AWAY = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }
)
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.2, 10.0


class RemoteScorer:
    """Scores groups by RewardService endpoints."""

    def __init__(self, clock: Clock, rng: random.Random, *, retry_s: float) -> None:
        """
        Args:
            retry_s: how long an endpoint that is away or too slow is tried again before the group is void.
        """
        self._clock, self._rng, self._retry_s = clock, rng, retry_s
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def score(self, spec: RewardSpec, group: RolloutGroup) -> list[Outcome]:
        """One outcome per completion.

        Raises:
            VoidGroup: the endpoint refuses, stays away or answers with something else.
        """
        target = spec.grpc.target
        response = await self._call(target, score_request(spec, group), timeout_of(spec))
        if len(response.scores) != len(group.completions):
            raise VoidGroup(
                f"{target} returned {len(response.scores)} scores for {len(group.completions)} completions"
            )
        return [outcome_of(score) for score in response.scores]

    async def _call(self, target: str, request: ScoreRequest, timeout_s: float) -> ScoreResponse:
        method = RewardServiceStub(self._channel(target)).Score
        began, pause, others = self._clock.monotonic(), _FIRST_PAUSE_S, 0
        while True:
            try:
                response: ScoreResponse = await method(
                    request, timeout=timeout_s, metadata=tuple(telemetry.inject().items())
                )
                return response
            except grpc.aio.AioRpcError as error:
                reason = f"{target}: {error.code().name}: {error.details()}"
                others += error.code() not in _AWAY
                late = self._clock.monotonic() - began + pause > self._retry_s
                if error.code() is grpc.StatusCode.INVALID_ARGUMENT or others > 1 or late:
                    raise VoidGroup(reason) from None
            if pause > 1:
                _log.warning("%s; trying again in %.1f s", reason, pause)
            # Many groups wait for the same endpoint: they must not all come back at one moment.
            await self._clock.sleep(pause * self._rng.uniform(0.75, 1.25))
            pause = min(2 * pause, _MAX_PAUSE_S)

    def _channel(self, target: str) -> Any:
        if target not in self._channels:
            self._channels[target] = rpc.make_channel(target)
        return self._channels[target]


def score_request(spec: RewardSpec, group: RolloutGroup) -> ScoreRequest:
    """What an endpoint gets. The request id is a hash of all else, so that equal work has equal ids, and a
    group that was sampled a second time after a crash has another."""
    request = ScoreRequest(
        run_id=group.prompt.run_id,
        group_id=group.prompt.group_id,
        prompt_text=prompt_text(group.prompt),
        metadata_json=group.prompt.metadata_json or "{}",
        items=[
            ScoreItem(sample_id=each.sample_id, text=each.text, token_ids=each.token_ids)
            for each in group.completions
        ],
    )
    content = spec.name.encode() + b"\0" + request.SerializeToString(deterministic=True)
    request.request_id = hashlib.sha256(content).hexdigest()[:32]
    return request
