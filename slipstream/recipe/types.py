"""What a recipe's prompts and reward function are made of."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.errors import ConfigError


@dataclass(frozen=True)
class Prompt:
    """One task. A recipe yields it with `messages` or `text`; its reward function gets it back.

    Raises:
        ConfigError: neither or both of `messages` and `text` are given, or `metadata` is not a JSON object.
    """

    messages: Sequence[Mapping[str, str]] = ()
    """Chat turns, oldest first: `{"role": "user", "content": "..."}`; the model's template is applied."""
    text: str = ""
    """Text as it stands, no template applied. Of a chat, the turns as `role: content` lines."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """JSON object for the reward function: the right answer, say. The model does not see it."""
    group_id: str = ""
    """`<run>/<sequence>`, set by the platform."""

    def __post_init__(self) -> None:
        if self.messages and self.text:
            raise ConfigError("a Prompt takes `messages` or `text`, not both")
        # A prompt that was published as tokens has an id and no text.
        if not self.messages and not self.text and not self.group_id:
            raise ConfigError("a Prompt needs `messages` or `text`")
        _check_metadata(self.metadata)
        if self.messages:
            object.__setattr__(self, "text", "\n".join(_turn(m) for m in self.messages))


@dataclass(frozen=True)
class Completion:
    """One sampled answer to a prompt, as a reward function sees it."""

    text: str
    """The answer, special tokens left out."""
    token_ids: Sequence[int] = ()
    """Sampled token ids, the end-of-sequence token included."""
    sample_id: str = ""
    """`<group_id>/<index>`."""
    truncated: bool = False
    """Whether it ended because `max_tokens` was reached."""


def _turn(message: Mapping[str, str]) -> str:
    keys = message.keys() if isinstance(message, Mapping) else set()
    if keys != {"role", "content"} or not all(isinstance(value, str) for value in message.values()):
        raise ConfigError(f'a chat turn is {{"role": "user", "content": "..."}}; found {message!r:.200}')
    return f"{message['role']}: {message['content']}"


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    if not isinstance(metadata, Mapping) or not all(isinstance(key, str) for key in metadata):
        raise ConfigError(f"metadata of a Prompt must be a dict with string keys; found {metadata!r:.200}")
    try:
        json.dumps(metadata, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"metadata of a Prompt must be JSON: {error}") from None
