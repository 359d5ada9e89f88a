"""Settings of the weightsync service."""

from pydantic_settings import SettingsConfigDict

from slipstream.settings import ServiceSettings


class WeightsyncSettings(ServiceSettings):
    """Prefix `SLIPSTREAM_WEIGHTSYNC_`."""

    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_WEIGHTSYNC_", frozen=True, extra="ignore")
