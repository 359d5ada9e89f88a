"""From a rollout group to a scored group."""

import logging

from slipstream.clock import Clock
from slipstream.v1.reward_pb2 import SCORE_STATUS_ERROR, Score, ScoredGroup
from slipstream.v1.rollout_pb2 import RewardSpec, RolloutGroup
from slipstream_reward.local import LocalScorer
from slipstream_reward.remote import RemoteScorer
from slipstream_reward.scoring import Outcome, VoidGroup, check, clean, combine
from slipstream_reward.sparing import Sparing
from slipstream_reward.together import together

_log = logging.getLogger(__name__)


class Scorer:
    """Computes all rewards of a group at once and adds them up."""

    def __init__(self, local: LocalScorer, remote: RemoteScorer, clock: Clock) -> None:
        self._local, self._remote, self._clock = local, remote, clock
        self._sparing = Sparing(clock)

    async def score(self, group: RolloutGroup) -> ScoredGroup:
        """The group with its scores, or void with the reason.

        Raises:
            RetryableError: the object store is away.
        """
        began = self._clock.monotonic()
        if group.void_reason:
            return ScoredGroup(rollout=group, void_reason=group.void_reason)
        try:
            scores = await self._scores(group)
        except VoidGroup as error:
            if self._sparing.due(str(error)):
                _log.warning("group %s is void: %s", group.prompt.group_id, clean(str(error)))
            return void(group, str(error))
        failed = [score.error for score in scores if score.status == SCORE_STATUS_ERROR]
        if failed and self._sparing.due(failed[0]):
            _log.warning(
                "group %s: %d of %d completions have no score: %s",
                *(group.prompt.group_id, len(failed), len(scores), failed[0]),
            )
        return ScoredGroup(rollout=group, scores=scores, duration_s=self._clock.monotonic() - began)

    async def _scores(self, group: RolloutGroup) -> list[Score]:
        specs = check(group)
        return combine(specs, await together(self._outcomes(spec, group) for spec in specs))

    async def _outcomes(self, spec: RewardSpec, group: RolloutGroup) -> list[Outcome]:
        scorer = self._local if spec.HasField("python") else self._remote
        try:
            return await scorer.score(spec, group)
        except VoidGroup as error:
            raise VoidGroup(f"{spec.name}: {error}" if len(group.prompt.rewards) > 1 else error) from None


def void(group: RolloutGroup, reason: str) -> ScoredGroup:
    """A group that is not to be trained on."""
    return ScoredGroup(rollout=group, void_reason=clean(f"reward: {reason}"))
