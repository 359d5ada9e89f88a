"""Rates from the counters in replicas' heartbeats. Pure.

Heartbeats and steps come on different topics, in any order relative to each other when the log is read
again. So counters are kept as curves over the records' timestamps, and rates are read off afterwards.
"""

from array import array
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from slipstream.v1.weights_pb2 import ReplicaStatus

MAX_POINTS = 2048


class Rates(NamedTuple):
    """Per interval, over all replicas; NaN where nothing is known."""

    tokens_per_s: list[float]
    idle_share: list[float]


class Curve:
    """Counters of one replica over time, thinned so that it never holds more than MAX_POINTS."""

    def __init__(self) -> None:
        self.columns = tuple(array("d") for _ in range(4))
        """Time in seconds, and tokens, busy seconds, uptime seconds since the first point; none goes down."""

    @property
    def times(self) -> "array[float]":
        return self.columns[0]

    def advance(self, since_s: float, time_s: float, tokens: float, busy_s: float, uptime_s: float) -> None:
        """Adds what was counted between two heartbeats. Time that goes back is ignored."""
        if not self.times or since_s > self.times[-1]:
            self._append(since_s, 0.0, 0.0, 0.0)
        if time_s > self.times[-1]:
            self._append(time_s, tokens, busy_s, uptime_s)
        if len(self.times) > MAX_POINTS:
            # The older half loses every second point: far history gets coarser, none of it is lost.
            half = MAX_POINTS // 2
            self.columns = tuple(column[:half:2] + column[half:] for column in self.columns)

    def _append(self, time_s: float, *counted: float) -> None:
        for column, more in zip(self.columns[1:], counted, strict=True):
            column.append((column[-1] if column else 0.0) + more)
        self.times.append(time_s)


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
    known = [curve for curve in curves if len(curve.times) > 1]
    b = np.minimum(b, max((curve.times[-1] for curve in known), default=-np.inf))
    tokens, busy, uptime = np.zeros((3, len(a)))
    for curve in known:
        # A copy: an array that numpy looks into cannot grow.
        times, *counters = (np.array(column) for column in curve.columns)
        for total, counter in zip((tokens, busy, uptime), counters, strict=True):
            total += np.interp(b, times, counter) - np.interp(a, times, counter)
    idle = 1.0 - _divide(busy, uptime, (b > a) & (uptime > 0))
    return Rates(_divide(tokens, b - a, b > a).tolist(), np.clip(idle, 0.0, 1.0).tolist())


def recent_rates(curve: Curve | None, span_s: float) -> Rates:
    """Rates over the last `span_s` seconds of one curve, one interval."""
    if curve is None or len(curve.times) < 2:
        return Rates([float("nan")], [float("nan")])
    end = curve.times[-1]
    return rates([curve], [max(curve.times[0], end - span_s)], [end])


def _divide(
    x: npt.NDArray[np.float64], y: npt.NDArray[np.float64], where: npt.NDArray[np.bool_]
) -> npt.NDArray[np.float64]:
    out = np.full(len(x), np.nan)
    np.divide(x, y, out=out, where=where)
    return out
