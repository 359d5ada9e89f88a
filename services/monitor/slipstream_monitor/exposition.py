"""Prometheus metrics, computed from the state when they are asked for."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from slipstream.v1.train_pb2 import GateState
from slipstream_monitor.alignment import LagSum
from slipstream_monitor.feed import Feed
from slipstream_monitor.views import shown_replicas

CONTENT_TYPE = CONTENT_TYPE_LATEST


def render(feed: Feed) -> bytes:
    """Text format, version 0.0.4. Names: `slipstream_*`, see the README of the service."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(feed))
    return generate_latest(registry)


class _Collector:
    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def collect(self) -> Iterator[Metric]:
        yield from _runs(self._feed)
        yield from _replicas(self._feed)
        yield from _topics(self._feed)


def _runs(feed: Feed) -> Iterator[Metric]:
    step = GaugeMetricFamily("slipstream_step", "Last optimizer step.", labels=["run"])
    gate = GaugeMetricFamily(
        "slipstream_gate", "1 for the state that the gate is in.", labels=["run", "state"]
    )
    metric = GaugeMetricFamily("slipstream_step_metric", "Metrics of the last step.", labels=["run", "name"])
    k3 = GaugeMetricFamily("slipstream_mismatch_k3", "k3 of the last step, nats.", labels=["run", "lag"])
    for run in feed.state.runs.values():
        for state in GateState.values()[1:]:
            active = float(run.gate == state or (run.gate == 0 and state == GateState.GATE_STATE_OK))
            gate.add_metric([run.run_id, GateState.Name(state).removeprefix("GATE_STATE_").lower()], active)
        if last := run.steps.newest:
            step.add_metric([run.run_id], last.record.step)
            for name, value in sorted(last.record.metrics.items()):
                metric.add_metric([run.run_id, name], value)
        if mismatch := run.mismatch.newest:
            for lag, total in sorted(mismatch.sums.items()):
                k3.add_metric([run.run_id, str(lag)], _k3(total))
    yield from (step, gate, metric, k3)


def _k3(total: LagSum) -> float:
    return float(total.stats().k3)


def _replicas(feed: Feed) -> Iterator[Metric]:
    labels = ["replica"]
    tokens = CounterMetricFamily("slipstream_replica_tokens", "Tokens sampled.", labels=labels)
    busy = CounterMetricFamily(
        "slipstream_replica_busy_seconds", "Seconds the engine was busy.", labels=labels
    )
    uptime = CounterMetricFamily(
        "slipstream_replica_uptime_seconds", "Seconds since the start.", labels=labels
    )
    lost = CounterMetricFamily("slipstream_replica_requests_lost", "Requests aborted.", labels=labels)
    version = GaugeMetricFamily(
        "slipstream_replica_version", "Version served.", labels=["replica", "run", "epoch"]
    )
    pause = GaugeMetricFamily(
        "slipstream_replica_swap_pause_seconds", "Pause of the last swap.", labels=labels
    )
    for replica in shown_replicas(feed.state, feed.clock.unix()):
        status, name = replica.status, [replica.status.replica_id]
        tokens.add_metric(name, status.tokens_generated)
        busy.add_metric(name, status.busy_s)
        uptime.add_metric(name, status.uptime_s)
        lost.add_metric(name, status.requests_lost)
        version.add_metric([*name, status.run_id, str(status.version.epoch)], status.version.number)
        if replica.last_swap:
            pause.add_metric(name, replica.last_swap.pause_ms / 1000)
    yield from (tokens, busy, uptime, lost, version, pause)


def _topics(feed: Feed) -> Iterator[Metric]:
    messages = CounterMetricFamily("slipstream_topic_messages", "Messages ever written.", labels=["topic"])
    behind = GaugeMetricFamily("slipstream_topic_behind", "Messages yet to be read.", labels=["topic"])
    skipped = CounterMetricFamily("slipstream_monitor_skipped", "Messages not understood.", labels=["topic"])
    for topic in feed.topics:
        messages.add_metric([topic.topic], topic.messages)
        if topic.behind >= 0:
            behind.add_metric([topic.topic], topic.behind)
    for name, count in sorted(feed.skipped.items()):
        skipped.add_metric([name], count)
    yield from (messages, behind, skipped)
