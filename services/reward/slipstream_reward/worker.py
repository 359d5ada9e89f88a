"""A reward worker: a process of its own that runs a recipe's reward function.

Started as `python -m slipstream_reward.worker BYTES` (of address space that it may take; 0: no limit). It
reads requests from stdin and writes one answer to each on stdout, as frames: length (4 bytes, big-endian),
then JSON. What the recipe prints goes to stderr. A worker serves one bundle for life, since two bundles may
hold modules of the same name. It imports next to nothing itself.

    {"load": {"zip": "/tmp/x/ab12.zip", "module": "recipe", "function": "reward"}}
        -> {"kind": "completion" | "group" | "async"} or {"error": "..."}
    {"score": {"prompt": {...}, "completions": [{...}, ...], "timeout_s": 30.0}}
        -> {"results": [{"value": 1.0, "parts": {}} | {"error": "..."}, ...]}
"""

import asyncio
import contextlib
import inspect
import json
import math
import os
import queue
import resource
import signal
import sys
import threading
import traceback
import zipimport
from collections.abc import Callable, Mapping, Sequence
from importlib.util import module_from_spec
from typing import Any, BinaryIO

from slipstream.errors import ConfigError
from slipstream.recipe.types import Completion, Prompt

Json = dict[str, Any]


def main() -> None:
    if limit := int(sys.argv[1]):
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    requests, responses = _take_stdio()
    pending: queue.SimpleQueue[Json] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(requests, pending), daemon=True).start()
    _offer_to_oom_killer()
    with asyncio.Runner() as runner:
        function: Function | None = None
        while True:
            request = pending.get()
            if "load" in request:
                function, answer = _load(request["load"])
            else:
                assert function is not None, "load comes before score"
                answer = {"results": function.score(runner, **request["score"])}
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            write_frame(responses, answer)


def _take_stdio() -> tuple[BinaryIO, BinaryIO]:
    """Keeps stdin and stdout for frames; the recipe gets an empty stdin, and its stdout is stderr."""
    requests, responses = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, responses


def _read(requests: BinaryIO, pending: "queue.SimpleQueue[Json]") -> None:
    while (request := read_frame(requests)) is not None:
        pending.put(request)
    # The service is gone: end at once, with whatever the recipe has started, even in the middle of a call.
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


def _offer_to_oom_killer() -> None:
    """When memory runs out, a worker is to go rather than the service."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("800")


def read_frame(stream: BinaryIO) -> Json | None:
    """Next frame, None at the end of the stream."""
    header = stream.read(4)
    if len(header) < 4:
        return None
    body = stream.read(int.from_bytes(header, "big"))
    return dict(json.loads(body))


def write_frame(stream: BinaryIO, message: Json) -> None:
    """Writes one frame."""
    body = json.dumps(message).encode()
    stream.write(len(body).to_bytes(4, "big") + body)
    stream.flush()


def _load(request: Json) -> "tuple[Function | None, Json]":
    try:
        function = Function.load(request["zip"], request["module"], request["function"])
    except LoadError as error:
        return None, {"error": str(error)}
    except BaseException as error:
        return None, {"error": f"importing {request['module']}.py: {describe(error, request['zip'])}"}
    return function, {"kind": function.kind}


class LoadError(Exception):
    """The bundle has no such function, or it cannot be called as a reward."""


class Function:
    """A recipe's reward function and how it wants to be called."""

    def __init__(self, call: Callable[..., Any], zip_path: str) -> None:
        self._call, self._zip = call, zip_path
        names = _two_arguments(call)
        if names[1] == "completions":
            self.kind = "group"
        else:
            self.kind = "async" if inspect.iscoroutinefunction(call) else "completion"

    @classmethod
    def load(cls, zip_path: str, module_name: str, name: str) -> "Function":
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
        return [_outcome_or_error(value) for value in values]

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


def _outcome_or_error(value: Any) -> Json:
    try:
        return outcome(value)
    except (TypeError, ValueError, OverflowError) as error:
        return {"error": str(error)}


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
        text = str(error)
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


if __name__ == "__main__":
    main()
