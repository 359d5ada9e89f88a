"""How far rollouts may run ahead of the trainer, and in which order groups are trained. Pure.

With P groups per optimizer step and staleness bound S:

* the trainer takes groups by windowed first-in-first-out: only those whose sequence number is less than
  `head + W`, head being the oldest group not taken yet and
  `W = max(1, min(floor(0.3 * (S + 1) * P), (S - 1) * P + 1))`;
* the recipe keeps at most `B = (S + 1) * P - (W - 1)` groups outstanding (published, and neither trained nor
  void).

Before a group is taken, at most the B - 1 others that were outstanding when it was published and W - 1
younger ones can be taken, so it waits at most `(B + W - 2) // P = S` optimizer steps: no group goes stale
for being overtaken. A slow group is never starved by quick ones, and a quick one waits for a slow one only
when it is W or more places behind. While a batch is trained on, B - P others are out: with S >= 1 a whole
batch is sampled meanwhile. The trainer checks the versions that sampled each token all the same.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from slipstream.errors import ConfigError

T = TypeVar("T")


def max_outstanding(max_lag: int, groups_per_step: int) -> int:
    """B: groups that may be published and not yet finished."""
    return _ceiling(max_lag, groups_per_step) - (window_size(max_lag, groups_per_step) - 1)


def window_size(max_lag: int, groups_per_step: int) -> int:
    """W: how many of the oldest groups, counted by sequence number from the head, may be taken."""
    # Integers only: 0.3 * 10 is not 3 in floating point on every path. The second bound leaves a whole
    # batch to be sampled while another is trained on; where S is 0 or 1 that leaves nothing to be overtaken.
    share = _ceiling(max_lag, groups_per_step) * 3 // 10
    return max(1, min(share, (max_lag - 1) * groups_per_step + 1))


def worst_age(max_lag: int, groups_per_step: int) -> int:
    """Optimizer steps that can pass between a group's publication and its training: S."""
    b, w = max_outstanding(max_lag, groups_per_step), window_size(max_lag, groups_per_step)
    return (b + w - 2) // groups_per_step


def _ceiling(max_lag: int, groups_per_step: int) -> int:
    if max_lag < 0 or groups_per_step < 1:
        raise ConfigError(
            f"max_lag must be >= 0 and groups_per_step >= 1, not {max_lag} and {groups_per_step}"
        )
    return (max_lag + 1) * groups_per_step


@dataclass
class Window(Generic[T]):
    """Windowed first-in-first-out over dense sequence numbers.

    Groups arrive in any order, perhaps more than once; each sequence number is released exactly once.
    """

    size: int
    head: int = 0
    """Lowest sequence number that has not been released."""
    released: set[int] = field(default_factory=set)
    """Sequence numbers released above the head."""
    waiting: dict[int, T] = field(default_factory=dict)
    """Arrived and not released."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"the window must hold at least one group, not {self.size}")
        self._advance()

    def add(self, sequence: int, group: T) -> bool:
        """Takes in a group; False (and nothing happens) when this sequence number has been seen."""
        if sequence < self.head or sequence in self.released or sequence in self.waiting:
            return False
        self.waiting[sequence] = group
        return True

    def skip(self, sequence: int) -> bool:
        """Counts a group that nobody will train on as released, wherever it stands; False when seen before.

        So a void group never holds the head back, and the loop can replace it at once.
        """
        if sequence < self.head or sequence in self.released or sequence in self.waiting:
            return False
        self._release(sequence)
        return True

    def take(self) -> tuple[int, T] | None:
        """Releases the oldest group that has arrived and is inside the window; None when there is none."""
        sequence = min(self.waiting, default=None)
        if sequence is None or sequence >= self.head + self.size:
            return None
        group = self.waiting.pop(sequence)
        self._release(sequence)
        return sequence, group

    def _release(self, sequence: int) -> None:
        self.released.add(sequence)
        self._advance()

    def _advance(self) -> None:
        while self.head in self.released:
            self.released.discard(self.head)
            self.head += 1

    def consumed(self, without: Iterable[int] = ()) -> tuple[int, list[int]]:
        """(head, released above it, ascending) as if the groups `without` had not been released.

        This is what a checkpoint keeps: with it, groups that are delivered again are known.
        """
        back = set(without)
        head = min([self.head, *back])
        above = (set(range(head, self.head)) | self.released) - back
        while head in above:
            above.discard(head)
            head += 1
        return head, sorted(above)


class Origin(NamedTuple):
    """One epoch of a lineage."""

    epoch: int
    start: int
    """Version number that the epoch began with: that of the checkpoint resumed from, 0 for the base model."""


def lag(lineage: Sequence[Origin], epoch: int, number: int, current: int) -> int:
    """Optimizer steps between the weights `(epoch, number)` and the trainer's, number `current` of its epoch.

    A version that an older epoch made after the point where this lineage branched off is not an ancestor of
    the trainer's weights: the way from it leads back to the branch point and up again, and all of it counts.

    Args:
        lineage: epochs that led to the trainer's weights, oldest first, the trainer's own last.

    Returns:
        The lag. Negative when the version cannot exist yet: a newer epoch, or a number that is still to come.
    """
    if epoch > lineage[-1].epoch:
        return -1
    starts = [origin.start for origin in lineage if origin.epoch > epoch]
    if not starts:
        return current - number
    branch = min(starts)
    return current - number if number <= branch else (number - branch) + (current - branch)
