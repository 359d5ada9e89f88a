"""The model's tokenizer: prompts to token ids, token ids to text."""

import logging
from pathlib import Path

from slipstream.errors import ConfigError
from slipstream.v1.rollout_pb2 import PromptGroup

_log = logging.getLogger(__name__)


class Tokens:
    """Wraps the tokenizer of a checkpoint directory. Thread-safe for reading; call it off the event loop."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(directory))
        except (OSError, ValueError) as error:
            raise ConfigError(f"no usable tokenizer in {directory}: {error}") from error

    def encode(self, prompt: PromptGroup) -> list[int]:
        """Token ids of a prompt: text with the model's own special tokens, chat by its template.

        Raises:
            ConfigError: no prompt is set, or the model has no chat template, or the template refuses it.
        """
        kind = prompt.WhichOneof("prompt")
        if kind == "tokens":
            return list(prompt.tokens.token_ids)
        if kind == "text":
            return list(self._tokenizer(prompt.text)["input_ids"])
        if kind == "chat":
            turns = [{"role": m.role, "content": m.content} for m in prompt.chat.messages]
            try:
                ids = self._tokenizer.apply_chat_template(
                    turns, add_generation_prompt=True, tokenize=True, return_dict=False
                )
            except Exception as error:  # jinja errors, missing template: all mean the prompt cannot be built
                raise ConfigError(f"the chat template refuses the prompt: {error}") from error
            return list(ids)
        raise ConfigError("the prompt is neither text, nor chat, nor tokens")

    def decode(self, token_ids: list[int]) -> str:
        """Text of the tokens, special ones left out, spaces as they are."""
        return str(
            self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )
