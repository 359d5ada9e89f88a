"""An outage is told once, its end once."""

import itertools
import logging

import pytest

from slipstream.bus.outage import Outage, pauses


class StillClock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def unix(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_pauses_grow_to_a_limit() -> None:
    assert list(itertools.islice(pauses(0.1, 1.0), 6)) == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


def test_an_outage_is_logged_once_with_its_address_and_its_end_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = StillClock()
    outage = Outage("Kafka at host:1", clock)
    caplog.set_level(logging.INFO)
    outage.up()
    for _ in range(3):
        outage.down("refused")
    clock.now = 7.0
    outage.up()
    outage.up()
    assert [r.getMessage() for r in caplog.records] == [
        "Kafka at host:1 does not answer (refused); trying again until it does",
        "Kafka at host:1 answers again after 7.0 s",
    ]
