"""A broker that integration tests may kill; the shared, quiet servers are in tests/support/fixtures.py."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.local import ports
from slipstream.local.servers import KafkaServer
from tests.support.background import BackgroundLoop


class Broker:
    """A Kafka of a test's own."""

    def __init__(self, directory: Path, extra: dict[str, str] | None = None) -> None:
        port, controller = ports.free(2)
        self.server = KafkaServer(directory, port=port, controller_port=controller, extra=extra)
        self._loop = BackgroundLoop()

    @property
    def bootstrap(self) -> str:
        return self.server.bootstrap

    async def start(self) -> None:
        await self._loop.wait(self.server.start())

    async def kill(self) -> None:
        """SIGKILL: nothing is flushed, nobody is told."""
        await self._loop.wait(self.server.stop(0))

    def freeze(self) -> None:
        """Connections stay open and nothing is answered."""
        self.server.child.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.server.child.signal(signal.SIGCONT)

    def start_now(self) -> None:
        self._loop.run(self.server.start())

    def close(self) -> None:
        self._loop.run(self.server.stop())
        self._loop.close()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    """May be killed; a test leaves it running."""
    made = Broker(tmp_path_factory.mktemp("broker"))
    made.start_now()
    yield made
    made.close()
