"""Settings as environment variables for child processes."""

import os
from collections.abc import Mapping

from pydantic import SecretStr

from slipstream.settings import PREFIX, CommonSettings


def of_settings(settings: CommonSettings) -> dict[str, str]:
    """The variables that make a child load equal settings. Holds secrets in clear."""
    values = {name: getattr(settings, name) for name in settings.model_fields_set}
    return {
        f"{PREFIX}{name}".upper(): value.get_secret_value() if isinstance(value, SecretStr) else str(value)
        for name, value in values.items()
    }


def for_child(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with our settings replaced by `variables`."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(PREFIX)}
    return {**inherited, **variables}
