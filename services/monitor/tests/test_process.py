"""The monitor as a process."""

import asyncio
import os
import socket
import sys


async def run_monitor(**settings: object) -> tuple[int | None, str]:
    """Exit code and what it said, of a monitor that is expected to refuse its settings."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLIPSTREAM_")}
    env |= {f"SLIPSTREAM_MONITOR_{name.upper()}": str(value) for name, value in settings.items()}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "slipstream_monitor", env=env, stderr=asyncio.subprocess.PIPE
    )
    try:
        _, said = await asyncio.wait_for(process.communicate(), 40)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, said.decode()


async def test_a_taken_page_port_ends_the_process_at_once_and_says_what_to_change() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, said = await run_monitor(port=0, page_port=port)
    assert code == 2
    assert f"port {port} of 127.0.0.1" in said
    assert "SLIPSTREAM_MONITOR_PAGE_PORT" in said
    assert "Traceback" not in said


async def test_a_misspelt_setting_is_refused() -> None:
    code, said = await run_monitor(pageport=1)
    assert code == 2
    assert "SLIPSTREAM_MONITOR_PAGEPORT; did you mean SLIPSTREAM_MONITOR_PAGE_PORT?" in said
