"""What the monitor remembers: bounded windows over the log, rebuilt by reading it again. Pure.

Every topic may be read twice (delivery is at least once, and a restart begins at the earliest record), and
topics come in any order relative to each other. So entries are keyed (step, group, replica), a repeat
changes nothing, and order within a run comes from versions and record timestamps, never from arrival.
"""

from collections import deque
from dataclasses import dataclass, field
from math import isfinite

from google.protobuf.message import Message as ProtoMessage

from slipstream.errors import PoisonMessageError
from slipstream.v1.common_pb2 import Version
from slipstream.v1.train_pb2 import (
    GROUP_OUTCOME_DROPPED,
    GROUP_OUTCOME_TRAINED,
    GROUP_OUTCOME_VOID,
    Alert,
    AlignmentRecord,
    GateState,
    StepRecord,
)
from slipstream.v1.weights_pb2 import ReplicaStatus, SwapReport, VersionAnnounced
from slipstream_monitor.alignment import LagSum, add_all
from slipstream_monitor.rates import Curve, counted
from slipstream_monitor.table import StepTable

MAX_REPLICAS = 256
MAX_SWAPS = 8000
MAX_ALERTS = 50
GROUPS_KEPT_STEPS = 50
"""Steps whose single groups are kept; of older ones only the counts."""
OPEN_STEPS = 4
"""Steps behind the newest to which alignment records may still come."""


@dataclass
class Step:
    """A step and what was derived from its groups before they were forgotten."""

    record: StepRecord
    time_ms: int
    serial: int
    metrics: dict[str, float]
    """Those of the record that are finite."""
    trained: int
    void: int
    dropped: int
    tokens: int
    """Sampled tokens trained on."""
    max_lag: int


@dataclass
class StepMismatch:
    """Mismatch of one step, merged over its groups."""

    serial: int = 0
    sums: dict[int, LagSum] = field(default_factory=dict)
    groups: set[str] | None = field(default_factory=set)
    """Groups added; None once nothing more is to come."""


@dataclass(frozen=True)
class Swap:
    """A swap of one replica."""

    serial: int
    time_ms: int
    replica_id: str
    report: SwapReport


@dataclass
class Replica:
    """Newest heartbeat of a replica."""

    status: ReplicaStatus
    time_ms: int
    last_swap: SwapReport | None = None


@dataclass
class Run:
    """Windows of one run."""

    run_id: str
    opened_ms: int
    """Timestamp of the first record of the newest epoch."""
    last_ms: int
    epoch: int
    steps: StepTable[Step]
    mismatch: StepTable[StepMismatch]
    swaps: deque[Swap] = field(default_factory=lambda: deque(maxlen=MAX_SWAPS))
    curves: dict[str, Curve] = field(default_factory=dict)
    alerts: deque[tuple[int, Alert]] = field(default_factory=lambda: deque(maxlen=MAX_ALERTS))
    head: VersionAnnounced | None = None

    @property
    def generation(self) -> int:
        """Goes up when entries are taken away because a trainer went back to a checkpoint."""
        return self.steps.removals + self.mismatch.removals

    @property
    def gate(self) -> GateState:
        return self.alerts[-1][1].state if self.alerts else GateState.GATE_STATE_OK


class MonitorState:
    """All runs and replicas. `serial` goes up with every change."""

    def __init__(self, max_steps: int = 2000, max_runs: int = 8) -> None:
        self.serial = 0
        self.runs: dict[str, Run] = {}
        self.replicas: dict[str, Replica] = {}
        self._max_steps = max_steps
        self._max_runs = max_runs

    def run_ids(self) -> list[str]:
        """Runs seen, the one opened last at the end."""
        return [run.run_id for run in sorted(self.runs.values(), key=lambda run: run.opened_ms)]

    def find(self, run_id: str = "") -> Run | None:
        """A run by name, the newest when the name is empty; None when there is none."""
        if run_id:
            return self.runs.get(run_id)
        ids = self.run_ids()
        return self.runs[ids[-1]] if ids else None

    def apply(self, message: ProtoMessage, time_ms: int) -> None:
        """Takes in one message.

        Args:
            time_ms: the record's timestamp, milliseconds since the Unix epoch.

        Raises:
            PoisonMessageError: the message names nothing it could belong to.
        """
        self.serial += 1
        match message:
            case ReplicaStatus():
                self._replica(message, time_ms)
            case StepRecord():
                self._step(message, time_ms)
            case AlignmentRecord():
                self._alignment(message, time_ms)
            case VersionAnnounced():
                self._version(message, time_ms)
            case Alert():
                self._alert(message, time_ms)
            case _:
                raise PoisonMessageError(f"the monitor does not read {type(message).__name__}")

    def steps_after(self, serial: int, run_id: str = "") -> list[Step]:
        """Steps that came after a serial, oldest first; of all runs when no run is named."""
        runs = self.runs.values() if not run_id else [r for r in self.runs.values() if r.run_id == run_id]
        found = [step for run in runs for step in run.steps.entries.values() if step.serial > serial]
        return sorted(found, key=lambda step: step.serial)

    def _run(self, run_id: str, time_ms: int, epoch: int) -> Run | None:
        """The run's window, made where needed; None when the run is older than all that are kept."""
        if not run_id:
            raise PoisonMessageError("the message names no run")
        run = self.runs.get(run_id)
        if run is None:
            if len(self.runs) >= self._max_runs:
                oldest = min(self.runs.values(), key=lambda r: r.last_ms)
                if time_ms < oldest.last_ms:
                    return None
                del self.runs[oldest.run_id]
            run = self.runs[run_id] = Run(
                run_id, time_ms, time_ms, epoch, StepTable(self._max_steps), StepTable(self._max_steps)
            )
        if epoch > run.epoch:
            run.epoch, run.opened_ms = epoch, time_ms
        elif epoch == run.epoch:
            run.opened_ms = min(run.opened_ms, time_ms)
        run.last_ms = max(run.last_ms, time_ms)
        return run

    def _step(self, record: StepRecord, time_ms: int) -> None:
        if record.step < 1:
            raise PoisonMessageError(f"step {record.step} is not a step")
        run = self._run(record.run_id, time_ms, record.version.epoch)
        if run is None or not run.steps.admit(record.step, record.version.epoch):
            return
        known = run.steps.entries.get(record.step)
        if known and known.record.version == record.version:
            return
        run.steps.put(record.step, record.version.epoch, _summarise(record, time_ms, self.serial))
        if old := run.steps.entries.get(record.step - GROUPS_KEPT_STEPS):
            del old.record.groups[:]

    def _alignment(self, record: AlignmentRecord, time_ms: int) -> None:
        if record.step < 1:
            raise PoisonMessageError(f"step {record.step} is not a step")
        epoch = record.version.epoch
        run = self._run(record.run_id, time_ms, epoch)
        if run is None or not run.mismatch.admit(record.step, epoch):
            return
        entry = run.mismatch.entries.get(record.step)
        if entry is None:
            entry = StepMismatch()
            run.mismatch.put(record.step, epoch, entry)
        if entry.groups is None or record.group_id in entry.groups:
            return
        entry.serial = self.serial
        entry.groups.add(record.group_id)
        add_all(entry.sums, record.by_lag)
        if old := run.mismatch.entries.get(record.step - OPEN_STEPS):
            old.groups = None

    def _version(self, message: VersionAnnounced, time_ms: int) -> None:
        run = self._run(message.run_id, time_ms, message.version.epoch)
        if run and (run.head is None or _order(message.version) > _order(run.head.version)):
            run.head = message

    def _alert(self, alert: Alert, time_ms: int) -> None:
        run = self._run(alert.run_id, time_ms, 0)
        if run and (time_ms, alert) not in run.alerts and (not run.alerts or time_ms >= run.alerts[-1][0]):
            run.alerts.append((time_ms, alert))

    def _replica(self, status: ReplicaStatus, time_ms: int) -> None:
        if not status.replica_id:
            raise PoisonMessageError("the message names no replica")
        known = self.replicas.get(status.replica_id)
        if known and (time_ms < known.time_ms or status == known.status):
            return
        self.replicas.pop(status.replica_id, None)
        swapped = status.HasField("swap")
        last_swap = status.swap if swapped else known.last_swap if known else None
        self.replicas[status.replica_id] = Replica(status, time_ms, last_swap)
        if len(self.replicas) > MAX_REPLICAS:
            del self.replicas[next(iter(self.replicas))]
        run = self._run(status.run_id, time_ms, 0) if status.run_id else None
        if run is None:
            return
        if swapped:
            run.swaps.append(Swap(self.serial, time_ms, status.replica_id, status.swap))
        if known:
            curve = run.curves.setdefault(status.replica_id, Curve())
            curve.advance(known.time_ms / 1000, time_ms / 1000, *counted(known.status, status))
            if len(run.curves) > MAX_REPLICAS:
                del run.curves[next(iter(run.curves))]


def _summarise(record: StepRecord, time_ms: int, serial: int) -> Step:
    outcomes = [group.outcome for group in record.groups]
    trained = [group for group in record.groups if group.outcome == GROUP_OUTCOME_TRAINED]
    return Step(
        record=record,
        time_ms=time_ms,
        serial=serial,
        # Six digits are more than a chart shows, and make the page's data a third as long.
        metrics={name: float(f"{value:.6g}") for name, value in record.metrics.items() if isfinite(value)},
        trained=len(trained),
        void=outcomes.count(GROUP_OUTCOME_VOID),
        dropped=outcomes.count(GROUP_OUTCOME_DROPPED),
        tokens=sum(group.num_tokens for group in trained),
        max_lag=max((group.lag for group in trained), default=0),
    )


def _order(version: Version) -> tuple[int, int]:
    return version.epoch, version.number
