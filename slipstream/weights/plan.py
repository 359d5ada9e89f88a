"""The cheapest way from the version that a replica holds to the one it wants. Pure."""

from collections.abc import Iterable

from slipstream.errors import NotFoundError
from slipstream.v1.common_pb2 import Version
from slipstream.v1.weights_pb2 import VERSION_KIND_ANCHOR, Manifest
from slipstream.weights.manifest import order, version_str


def plan(manifests: Iterable[Manifest], have: Version | None, target: Version | None) -> list[Manifest]:
    """Manifests to apply in order, with the fewest bytes to fetch in all.

    From the target, parents are followed back until what the replica holds or an anchor is met. Each version
    has one manifest, hence one parent: there is one way back, every step on it adds bytes, and so the first
    place where one can begin is the cheapest.

    Args:
        manifests: all manifests of the run, in any order.
        have: version held; None when it holds none of the run.
        target: version wanted; None for the newest.

    Returns:
        Empty when there is nothing to do.

    Raises:
        NotFoundError: there is no such target, or no way to it.
    """
    known = {order(m.version): m for m in manifests}
    if not known and target is None:
        raise NotFoundError("the run has no version yet")
    goal = order(target) if target is not None else max(known)
    held = order(have) if have is not None else None
    if goal not in known:
        raise NotFoundError(f"there is no version {goal[0]}-{goal[1]}")
    if held == goal:
        return []
    path: list[Manifest] = []
    at = goal
    while (manifest := known.get(at)) is not None:
        path.append(manifest)
        if manifest.kind == VERSION_KIND_ANCHOR or order(manifest.parent) == held:
            return path[::-1]
        at = order(manifest.parent)
    passing = f", and it does not pass {version_str(have)}" if have is not None else ""
    raise NotFoundError(f"the way to version {goal[0]}-{goal[1]} is broken: {at[0]}-{at[1]} is gone{passing}")
