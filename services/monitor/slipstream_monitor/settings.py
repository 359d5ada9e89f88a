"""Settings of the monitor, `SLIPSTREAM_MONITOR_*`."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from slipstream.settings import ServiceSettings


class MonitorSettings(ServiceSettings):
    """What only the monitor knows."""

    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_MONITOR_", frozen=True, extra="ignore")

    port: int = Field(50055, ge=0, le=65535)
    page_port: int = Field(50080, ge=0, le=65535)
    """Port of the web page, on the same address as the gRPC server; 0 takes a free one."""
    max_steps: int = Field(2000, ge=1, le=100_000)
    """Steps kept per run; older ones stay in the log only."""
    max_runs: int = Field(8, ge=1, le=1000)
    """Runs kept; the one that was silent for longest goes first."""
    depth_interval_s: float = Field(3.0, gt=0)
    """Seconds between looks at the length of the topics."""
