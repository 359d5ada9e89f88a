"""From what each reward says to one score per completion. Pure."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.errors import RewardError
from slipstream.v1.reward_pb2 import SCORE_STATUS_ERROR, SCORE_STATUS_OK, Score
from slipstream.v1.rollout_pb2 import FINISH_REASON_LENGTH, PromptGroup, RewardSpec, RolloutGroup

DEFAULT_TIMEOUT_S = 30.0
_MAX_ERROR_CHARS = 500


class VoidGroup(RewardError):
    """The group cannot be scored at all; the message is its void reason."""


@dataclass(frozen=True)
class Outcome:
    """What one reward says about one completion: a finite value with named parts, or an error."""

    value: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    error: str = ""


def outcome_of(score: Score) -> Outcome:
    """The score that a RewardService returned, checked."""
    if score.status != SCORE_STATUS_OK:
        return Outcome(error=score.error or "the reward service gave no reason")
    for name, value in (("value", score.value), *score.parts.items()):
        if not math.isfinite(value):
            return Outcome(error=f"the reward service returned {name} = {value}, expected a finite number")
    return Outcome(score.value, dict(score.parts))


def combine(specs: Sequence[RewardSpec], outcomes: Sequence[Sequence[Outcome]]) -> list[Score]:
    """One score per completion: the weighted sum of all rewards, or the first error.

    Parts bear their own names when there is one reward; `<reward>/<part>` beside `<reward>` when there are
    several.

    Args:
        outcomes: by reward, then by completion.

    Raises:
        VoidGroup: not one completion could be scored.
    """
    scores = [_combine_one(specs, each) for each in zip(*outcomes, strict=True)]
    if all(score.status == SCORE_STATUS_ERROR for score in scores):
        raise VoidGroup(f"no completion could be scored: {scores[0].error}")
    return scores


def _combine_one(specs: Sequence[RewardSpec], outcomes: Sequence[Outcome]) -> Score:
    parts: dict[str, float] = {}
    for spec, outcome in zip(specs, outcomes, strict=True):
        prefix = f"{spec.name}: " if len(specs) > 1 else ""
        if outcome.error:
            return _failed(prefix + outcome.error)
        if len(specs) > 1:
            parts[spec.name] = outcome.value
            parts.update({f"{spec.name}/{name}": value for name, value in outcome.parts.items()})
        else:
            parts.update(outcome.parts or {spec.name or "reward": outcome.value})
    value = sum(
        (spec.weight if spec.HasField("weight") else 1.0) * o.value
        for spec, o in zip(specs, outcomes, strict=True)
    )
    if not math.isfinite(value):
        return _failed("the weighted sum of the rewards overflows")
    return Score(status=SCORE_STATUS_OK, value=value, parts=parts)


def _failed(error: str) -> Score:
    return Score(status=SCORE_STATUS_ERROR, error=clean(error))


def clean(text: str) -> str:
    """Text that fits a protobuf string and a log line."""
    return text[:_MAX_ERROR_CHARS].encode(errors="replace").decode()


def check(group: RolloutGroup) -> list[RewardSpec]:
    """The rewards of a group that is fit to be scored.

    Raises:
        VoidGroup: it is not.
    """
    prompt, found = group.prompt, len(group.completions)
    if found != prompt.num_samples or not found:
        raise VoidGroup(f"the rollout has {found} completions, {prompt.num_samples} expected")
    if not prompt.rewards:
        raise VoidGroup("the prompt names no reward")
    names = [spec.name for spec in prompt.rewards]
    for spec in prompt.rewards:
        if spec.WhichOneof("target") is None:
            raise VoidGroup(f"reward {spec.name!r} says neither a Python function nor a gRPC target")
        if not math.isfinite(spec.weight):
            raise VoidGroup(f"reward {spec.name!r} has the weight {spec.weight}")
        if names.count(spec.name) > 1:
            raise VoidGroup(f"two rewards are called {spec.name!r}")
    return list(prompt.rewards)


def timeout_of(spec: RewardSpec) -> float:
    """Seconds that a call for this reward may take."""
    return spec.timeout_s if spec.timeout_s > 0 else DEFAULT_TIMEOUT_S


def prompt_fields(prompt: PromptGroup) -> dict[str, Any]:
    """Fields of slipstream.recipe.Prompt.

    Raises:
        VoidGroup: the metadata is not a JSON object.
    """
    try:
        metadata = json.loads(prompt.metadata_json or "{}")
    except ValueError as error:
        raise VoidGroup(f"metadata_json of the prompt is not JSON: {error}") from None
    if not isinstance(metadata, dict):
        raise VoidGroup("metadata_json of the prompt is not a JSON object")
    messages = [{"role": m.role, "content": m.content} for m in prompt.chat.messages]
    return {"messages": messages, "text": prompt.text, "metadata": metadata, "group_id": prompt.group_id}


def prompt_text(prompt: PromptGroup) -> str:
    """The prompt for a RewardService: the text, or the turns of a chat as `role: content` lines."""
    return prompt.text or "\n".join(f"{m.role}: {m.content}" for m in prompt.chat.messages)


def completion_fields(group: RolloutGroup) -> list[dict[str, Any]]:
    """Fields of slipstream.recipe.Completion, per completion."""
    return [
        {
            "text": each.text,
            "token_ids": list(each.token_ids),
            "sample_id": each.sample_id,
            "truncated": each.finish_reason == FINISH_REASON_LENGTH,
        }
        for each in group.completions
    ]
