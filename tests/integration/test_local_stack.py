"""The stack as people use it: up, down, a crash, Ctrl-C, a killed supervisor; nothing is left behind."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.errors import ConfigError, SlipstreamError
from slipstream.local import LocalStack, StackOptions, client_environment, layout, ports, state
from tests.support.tiny_model import make_tiny_model

EXAMPLE = Path(__file__).parents[2] / "examples/arithmetic/recipe.py"
pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def _port_base() -> int:
    """A row of free ports."""
    for base in range(20000 + os.getpid() % 5000, 60000, 16):
        if all(ports.is_free(port) for port in layout.Ports(base).named().values()):
            return base
    raise AssertionError("no free ports")


def _processes_of(home: Path) -> list[str]:
    """Command lines of living processes that belong to the stack in `home`."""
    found, needle = [], str(home).encode()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            command, environ = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
        except OSError:
            continue
        if needle in command or needle in environ:
            found.append(command.replace(b"\0", b" ").decode())
    return found


def _until_nothing_runs(home: Path, timeout_s: float = 40.0) -> None:
    deadline = time.monotonic() + timeout_s
    while left := _processes_of(home):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


class Cli:
    """The command line with a state directory of its own and a Maven repository that is not there."""

    def __init__(self, home: Path, model: Path) -> None:
        self.home, self.base = home, _port_base()
        self.up = ["up", "--port-base", str(self.base), "--engine", "torch", "--model", str(model)]
        own = {key: value for key, value in os.environ.items() if not key.startswith("SLIPSTREAM_")}
        if "SLIPSTREAM_CACHE" in os.environ:
            own["SLIPSTREAM_CACHE"] = os.environ["SLIPSTREAM_CACHE"]
        self.env = {
            **own,
            "SLIPSTREAM_HOME": str(home),
            "SLIPSTREAM_MAVEN_URL": "http://127.0.0.1:1",
            "SLIPSTREAM_TRAINER_DEVICE": "cpu",
            "OMP_NUM_THREADS": "2",
            "COLUMNS": "200",
        }

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        command = [sys.executable, "-m", "slipstream.cli", *arguments]
        return subprocess.Popen(
            command, env=self.env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )

    def __call__(self, *arguments: str) -> tuple[int, str]:
        with self.start(*arguments) as process:
            output, _ = process.communicate(timeout=250)
        return process.returncode, output


@pytest.fixture
def cli(tmp_path: Path, tiny_model: Path) -> Iterator[Cli]:
    made = Cli(tmp_path / "home", tiny_model)
    yield made
    made("down")
    _until_nothing_runs(made.home)


def test_up_status_doctor_and_down(cli: Cli) -> None:
    code, text = cli(*cli.up, "--detach")
    assert code == 0, text
    assert f"page: http://127.0.0.1:{cli.base + 3}" in text

    code, text = cli("status")
    assert code == 0, text
    for name in ("rollout-0", "reward", "trainer", "weightsync", "monitor"):
        assert re.search(rf"{name} .* serving", text), text
    assert "slipstream.prompts.v1" in text

    _, text = cli("doctor", "--model", cli.up[-1])
    assert re.search(r"ok .*Kafka at \S+ answers", text)
    assert re.search(r"ok .*store at \S+, bucket slipstream answers", text)

    code, text = cli(*cli.up)
    assert code == 2
    assert "runs already" in text
    assert "Traceback" not in text

    code, text = cli("down")
    assert (code, text) == (0, "stopped\n")
    assert _processes_of(cli.home) == []
    assert not (cli.home / "stack.json").exists()
    assert all(ports.is_free(port) for port in layout.Ports(cli.base).named().values())


def _until_services_start(process: "subprocess.Popen[str]") -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("starting services"):
            return
    raise AssertionError("the services were not started")


def test_a_killed_supervisor_takes_its_children_along(cli: Cli) -> None:
    with cli.start(*cli.up) as process:
        try:
            _until_services_start(process)
            while len(_processes_of(cli.home)) < 4:  # the supervisor, two servers and a service
                time.sleep(0.05)
        finally:
            process.kill()
    _until_nothing_runs(cli.home)
    code, text = cli("status")
    assert code == 1
    assert "no local stack" in text


def test_ctrl_c_while_services_start_leaves_nothing(cli: Cli) -> None:
    with cli.start(*cli.up) as process:
        _until_services_start(process)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        rest = process.stdout.read()
    assert process.returncode == 0, rest
    assert rest == "stopping\n"
    assert _processes_of(cli.home) == []


def test_bad_options_get_one_line_and_exit_code_2(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", cli.base + 2)):
        code, text = cli(*cli.up)
    assert code == 2
    assert f"port {cli.base + 2} (s3)" in text
    assert "--port-base" in text
    code, missing = cli("up", "--model", "/not/there", "--port-base", str(cli.base), "--engine", "torch")
    assert code == 2
    assert "no model directory /not/there" in missing
    code, engine = cli("up", "--engine", "vlm", "--port-base", str(cli.base))
    assert code == 2
    assert "use vllm or torch" in engine
    code, nowhere = cli("run", str(EXAMPLE))
    assert code == 2
    assert "no stack is up" in nowhere
    cli.env["SLIPSTREAM_TRANER_DEVICE"] = "cpu"
    code, unknown = cli(*cli.up, "--detach")
    assert code == 2
    assert "SLIPSTREAM_TRANER_DEVICE" in unknown
    assert "Traceback" not in text + missing + engine + nowhere + unknown
    assert _processes_of(cli.home) == []


async def test_a_crashed_service_ends_the_stack_with_its_name_and_log(
    tmp_path: Path, tiny_model: Path
) -> None:
    old = tmp_path / "home" / "checkpoints" / "old"
    old.mkdir(parents=True)
    options = StackOptions(
        home=tmp_path / "home",
        port_base=_port_base(),
        model=str(tiny_model),
        engine="torch",
        device="cpu",
        fresh=True,
    )

    async def use_until_a_crash() -> None:
        async with LocalStack(options) as stack:
            assert client_environment(stack.home) == stack.environment
            assert not old.exists()
            with pytest.raises(ConfigError, match="runs already"):
                async with LocalStack(options):
                    pass
            live = state.read_live(stack.home)
            assert live is not None
            os.kill(live["processes"]["monitor"]["pid"], signal.SIGKILL)
            await asyncio.sleep(60)

    with pytest.raises(SlipstreamError, match=r"monitor ended with signal SIGKILL[\s\S]*monitor INFO ready"):
        await use_until_a_crash()
    _until_nothing_runs(tmp_path / "home")
    assert client_environment(tmp_path / "home") is None


async def test_a_service_that_refuses_its_settings_is_named(tmp_path: Path, tiny_model: Path) -> None:
    options = StackOptions(
        home=tmp_path / "home",
        port_base=_port_base(),
        model=str(tiny_model),
        engine="torch",
        env={"SLIPSTREAM_REWARD_WORKERS": "none", "HOME": os.environ["HOME"]},
    )
    with pytest.raises(
        SlipstreamError, match=r"reward ended with exit code 2[\s\S]*SLIPSTREAM_REWARD_WORKERS"
    ):
        async with LocalStack(options):
            pass
    _until_nothing_runs(tmp_path / "home")
