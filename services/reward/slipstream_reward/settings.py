"""Settings of the reward service."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from slipstream.settings import ServiceSettings
from slipstream_reward.pool import default_size


class RewardSettings(ServiceSettings):
    """Prefix `SLIPSTREAM_REWARD_`."""

    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_REWARD_", frozen=True, extra="ignore")

    replica_id: str = Field("", pattern=r"^[A-Za-z0-9._-]{0,200}$")
    """Name of this replica, if it has one that lasts (`reward-0`). Started again under it, it has its part of
    the log back at once; without one, Kafka gives the part of a killed replica to another after 45 s."""
    workers: int = Field(default_factory=default_size, ge=1, le=256)
    """Worker processes for Python rewards; by default one per core."""
    worker_memory_mb: int = Field(0, ge=0)
    """Address space that one worker may take; 0 sets no limit."""
    load_timeout_s: float = Field(60.0, gt=0)
    """Seconds that importing a recipe may take."""
    max_groups: int = Field(32, ge=1)
    """Groups that are scored at the same time."""
    retry_s: float = Field(120.0, ge=0)
    """Seconds that a RewardService which is away or too slow is tried again before the group is void."""
