"""Whole runs on the torch engine and a tiny model: learning, resuming, and what users do wrong."""

import re
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from slipstream.bus import open_bus
from slipstream.settings import CommonSettings
from slipstream.topics import ROLLOUTS, dead_letter_name
from tests.e2e.recipes import letters
from tests.e2e.stack import Deployment, deployment, interrupt, until_line
from tests.support.fixtures import Servers, make_topics, own_place
from tests.support.tiny_model import make_tiny_model

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.integration,
    pytest.mark.timeout(420),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.fixture(scope="module")
def settings(servers: Servers) -> CommonSettings:
    made = own_place(servers)
    make_topics(made)
    return made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(
    settings: CommonSettings, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Deployment]:
    """One deployment for all runs of this file, one after the other, as a user's is."""
    directory = tmp_path_factory.mktemp("stack")
    model = make_tiny_model(directory / "model")
    # Trainer and engine compute alike on any machine, so that what differs between them is a fault.
    float32 = {f"SLIPSTREAM_{name}_COMPUTE": "float32" for name in ("TRAINER", "ROLLOUT")}
    async with deployment(settings, directory, model, **float32) as running:
        yield running


async def test_reward_rises_within_the_bound_and_nothing_is_lost(stack: Deployment, tmp_path: Path) -> None:
    done = await stack.run(letters(tmp_path, steps=20, save_every=0), "--run", "learn")
    assert done.code == 0, done.output
    summary = done.summary("learn")
    assert summary["reward_mean_last_5"] > summary["reward_mean_first_5"] + 0.2
    assert summary["max_lag"] <= 1
    assert summary["groups_trained"] == 20 * 4
    assert summary["requests_lost"] == 0
    assert summary["groups_void"] == 0
    assert summary["groups_dropped"] == 0
    assert summary["versions"] == {"rollout-0": "1-20"}
    assert summary["mismatch_k3_lag0_max"] < 1e-8

    # The same command again has nothing to do, says so, and spoils nothing.
    again = await stack.run(letters(tmp_path, steps=20, save_every=0), "--run", "learn")
    assert again.code == 0, again.output
    assert "learn is finished" in again.output
    assert again.summary("learn") == summary

    # Synchronous training is the same code with S = 0.
    synchronous = await stack.run(letters(tmp_path, steps=3, max_lag=0), "--run", "sync")
    assert synchronous.code == 0, synchronous.output
    summary = synchronous.summary("sync")
    assert (summary["max_lag"], summary["groups_dropped"]) == (0, 0)


async def test_a_run_survives_the_death_of_each_of_its_processes(stack: Deployment, tmp_path: Path) -> None:
    # Slow enough for all this to happen before the last step.
    slow = "import time; time.sleep(0.02); return completion.text.count('a') / 8"
    recipe, options = letters(tmp_path, steps=40, save_every=2, reward=slow), ("--run", "resume")

    process = await stack.spawn(recipe, *options)
    await until_line(process, r"^step 3/")
    second = await stack.run(recipe, *options)
    assert second.code != 0
    assert "held by" in second.output
    output = await interrupt(process)
    assert process.returncode == 128 + signal.SIGINT
    assert "goes on from the last checkpoint" in output
    assert output.rstrip().endswith("stopped")

    process = await stack.spawn(recipe, *options)
    step = int((await until_line(process, r"goes on from step \d+$")).split()[-1])
    assert step >= 2
    assert step % 2 == 0
    await until_line(process, rf"^step {step + 3}/")
    await stack.kill("trainer")
    await stack.start("trainer")
    await until_line(process, rf"^step {step + 5}/")
    await stack.kill("rollout")
    await stack.start("rollout")
    rest, _ = await process.communicate()
    assert process.returncode == 0, rest.decode()

    done = await stack.run(recipe, *options)
    summary = done.summary("resume")
    assert summary["steps"] == 40
    assert summary["groups_trained"] == 40 * 4
    assert summary["max_lag"] <= 1
    assert summary["requests_lost"] == 0


async def test_what_users_do_wrong_gets_a_clear_answer_and_loses_nothing(
    stack: Deployment, tmp_path: Path
) -> None:
    missing = await stack.run(tmp_path / "nowhere.py")
    assert missing.code == 2
    assert "no such recipe file" in missing.output

    # Foreign bytes on a topic go to the dead letters, and the pipeline goes on.
    async with open_bus(stack.settings) as bus:
        await bus.producer.send(ROLLOUTS.full_name(stack.settings.namespace), b"\xff not a message", key="x")

    # Every fourth completion fails in one of the ways rewards fail; the rest still trains.
    fails = (
        "import os, time\n"
        "    n = int(completion.sample_id.rsplit('/', 1)[1])\n"
        "    if n == 0: raise ValueError('no such word')\n"
        "    if n == 1: return float('nan')\n"
        "    if n == 2 and prompt.group_id.endswith('/3'): os._exit(1)\n"
        "    return completion.text.count('a') / 8"
    )
    done = await stack.run(letters(tmp_path, steps=3, reward=fails), "--run", "faults", timeout_s=360)
    assert done.code == 0, done.output
    summary = done.summary("faults")
    assert summary["groups_trained"] == 12
    assert summary["requests_lost"] == 0

    async with open_bus(stack.settings) as bus:
        name = dead_letter_name(stack.settings.namespace, "reward")
        offsets = await bus.topic_offsets([name])
    assert sum(end - start for start, end in offsets.values()) == 1


async def test_a_reward_that_always_fails_voids_its_groups_and_ends_the_run_with_the_reason(
    stack: Deployment, tmp_path: Path
) -> None:
    done = await stack.run(letters(tmp_path, steps=2, reward="raise KeyError('label')"), "--run", "void")
    assert done.code == 1
    said = " ".join(done.output.split())
    assert re.search(
        r"group void/\d+ is void: reward: no completion could be scored: KeyError: 'label'", said
    )
    assert re.search(r"groups in a row came to nothing, the last because: .* KeyError: 'label'", said)
