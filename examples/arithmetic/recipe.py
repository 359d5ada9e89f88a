"""Teaches a small model to add two-digit numbers and to answer with the bare number.

SmolLM2-135M-Instruct gets about one sum in eight fully right at first. Two solved sums before the question
show it the form; the reward is 1 for the bare right number, less for a number that is part of the answer.
"""

import random
import re
from collections.abc import Iterator

from slipstream.recipe import Completion, Prompt, Settings

settings = Settings(
    steps=30,
    groups_per_step=8,
    group_size=8,
    max_lag=1,
    learning_rate=2e-5,
    temperature=1.0,
    max_tokens=12,
)


def prompts(rng: random.Random) -> Iterator[Prompt]:
    """Sums of two numbers from 10 to 49, for ever."""
    while True:
        a, b = rng.randint(10, 49), rng.randint(10, 49)
        yield Prompt(
            messages=[
                {"role": "user", "content": "What is 12 + 7?"},
                {"role": "assistant", "content": "19"},
                {"role": "user", "content": "What is 23 + 14?"},
                {"role": "assistant", "content": "37"},
                {"role": "user", "content": f"What is {a} + {b}?"},
            ],
            metadata={"answer": a + b},
        )


def reward(prompt: Prompt, completion: Completion) -> float:
    """1 for the bare right number, 0.3 for the right number among other text, 0.1 for a bare wrong number."""
    text, answer = completion.text.strip(), str(prompt.metadata["answer"])
    if text == answer:
        return 1.0
    numbers = re.findall(r"\d+", text)
    if numbers and numbers[0] == answer:
        return 0.3
    return 0.1 if text.isdigit() else 0.0
