"""How a reward function is loaded from a bundle and called. Imports little, so that workers start fast."""

import asyncio
import inspect
import math
import sys
import traceback
import zipimport
from collections.abc import Callable, Mapping, Sequence
from importlib.util import module_from_spec
from typing import Any

from slipstream.errors import ConfigError, RewardError
from slipstream.recipe.types import Completion, Prompt

Json = dict[str, Any]

_MAX_MESSAGE_CHARS = 400


class LoadError(RewardError):
    """The bundle has no such function, or it cannot be called as a reward."""


class RewardFunction:
    """A recipe's reward function.

    `kind` says how it wants to be called: `completion` for `reward(prompt, completion)`, `async` for the same
    as a coroutine function, `group` for `reward(prompt, completions)`, which returns a list.
    """

    def __init__(self, call: Callable[..., Any], zip_path: str) -> None:
        self._call, self._zip = call, zip_path
        names = _two_arguments(call)
        if names[1] == "completions":
            self.kind = "group"
        else:
            self.kind = "async" if inspect.iscoroutinefunction(call) else "completion"

    @classmethod
    def load(cls, zip_path: str, module_name: str, name: str) -> "RewardFunction":
        """Imports the module from the bundle.

        Raises:
            LoadError: says what is missing.
        """
        importer = zipimport.zipimporter(zip_path)
        spec = importer.find_spec(module_name)
        if spec is None or spec.loader is None:
            raise LoadError(f"the bundle has no module {module_name}")
        sys.path.insert(0, zip_path)
        # Not import_module: the recipe may be called like a module that is loaded already.
        module = sys.modules[module_name] = module_from_spec(spec)
        spec.loader.exec_module(module)
        call = getattr(module, name, None)
        if call is None:
            raise LoadError(f"{module_name}.py has no function {name}")
        if not callable(call):
            raise LoadError(f"{module_name}.{name} is a {type(call).__name__}, expected a function")
        return cls(call, zip_path)

    def score(
        self, runner: asyncio.Runner, prompt: Json, completions: Sequence[Json], timeout_s: float
    ) -> list[Json]:
        """One result per completion, in order; never raises."""
        try:
            task, answers = Prompt(**prompt), [Completion(**each) for each in completions]
        except ConfigError as error:
            return [{"error": str(error)}] * len(completions)
        if self.kind == "async":
            return runner.run(self._score_together(task, answers, timeout_s))
        if self.kind == "group":
            return self._score_group(runner, task, answers)
        return [self._score_one(runner, task, each) for each in answers]

    def _score_one(self, runner: asyncio.Runner, prompt: Prompt, answer: Completion) -> Json:
        try:
            return outcome(_finish(runner, self._call(prompt, answer)))
        except BaseException as error:
            return {"error": describe(error, self._zip)}

    def _score_group(self, runner: asyncio.Runner, prompt: Prompt, answers: list[Completion]) -> list[Json]:
        try:
            values = _finish(runner, self._call(prompt, answers))
            if isinstance(values, str | Mapping) or not hasattr(values, "__len__"):
                raise TypeError(f"returned {_show(values)}, expected a list of {len(answers)} rewards")
            if len(values) != len(answers):
                raise ValueError(f"returned {len(values)} rewards for {len(answers)} completions")
        except BaseException as error:
            return [{"error": describe(error, self._zip)}] * len(answers)
        return [self._outcome(value) for value in values]

    def _outcome(self, value: Any) -> Json:
        try:
            return outcome(value)
        except BaseException as error:
            return {"error": describe(error, self._zip)}

    async def _score_together(
        self, prompt: Prompt, answers: list[Completion], timeout_s: float
    ) -> list[Json]:
        async def one(answer: Completion) -> Json:
            try:
                async with asyncio.timeout(timeout_s) as limit:
                    return outcome(await self._call(prompt, answer))
            except BaseException as error:
                if isinstance(error, TimeoutError) and limit.expired():
                    return {"error": f"did not return within {timeout_s:g} s"}
                return {"error": describe(error, self._zip)}

        return await asyncio.gather(*(one(each) for each in answers))


def _two_arguments(call: Callable[..., Any]) -> tuple[str, str]:
    try:
        signature = inspect.signature(call)
        bound = signature.bind(None, None)
    except TypeError:
        raise LoadError(f"{call!r:.100} must take two arguments: `def reward(prompt, completion)`") from None
    except ValueError:
        return ("prompt", "completion")
    names = (*bound.arguments, "")
    return names[0], names[1]


def _finish(runner: asyncio.Runner, value: Any) -> Any:
    """The value itself, or what it comes to when it is to be awaited."""
    if not inspect.isawaitable(value):
        return value

    async def wait() -> Any:
        return await value

    return runner.run(wait())


def outcome(value: Any) -> Json:
    """What a reward function returned, as a result: a number, or named parts with their sum as the value
    unless a part called `reward` gives it.

    Raises:
        TypeError, ValueError: it is not a finite number, nor a dict of such.
    """
    if not isinstance(value, Mapping):
        return {"value": _number(value, "returned"), "parts": {}}
    if not value:
        raise ValueError("returned an empty dict, expected a number or a dict of numbers")
    for key in value:
        if not isinstance(key, str):
            raise TypeError(f"returned a dict with the key {_show(key)}, expected strings")
    parts = {key: _number(part, f"part {key!r} is") for key, part in value.items()}
    total = parts["reward"] if "reward" in parts else sum(parts.values())
    return {"value": _number(total, "the sum of the parts is"), "parts": parts}


def _number(value: Any, what: str) -> float:
    # numpy and torch scalars are numbers here, arrays are not.
    shape = getattr(value, "shape", ())
    if value is None or not hasattr(value, "__float__") or tuple(shape) != ():
        hint = " (does a branch lack its return?)" if value is None else ""
        raise TypeError(f"{what} {_show(value)}, expected a finite number{hint}")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{what} {number}, expected a finite number")
    return number


def _show(value: Any) -> str:
    if value is None:
        return "None"
    try:
        return f"{value!r:.80} of type {type(value).__name__}"
    except Exception:
        return f"a {type(value).__name__}"


def describe(error: BaseException, zip_path: str) -> str:
    """An error for a person: what went wrong, and the last line of the recipe that had a part in it."""
    try:
        text = str(error)[:_MAX_MESSAGE_CHARS]
    except Exception:
        text = "(the message cannot be shown)"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.filename.startswith(zip_path)]
    if not own:
        # Raised here, about what the function returned: the sentence says it all.
        ours = not frames or frames[-1].filename == __file__
        return text if ours and text else f"{type(error).__name__}: {text}".rstrip(": ")
    where = f"{own[-1].filename.removeprefix(zip_path).lstrip('/')}:{own[-1].lineno}"
    return f"{type(error).__name__}: {text}".rstrip(": ") + f" ({where} in {own[-1].name})"
