"""TCP ports of this machine."""

import socket
import time
from collections.abc import Iterable, Mapping

from slipstream.errors import ConfigError


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Whether a server could bind the port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def is_open(port: int, host: str = "127.0.0.1", timeout_s: float = 0.5) -> bool:
    """Whether somebody accepts connections on the port."""
    try:
        with socket.create_connection((host, port), timeout=timeout_s):
            return True
    except OSError:
        return False


def free(count: int) -> list[int]:
    """Ports that are free now. Held together while choosing, so that all differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def wait_free(wanted: Iterable[int], timeout_s: float) -> bool:
    """Waits until all ports are free; returns whether they are. Blocking."""
    wanted, deadline = list(wanted), time.monotonic() + timeout_s
    while not all(map(is_free, wanted)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def require_free(ports: Mapping[str, int], mend: str) -> None:
    """Checks named ports.

    Raises:
        ConfigError: some are taken; names them and appends `mend`.
    """
    taken = [f"{port} ({name})" for name, port in ports.items() if not is_free(port)]
    if taken:
        raise ConfigError(f"taken on 127.0.0.1: port {', '.join(taken)}; {mend}")
