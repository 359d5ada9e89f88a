"""Settings of a run, written in the recipe."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from slipstream.v1.rollout_pb2 import SamplingParams
from slipstream.v1.trainer_service_pb2 import RunConfig
from slipstream.v1.weights_pb2 import KV_CACHE_POLICY_KEEP, KV_CACHE_POLICY_RECOMPUTE


class Loss(BaseModel):
    """A loss by name, with its parameters; the trainer lists what it knows when a name is wrong."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = "grpo"
    params: dict[str, float] = Field(default_factory=dict)


class Reward(BaseModel):
    """A reward served over gRPC by any program that implements RewardService."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str = Field(min_length=1)
    """gRPC target as the reward service sees it, for example `127.0.0.1:50060`."""
    name: str = "reward"
    """Name of this part."""
    weight: float = Field(1.0, allow_inf_nan=False)
    """Factor in the sum; 0 to watch it only."""
    timeout_s: float = Field(30.0, gt=0)


class Settings(BaseModel):
    """What a run is made of. Unknown names and impossible values are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(100, ge=1)
    """Optimizer steps of the whole run."""
    groups_per_step: int = Field(8, ge=1)
    """P: prompt groups that one step trains on."""
    group_size: int = Field(8, ge=1)
    """G: completions sampled per prompt."""
    max_lag: int = Field(1, ge=0)
    """S: optimizer steps by which a trained token may be stale; 0 is synchronous."""
    temperature: float = Field(1.0, ge=0.01, le=10)
    max_tokens: int = Field(256, ge=1)
    """Upper bound on new tokens per completion."""
    stop_token_ids: list[int] = Field(default_factory=list)
    learning_rate: float = Field(1e-6, gt=0)
    warmup_steps: int = Field(0, ge=0)
    """Steps over which the learning rate rises linearly from 0."""
    weight_decay: float = Field(0.0, ge=0)
    adam_betas: tuple[Annotated[float, Field(gt=0, lt=1)], Annotated[float, Field(gt=0, lt=1)]] = (0.9, 0.95)
    adam_eps: float = Field(1e-8, gt=0)
    max_grad_norm: float = Field(1.0, ge=0)
    """Gradient norm to clip to; 0 for no clipping."""
    loss: Loss = Loss()
    scale_by_std: bool = True
    """Divide advantages by the group's std (GRPO); False: take off the mean alone (Dr. GRPO)."""
    kv_cache: Literal["keep", "recompute"] = "keep"
    """What replicas are asked to do, when new weights come, with the KV cache of completions in flight.
    `keep` costs nothing and leaves a trace of the older weights in it; `recompute` makes it anew.
    Every version's manifest says it."""
    save_every: int = Field(10, ge=0)
    """Steps between checkpoints; the last step is always saved. 0: the last alone."""
    reward_timeout_s: float = Field(30.0, gt=0)
    """Seconds that scoring one group may take."""
    seed: int = 0
    """Seed of the prompts' order."""

    def run_config(self) -> RunConfig:
        """The part that the trainer must know."""
        return RunConfig(
            max_lag=self.max_lag,
            groups_per_step=self.groups_per_step,
            adam_beta1=self.adam_betas[0],
            adam_beta2=self.adam_betas[1],
            adam_eps=self.adam_eps,
            weight_decay=self.weight_decay,
            kv_cache=KV_CACHE_POLICY_RECOMPUTE if self.kv_cache == "recompute" else KV_CACHE_POLICY_KEEP,
        )

    def sampling_params(self) -> SamplingParams:
        """The part that the engine must know."""
        return SamplingParams(
            temperature=self.temperature, max_tokens=self.max_tokens, stop_token_ids=self.stop_token_ids
        )

    def learning_rate_at(self, step: int) -> float:
        """Learning rate of an optimizer step (from 1)."""
        return (
            self.learning_rate * min(1.0, step / self.warmup_steps)
            if self.warmup_steps
            else self.learning_rate
        )
