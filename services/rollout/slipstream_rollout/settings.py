"""Settings of a rollout replica, `SLIPSTREAM_ROLLOUT_*`."""

import socket
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from slipstream.settings import ServiceSettings

_NAME = r"^[a-z0-9][a-z0-9._-]{0,62}$"


class RolloutSettings(ServiceSettings):
    """Settings of one replica."""

    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_ROLLOUT_", frozen=True, extra="ignore")

    model: str
    """Directory of a Hugging Face checkpoint, or the name of a model on the hub."""
    engine: Literal["vllm", "torch"] = "vllm"
    """vLLM, or plain transformers on the CPU: slower, no native code, the reference for tests."""
    replica_id: str = Field(default_factory=lambda: socket.gethostname().lower(), pattern=_NAME)
    """Stable name of this replica, unique in the deployment; by default the machine's or container's."""
    work_dir: Path = Path("/tmp/slipstream")
    """Where new weights are put for the engine's workers to map; a RAM disk is best."""
    max_concurrent_groups: int = Field(16, ge=1, le=4096)
    """Prompt groups sampled at once."""
    max_model_len: int = Field(2048, ge=16)
    """Most tokens of a prompt and its completion together."""
    kv_cache_gib: float = Field(1.0, gt=0)
    """KV cache of the vLLM engine on the CPU, in GiB."""
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1)
    """Share of GPU memory that vLLM may take."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs that one replica spreads over."""
    compute: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type that the engine computes in. Weights are the published bf16 ones either way; a CPU without bf16
    instructions is several times faster in float32, which `auto` then takes, as the trainer does."""
    threads: str = "auto"
    """Cores of the vLLM engine on the CPU: `auto`, `nobind`, or a list such as `0-3`."""
    recompute_kv: bool = False
    """After a swap, compute the KV cache of running requests anew with the new weights. Off: they keep
    it, which costs nothing and leaves a trace of the older weights in what they attend to."""
    version_wait_s: float = Field(120.0, gt=0)
    """How long a prompt waits for the first version of its run before its group is voided."""
    poll_versions_s: float = Field(5.0, gt=0)
    """How often to ask for a new version when no announcement comes."""
    heartbeat_s: float = Field(2.0, gt=0)
