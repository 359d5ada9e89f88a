"""Logging: one line per event on stderr, as text for people or JSON for collectors."""

import json
import logging
import sys
import time
from typing import Any

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}
QUIET = ("grpc", "uvicorn", "httpx", "asyncio", "opentelemetry")


class JsonFormatter(logging.Formatter):
    """One JSON object per line; keys given in `extra` become fields."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        fields.update({k: v for k, v in record.__dict__.items() if k not in _STANDARD})
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)


class TextFormatter(logging.Formatter):
    """`12:34:56 trainer INFO message key=value`."""

    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s {service} %(levelname)s %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        extra = " ".join(f"{k}={v}" for k, v in record.__dict__.items() if k not in _STANDARD)
        line = super().formatMessage(record)
        return f"{line} {extra}" if extra else line


def configure(service: str, level: str = "INFO", format: str = "text") -> None:
    """Sets up the root logger of this process; libraries speak only from WARNING on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if format == "json" else TextFormatter(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level)))
    # These repeat what is wrong up to ten times a second; slipstream.bus says it once, and slipstream.blobs
    # raises it.
    for name in ("aiokafka", "urllib3"):
        logging.getLogger(name).setLevel(logging.INFO if level == "DEBUG" else logging.CRITICAL)
