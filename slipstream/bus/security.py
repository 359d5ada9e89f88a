"""How to reach a Kafka cluster, from the settings."""

import ssl
from typing import Any

from slipstream.errors import ConfigError
from slipstream.settings import CommonSettings


def connection(settings: CommonSettings) -> dict[str, Any]:
    """Keyword arguments of every client: where, and with what proof.

    Raises:
        ConfigError: the file of certificates cannot be read.
    """
    security = settings.kafka_security
    options: dict[str, Any] = {
        "bootstrap_servers": settings.kafka_bootstrap,
        "security_protocol": security,
    }
    if security.endswith("SSL"):
        try:
            options["ssl_context"] = ssl.create_default_context(cafile=settings.kafka_ca_file or None)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"SLIPSTREAM_KAFKA_CA_FILE={settings.kafka_ca_file}: {error}") from None
    if security.startswith("SASL"):
        options["sasl_mechanism"] = settings.kafka_sasl_mechanism
        options["sasl_plain_username"] = settings.kafka_username
        options["sasl_plain_password"] = settings.kafka_password.get_secret_value()
    return options
