"""Loss and gradient over packed samples; runs on the thread that owns the policy."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.pacing import Origin
from slipstream.v1.rollout_pb2 import Completion
from slipstream.v1.train_pb2 import LagStats
from slipstream_trainer.alignment import lag_stats
from slipstream_trainer.batches import Arrived, token_lags
from slipstream_trainer.model import Policy
from slipstream_trainer.packing import Row, Sample, pack

LossFn = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Chosen:
    """A sample to train on."""

    arrived: Arrived
    index: int
    """Place in its group."""
    advantage: float

    @property
    def completion(self) -> Completion:
        return self.arrived.group.rollout.completions[self.index]

    @property
    def sample(self) -> Sample:
        rollout = self.arrived.group.rollout
        return Sample(
            rollout.prompt_token_ids, self.completion.token_ids, rollout.prompt.sampling.temperature
        )


@dataclass(frozen=True)
class Gradient:
    """What came out besides the gradient itself."""

    metrics: dict[str, float]
    by_group: dict[str, list[LagStats]]


def compute(
    policy: Policy,
    chosen: Sequence[Chosen],
    loss: LossFn,
    budget: int,
    lineage: Sequence[Origin],
    step: int,
) -> Gradient:
    """Adds the gradient of the token-mean loss over all chosen samples to the policy's.

    Raises:
        SlipstreamError: the loss is not finite; all gradients are discarded.
    """
    rows = pack([c.sample for c in chosen], budget)
    tokens = sum(len(row.target) for row in rows)
    outputs = [_row(policy, row, chosen, loss, tokens) for row in rows]
    metrics = {
        "loss": sum(o.loss for o in outputs),
        "entropy": sum(o.entropy for o in outputs) / max(tokens, 1),
        "tokens": float(tokens),
        "tokens_computed": float(sum(len(row.tokens) for row in rows)),
        "samples": float(len(chosen)),
    }
    return Gradient(metrics, _by_group(chosen, rows, outputs, lineage, step))


def probe(
    policy: Policy, arrived: Arrived, budget: int, lineage: Sequence[Origin], step: int
) -> list[LagStats]:
    """Mismatch of a whole group, without gradients."""
    chosen = [Chosen(arrived, index, 0.0) for index in range(len(arrived.group.rollout.completions))]
    rows = pack([c.sample for c in chosen], budget)
    with torch.no_grad():
        forwards = [policy.forward(row) for row in rows]
    outputs = [
        _Output(0.0, 0.0, f.logp.cpu().numpy().astype(np.float64), np.zeros(len(f.logp), dtype=np.bool_))
        for f in forwards
    ]
    return _by_group(chosen, rows, outputs, lineage, step)[arrived.group_id]


@dataclass(frozen=True)
class _Output:
    loss: float
    entropy: float
    logp: NDArray[np.float64]
    clipped: NDArray[np.bool_]


def _row(policy: Policy, row: Row, chosen: Sequence[Chosen], loss: LossFn, tokens: int) -> _Output:
    forward = policy.forward(row)
    mu = torch.tensor(_per_token(row, lambda c: c.completion.logprobs, chosen), dtype=torch.float32)
    advantage = torch.tensor([chosen[i].advantage for i in row.sample], dtype=torch.float32)
    values, clipped = loss(forward.logp, mu.to(policy.device), advantage.to(policy.device))
    if not bool(torch.isfinite(values).all()):
        policy.clear_gradients()
        place = int((~torch.isfinite(values)).nonzero()[0])
        raise SlipstreamError(
            f"the loss of {chosen[row.sample[place]].completion.sample_id} is not finite "
            f"(log-prob {float(forward.logp[place].detach()):g} here, {float(mu[place]):g} when sampled); "
            "the gradients of this step are discarded, weights and optimizer are as before"
        )
    total = values.sum() / tokens
    policy.backward(total)
    return _Output(
        float(total.detach()),
        float(forward.entropy.sum()),
        forward.logp.detach().cpu().numpy().astype(np.float64),
        clipped.cpu().numpy(),
    )


def _per_token(
    row: Row, values: Callable[[Chosen], Sequence[float]], chosen: Sequence[Chosen]
) -> list[float]:
    # A sample's tokens are all in one row, in order, and samples follow each other.
    return [value for index in dict.fromkeys(row.sample.tolist()) for value in values(chosen[index])]


def _by_group(
    chosen: Sequence[Chosen],
    rows: Sequence[Row],
    outputs: Sequence[_Output],
    lineage: Sequence[Origin],
    step: int,
) -> dict[str, list[LagStats]]:
    if not rows:
        return {}
    sample = np.concatenate([row.sample for row in rows])
    logp = np.concatenate([o.logp for o in outputs])
    clipped = np.concatenate([o.clipped for o in outputs])
    mu = np.array([v for row in rows for v in _per_token(row, lambda c: c.completion.logprobs, chosen)])
    # After a swap in mid-completion the engine keeps its KV cache: a later token still depends on the older
    # weights. Counting it as younger would mix staleness into lag 0, which is there to show numerics alone.
    lags = np.array(
        [
            v
            for row in rows
            for v in _per_token(
                row, lambda c: list(accumulate(token_lags(c.completion, lineage, step), max)), chosen
            )
        ]
    )
    groups = np.array([chosen[i].arrived.group_id for i in sample])
    return {
        str(group): lag_stats(
            lags[groups == group], logp[groups == group], mu[groups == group], clipped[groups == group]
        )
        for group in dict.fromkeys(groups.tolist())
    }
