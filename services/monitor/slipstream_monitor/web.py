"""Serves an ASGI application inside the service's own event loop."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from slipstream.errors import ConfigError


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # Signals belong to the service runner.
        yield


class WebServer:
    """One HTTP server. `bind` early, so that a taken port is found at once; `start` when there is something
    to serve."""

    def __init__(self, app: ASGIApp, host: str, port: int, variable: str) -> None:
        """
        Args:
            variable: environment variable that sets the port, named when the port is taken.
        """
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
        )
        self._server = _Server(config)
        self._host, self._port, self._variable = host, port, variable
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    def bind(self) -> int:
        """Takes the port and returns it.

        Raises:
            ConfigError: the port is taken or the address is not this machine's.
        """
        try:
            family, kind, proto, _, address = socket.getaddrinfo(
                self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            self._socket = socket.socket(family, kind, proto)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
            self._socket.listen(128)
            self._socket.setblocking(False)
        except OSError as error:
            self._release()
            raise ConfigError(
                f"cannot serve the page on port {self._port} of {self._host}: {error.strerror}; "
                f"choose another with {self._variable}"
            ) from None
        return int(self._socket.getsockname()[1])

    async def start(self) -> None:
        """Begins to serve; returns when requests are answered."""
        if self._socket is None:
            self.bind()
        assert self._socket is not None
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started:
            if self._task.done():
                self._task.result()
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        """Ends open requests (within two seconds) and frees the port."""
        self._server.should_exit = True
        if self._task:
            await self._task
        self._release()

    def _release(self) -> None:
        if self._socket:
            self._socket.close()
            self._socket = None
