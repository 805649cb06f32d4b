"""How log lines are written: as text for people, as JSON for programs; in both with the line's `fields`."""

import datetime
import json
import logging
import re
from typing import Any

import msgspec

_PLAIN = re.compile(r"[\w.,:;/@+*-]+", re.ASCII)


class TextFormatter(logging.Formatter):
    """Time, level and message, then the fields as `name=value`; what could be mistaken is quoted as JSON."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record) + "".join(
            f" {name}={_shown(value)}" for name, value in _fields(record).items()
        )


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["fault"] = self.formatException(record.exc_info)
        return msgspec.json.encode(line).decode()


def handler(log_format: str) -> logging.Handler:
    """Writes to stderr as `log_format` says, `text` or `json`."""
    written = logging.StreamHandler()
    written.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    return written


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "fields", {})
    return fields


def _shown(value: Any) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
