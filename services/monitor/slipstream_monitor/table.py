"""A bounded table by step number that follows a run through takeovers. Pure."""

from typing import Generic, TypeVar

T = TypeVar("T")

_EPOCHS_KEPT = 64


class StepTable(Generic[T]):
    """Entries by step, at most `capacity` of them, the highest steps kept.

    When a trainer resumes from a checkpoint it works under a new epoch and goes over some steps again. What
    older epochs did at those steps was thrown away, so their entries go, and do not come back when the log
    is read again in another order.
    """

    def __init__(self, capacity: int) -> None:
        self.entries: dict[int, T] = {}
        self.removals = 0
        """How often a takeover removed entries."""
        self._capacity = capacity
        self._epochs: dict[int, int] = {}
        self._first_step: dict[int, int] = {}

    @property
    def newest(self) -> T | None:
        return self.entries[max(self.entries)] if self.entries else None

    def admit(self, step: int, epoch: int) -> bool:
        """Makes way for an entry; False when a later epoch has gone over this step again."""
        if any(later > epoch and first <= step for later, first in self._first_step.items()):
            return False
        if step < self._first_step.get(epoch, step + 1):
            self._first_step[epoch] = step
            self._remove_older(step, epoch)
            if len(self._first_step) > _EPOCHS_KEPT:
                del self._first_step[min(self._first_step)]
        return True

    def put(self, step: int, epoch: int, entry: T) -> None:
        """Sets an entry that was admitted."""
        self.entries[step] = entry
        self._epochs[step] = epoch
        while len(self.entries) > self._capacity:
            lowest = min(self.entries)
            del self.entries[lowest], self._epochs[lowest]

    def _remove_older(self, step: int, epoch: int) -> None:
        stale = [n for n, e in self._epochs.items() if n >= step and e < epoch]
        for number in stale:
            del self.entries[number], self._epochs[number]
        self.removals += bool(stale)
