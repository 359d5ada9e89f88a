"""Recipes that tests write to disk."""

from pathlib import Path

LETTERS = '''
"""Rewards the share of characters that are the letter a: a random model learns it within a few steps."""

from slipstream.recipe import Prompt, Settings

settings = Settings(
    steps={steps},
    groups_per_step=4,
    group_size=8,
    max_lag={max_lag},
    learning_rate={learning_rate},
    max_tokens=8,
    save_every={save_every},
)


def prompts(rng):
    while True:
        yield Prompt(text=rng.choice("bcdefgh") * 4)


def reward(prompt, completion):
    {reward}
'''


def letters(
    directory: Path,
    *,
    steps: int = 3,
    max_lag: int = 1,
    learning_rate: float = 1e-2,
    save_every: int = 1,
    reward: str = "return completion.text.count('a') / 8",
) -> Path:
    """Writes the recipe; returns its path."""
    path = directory / "letters.py"
    path.write_text(
        LETTERS.format(
            steps=steps, max_lag=max_lag, learning_rate=learning_rate, save_every=save_every, reward=reward
        )
    )
    return path
