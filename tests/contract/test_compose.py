"""compose.yaml and the Dockerfiles hold what a person relies on."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from slipstream.settings import CommonSettings

ROOT = Path(__file__).parents[2]
SERVICES = ("rollout", "reward", "trainer", "weightsync", "monitor")


@pytest.fixture(scope="module")
def variables() -> dict[str, str]:
    lines = (ROOT / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.fixture(scope="module")
def compose(variables: dict[str, str]) -> Any:
    text = (ROOT / "compose.yaml").read_text()
    body = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
    missing = {name for name in re.findall(r"\$\{(\w+)", body) if name not in variables}
    assert not missing, f".env lacks {missing}"
    return yaml.safe_load(re.sub(r"\$\{(\w+)\}", lambda m: variables[m[1]], text))


def test_it_is_valid_by_the_schema_of_compose() -> None:
    command = ["check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(ROOT / "compose.yaml")]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_service_is_there(compose: Any) -> None:
    assert {*SERVICES, "kafka", "store", "init", "model"} == set(compose["services"])


def test_images_are_pinned(variables: dict[str, str]) -> None:
    for name in ("KAFKA_IMAGE", "STORE_IMAGE"):
        tag = variables[name].rpartition(":")[2]
        assert re.search(r"\d", tag), f"{name} has no version"


@pytest.mark.parametrize("name", [*SERVICES, "kafka", "store"])
def test_long_running_services_have_health_checks_and_restart(compose: Any, name: str) -> None:
    service = compose["services"][name]
    assert service["healthcheck"]["test"]
    assert service["restart"] == "unless-stopped"


def test_dependencies_wait_for_health_or_completion(compose: Any) -> None:
    services = compose["services"]
    for name, service in services.items():
        for other, how in service.get("depends_on", {}).items():
            assert other in services, f"{name} depends on {other}"
            done = "service_completed_successfully" if other in ("init", "model") else "service_healthy"
            assert how["condition"] == done


def test_state_lives_on_named_volumes(compose: Any) -> None:
    used = {v.split(":")[0] for s in compose["services"].values() for v in s.get("volumes", [])}
    assert used == set(compose["volumes"]) == {"kafka", "store", "models", "checkpoints"}


def test_ports_are_published_on_loopback_only(compose: Any) -> None:
    ports = [p for s in compose["services"].values() for p in s.get("ports", [])]
    assert ports
    assert all(str(port).startswith("127.0.0.1:") for port in ports)


@pytest.mark.parametrize("name", SERVICES)
def test_every_variable_of_a_service_is_a_setting_it_knows(compose: Any, name: str) -> None:
    import importlib

    module = importlib.import_module(f"slipstream_{name}.settings")
    classes = [c for c in vars(module).values() if isinstance(c, type) and hasattr(c, "model_config")]
    known = {
        f"{c.model_config.get('env_prefix', '')}{f}".upper()
        for c in (*classes, CommonSettings)
        for f in c.model_fields
    }
    assert set(compose["services"][name]["environment"]) <= known


@pytest.mark.parametrize("name", SERVICES)
def test_an_image_installs_from_its_hashed_lock_and_runs_as_a_user(name: str) -> None:
    text = (ROOT / f"services/{name}/Dockerfile").read_text()
    assert f"--require-hashes -r locks/{name}.txt" in text
    assert re.search(r"^USER slipstream$", text, flags=re.MULTILINE)
    assert re.search(r"^FROM python:3\.11-slim-bookworm$", text, flags=re.MULTILINE)
