"""A made-up run, to look at the page and to test it: `scripts/page-demo` (no Kafka, no model).

The numbers are drawn so that they look like a real run on a small machine; nothing is measured.
"""

import argparse
import asyncio
import math
import random
from collections.abc import Iterator

from google.protobuf.message import Message
from slipstream_monitor.feed import Feed
from slipstream_monitor.page import make_app
from slipstream_monitor.state import MonitorState
from slipstream_monitor.web import WebServer

from slipstream import topics
from slipstream.clock import SystemClock
from slipstream.v1.common_pb2 import Version
from slipstream.v1.monitor_service_pb2 import TopicStatus
from slipstream.v1.train_pb2 import (
    Alert,
    AlignmentRecord,
    GateState,
    GroupOutcome,
    GroupRecord,
    LagStats,
    StepRecord,
)
from slipstream.v1.weights_pb2 import ReplicaState, ReplicaStatus, SwapReport, VersionAnnounced, VersionKind

FULL_BYTES = 269_060_000
GROUPS = 8
Timed = tuple[Message, int]


def run(
    run_id: str, steps: int, *, replicas: int = 2, max_lag: int = 2, start_ms: int = 0, seed: int = 0
) -> Iterator[Timed]:
    """Messages of one run with their timestamps in ms, in the order in which services would send them."""
    rng = random.Random(seed)
    now = float(start_ms)
    workers = [_Worker(f"rollout-{i}", run_id, random.Random(seed + i)) for i in range(replicas)]
    yield _announce(run_id, 0, FULL_BYTES, VersionKind.VERSION_KIND_ANCHOR), int(now)
    for step in range(1, steps + 1):
        length = rng.uniform(7.5, 10.5) * 1000
        for beat in range(4):
            for worker in workers:
                yield worker.beat(step - 1, length / 4, max_lag), int(now + (beat + 1) * length / 4)
        now += length
        for group in range(GROUPS):
            yield _alignment(run_id, step, group, workers[group % replicas].name, max_lag, rng), int(now) - 3
        size = int(FULL_BYTES * rng.uniform(0.018, 0.024) * (0.6 + 0.4 * math.exp(-step / 20)))
        yield _announce(run_id, step, size, VersionKind.VERSION_KIND_DELTA), int(now) - 2
        yield _step(run_id, step, length / 1000, size, max_lag, rng), int(now)
        for i, worker in enumerate(workers):
            yield worker.swap(step, size), int(now) + 900 + 300 * i


class _Worker:
    """One replica's counters."""

    def __init__(self, name: str, run_id: str, rng: random.Random) -> None:
        self.name, self._run_id, self._rng = name, run_id, rng
        self._tokens, self._busy, self._uptime, self._groups = 0, 0.0, 20.0, 0
        self._number = 0

    def beat(self, number: int, elapsed_ms: float, max_lag: int) -> ReplicaStatus:
        busy = min(1.0, self._rng.gauss(0.86 if max_lag else 0.45, 0.06)) * elapsed_ms / 1000
        self._uptime += elapsed_ms / 1000
        self._busy += busy
        self._tokens += int(busy * self._rng.gauss(42, 3))
        self._groups += self._rng.randrange(2)
        return self._status()

    def swap(self, number: int, size: int) -> ReplicaStatus:
        self._number = number
        self._uptime += 0.001
        status = self._status()
        status.swap.CopyFrom(
            SwapReport(
                version=Version(epoch=1, number=number),
                fetched_bytes=size,
                fetch_s=self._rng.uniform(0.02, 0.06),
                decode_s=self._rng.uniform(0.1, 0.2),
                stage_s=self._rng.uniform(0.11, 0.33),
                pause_ms=self._rng.gammavariate(6, 1.5),
                requests_in_flight=self._rng.randrange(4, 24),
            )
        )
        return status

    def _status(self) -> ReplicaStatus:
        return ReplicaStatus(
            replica_id=self.name,
            run_id=self._run_id,
            version=Version(epoch=1, number=self._number),
            state=ReplicaState.REPLICA_STATE_SERVING,
            groups_running=4,
            groups_done=self._groups,
            tokens_generated=self._tokens,
            busy_s=self._busy,
            uptime_s=self._uptime,
            engine="vllm",
        )


def _announce(run_id: str, number: int, size: int, kind: VersionKind) -> VersionAnnounced:
    return VersionAnnounced(
        run_id=run_id, version=Version(epoch=1, number=number), kind=kind, size_bytes=size
    )


def _alignment(
    run_id: str, step: int, group: int, replica: str, max_lag: int, rng: random.Random
) -> AlignmentRecord:
    base = 0.0015 * (1 + step / 12)
    return AlignmentRecord(
        run_id=run_id,
        step=step,
        version=Version(epoch=1, number=step - 1),
        group_id=f"{run_id}/{(step - 1) * GROUPS + group}",
        replica_id=replica,
        by_lag=[_stats(lag, base, rng) for lag in range(min(max_lag, step - 1) + 1)],
    )


def _stats(lag: int, base: float, rng: random.Random) -> LagStats:
    k3 = base * (1 + 2.5 * lag) * rng.lognormvariate(0, 0.35)
    return LagStats(
        lag=lag,
        num_tokens=rng.randrange(20, 60),
        k1=rng.gauss(0, k3),
        k3=k3,
        max_abs_dp=min(1.0, 9 * k3),
        ess=1 / (1 + 2 * k3),
        clipped=min(1.0, k3),
    )


def _step(run_id: str, step: int, length: float, size: int, max_lag: int, rng: random.Random) -> StepRecord:
    reward = 0.12 + 0.36 * (1 - math.exp(-step / 14)) + rng.gauss(0, 0.035)
    wait = length * (rng.uniform(0.06, 0.16) if max_lag else rng.uniform(0.35, 0.45))
    publish, optim = rng.uniform(0.3, 0.5), rng.uniform(0.25, 0.35)
    groups = [
        GroupRecord(
            group_id=f"{run_id}/{n}",
            sequence=n,
            outcome=GroupOutcome.GROUP_OUTCOME_TRAINED,
            lag=min(step - 1, rng.choice([0, 1, 1, max_lag]) if max_lag else 0),
            mean_reward=max(0.0, reward + rng.gauss(0, 0.15)),
            num_tokens=rng.randrange(60, 96),
        )
        for n in range((step - 1) * GROUPS, step * GROUPS)
    ]
    if step % 9 == 0:
        groups[3].outcome = GroupOutcome.GROUP_OUTCOME_VOID
        groups[3].reason = "reward raised ValueError: no number in the completion"
    if step % 13 == 0:
        groups[5].outcome = GroupOutcome.GROUP_OUTCOME_DROPPED
        groups[5].reason = f"lag {max_lag + 1} is above the bound of {max_lag}"
    trained = [g for g in groups if g.outcome == GroupOutcome.GROUP_OUTCOME_TRAINED]
    return StepRecord(
        run_id=run_id,
        step=step,
        version=Version(epoch=1, number=step),
        groups=groups,
        offsets={0: step * GROUPS},
        metrics={
            "reward/mean": reward,
            "reward/std": rng.uniform(0.2, 0.3),
            "loss": rng.gauss(0, 0.02),
            "entropy": 1.3 * math.exp(-step / 60) + 0.3,
            "grad_norm": rng.lognormvariate(0, 0.3),
            "lr": 2e-5,
            "publish/delta_bytes": float(size),
            "publish/full_bytes": float(FULL_BYTES),
            "publish/ratio": FULL_BYTES / size,
            "publish/changed": size / FULL_BYTES * 1.4,
            "time/wait_s": wait,
            "time/forward_backward_s": length - wait - publish - optim,
            "time/optim_s": optim,
            "time/publish_s": publish,
            "time/step_s": length,
            "tokens/trained": float(sum(g.num_tokens for g in trained)),
            "lag/max": float(max(g.lag for g in trained)),
            "lag/mean": sum(g.lag for g in trained) / len(trained),
            "groups/trained": float(len(trained)),
        },
    )


def topic_lengths(namespace: str, step: int) -> list[TopicStatus]:
    """What the topics might hold after a step."""
    groups = (step + 2) * GROUPS
    lengths = {"prompts": (groups, 8), "rollouts": (groups - 8, 2), "samples": (groups - 10, 6)}
    others = {"versions": step + 1, "steps": step, "alignment": step * GROUPS, "replicas": step * 10}
    return [
        TopicStatus(topic=t.full_name(namespace), messages=messages, behind=behind)
        for t in topics.ALL
        for messages, behind in [lengths.get(t.name, (others.get(t.name, 0), -1))]
    ]


def fill(feed: Feed, messages: Iterator[Timed]) -> None:
    """Applies messages and wakes the readers."""
    for message, time_ms in messages:
        feed.state.apply(message, time_ms)
    feed.notify()


async def serve(arguments: argparse.Namespace) -> None:
    """Serves the page over `--steps` steps, and goes on with the run as fast as it says."""
    clock = SystemClock()
    feed = Feed(MonitorState(), clock)
    web = WebServer(make_app(feed), "127.0.0.1", arguments.port, "--port")
    print(f"http://127.0.0.1:{web.bind()}/", flush=True)
    await web.start()
    if not arguments.empty:
        await _play(feed, arguments, int(clock.unix() * 1000))
    await asyncio.Event().wait()


async def _play(feed: Feed, arguments: argparse.Namespace, now_ms: int) -> None:
    begin = asyncio.get_running_loop().time()
    feed.topics = topic_lengths("slipstream", arguments.steps)
    fill(feed, run("arithmetic-sync", 40, max_lag=0, start_ms=now_ms - 86_400_000, seed=1))
    messages = list(run("arithmetic", arguments.steps + 2000, replicas=arguments.replicas))
    known = 1 + next(
        i for i, (m, _) in enumerate(messages) if isinstance(m, StepRecord) and m.step == arguments.steps
    )
    shift = now_ms - messages[known - 1][1]
    fill(feed, ((message, time_ms + shift) for message, time_ms in messages[:known]))
    if arguments.gate:
        reason = "k3 at lag 0 is 0.031 and was above 0.03 for 3 steps; look at the engine's dtype"
        state = GateState.Name(GateState.Value(f"GATE_STATE_{arguments.gate.upper()}"))
        fill(
            feed,
            iter([(Alert(run_id="arithmetic", state=state, step=arguments.steps, reason=reason), now_ms)]),
        )
    for message, time_ms in messages[known:]:
        due = begin + (time_ms + shift - now_ms) / 1000 / arguments.speed
        await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
        fill(feed, iter([(message, time_ms + shift)]))
        if isinstance(message, StepRecord):
            feed.topics = topic_lengths("slipstream", message.step)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--speed", type=float, default=1.0, help="2 plays twice as fast")
    parser.add_argument("--gate", choices=["warn", "tighten", "hold"])
    parser.add_argument("--empty", action="store_true", help="no run at all")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
