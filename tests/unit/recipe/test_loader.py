"""Loading a recipe: what is wrong with the file is said before anything starts."""

from itertools import islice
from pathlib import Path

import pytest

from slipstream.errors import ConfigError
from slipstream.recipe.loader import load_recipe

GOOD = """
from slipstream.recipe import Prompt, Settings
settings = Settings(steps=3)
def prompts(rng):
    while True:
        yield Prompt(text=str(rng.random()))
def reward(prompt, completion):
    return 1.0
"""


def write(tmp_path: Path, source: str) -> Path:
    path = tmp_path / "recipe.py"
    path.write_text(source)
    return path


def test_a_good_recipe_loads_and_is_named_after_its_directory(tmp_path: Path) -> None:
    directory = tmp_path / "My Task"
    directory.mkdir()
    assert load_recipe(write(directory, GOOD)).name == "my-task"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (GOOD.replace("def reward", "def score"), "has no `reward`"),
        (GOOD.replace("def prompts", "def tasks"), "has no `prompts`"),
        (GOOD.replace("settings =", "config ="), "has no `settings = Settings"),
        (GOOD.replace("steps=3", "steps=0"), "steps: Input should be greater than or equal to 1"),
        (GOOD.replace("steps=3", "step=3"), "step: no such setting; did you mean steps?"),
        (GOOD + "reward = 3\n", "`reward` is a int, expected a function"),
        (GOOD + "loop = 3\n", "`loop` is a int"),
        (GOOD + "rewards = ['x']\n", "`rewards` must hold"),
        (
            GOOD + "from slipstream.recipe import Reward\nrewards = [Reward(target='a:1')]\n",
            "rewards need different names",
        ),
        (GOOD + "import no_such_module_here\n", "ModuleNotFoundError: No module named 'no_such_module_here'"),
        (GOOD + "1 +\n", "SyntaxError"),
    ],
)
def test_a_faulty_recipe_is_refused_with_the_reason(tmp_path: Path, source: str, message: str) -> None:
    path = write(tmp_path, source)
    with pytest.raises(ConfigError) as error:
        load_recipe(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.py: no such recipe file"):
        load_recipe(tmp_path / "nowhere.py")


def test_overrides_are_checked_like_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    assert load_recipe(path, {"steps": 7}).settings.steps == 7
    with pytest.raises(ConfigError, match="steps"):
        load_recipe(path, {"steps": -1})


def test_prompts_go_on_from_any_position_as_if_never_interrupted(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    whole = [p.text for p in islice(load_recipe(path).prompts_from(0), 10)]
    assert [p.text for p in islice(load_recipe(path).prompts_from(4), 6)] == whole[4:]


def test_a_list_of_prompts_is_repeated_in_a_new_order_each_time(tmp_path: Path) -> None:
    source = GOOD.replace(
        "def prompts(rng):", "prompts = [Prompt(text=str(i)) for i in range(20)]\ndef other(rng):"
    )
    texts = [p.text for p in islice(load_recipe(write(tmp_path, source)).prompts_from(0), 40)]
    assert sorted(texts[:20]) == sorted(texts[20:]) == sorted(map(str, range(20)))
    assert texts[:20] != texts[20:]


@pytest.mark.parametrize(
    ("body", "message"),
    [("yield 'text'", "prompt 0 is a str"), ("yield Prompt(text='a')", "`prompts` ended after 1")],
)
def test_prompts_that_are_wrong_or_run_out_say_where(tmp_path: Path, body: str, message: str) -> None:
    source = GOOD.replace("    while True:\n        yield Prompt(text=str(rng.random()))", f"    {body}")
    recipe = load_recipe(write(tmp_path, source))
    with pytest.raises(ConfigError, match=message):
        list(recipe.prompts_from(0))
