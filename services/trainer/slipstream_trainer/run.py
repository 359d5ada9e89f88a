"""One run in the trainer's hands: batch, gradients, step, publication, checkpoint."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from google.protobuf.message import Message

from slipstream.blobs import BlobStore
from slipstream.bus import Bus
from slipstream.bus.events import publish
from slipstream.clock import Clock
from slipstream.delta.tensors import Weights
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.pacing import Origin
from slipstream.topics import ALIGNMENT, STEPS, Topic
from slipstream.v1.common_pb2 import Version
from slipstream.v1.train_pb2 import AlignmentRecord, GroupRecord, LagStats, StepRecord
from slipstream.weights.publisher import Published, Publisher
from slipstream_trainer import checkpoint, losses
from slipstream_trainer.alignment import summary
from slipstream_trainer.batches import Arrived, Inbox, Taken
from slipstream_trainer.gradient import Chosen, Gradient, compute, probe
from slipstream_trainer.model import Policy

T = TypeVar("T")
MAX_RECIPE_STATE = 1 << 20
_LOOK_EVERY = 4
"""Steps without a measurement of mismatch at lag 0 after which one is waited for."""


@dataclass
class Run:
    """State of the run that is held. Its methods are called one at a time."""

    run_id: str
    policy: Policy
    executor: ThreadPoolExecutor
    """The one thread that touches the policy."""
    bus: Bus
    blobs: BlobStore
    namespace: str
    clock: Clock
    inbox: Inbox
    publisher: Publisher
    lineage: list[Origin]
    step: int
    micro_batch_tokens: int
    checkpoint_dir: Path
    keep_checkpoints: int
    version: Version = field(default_factory=Version)
    """The newest published."""
    batch: dict[str, Arrived] = field(default_factory=dict)
    """Groups taken since the last optimizer step, by id."""
    records: list[GroupRecord] = field(default_factory=list)
    """All groups taken, trained or not, that no StepRecord has named yet."""
    _undelivered: list[Taken] = field(default_factory=list)
    _metrics: dict[str, float] = field(default_factory=dict)
    _alignment: dict[str, AlignmentRecord] = field(default_factory=dict)
    _refused: str = ""
    """Why the gradients in hand must not be used."""
    _unsent: tuple[StepRecord, list[AlignmentRecord]] | None = None
    """Records of the step just made, until it is published."""
    _last_publish: dict[str, float] = field(default_factory=dict)
    _looked_at: int = 0
    """Step at which mismatch at lag 0 was measured, or waited for, last."""
    _step_s: float = 0.0
    """Seconds between the last two optimizer steps."""
    _stepped_at: float = 0.0

    @property
    def epoch(self) -> int:
        return self.lineage[-1].epoch

    async def _on_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self.executor, partial(function, *args))

    async def next_batch(
        self, num_groups: int, timeout_s: float, held: Callable[[], None]
    ) -> tuple[list[Taken], float]:
        """Groups for the batch, and what must be replaced; (groups, seconds waited). See NextBatch.

        Args:
            held: raises when the caller lost the run meanwhile.
        """
        if num_groups < 1:
            raise ConfigError(f"num_groups must be at least 1, not {num_groups}")
        began = self.clock.monotonic()
        # What a call that was cancelled had taken, this one returns.
        out = self._undelivered
        trainable = sum(taken.arrived is not None for taken in out)
        replace = trainable < len(out)
        while True:
            held()
            while trainable < num_groups and (taken := self.inbox.take(self.lineage, self.step)):
                out.append(taken)
                self.records.append(taken.record)
                if taken.arrived:
                    trainable += 1
                    self.batch[taken.arrived.group_id] = taken.arrived
                else:
                    replace = True
            waited = self.clock.monotonic() - began
            if trainable >= num_groups or replace or waited >= timeout_s:
                self._undelivered = []
                return out, waited
            await self.inbox.read(min(1.0, max(0.05, timeout_s - waited)))

    async def forward_backward(
        self, advantages: Mapping[str, float], name: str, params: Mapping[str, float]
    ) -> dict[str, float]:
        """Adds up gradients over samples of the batch; see ForwardBackward.

        Raises:
            SlipstreamError: the loss is not finite. All gradients of the step are discarded.
        """
        loss = losses.resolve(name, params)
        chosen = self._choose(advantages)
        began = self.clock.monotonic()
        work = partial(compute, self.policy, chosen, loss, self.micro_batch_tokens, self.lineage, self.step)
        try:
            gradient = await self._on_thread(work)
        except SlipstreamError as error:
            self._refused = str(error)
            raise
        self._refused = ""
        return self._note(gradient, self.clock.monotonic() - began)

    def _choose(self, advantages: Mapping[str, float]) -> list[Chosen]:
        places = {
            completion.sample_id: (arrived, index)
            for arrived in self.batch.values()
            for index, completion in enumerate(arrived.group.rollout.completions)
        }
        if unknown := sorted(advantages.keys() - places.keys()):
            raise ConfigError(
                f"not in the current batch: {', '.join(unknown[:3])}{' ...' if len(unknown) > 3 else ''}; "
                "a batch ends with its optimizer step"
            )
        if wrong := [key for key, value in advantages.items() if not math.isfinite(value)]:
            raise ConfigError(f"the advantage of {wrong[0]} is {advantages[wrong[0]]}")
        # In the order of the batch, whatever order they are named in: siblings share their prompt.
        return [Chosen(a, i, advantages[key]) for key, (a, i) in places.items() if key in advantages]

    def _note(self, gradient: Gradient, seconds: float) -> dict[str, float]:
        for group_id, stats in gradient.by_group.items():
            self._align(self.batch[group_id], stats)
        every = [entry for record in self._alignment.values() for entry in record.by_lag]
        metrics = {**gradient.metrics, **summary(every), "seconds": seconds}
        self._metrics.update({key: value for key, value in metrics.items() if key != "seconds"})
        return metrics

    def _align(self, arrived: Arrived, stats: list[LagStats]) -> None:
        self._alignment[arrived.group_id] = AlignmentRecord(
            run_id=self.run_id,
            step=self.step + 1,
            version=Version(epoch=self.epoch, number=self.step),
            group_id=arrived.group_id,
            replica_id=arrived.group.rollout.replica_id,
            by_lag=stats,
        )

    async def _probe(self) -> dict[str, float]:
        """Mismatch at lag 0 when the batch has no such token, from a group that arrived meanwhile.

        In a well-filled pipeline what is trained on is always a step old; without this the figure that
        shows numerics apart from staleness would hardly ever be measured.
        """
        if any(entry.lag == 0 for record in self._alignment.values() for entry in record.by_lag):
            self._looked_at = self.step
            return {}
        arrived = await self._fresh()
        if arrived is None:
            return {}
        self._looked_at = self.step
        work = partial(probe, self.policy, arrived, self.micro_batch_tokens, self.lineage, self.step)
        stats = await self._on_thread(work)
        self._align(arrived, stats)
        return {name: value for name, value in summary(stats).items() if name.endswith("/lag0")}

    async def _fresh(self) -> Arrived | None:
        """A group sampled by the current weights; when none was seen for some steps, it is waited for."""
        now = self.clock.monotonic()
        waits = self.step - self._looked_at >= _LOOK_EVERY
        # No longer than the step before took: that is a small share of the time, however long steps are.
        deadline = now + (self._step_s if waits else 0.0)
        await self.inbox.read(0.0)
        while (arrived := self.inbox.fresh(self.lineage, self.step)) is None:
            if (now := self.clock.monotonic()) >= deadline:
                break
            await self.inbox.read(min(0.2, deadline - now))
        if waits:
            self._looked_at = self.step
        return arrived

    async def optim_step(self, step: int, learning_rate: float, max_grad_norm: float) -> dict[str, float]:
        """Makes optimizer step number `step`; see OptimStep.

        Raises:
            SlipstreamError: not the next step, or the gradients are not finite; nothing has changed.
        """
        if step != self.step + 1:
            raise SlipstreamError(f"step {step} was asked for, but the trainer has made {self.step} steps")
        if not (math.isfinite(learning_rate) and learning_rate >= 0):
            raise ConfigError(f"learning_rate must be a number from 0 up, not {learning_rate}")
        if self._refused:
            raise SlipstreamError(f"no step: {self._refused}")
        await self._send_records()
        began = self.clock.monotonic()
        probed = await self._probe()
        norm = await self._on_thread(self.policy.step, learning_rate, max_grad_norm)
        self.step = step
        record = StepRecord(
            run_id=self.run_id,
            step=step,
            version=Version(epoch=self.epoch, number=step),
            groups=self.records,
            offsets=self.inbox.resume_offsets(()),
            metrics={**self._metrics, **probed, "grad_norm": norm, "lr": learning_rate},
        )
        self._unsent = record, list(self._alignment.values())
        self.batch, self.records, self._metrics, self._alignment = {}, [], {}, {}
        now = self.clock.monotonic()
        self._step_s, self._stepped_at = now - self._stepped_at if self._stepped_at else 0.0, now
        return {**probed, "grad_norm": norm, "seconds": self.clock.monotonic() - began}

    async def _send_records(self, metrics: Mapping[str, float] | None = None) -> None:
        """Writes the record of the step made last, once."""
        if self._unsent is None:
            return
        record, alignment = self._unsent
        for name, value in (metrics or {}).items():
            record.metrics[name] = value
        name = f"{self.run_id}/{self.epoch}/{record.step}"
        await self._send(STEPS, record, f"steps/{name}")
        for each in alignment:
            await self._send(ALIGNMENT, each, f"alignment/{name}/{each.group_id}")
        self._unsent = None

    async def _send(self, topic: Topic, message: Message, event_id: str) -> None:
        send = partial(publish, self.bus, self.namespace, topic, message, blobs=self.blobs, event_id=event_id)
        await self.inbox.outage.wait_out(send)

    async def publish_anchor(self) -> None:
        """Publishes the weights in full, as the first version of this epoch."""
        await self._publish(self.publisher.publish_anchor)

    async def publish(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Publishes the weights as the difference to the version before; see Publish. Repeating is harmless.

        Raises:
            FencedError: another trainer has taken the run over.
        """
        if self.version.number != self.step:
            self._last_publish = await self._publish(self.publisher.publish_delta)
        await self._send_records({**metrics, **{f"publish/{k}": v for k, v in self._last_publish.items()}})
        return self._last_publish

    async def _publish(self, how: Callable[[Version, Weights], Awaitable[Published]]) -> dict[str, float]:
        version = Version(epoch=self.epoch, number=self.step)
        weights = await self._on_thread(self.policy.weights)
        done = await self.inbox.outage.wait_out(lambda: how(version, weights))
        self.version = version
        return {
            "delta_bytes": float(done.size_bytes),
            "full_bytes": float(done.full_bytes),
            "ratio": done.full_bytes / max(done.size_bytes, 1),
            "changed": done.changed,
            "encode_s": done.encode_s,
            "upload_s": done.upload_s,
            "commit_s": done.commit_s,
        }

    async def save(self, recipe_state: bytes) -> str:
        """Writes a checkpoint; returns its name. A batch not stepped on yet is read again after it.

        Raises:
            StoreFullError: the disk is full. The run goes on, older checkpoints are untouched.
        """
        if len(recipe_state) > MAX_RECIPE_STATE:
            raise ConfigError(
                f"recipe_state has {len(recipe_state)} bytes; at most {MAX_RECIPE_STATE} are kept"
            )
        await self._send_records()
        head, above = self.inbox.consumed(self.batch.values())
        steps, moments = self.policy.optimizer_state()
        state = checkpoint.State(
            run_id=self.run_id,
            step=self.step,
            lineage=self.lineage,
            model=str(self.policy.path),
            offsets=self.inbox.resume_offsets(self.batch.values()),
            head=head,
            consumed=above,
            records=[r.SerializeToString().hex() for r in self.records if r.group_id not in self.batch],
            recipe_state=recipe_state.hex(),
            optimizer_steps=steps,
        )
        whole = checkpoint.Checkpoint(state, self.policy.masters, moments, torch.get_rng_state())
        write = partial(checkpoint.save, self.checkpoint_dir, whole, keep=self.keep_checkpoints)
        return await self._on_thread(write)
