"""Loads a recipe file and checks it before anything starts."""

import difflib
import importlib.util
import random
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from slipstream.errors import ConfigError
from slipstream.recipe.settings import Reward, Settings
from slipstream.recipe.types import Prompt

if TYPE_CHECKING:
    from slipstream.recipe.run import Run

Loop = Callable[["Run"], Awaitable[None]]


@dataclass(frozen=True)
class Recipe:
    """A checked recipe."""

    path: Path
    settings: Settings
    prompts: Callable[[random.Random], Iterator[Prompt]] | Sequence[Prompt]
    reward: Callable[..., Any] | None
    rewards: Sequence[Reward]
    loop: Loop | None

    @property
    def name(self) -> str:
        """Default name of its runs."""
        stem = self.path.parent.name if self.path.stem == "recipe" else self.path.stem
        return "".join(c if c.isalnum() or c in "._-" else "-" for c in stem.lower()) or "run"

    def prompts_from(self, start: int) -> Iterator[Prompt]:
        """Prompts from position `start` on; the same ones in every process, for ever.

        Raises:
            ConfigError: the recipe ran out of prompts or yielded something else.
        """
        position = start
        for item in islice(self._all_prompts(), start, None):
            if not isinstance(item, Prompt):
                raise ConfigError(f"{self.path}: prompt {position} is a {type(item).__name__}, not a Prompt")
            yield item
            position += 1
        raise ConfigError(
            f"{self.path}: `prompts` ended after {position}; it must go on for as long as it is asked"
        )

    def _all_prompts(self) -> Iterator[Any]:
        rng = random.Random(self.settings.seed)
        if callable(self.prompts):
            yield from self.prompts(rng)
            return
        while self.prompts:
            order = list(range(len(self.prompts)))
            rng.shuffle(order)
            for index in order:
                yield self.prompts[index]


def load_recipe(path: Path, overrides: dict[str, Any] | None = None) -> Recipe:
    """Imports and checks a recipe.

    Args:
        overrides: settings that replace those of the file.

    Raises:
        ConfigError: says what is missing or wrong, and where.
    """
    module = _import(path)
    settings = getattr(module, "settings", None)
    if not isinstance(settings, Settings):
        raise ConfigError(f"{path}: has no `settings = Settings(...)` from slipstream.recipe")
    prompts = getattr(module, "prompts", None)
    if not callable(prompts) and not (isinstance(prompts, Sequence) and prompts):
        raise ConfigError(
            f"{path}: has no `prompts`: a function of a random.Random that yields Prompt, or a list of them"
        )
    reward, rewards = getattr(module, "reward", None), tuple(getattr(module, "rewards", ()))
    if reward is None and not rewards:
        raise ConfigError(
            f"{path}: has no `reward`: write `def reward(prompt, completion) -> float`, "
            'or `rewards = [Reward(target="host:port")]` for a service'
        )
    if reward is not None and not callable(reward):
        raise ConfigError(f"{path}: `reward` is a {type(reward).__name__}, expected a function")
    loop = getattr(module, "loop", None)
    if loop is not None and not callable(loop):
        raise ConfigError(f"{path}: `loop` is a {type(loop).__name__}, expected `async def loop(run)`")
    if not all(isinstance(each, Reward) for each in rewards):
        raise ConfigError(f"{path}: `rewards` must hold slipstream.recipe.Reward only")
    names = [each.name for each in rewards] + (["reward"] if reward is not None else [])
    if len(set(names)) < len(names):
        raise ConfigError(
            f"{path}: rewards need different names, not {', '.join(sorted(names))}; set Reward(name=...)"
        )
    return Recipe(path, _override(path, settings, overrides or {}), prompts, reward, rewards, loop)


def _override(path: Path, settings: Settings, overrides: dict[str, Any]) -> Settings:
    try:
        return Settings.model_validate(settings.model_dump() | overrides)
    except ValidationError as error:
        raise ConfigError(f"{path}: {_details(error)}") from None


def _details(error: ValidationError) -> str:
    return "; ".join(_detail(".".join(map(str, each["loc"])), each) for each in error.errors())


def _detail(name: str, error: Any) -> str:
    if error["type"] != "extra_forbidden":
        return f"{name}: {error['msg']}"
    near = difflib.get_close_matches(name, [*Settings.model_fields, *Reward.model_fields], 1)
    return f"{name}: no such setting{f'; did you mean {near[0]}?' if near else ''}"


def _import(path: Path) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{path}: no such recipe file")
    directory = str(path.resolve().parent)
    if directory not in sys.path:
        sys.path.insert(0, directory)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except ValidationError as error:
        raise ConfigError(f"{path}: settings: {_details(error)}") from None
    except Exception as error:
        raise ConfigError(f"{path}: {type(error).__name__}: {error}") from error
    return module
