"""The two Java servers: start, answer, keep their data, stop, and say what went wrong."""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from slipstream.blobs import open_store
from slipstream.bus import open_bus
from slipstream.bus.events import ensure_topics
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.local import ports
from slipstream.local.process import Child
from slipstream.local.servers import KafkaServer, S3Server
from slipstream.settings import CommonSettings, load

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


async def test_the_servers_of_the_run_carry_records_and_objects(deployment: CommonSettings) -> None:
    async with open_bus(deployment) as bus:
        topic = f"{deployment.namespace}.prompts.v1"
        await bus.producer.send(topic, b"hello", key="k")
        consumer = await bus.assign([topic], offsets="earliest")
        assert [record.value for record in await consumer.poll(timeout_s=10)] == [b"hello"]
    store = open_store(deployment)
    await store.put("a/b", b"bytes")
    assert await store.get("a/b") == b"bytes"
    await store.close()


async def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} \(s3\)"):
            await S3Server(tmp_path, port=port).start()


async def test_kafka_started_again_in_its_directory_has_its_topics(tmp_path: Path) -> None:
    async def topics_after(setup: bool) -> set[str]:
        port, controller = ports.free(2)
        async with KafkaServer(tmp_path, port=port, controller_port=controller) as kafka:
            settings = load(CommonSettings, {"SLIPSTREAM_KAFKA_BOOTSTRAP": kafka.bootstrap})
            async with open_bus(settings) as bus:
                if setup:
                    await ensure_topics(bus, settings)
                return {tp.topic for tp in await bus.topic_offsets(["slipstream.steps.v1"])}

    assert await topics_after(setup=True) == {"slipstream.steps.v1"}
    assert await topics_after(setup=False) == {"slipstream.steps.v1"}


async def test_a_server_that_ends_at_once_shows_its_log(tmp_path: Path) -> None:
    port, controller = ports.free(2)
    broken = KafkaServer(tmp_path, port=port, controller_port=controller, extra={"log.segment.bytes": "few"})
    with pytest.raises(SlipstreamError, match=r"exit code 1[\s\S]*log\.segment\.bytes"):
        await broken.start()


async def test_servers_leave_no_process_when_stopped(tmp_path: Path) -> None:
    (port,) = ports.free(1)
    async with S3Server(tmp_path, port=port) as server:
        pid = server.child.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert ports.is_free(port)


async def test_a_child_that_ignores_sigterm_is_killed_with_what_it_started(tmp_path: Path) -> None:
    script = 'trap "" TERM; sleep 1000 & echo $!; while :; do sleep 1; done'
    child = await Child.start("stubborn", ["bash", "-c", script], log=tmp_path / "log", env={**os.environ})
    while not (text := (tmp_path / "log").read_text()).strip():
        await asyncio.sleep(0.05)
    assert not await child.stop(0.3)
    assert child.returncode == -signal.SIGKILL
    await _until_gone(int(text))


async def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    program = (
        "import asyncio, os, sys\n"
        "from pathlib import Path\n"
        "from slipstream.local.process import Child\n"
        "async def main():\n"
        "    child = await Child.start('c', ['sleep', '1000'], log=Path(sys.argv[1]), env=os.environ)\n"
        "    print(child.pid, flush=True)\n"
        "    await asyncio.sleep(1000)\n"
        "asyncio.run(main())\n"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(tmp_path / "log"), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    os.kill(pid, 0)
    parent.kill()
    await parent.wait()
    await _until_gone(pid)


async def _until_gone(pid: int) -> None:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            return
        if state == "Z":
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")
