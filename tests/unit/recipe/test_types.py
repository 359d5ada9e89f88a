"""Prompts as recipes yield them."""

from typing import Any

import pytest

from slipstream.errors import ConfigError
from slipstream.recipe import Prompt

TURNS = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


def test_a_chat_has_a_text_for_the_reward_function_to_read() -> None:
    assert Prompt(messages=TURNS).text == "user: 2 + 2?\nassistant: 4"


def test_a_text_stays_as_it_is() -> None:
    prompt = Prompt(text="2 + 2 =", metadata={"answer": 4})
    assert (prompt.text, prompt.messages, prompt.metadata) == ("2 + 2 =", (), {"answer": 4})


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, "needs `messages` or `text`"),
        ({"text": "x", "messages": TURNS}, "not both"),
        ({"messages": [{"role": "user"}]}, "a chat turn is"),
        ({"messages": [{"role": "user", "content": 4}]}, "a chat turn is"),
        ({"messages": ["hello"]}, "a chat turn is"),
        ({"text": "x", "metadata": {"answer": {1, 2}}}, "must be JSON"),
        ({"text": "x", "metadata": {"answer": float("nan")}}, "must be JSON"),
        ({"text": "x", "metadata": {1: 2}}, "string keys"),
        ({"text": "x", "metadata": [1]}, "string keys"),
    ],
)
def test_what_could_not_be_published_is_refused_where_it_is_made(
    arguments: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        Prompt(**arguments)
