"""Settings of the trainer."""

from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from slipstream.settings import ServiceSettings


class TrainerSettings(ServiceSettings):
    """Prefix `SLIPSTREAM_TRAINER_`."""

    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_TRAINER_", frozen=True, extra="ignore")

    port: int = Field(50053, ge=0, le=65535)
    model: str = Field(min_length=1)
    """Directory of a Hugging Face checkpoint, or a model's name on the hub."""
    checkpoint_dir: Path
    """Where checkpoints go, one directory per run."""
    keep_checkpoints: int = Field(2, ge=1)
    """Newest checkpoints of a run to keep."""
    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, ...; `auto` takes a GPU when there is one."""
    compute: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of the arithmetic. The weights are rounded to bf16 in either case: trainer and engine hold the
    same ones. `auto` is bfloat16 on GPUs and processors with instructions for it, else float32."""
    threads: int = Field(0, ge=0)
    """Threads of the tensor library; 0 leaves its default."""
    micro_batch_tokens: int = Field(0, ge=0)
    """Tokens computed at once; bounds memory. A sample that is longer gets a batch of its own. 0: 512 on a
    processor, where attention over longer rows costs more than it saves, 8192 on a GPU."""
    delta_shards: int = Field(1, ge=1)
    """Parts that each version is stored in."""
