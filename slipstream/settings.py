"""Settings from environment variables, and nothing else.

What all processes share is `SLIPSTREAM_*` (`CommonSettings`); what only one service knows is
`SLIPSTREAM_<SERVICE>_*` (a subclass of `ServiceSettings` in that service). A variable that starts with one
of these prefixes and that nobody knows is an error: a misspelt setting must not be silently ignored.
"""

import difflib
import os
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from slipstream.errors import ConfigError

PREFIX = "SLIPSTREAM_"
SERVICES = ("rollout", "reward", "trainer", "weightsync", "monitor")
_SERVICE_PREFIXES = tuple(f"{PREFIX}{name.upper()}_" for name in SERVICES)
_OF_TOOLS = frozenset(f"{PREFIX}{name}" for name in ("HOME", "CACHE", "MAVEN_URL", "PAGE_URL", "TORCH_INDEX"))
"""Variables that the command line and the set-up read; they may be there when a service starts."""


class _Settings(BaseSettings):
    """Takes values from `load` alone, so that the environment is an argument like any other."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore")

    @classmethod
    def settings_customise_sources(
        cls, settings_cls: type[BaseSettings], init_settings: PydanticBaseSettingsSource, *_: Any, **__: Any
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


class CommonSettings(_Settings):
    """What every process of a deployment agrees on. Prefix `SLIPSTREAM_`."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore")

    namespace: str = Field("slipstream", pattern=r"^[a-z0-9][a-z0-9-]{0,48}$")
    """First part of every topic name; two deployments can share one Kafka."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    log_format: Literal["text", "json"] = "text"

    kafka_bootstrap: str = "127.0.0.1:9092"
    """`host:port`, several separated by commas."""
    kafka_security: Literal["PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL"] = "PLAINTEXT"
    kafka_sasl_mechanism: Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"] = "SCRAM-SHA-512"
    kafka_username: str = ""
    kafka_password: SecretStr = SecretStr("")
    kafka_ca_file: str = ""
    kafka_replication: int = Field(1, ge=1, le=10)
    """Replication factor of the topics that Slipstream creates."""

    store_url: str = "http://127.0.0.1:9000"
    """`http(s)://host:port` of an S3 API, or `file:///directory` for a single machine."""
    store_bucket: str = "slipstream"
    store_access_key: SecretStr = SecretStr("")
    store_secret_key: SecretStr = SecretStr("")
    store_region: str = "us-east-1"

    rollout_target: str = "127.0.0.1:50051"
    """gRPC target of a rollout replica, for clients."""
    trainer_target: str = "127.0.0.1:50053"
    weightsync_target: str = "127.0.0.1:50054"
    monitor_target: str = "127.0.0.1:50055"


class ServiceSettings(_Settings):
    """What every service has under its own prefix."""

    model_config = SettingsConfigDict(frozen=True, extra="ignore")

    host: str = "127.0.0.1"
    """Address that the gRPC server binds to."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the gRPC server; 0 takes a free one."""
    drain_s: float = Field(20.0, ge=0)
    """Seconds that work in hand may take after SIGTERM."""


S = TypeVar("S", bound=BaseSettings)


def load(cls: type[S], environ: Mapping[str, str] | None = None) -> S:
    """Reads settings from the environment.

    Raises:
        ConfigError: a value is invalid, or a variable with the class's prefix is not known.
    """
    env = os.environ if environ is None else environ
    prefix = str(cls.model_config.get("env_prefix", ""))
    known = {f"{prefix}{name}".upper() for name in cls.model_fields}
    _refuse_unknown(prefix, known, env)
    values: dict[str, Any] = {
        name: env[var] for name in cls.model_fields if (var := f"{prefix}{name}".upper()) in env
    }
    try:
        return cls(**values)
    except ValidationError as error:
        lines = [f"{prefix}{'_'.join(map(str, e['loc']))}".upper() + f": {e['msg']}" for e in error.errors()]
        raise ConfigError("invalid settings: " + "; ".join(lines)) from None


def _refuse_unknown(prefix: str, own: Iterable[str], env: Mapping[str, str]) -> None:
    # SLIPSTREAM_TRAINER_TARGET, say, has a service's prefix and is everybody's.
    known = {*own, *(f"{PREFIX}{name}".upper() for name in CommonSettings.model_fields)}
    for var in sorted(env):
        if not var.startswith(prefix) or var in known or var in _OF_TOOLS:
            continue
        if prefix == PREFIX and var.startswith(_SERVICE_PREFIXES):
            continue
        near = difflib.get_close_matches(var, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(sorted(known))}"
        raise ConfigError(f"unknown setting {var}{hint}")


def describe(settings: BaseSettings) -> dict[str, str]:
    """Environment names and values for display, secrets masked."""
    prefix = str(settings.model_config.get("env_prefix", ""))
    return {f"{prefix}{name}".upper(): str(getattr(settings, name)) for name in type(settings).model_fields}
