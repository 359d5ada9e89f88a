"""Settings become the client's arguments."""

import ssl
from pathlib import Path

import pytest
from pydantic import SecretStr

from slipstream.bus.security import connection
from slipstream.errors import ConfigError
from slipstream.settings import CommonSettings


def test_a_plain_connection_carries_no_credentials() -> None:
    assert connection(CommonSettings(kafka_bootstrap="a:1,b:2", kafka_username="me")) == {
        "bootstrap_servers": "a:1,b:2",
        "security_protocol": "PLAINTEXT",
    }


def test_sasl_over_tls_carries_both() -> None:
    found = connection(
        CommonSettings(kafka_security="SASL_SSL", kafka_username="me", kafka_password=SecretStr("secret"))
    )
    assert found["sasl_mechanism"] == "SCRAM-SHA-512"
    assert (found["sasl_plain_username"], found["sasl_plain_password"]) == ("me", "secret")
    assert found["ssl_context"].verify_mode is ssl.CERT_REQUIRED


def test_a_missing_file_of_certificates_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "ca.pem")
    with pytest.raises(ConfigError, match=f"SLIPSTREAM_KAFKA_CA_FILE={path}: .*No such file"):
        connection(CommonSettings(kafka_security="SSL", kafka_ca_file=path))
