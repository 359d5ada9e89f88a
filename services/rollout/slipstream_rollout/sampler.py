"""From a prompt group to a rollout group: tokens, completions, text, version spans."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.errors import ConfigError
from slipstream.v1.common_pb2 import Version
from slipstream.v1.rollout_pb2 import Completion, FinishReason, PromptGroup, RolloutGroup, VersionSpan
from slipstream.weights.manifest import parse_version, version_str
from slipstream_rollout.engine import BASE_LABEL, Engine, EngineLostError, Sampled, Sampling, Span
from slipstream_rollout.tokens import Tokens


def make_label(run_id: str, version: Version) -> str:
    """What the engine stamps on tokens sampled by a version of a run."""
    return f"{run_id}/{version_str(version)}"


def read_label(label: str) -> tuple[str, Version]:
    """(run, version) of a label; ("", 0-0) for the weights that the engine started with."""
    if label == BASE_LABEL:
        return "", Version()
    run_id, _, version = label.rpartition("/")
    return run_id, parse_version(version)


def min_version(prompt: PromptGroup) -> Version | None:
    """The oldest weights that may sample a group; None for any."""
    return prompt.min_version if prompt.HasField("min_version") else None


@dataclass
class Sampler:
    """Samples groups with one engine. Counts what it does."""

    engine: Engine
    tokens: Tokens
    replica_id: str
    groups_done: int = 0
    tokens_generated: int = 0
    requests_lost: int = 0

    async def sample(self, prompt: PromptGroup) -> RolloutGroup:
        """Samples one group.

        Raises:
            ConfigError: the group can never be sampled; the message is its void reason.
            EngineLostError: the engine gave it up.
        """
        arrived = time.monotonic()
        prompt_ids = await asyncio.to_thread(self.tokens.encode, prompt)
        try:
            completions = await self.engine.generate(
                prompt_ids, prompt.num_samples, _sampling(prompt), prompt.group_id
            )
        except EngineLostError as error:
            self.requests_lost += error.requests
            raise
        last_token = time.monotonic()
        _check_spans(prompt, completions)
        texts = await asyncio.to_thread(lambda: [self.tokens.decode(c.token_ids) for c in completions])
        self.groups_done += 1
        self.tokens_generated += sum(len(c.token_ids) for c in completions)
        return RolloutGroup(
            prompt=prompt,
            prompt_token_ids=prompt_ids,
            completions=[
                _completion(f"{prompt.group_id}/{i}", c, text)
                for i, (c, text) in enumerate(zip(completions, texts, strict=True))
            ],
            replica_id=self.replica_id,
            duration_s=last_token - arrived,
        )

    def void(self, prompt: PromptGroup, reason: str) -> RolloutGroup:
        """The group's place in the record when it cannot be sampled."""
        return RolloutGroup(prompt=prompt, replica_id=self.replica_id, void_reason=f"rollout: {reason}")


def _sampling(prompt: PromptGroup) -> Sampling:
    wanted = prompt.sampling
    # Direct requests, which belong to no run, may be greedy; a run's are trained on.
    if wanted.temperature == 0 and prompt.run_id:
        raise ConfigError("temperature is 0; sampling needs one above 0, or there is nothing to learn from")
    return Sampling(
        max_tokens=wanted.max_tokens,
        temperature=wanted.temperature,
        seed=wanted.seed if wanted.HasField("seed") else None,
        stop_token_ids=tuple(wanted.stop_token_ids),
    )


def _check_spans(prompt: PromptGroup, completions: Sequence[Sampled]) -> None:
    """Tokens of another run's weights would be trained on as if they were this run's."""
    runs = {read_label(span.label)[0] for c in completions for span in c.spans}
    if prompt.run_id and runs - {prompt.run_id}:
        raise ConfigError(f"sampled by weights of {sorted(runs)}, not of run {prompt.run_id}")


def _completion(sample_id: str, sampled: Sampled, text: str) -> Completion:
    return Completion(
        sample_id=sample_id,
        token_ids=sampled.token_ids,
        logprobs=sampled.logprobs,
        text=text,
        finish_reason=(
            FinishReason.FINISH_REASON_STOP if sampled.stopped else FinishReason.FINISH_REASON_LENGTH
        ),
        spans=[_span(span) for span in sampled.spans],
    )


def _span(span: Span) -> VersionSpan:
    return VersionSpan(version=read_label(span.label)[1], start=span.start, end=span.end)
