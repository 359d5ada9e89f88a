"""Which offsets may be committed when records are finished out of order. Pure."""

from collections.abc import Collection

from slipstream.bus.base import Record, TopicPartition


class _Partition:
    """One partition: what is in hand, and what was finished above the first of these."""

    def __init__(self, first: int) -> None:
        self.in_hand: set[int] = set()
        self.next = first
        """One past the highest offset ever begun."""
        self.reported = first

    @property
    def committable(self) -> int:
        return min(self.in_hand, default=self.next)


class OffsetTracker:
    """Follows records from when they are read until their effect is durable.

    `begin` each record that was read, in order; `done` when it is finished; then commit `take()`. Nothing
    is committable past a record that is still in hand, so that a crash makes it be delivered again.
    """

    def __init__(self) -> None:
        self._partitions: dict[TopicPartition, _Partition] = {}

    @property
    def in_hand(self) -> int:
        """Records begun and not done."""
        return sum(len(p.in_hand) for p in self._partitions.values())

    def begin(self, record: Record) -> bool:
        """Takes a record in hand.

        Returns:
            False for one that is in hand or done already (a redelivery after a rebalance): skip it.
        """
        part = self._partitions.setdefault(record.tp, _Partition(record.offset))
        if record.offset < part.next:
            # Delivered again because an earlier commit did not arrive: report it once more.
            part.reported = min(part.reported, record.offset)
            return False
        part.in_hand.add(record.offset)
        part.next = record.offset + 1
        return True

    def done(self, record: Record) -> None:
        """Marks a record as finished. One of a partition that was lost meanwhile is ignored."""
        part = self._partitions.get(record.tp)
        if part is not None:
            part.in_hand.discard(record.offset)

    def take(self) -> dict[TopicPartition, int]:
        """Next offset to read per partition, for those that moved since the last `take`."""
        moved = {tp: p.committable for tp, p in self._partitions.items() if p.committable > p.reported}
        for tp, offset in moved.items():
            self._partitions[tp].reported = offset
        return moved

    def retain(self, owned: Collection[TopicPartition]) -> None:
        """Forgets partitions that are no longer ours: their new owner begins at what was committed."""
        self._partitions = {tp: part for tp, part in self._partitions.items() if tp in owned}
