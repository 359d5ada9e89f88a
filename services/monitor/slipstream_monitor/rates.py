"""Rates from the counters in replicas' heartbeats. Pure.

Heartbeats and steps come on different topics, in any order relative to each other when the log is read
again. So counters are kept as curves over the records' timestamps, and rates are read off afterwards.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.v1.weights_pb2 import ReplicaStatus

MAX_POINTS = 2048


class Point(NamedTuple):
    """Counters of a replica at one time; never going down within a curve."""

    time_s: float
    tokens: float
    busy_s: float
    uptime_s: float


class Rates(NamedTuple):
    """Per interval, over all replicas; NaN where nothing is known."""

    tokens_per_s: list[float]
    idle_share: list[float]


@dataclass
class Curve:
    """Counters of one replica over time, thinned so that it never holds more than MAX_POINTS."""

    points: list[Point] = field(default_factory=list)

    def advance(self, since_s: float, time_s: float, tokens: float, busy_s: float, uptime_s: float) -> None:
        """Adds what was counted between two heartbeats. Time that goes back is ignored."""
        last = self.points[-1] if self.points else Point(since_s, 0.0, 0.0, 0.0)
        if not self.points or since_s > last.time_s:
            last = last._replace(time_s=since_s)
            self.points.append(last)
        if time_s <= last.time_s:
            return
        self.points.append(
            Point(time_s, last.tokens + tokens, last.busy_s + busy_s, last.uptime_s + uptime_s)
        )
        if len(self.points) > MAX_POINTS:
            # The older half loses every second point: far history gets coarser, none of it is lost.
            half = MAX_POINTS // 2
            self.points = self.points[:half:2] + self.points[half:]


def counted(previous: ReplicaStatus, current: ReplicaStatus) -> tuple[float, float, float]:
    """Tokens, busy seconds and uptime between two heartbeats; a restarted process counts from 0."""
    restarted = current.uptime_s < previous.uptime_s or current.tokens_generated < previous.tokens_generated
    base = ReplicaStatus() if restarted else previous
    return (
        float(current.tokens_generated - base.tokens_generated),
        max(0.0, current.busy_s - base.busy_s),
        max(0.0, current.uptime_s - base.uptime_s),
    )


def rates(curves: Iterable[Curve], starts: Sequence[float], ends: Sequence[float]) -> Rates:
    """Rates over the intervals [start, end] (seconds), each cut off at the newest heartbeat."""
    a, b = np.asarray(starts, dtype=float), np.asarray(ends, dtype=float)
    total = np.zeros((3, len(a)))
    newest = -np.inf
    for curve in curves:
        if len(curve.points) < 2:
            continue
        newest = max(newest, curve.points[-1].time_s)
    b = np.minimum(b, newest)
    for curve in curves:
        if len(curve.points) < 2:
            continue
        table = np.asarray(curve.points)
        for row in range(3):
            total[row] += np.interp(b, table[:, 0], table[:, row + 1]) - np.interp(
                a, table[:, 0], table[:, row + 1]
            )
    known = b > a
    tokens = _divide(total[0], b - a, known)
    busy = _divide(total[1], total[2], known & (total[2] > 0))
    return Rates(tokens.tolist(), np.clip(1.0 - busy, 0.0, 1.0).tolist())


def recent_rates(curve: Curve | None, span_s: float) -> Rates:
    """Rates over the last `span_s` seconds of one curve, one interval."""
    if curve is None or len(curve.points) < 2:
        return Rates([float("nan")], [float("nan")])
    end = curve.points[-1].time_s
    return rates([curve], [max(curve.points[0].time_s, end - span_s)], [end])


def _divide(
    x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], where: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    out = np.full(len(x), np.nan)
    np.divide(x, y, out=out, where=where)
    return out
