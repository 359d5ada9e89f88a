"""Plans reach the target with the fewest bytes, whatever the replica holds."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import NotFoundError
from slipstream.v1.common_pb2 import BlobRef, Version
from slipstream.v1.weights_pb2 import VERSION_KIND_ANCHOR, VERSION_KIND_DELTA, Manifest, Shard
from slipstream.weights.manifest import order, size_of
from slipstream.weights.plan import plan


def anchor(number: int, size: int = 1000, epoch: int = 1) -> Manifest:
    return Manifest(
        version=Version(epoch=epoch, number=number),
        kind=VERSION_KIND_ANCHOR,
        shards=[Shard(blob=BlobRef(size_bytes=size))],
    )


def delta(number: int, size: int = 10, parent: int | None = None, epoch: int = 1) -> Manifest:
    return Manifest(
        version=Version(epoch=epoch, number=number),
        kind=VERSION_KIND_DELTA,
        parent=Version(epoch=epoch, number=number - 1 if parent is None else parent),
        shards=[Shard(blob=BlobRef(size_bytes=size))],
    )


def numbers(manifests: list[Manifest]) -> list[tuple[int, int]]:
    return [order(m.version) for m in manifests]


def v(number: int, epoch: int = 1) -> Version:
    return Version(epoch=epoch, number=number)


RUN = [anchor(0), delta(1), delta(2), anchor(3), delta(4), anchor(4, epoch=2), delta(5, epoch=2)]


@pytest.mark.parametrize(
    ("have", "target", "expected"),
    [
        (None, None, [(2, 4), (2, 5)]),
        (v(4, 2), None, [(2, 5)]),
        (v(5, 2), None, []),
        (v(4), None, [(2, 4), (2, 5)]),
        (None, v(2), [(1, 0), (1, 1), (1, 2)]),
        (v(1), v(2), [(1, 2)]),
        (v(1), v(4), [(1, 3), (1, 4)]),
        (v(4), v(1), [(1, 0), (1, 1)]),
        (v(99), v(1), [(1, 0), (1, 1)]),
    ],
)
def test_the_way_begins_at_what_is_held_or_at_an_anchor(
    have: Version | None, target: Version | None, expected: list[tuple[int, int]]
) -> None:
    assert numbers(plan(RUN, have, target)) == expected
    assert numbers(plan(RUN[::-1], have, target)) == expected


def test_an_empty_run_has_no_version() -> None:
    with pytest.raises(NotFoundError, match="no version yet"):
        plan([], None, None)


def test_an_unknown_target_is_named() -> None:
    with pytest.raises(NotFoundError, match="1-9"):
        plan(RUN, None, v(9))


def test_a_broken_chain_is_named_unless_the_replica_is_past_the_gap() -> None:
    broken = [m for m in RUN if order(m.version) != (1, 1)]
    with pytest.raises(NotFoundError, match="1-1 is gone"):
        plan(broken, None, v(2))
    assert numbers(plan(broken, v(1), v(2))) == [(1, 2)]


@given(st.data())
def test_no_other_way_takes_fewer_bytes(data: st.DataObject) -> None:
    manifests = [anchor(0, data.draw(st.integers(1, 100)))]
    for number in range(1, data.draw(st.integers(2, 8))):
        size = data.draw(st.integers(1, 100))
        if data.draw(st.booleans()):
            manifests.append(anchor(number, size))
        else:
            manifests.append(delta(number, size, data.draw(st.integers(0, number - 1))))
    have = data.draw(st.none() | st.integers(0, len(manifests) - 1).map(v))
    target = v(data.draw(st.integers(0, len(manifests) - 1)))
    found = plan(manifests, have, target)

    # Cheapest by relaxing over all versions, as for any graph: nothing, and what is held, cost nothing.
    cost = {None: 0} | ({have.number: 0} if have is not None else {})
    for _ in manifests:
        for m in manifests:
            start = m.parent.number if m.kind == VERSION_KIND_DELTA else None
            if start in cost:
                total = cost[start] + size_of(m)
                cost[m.version.number] = min(total, cost.get(m.version.number, total))
    assert sum(map(size_of, found)) == cost[target.number]
    if found:
        assert found[-1].version == target
        assert found[0].kind == VERSION_KIND_ANCHOR or found[0].parent == have
        assert all(b.parent == a.version for a, b in pairwise(found))
