"""A run as a loop sees it: the next batch, forward and backward, optimizer step, publish, save."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Any, Protocol

from slipstream import rpc
from slipstream.errors import ConfigError, SlipstreamError, StoreFullError
from slipstream.pacing import max_outstanding
from slipstream.recipe.advantages import group_advantages
from slipstream.recipe.feeder import Feeder
from slipstream.recipe.settings import Loss, Settings
from slipstream.v1.common_pb2 import Version
from slipstream.v1.train_pb2 import (
    GROUP_OUTCOME_DROPPED,
    GROUP_OUTCOME_TRAINED,
    GROUP_OUTCOME_VOID,
    GroupRecord,
)
from slipstream.v1.trainer_service_pb2 import (
    ForwardBackwardRequest,
    GroupSummary,
    LossConfig,
    NextBatchRequest,
    OpenRunResponse,
    OptimStepRequest,
    PublishRequest,
    SampleAdvantage,
    SampleSummary,
    SaveRequest,
)
from slipstream.v1.trainer_service_pb2_grpc import TrainerServiceStub

_BATCH_S, _WORK_S = 90.0, 3600.0


@dataclass(frozen=True)
class Group:
    """One prompt's completions. Tokens stay in the trainer; a loop handles ids, rewards and lengths."""

    record: GroupRecord
    samples: Sequence[SampleSummary]

    @property
    def rewards(self) -> list[float | None]:
        """Reward per completion; None where it could not be scored."""
        return [s.reward if s.scored else None for s in self.samples]


@dataclass(frozen=True)
class Batch:
    """What one optimizer step trains on."""

    groups: Sequence[Group]
    wait_s: float
    """Seconds the trainer waited for it."""

    @property
    def rewards(self) -> list[float]:
        """All valid rewards."""
        return [r for group in self.groups for r in group.rewards if r is not None]

    def advantages(self, *, scale_by_std: bool = True) -> dict[str, float]:
        """Group-relative advantage by sample id; samples that teach nothing are left out."""
        result: dict[str, float] = {}
        for group in self.groups:
            values = group_advantages(group.rewards, scale_by_std=scale_by_std)
            pairs = zip(group.samples, values, strict=True)
            result.update({sample.sample_id: value for sample, value in pairs if value is not None})
        return result


@dataclass
class Progress:
    """What the recipe itself must remember; saved inside the trainer's checkpoint."""

    published: int = 0
    trained: int = 0
    void: int = 0
    dropped: int = 0

    @property
    def finished(self) -> int:
        return self.trained + self.void + self.dropped

    def to_bytes(self) -> bytes:
        return json.dumps(vars(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> "Progress":
        return cls(**json.loads(data)) if data else cls()


class Listener(Protocol):
    """Hears how a run goes."""

    def opened(self, answer: OpenRunResponse) -> None:
        """The run is held; also after each resumption."""
        ...

    def stepped(self, step: int, version: Version, metrics: Mapping[str, float]) -> None:
        """A step was published."""
        ...

    def complained(self, subject: str, reason: str) -> None:
        """A group was void or dropped, or a completion could not be scored."""
        ...


class Run:
    """One run, held by this process."""

    def __init__(
        self,
        run_id: str,
        settings: Settings,
        opened: OpenRunResponse,
        feeder: Feeder,
        trainer: tuple[str, Any],
        listener: Listener,
    ) -> None:
        self.id = run_id
        self.settings = settings
        self.step = opened.step
        """Optimizer steps done."""
        self.version: Version = opened.version
        self.progress = Progress.from_bytes(opened.recipe_state)
        self.metrics: dict[str, float] = {}
        """Metrics of the step being made; `log` adds to them, `publish` records them."""
        self._session, self._feeder = opened.session_id, feeder
        self._target, self._trainer = trainer[0], TrainerServiceStub(trainer[1])
        self._listener = listener
        self._in_batch = 0
        self._fruitless, self._reason = 0, ""
        self._step_began = time.monotonic()
        self._update_feeder()

    def complain(self, subject: str, reason: str) -> None:
        """Tells the person who watches that something is wrong; the run goes on."""
        self._listener.complained(subject, reason)

    def log(self, **metrics: float) -> None:
        """Adds metrics to the step's record."""
        self.metrics.update(metrics)

    async def next_batch(self, num_groups: int | None = None) -> Batch:
        """Waits for the next groups, replacing those that turn out void or too stale.

        Raises:
            ConfigError: more groups are asked for than may be outstanding.
            SlipstreamError: a long row of groups came to nothing; the message has the last reason.
        """
        wanted = num_groups or self.settings.groups_per_step
        self._check_room(wanted)
        self._update_feeder(wanted)
        groups: list[Group] = []
        wait_s, outcomes = 0.0, {GROUP_OUTCOME_VOID: 0, GROUP_OUTCOME_DROPPED: 0}
        while len(groups) < wanted:
            request = NextBatchRequest(session_id=self._session, num_groups=wanted - len(groups))
            response = await self._call(self._trainer.NextBatch, request, _BATCH_S)
            wait_s += response.wait_s
            for summary in response.groups:
                self._take(summary, groups, outcomes)
            self._check_fruitful()
            self._update_feeder(wanted - len(groups))
        batch = Batch(groups, wait_s)
        self._log_batch(batch, outcomes)
        return batch

    def _check_room(self, wanted: int) -> None:
        """The batch in hand is outstanding too: with more than may be, the wait would never end."""
        most = max_outstanding(self.settings.max_lag, self.settings.groups_per_step)
        if self._in_batch + wanted > most:
            raise ConfigError(
                f"{self._in_batch + wanted} groups are asked for before one step; with groups_per_step "
                f"{self.settings.groups_per_step} and max_lag {self.settings.max_lag} at most {most} are "
                "out at once: raise groups_per_step"
            )

    def _check_fruitful(self) -> None:
        if self._fruitless >= max(20, 5 * self.settings.groups_per_step):
            raise SlipstreamError(
                f"{self._fruitless} groups in a row came to nothing, the last because: {self._reason}"
            )

    def _take(self, summary: GroupSummary, groups: list[Group], outcomes: dict[Any, int]) -> None:
        if summary.record.outcome == GROUP_OUTCOME_TRAINED:
            groups.append(Group(summary.record, list(summary.samples)))
            self._in_batch += 1
            self._fruitless = 0
            for sample in summary.samples:
                if not sample.scored:
                    self._listener.complained(f"completion {sample.sample_id} has no reward", sample.error)
            return
        fate = "void" if summary.record.outcome == GROUP_OUTCOME_VOID else "dropped"
        self._fruitless, self._reason = self._fruitless + 1, summary.record.reason
        self._listener.complained(f"group {summary.record.group_id} is {fate}", summary.record.reason)
        outcomes[summary.record.outcome] += 1
        if summary.record.outcome == GROUP_OUTCOME_VOID:
            self.progress.void += 1
        else:
            self.progress.dropped += 1

    def _log_batch(self, batch: Batch, outcomes: Mapping[Any, int]) -> None:
        samples = [s for group in batch.groups for s in group.samples]
        rewards, lags = batch.rewards, [g.record.lag for g in batch.groups]
        self.metrics.update(
            {
                "reward/mean": fmean(rewards) if rewards else float("nan"),
                "reward/std": pstdev(rewards) if rewards else float("nan"),
                "reward/failed": float(len(samples) - len(rewards)),
                "lag/mean": fmean(lags),
                "lag/max": float(max(lags)),
                "groups/trained": float(len(batch.groups)),
                "groups/void": float(outcomes[GROUP_OUTCOME_VOID]),
                "groups/dropped": float(outcomes[GROUP_OUTCOME_DROPPED]),
                "length/mean": fmean(s.num_tokens for s in samples),
                "truncated": fmean(s.truncated for s in samples),
                "tokens/trained": float(sum(s.num_tokens for s in samples)),
                "time/wait_s": batch.wait_s,
            }
        )
        names = sorted({name for s in samples for name in s.parts})
        if len(names) > 1:
            for name in names:
                self.metrics[f"reward/{name}"] = fmean(s.parts[name] for s in samples if name in s.parts)

    async def forward_backward(
        self, batch: Batch, advantages: Mapping[str, float], loss: Loss | None = None
    ) -> dict[str, float]:
        """Adds up gradients of the loss on samples of the batch.

        Args:
            advantages: by sample id; samples not named are not trained on.
        """
        loss = loss or self.settings.loss
        known = {s.sample_id for group in batch.groups for s in group.samples}
        if unknown := sorted(advantages.keys() - known):
            raise ConfigError(f"advantages name samples that are not in the batch: {', '.join(unknown[:3])}")
        request = ForwardBackwardRequest(
            session_id=self._session,
            samples=[SampleAdvantage(sample_id=k, advantage=v) for k, v in advantages.items()],
            loss=LossConfig(name=loss.name, params=loss.params),
        )
        return await self._timed("forward_backward", self._trainer.ForwardBackward, request)

    async def optim_step(self, learning_rate: float | None = None) -> dict[str, float]:
        """Steps the optimizer, by default at the settings' learning rate for this step."""
        rate = learning_rate if learning_rate is not None else self.settings.learning_rate_at(self.step + 1)
        request = OptimStepRequest(
            session_id=self._session,
            step=self.step + 1,
            learning_rate=rate,
            max_grad_norm=self.settings.max_grad_norm,
        )
        metrics = await self._timed("optim", self._trainer.OptimStep, request)
        self.metrics["lr"] = rate
        self.step += 1
        self.progress.trained += self._in_batch
        self._in_batch = 0
        return metrics

    async def publish(self) -> dict[str, float]:
        """Makes the weights a version that every replica swaps to, and records the step."""
        began = time.monotonic()
        self.metrics["time/step_s"] = began - self._step_began
        request = PublishRequest(session_id=self._session, metrics=self.metrics)
        response = await self._call(self._trainer.Publish, request, _WORK_S)
        self.version = response.version
        self._update_feeder()
        self.metrics.update({f"publish/{name}": value for name, value in response.metrics.items()})
        self.metrics["time/publish_s"] = time.monotonic() - began
        self._listener.stepped(self.step, self.version, dict(self.metrics))
        self.metrics, self._step_began = {}, time.monotonic()
        return dict(response.metrics)

    async def save(self) -> str:
        """Writes a checkpoint of everything; returns its name.

        Raises:
            StoreFullError: the trainer's disk is full. The run can go on, older checkpoints are untouched.
        """
        request = SaveRequest(session_id=self._session, recipe_state=self._state())
        return str((await self._call(self._trainer.Save, request, _WORK_S)).name)

    def _update_feeder(self, wanted: int = 0) -> None:
        # Groups of the batch in hand count as outstanding until the step's weights are published: what takes
        # their place is sampled by those.
        steps_left = self.settings.steps - self.step
        needed = max(steps_left * self.settings.groups_per_step, self._in_batch + wanted)
        self._feeder.update(finished=self.progress.finished, needed=needed, version=self.version)

    def _state(self) -> bytes:
        self.progress.published = self._feeder.published
        return self.progress.to_bytes()

    async def _timed(self, name: str, method: Any, request: Any) -> dict[str, float]:
        began = time.monotonic()
        metrics = dict((await self._call(method, request, _WORK_S)).metrics)
        self.metrics.update({key: value for key, value in metrics.items() if key != "seconds"})
        key = f"time/{name}_s"
        self.metrics[key] = self.metrics.get(key, 0.0) + time.monotonic() - began
        return metrics

    async def _call(self, method: Any, request: Any, timeout_s: float) -> Any:
        return await rpc.call(self._target, method, request, timeout_s=timeout_s)


async def standard_loop(run: Run) -> None:
    """GRPO: what runs when a recipe brings no loop of its own."""
    while run.step < run.settings.steps:
        batch = await run.next_batch()
        advantages = batch.advantages(scale_by_std=run.settings.scale_by_std)
        await run.forward_backward(batch, advantages)
        await run.optim_step()
        await run.publish()
        every = run.settings.save_every
        if run.step == run.settings.steps:
            await run.save()
        elif every and run.step % every == 0:
            try:
                await run.save()
            except StoreFullError as error:
                run.complain(f"step {run.step} is not saved, the run goes on", str(error))
