"""What the service asks of an inference engine, whichever it is."""

import json
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from slipstream.delta.tensors import RawTensor, Weights
from slipstream.errors import ConfigError, SlipstreamError

BASE_LABEL = ""
"""Label of the weights that the engine loaded at its start, before any commit."""


class EngineLostError(SlipstreamError):
    """The engine gave requests up. The group they belong to cannot be completed."""

    def __init__(self, message: str, requests: int) -> None:
        super().__init__(message)
        self.requests = requests
        """Completions that were given up."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. Log-probs are those of the distribution that this defines."""

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy, with log-probs at temperature 1."""
    seed: int | None = None
    """Completion i uses seed + i."""
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) were sampled by the weights committed as `label`."""

    label: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Sampled:
    """One completion."""

    token_ids: list[int]
    """The end-of-sequence or stop token included."""
    logprobs: list[float]
    """Natural log, one per token."""
    stopped: bool
    """True for an end-of-sequence or stop token, False when max_tokens was reached."""
    spans: list[Span]
    """Tile [0, len(token_ids)) in order."""


@dataclass(frozen=True, slots=True)
class Committed:
    """How a commit went."""

    pause_ms: float
    """Time in which the engine took no step."""
    in_flight: int
    """Completions that were being sampled; all of them go on."""


class Engine(Protocol):
    """An inference engine whose weights can be replaced while it samples.

    Names and bytes of weights are those of the Hugging Face checkpoint. One `stage` or `commit` at a
    time; `generate` may run any number of times at once.
    """

    name: str

    async def start(self) -> None:
        """Loads the model.

        Raises:
            ConfigError: no such model, or one that the engine cannot run.
        """
        ...

    async def generate(
        self, prompt_token_ids: Sequence[int], n: int, sampling: Sampling, request_id: str
    ) -> list[Sampled]:
        """Samples n completions of one prompt.

        Raises:
            ConfigError: the request can never be served (see `check_request`).
            EngineLostError: the engine gave it up.
        """
        ...

    async def stage(self, weights: Weights, changed: Collection[str]) -> float:
        """Gets new weights ready beside those in use, while sampling goes on. Returns seconds.

        Args:
            weights: all tensors of the checkpoint.
            changed: names of those that differ from what was staged last.
        """
        ...

    async def commit(self, label: str) -> Committed:
        """Puts the staged weights to use; tokens sampled from now on carry `label`. Completions in
        flight go on with the new weights."""
        ...

    async def read_back(self) -> dict[str, RawTensor]:
        """The weights in use, in the checkpoint's layout, as the engine really computes with them; tied
        tensors under both names. vLLM on a CPU loses the sign of zeros."""
        ...

    async def close(self) -> None:
        """Frees memory and processes."""
        ...


def check_request(
    prompt: Sequence[int], n: int, sampling: Sampling, *, max_len: int, vocab_size: int
) -> None:
    """Refuses what no engine could sample.

    Raises:
        ConfigError: says which limit is broken and by how much.
    """
    if not prompt:
        raise ConfigError("the prompt has no tokens")
    if n < 1 or sampling.max_tokens < 1:
        raise ConfigError(f"num_samples is {n} and max_tokens {sampling.max_tokens}; both must be at least 1")
    if len(prompt) + sampling.max_tokens > max_len:
        raise ConfigError(
            f"a prompt of {len(prompt)} tokens and {sampling.max_tokens} new ones exceed the model length of "
            f"{max_len}; shorten it or raise SLIPSTREAM_ROLLOUT_MAX_MODEL_LEN"
        )
    if sampling.temperature != 0 and not (0.01 <= sampling.temperature <= 100):
        raise ConfigError(f"temperature is {sampling.temperature}; it must be between 0.01 and 100")
    if not math.isfinite(sampling.temperature):
        raise ConfigError("temperature is not a number")
    for token in (*prompt, *sampling.stop_token_ids):
        if not 0 <= token < vocab_size:
            raise ConfigError(f"token id {token} is outside the vocabulary of {vocab_size}")


def end_tokens(directory: Path) -> frozenset[int]:
    """Ids of the tokens that end a sequence, by generation_config.json, else config.json."""
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        found = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return frozenset([found] if isinstance(found, int) else found)
    return frozenset()


def add_token(spans: list[Span], label: str, position: int) -> None:
    """Extends the last span by the token at `position`, or opens a new one."""
    if spans and spans[-1].label == label:
        spans[-1] = Span(label, spans[-1].start, position + 1)
    else:
        spans.append(Span(label, position, position + 1))


def find_model(model: str) -> Path:
    """Directory of a checkpoint: `model` itself, or the hub's snapshot of that name.

    Raises:
        ConfigError: neither exists.
    """
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        return path
    if path.is_absolute() or path.is_dir():
        raise ConfigError(f"SLIPSTREAM_ROLLOUT_MODEL: no config.json in {path}")
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                model, allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
            )
        )
    except Exception as error:
        raise ConfigError(
            f"SLIPSTREAM_ROLLOUT_MODEL: {model} is neither a directory with a checkpoint nor a model on the "
            f"hub ({error})"
        ) from error
