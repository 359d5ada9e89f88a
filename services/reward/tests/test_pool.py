"""Python rewards in real worker processes."""

import asyncio
import os
import textwrap
import time
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from slipstream_reward.pool import WorkerPool
from slipstream_reward.process import Function, worker_environment

from slipstream.clock import SystemClock
from slipstream.recipe.call import LoadError

PROMPT = {"text": "What is 2 + 2?", "metadata": {"answer": 4}, "group_id": "demo/0"}
ANSWERS = [{"text": text, "token_ids": [1, 2], "sample_id": f"demo/0/{i}"} for i, text in enumerate("4567")]

MakeFunction = Callable[[str], Function]


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(2, tmp_path, SystemClock(), load_timeout_s=30)
    yield pool
    await pool.close()


@pytest.fixture
def function(tmp_path: Path) -> MakeFunction:
    made = iter(range(100))

    def make(source: str) -> Function:
        path = tmp_path / f"{next(made)}.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("recipe.py", textwrap.dedent(source))
        return Function(path, "recipe", "reward")

    return make


async def one(pool: WorkerPool, function: Function, answer: int = 0, timeout_s: float = 20) -> dict[str, Any]:
    return (await pool.score(function, PROMPT, [ANSWERS[answer]], timeout_s))[0]


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


async def until(condition: Callable[[], bool], timeout_s: float = 10) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_function_sees_prompt_and_completion(pool: WorkerPool, function: MakeFunction) -> None:
    plain = function("""
        from slipstream.recipe import Completion, Prompt
        def reward(prompt: Prompt, completion: Completion) -> float:
            assert prompt.group_id == "demo/0" and completion.sample_id.startswith("demo/0/")
            assert list(completion.token_ids) == [1, 2] and not completion.truncated
            return float(completion.text == str(prompt.metadata["answer"]))
    """)
    assert await one(pool, plain, 0) == {"value": 1.0, "parts": {}}
    assert await one(pool, plain, 1) == {"value": 0.0, "parts": {}}


@pytest.mark.parametrize(
    ("expression", "value", "parts"),
    [
        ("True", 1.0, {}),
        ("3", 3.0, {}),
        ("__import__('numpy').float32(0.5)", 0.5, {}),
        ("__import__('numpy').array(2)", 2.0, {}),
        ("__import__('fractions').Fraction(1, 4)", 0.25, {}),
        ("{'right': 1, 'form': 0.5}", 1.5, {"right": 1.0, "form": 0.5}),
        ("{'reward': 0.2, 'length': 7}", 0.2, {"reward": 0.2, "length": 7.0}),
    ],
)
async def test_numbers_and_named_parts_are_rewards(
    pool: WorkerPool, function: MakeFunction, expression: str, value: float, parts: dict[str, float]
) -> None:
    got = await one(pool, function(f"def reward(prompt, completion): return {expression}"))
    assert got == {"value": value, "parts": parts}


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("None", "returned None, expected a finite number (does a branch lack its return?)"),
        ("float('nan')", "returned nan, expected a finite number"),
        ("float('-inf')", "returned -inf, expected a finite number"),
        ("10 ** 400", "int too large to convert to float"),
        ("'1.0'", "returned '1.0' of type str, expected a finite number"),
        ("[1.0]", "returned [1.0] of type list, expected a finite number"),
        ("1j", "returned 1j of type complex, expected a finite number"),
        ("__import__('numpy').ones(1)", "returned array([1.]) of type ndarray, expected a finite number"),
        ("{}", "returned an empty dict"),
        ("{'a': None}", "part 'a' is None, expected a finite number"),
        ("{'a': 1e308, 'b': 1e308}", "expected a finite number"),
        ("{1: 1.0}", "returned a dict with the key 1 of type int, expected strings"),
    ],
)
async def test_what_is_no_finite_number_is_an_error(
    pool: WorkerPool, function: MakeFunction, expression: str, reason: str
) -> None:
    got = await one(pool, function(f"def reward(prompt, completion): return {expression}"))
    assert reason in got["error"]
    assert "value" not in got


async def test_an_exception_is_reported_with_its_line(pool: WorkerPool, function: MakeFunction) -> None:
    raising = function("""
        import json

        def parse(text):
            return json.loads("{" + text)

        def reward(prompt, completion):
            return parse(completion.text)
    """)
    error = (await one(pool, raising))["error"]
    assert error.startswith("JSONDecodeError: Expecting property name")
    assert error.endswith("(recipe.py:5 in parse)")


async def test_leaving_the_process_politely_is_an_error_too(pool: WorkerPool, function: MakeFunction) -> None:
    got = await one(pool, function("import sys\ndef reward(prompt, completion): sys.exit('bye')"))
    assert got == {"error": "SystemExit: bye (recipe.py:2 in reward)"}


async def test_a_hang_costs_that_completion_alone(pool: WorkerPool, function: MakeFunction) -> None:
    hanging = function("""
        import time
        def reward(prompt, completion):
            while completion.text == "5":
                time.sleep(60)
            return 1
    """)
    results = await asyncio.gather(*(one(pool, hanging, i, 1.5 if i == 1 else 20) for i in range(4)))
    assert [r.get("value") for r in results] == [1.0, None, 1.0, 1.0]
    assert results[1] == {"error": "did not return within 1.5 s"}


async def test_what_a_hanging_function_started_is_killed_with_it(
    pool: WorkerPool, function: MakeFunction, tmp_path: Path
) -> None:
    hanging = function(f"""
        import pathlib, subprocess
        def reward(prompt, completion):
            child = subprocess.Popen(["sleep", "600"])
            pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(child.pid))
            child.wait()
    """)
    assert "did not return" in (await one(pool, hanging, timeout_s=3))["error"]
    child = int((tmp_path / "pid").read_text())
    await until(lambda: gone(child))


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("os._exit(3)", "the worker exited with code 3"),
        ("os.kill(os.getpid(), 9)", "the worker was killed (SIGKILL: out of memory?)"),
        ("ctypes.string_at(0)", "the worker died of SIGSEGV (recipe.py:4 in reward)"),
        ("os.close(1); os._exit(4)", "the worker exited with code 4"),
    ],
)
async def test_a_crash_is_survived_and_reported(
    pool: WorkerPool, function: MakeFunction, statement: str, reason: str
) -> None:
    crashing = function(f"""
        import ctypes, os
        def reward(prompt, completion):
            if completion.text == "5": {statement}
            return 1
    """)
    results = await asyncio.gather(*(one(pool, crashing, i) for i in range(4)))
    assert [r.get("value") for r in results] == [1.0, None, 1.0, 1.0]
    assert results[1] == {"error": reason}


async def test_an_accidental_crash_is_tried_again(
    pool: WorkerPool, function: MakeFunction, tmp_path: Path
) -> None:
    once = function(f"""
        import os, pathlib
        mark = pathlib.Path({str(tmp_path / "mark")!r})
        def reward(prompt, completion):
            if not mark.exists():
                mark.touch()
                os._exit(1)
            return 1
    """)
    assert await one(pool, once) == {"value": 1.0, "parts": {}}


async def test_output_goes_nowhere_near_the_answers_and_is_logged_only_with_an_error(
    pool: WorkerPool,
    function: MakeFunction,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    chatty = function("""
        import os, sys
        assert sys.stdin.read() == ""
        def reward(prompt, completion):
            print("x" * 200_000)
            print("loud", file=sys.stderr)
            os.write(1, b"louder")
            return 1 / (completion.text == "4")
    """)
    assert await one(pool, chatty, 0) == {"value": 1.0, "parts": {}}
    assert not caplog.records
    assert "ZeroDivisionError" in (await one(pool, chatty, 1))["error"]
    assert capfd.readouterr().out == ""
    assert sum(len(r.getMessage()) for r in caplog.records) < 2000


async def test_a_group_function_gets_all_completions(pool: WorkerPool, function: MakeFunction) -> None:
    ranking = function("""
        def reward(prompt, completions):
            order = sorted(c.text for c in completions)
            return [order.index(c.text) for c in completions]
    """)
    assert await pool.kind(ranking) == "group"
    results = await pool.score(ranking, PROMPT, ANSWERS, 20)
    assert [r["value"] for r in results] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("[1]", "returned 1 rewards for 4 completions"),
        ("1.0", "returned 1.0 of type float, expected a list of 4 rewards"),
        ("'4567'", "returned '4567' of type str, expected a list of 4 rewards"),
        ("1 / 0", "ZeroDivisionError: division by zero (recipe.py:1 in reward)"),
    ],
)
async def test_a_group_function_that_fails_fails_all(
    pool: WorkerPool, function: MakeFunction, expression: str, reason: str
) -> None:
    failing = function(f"def reward(prompt, completions): return {expression}")
    assert await pool.score(failing, PROMPT, ANSWERS, 20) == [{"error": reason}] * 4


async def test_one_wrong_item_of_a_group_function_fails_alone(
    pool: WorkerPool, function: MakeFunction
) -> None:
    mixed = function("def reward(prompt, completions): return [1, None, {'a': 2}, float('nan')]")
    results = await pool.score(mixed, PROMPT, ANSWERS, 20)
    assert [r.get("value") for r in results] == [1, None, 2, None]


async def test_async_functions_run_together_and_time_out_alone(
    pool: WorkerPool, function: MakeFunction
) -> None:
    waiting = function("""
        import asyncio
        async def reward(prompt, completion):
            await asyncio.sleep(60 if completion.text == "5" else 0.5)
            if completion.text == "6":
                raise TimeoutError("of its own")
            return 1
    """)
    assert await pool.kind(waiting) == "async"
    began = time.monotonic()
    results = await pool.score(waiting, PROMPT, ANSWERS, 1.5)
    assert time.monotonic() - began < 4
    assert [r.get("value") for r in results] == [1.0, None, None, 1.0]
    assert results[1]["error"] == "did not return within 1.5 s"
    assert results[2]["error"] == "TimeoutError: of its own (recipe.py:6 in reward)"


async def test_a_function_that_returns_an_awaitable_is_awaited(
    pool: WorkerPool, function: MakeFunction
) -> None:
    got = await one(pool, function("async def two(): return 2\nreward = lambda prompt, completion: two()"))
    assert got == {"value": 2.0, "parts": {}}


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("x = 1", "recipe.py has no function reward"),
        ("reward = 1", "recipe.reward is a int, expected a function"),
        ("def reward(prompt): return 1", "must take two arguments: `def reward(prompt, completion)`"),
        ("import nonesuch", "No module named 'nonesuch' (recipe.py:1 in <module>)"),
        ("def reward(:", "SyntaxError"),
        ("import os; os._exit(7)", "importing recipe.py: the worker exited with code 7"),
        ("import time; time.sleep(60)", "importing recipe.py took more than 2 s"),
    ],
)
async def test_what_cannot_be_loaded_says_why(
    tmp_path: Path, function: MakeFunction, source: str, reason: str
) -> None:
    pool = WorkerPool(1, tmp_path, SystemClock(), load_timeout_s=2 if "sleep" in source else 30)
    try:
        with pytest.raises(LoadError) as caught:
            await pool.kind(function(source))
        assert reason in str(caught.value)
        assert await one(pool, function("def reward(prompt, completion): return 1")) == {
            "value": 1.0,
            "parts": {},
        }
    finally:
        await pool.close()


async def test_a_recipe_that_cannot_be_imported_is_not_imported_again_for_each_group(
    pool: WorkerPool, function: MakeFunction, tmp_path: Path
) -> None:
    failing = function(f"""
        import pathlib, time
        with open({str(tmp_path / "count")!r}, "a") as file: file.write("x")
        time.sleep(0.5)
        raise OSError("no model here")
    """)
    results = await asyncio.gather(*(pool.kind(failing) for _ in range(10)), return_exceptions=True)
    assert all(isinstance(r, LoadError) and "no model here" in str(r) for r in results)
    assert (tmp_path / "count").read_text() == "x"


async def test_a_missing_module_says_so(pool: WorkerPool, function: MakeFunction) -> None:
    there = function("def reward(prompt, completion): return 1")
    with pytest.raises(LoadError, match="the bundle has no module other"):
        await pool.kind(Function(there.zip_path, "other", "reward"))


async def test_bundles_do_not_see_each_others_modules(pool: WorkerPool, function: MakeFunction) -> None:
    bundles = [function(f"def reward(prompt, completion): return {i}") for i in range(4)]
    results = await asyncio.gather(*(one(pool, bundle) for bundle in bundles * 3))
    assert [r["value"] for r in results] == [0, 1, 2, 3] * 3
    assert len(pool.pids) <= 2


async def test_a_worker_is_kept_for_the_next_call(pool: WorkerPool, function: MakeFunction) -> None:
    pid = function("import os\ndef reward(prompt, completion): return os.getpid()")
    assert (await one(pool, pid))["value"] == (await one(pool, pid))["value"]


async def test_closing_leaves_no_process(tmp_path: Path, function: MakeFunction) -> None:
    pool = WorkerPool(2, tmp_path, SystemClock(), load_timeout_s=30)
    await pool.start()
    busy = asyncio.create_task(
        one(pool, function("import time\ndef reward(prompt, completion): time.sleep(60)"))
    )
    await asyncio.sleep(0.5)
    pids = pool.pids
    assert len(pids) == 2
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)
    await pool.close()
    assert all(gone(pid) for pid in pids)


async def test_a_killed_idle_worker_is_replaced(pool: WorkerPool, function: MakeFunction) -> None:
    fine = function("def reward(prompt, completion): return 1")
    await one(pool, fine)
    for pid in pool.pids:
        os.kill(pid, 9)
    await until(lambda: all(gone(pid) for pid in pool.pids))
    assert await one(pool, fine) == {"value": 1.0, "parts": {}}


async def test_memory_limit_ends_in_an_error(tmp_path: Path, function: MakeFunction) -> None:
    pool = WorkerPool(1, tmp_path, SystemClock(), load_timeout_s=30, memory_bytes=512 * 1024**2)
    try:
        greedy = function("def reward(prompt, completion): return len(bytearray(2**30))")
        assert (await one(pool, greedy))["error"] == "MemoryError (recipe.py:1 in reward)"
    finally:
        await pool.close()


async def test_a_blank_worker_is_light(pool: WorkerPool, function: MakeFunction) -> None:
    modules = function("""
        import sys
        def reward(prompt, completion):
            return len({"torch", "vllm", "transformers", "grpc", "numpy", "pydantic"} & sys.modules.keys())
    """)
    assert (await one(pool, modules))["value"] == 0


def test_workers_do_not_get_the_platforms_credentials() -> None:
    env = worker_environment({"PATH": "/bin", "SLIPSTREAM_STORE_SECRET_KEY": "s3cret"})
    assert env == {"PATH": "/bin", "OMP_NUM_THREADS": "1"}
