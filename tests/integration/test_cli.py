"""`slipstream init`, `doctor` and `status` against a deployment that the settings name."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from slipstream.bus import open_bus
from slipstream.cli import app
from slipstream.local import environment, ports
from slipstream.settings import CommonSettings
from tests.support.fixtures import run_now

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


@pytest.fixture
def variables(
    common_settings: CommonSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, str]:
    monkeypatch.setenv("SLIPSTREAM_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    return environment.of_settings(common_settings)


def _run(variables: dict[str, str], *arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments, env=variables)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


async def _count_topics(settings: CommonSettings) -> int:
    async with open_bus(settings) as bus:
        return len(await bus.topic_offsets([f"{settings.namespace}.prompts.v1"]))


def test_init_creates_topics_and_bucket_and_may_be_repeated(
    variables: dict[str, str], common_settings: CommonSettings
) -> None:
    variables["SLIPSTREAM_STORE_BUCKET"] += "new"
    for _ in range(2):
        assert _run(variables, "init") == (0, "topics and bucket are in place\n")
    assert run_now(_count_topics(common_settings)) == 4


def test_doctor_finds_a_good_deployment_well(variables: dict[str, str]) -> None:
    _, text = _run(variables, "doctor")
    assert f"Kafka at {variables['SLIPSTREAM_KAFKA_BOOTSTRAP']} answers" in text
    assert "answers and accepts the credentials" in text


@pytest.mark.parametrize(
    ("name", "value", "complaint", "mend"),
    [
        ("SLIPSTREAM_STORE_SECRET_KEY", "wrong", "refuses", "SLIPSTREAM_STORE_ACCESS_KEY, _SECRET_KEY"),
        ("SLIPSTREAM_STORE_BUCKET", "no-such-bucket", "refuses", "slipstream init"),
        ("SLIPSTREAM_STORE_URL", "http://127.0.0.1:{port}", "does not answer", "SLIPSTREAM_STORE_URL"),
        ("SLIPSTREAM_KAFKA_BOOTSTRAP", "127.0.0.1:{port}", "does not answer", "SLIPSTREAM_KAFKA_BOOTSTRAP"),
        ("SLIPSTREAM_KAFKA_BOOTSTRUP", "x", "unknown setting", "did you mean SLIPSTREAM_KAFKA_BOOTSTRAP"),
    ],
)
def test_doctor_says_what_is_wrong_and_how_to_mend_it(
    variables: dict[str, str], name: str, value: str, complaint: str, mend: str
) -> None:
    variables[name] = value.format(port=ports.free(1)[0])
    code, text = _run(variables, "doctor")
    assert code == 1
    failed = text[text.index("FAIL") :]
    assert complaint in failed
    assert mend in failed
    secret = variables["SLIPSTREAM_STORE_SECRET_KEY"]
    assert secret == "wrong" or secret not in text


def test_status_without_services_says_so_and_fails(variables: dict[str, str]) -> None:
    port = ports.free(1)[0]
    for service in ("ROLLOUT", "TRAINER", "WEIGHTSYNC", "MONITOR"):
        variables[f"SLIPSTREAM_{service}_TARGET"] = f"127.0.0.1:{port}"
    code, text = _run(variables, "status")
    assert code == 1
    assert text.count("unreachable") == 4
    assert "the monitor does not answer" in text


def test_an_error_is_one_line_and_an_exit_code(variables: dict[str, str]) -> None:
    code, text = _run(variables, "model", "prepare", "/not/there")
    assert (code, text) == (2, "error: there is no model directory /not/there\n")
