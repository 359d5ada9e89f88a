"""Groups of one run at a time."""

import asyncio

import pytest
from slipstream_rollout.gate import RunGate

from slipstream.clock import SystemClock
from slipstream.v1.common_pb2 import Version


class Held:
    def __init__(self) -> None:
        self.run_id = ""
        self.min_version: Version | None = None
        self.broken = False

    async def ensure(self, run_id: str, min_version: Version | None) -> None:
        await asyncio.sleep(0)
        if self.broken and run_id != self.run_id:
            raise LookupError(run_id)
        self.run_id, self.min_version = run_id, min_version


@pytest.fixture
def held() -> Held:
    return Held()


@pytest.fixture
def gate(held: Held) -> RunGate:
    return RunGate(held.ensure, SystemClock())


async def test_groups_of_a_run_share_the_engine_and_those_of_another_wait(gate: RunGate, held: Held) -> None:
    leave, inside = asyncio.Event(), []

    async def group(run_id: str) -> None:
        async with gate.enter(run_id):
            assert held.run_id == run_id
            inside.append(run_id)
            await leave.wait()
            assert held.run_id == run_id

    tasks = [asyncio.ensure_future(group(run)) for run in ("a", "a", "b", "a")]
    await asyncio.sleep(0.05)
    assert inside == ["a", "a"]
    assert gate.inside == 2
    leave.set()
    await asyncio.gather(*tasks)
    assert inside == ["a", "a", "b", "a"]
    assert gate.inside == 0


async def test_a_group_asks_for_its_version_while_others_are_inside(gate: RunGate, held: Held) -> None:
    async with gate.enter("a"), gate.enter("a", Version(epoch=1, number=7)):
        assert held.min_version == Version(epoch=1, number=7)
        assert gate.inside == 2


async def test_a_group_that_cannot_enter_leaves_the_gate_open(gate: RunGate, held: Held) -> None:
    held.broken = True
    with pytest.raises(LookupError):
        async with gate.enter("a"):
            pass
    held.broken = False
    async with gate.enter("b"):
        assert held.run_id == "b"


async def test_a_run_comes_back_after_another_failed_to_come(gate: RunGate, held: Held) -> None:
    async with gate.enter("a"):
        pass
    held.broken = True
    with pytest.raises(LookupError):
        async with gate.enter("b"):
            pass
    async with gate.enter("a"):
        assert held.run_id == "a"


async def test_busy_time_counts_only_while_someone_is_inside(gate: RunGate) -> None:
    assert gate.busy_s == 0
    async with gate.enter("a"):
        await asyncio.sleep(0.05)
        assert gate.busy_s >= 0.04
    before = gate.busy_s
    await asyncio.sleep(0.05)
    assert gate.busy_s == before
