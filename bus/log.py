"""Logging of every process: one event a line, as text (``event key=value``) or JSON, to stderr.

The vocabulary of keys is the project's: ``session``, ``request``, ``worker``, ``rank``, ``model``, ``reason``.
Values of keys that look like secrets are never written.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from bus.settings import redact

_FIELDS = "tidegate_fields"
_NEEDS_QUOTES = frozenset(' "=\n\r\t')


class EventLog:
    """``log.info("bus_connected", url=...)`` on top of the standard library's loggers."""

    def __init__(self, name: str) -> None:
        self._logger = logging.getLogger(name)

    def debug(self, event: str, /, **fields: Any) -> None:
        self._log(logging.DEBUG, event, None, fields)

    def info(self, event: str, /, **fields: Any) -> None:
        self._log(logging.INFO, event, None, fields)

    def warning(self, event: str, /, *, error: BaseException | None = None, **fields: Any) -> None:
        self._log(logging.WARNING, event, error, fields)

    def error(self, event: str, /, *, error: BaseException | None = None, **fields: Any) -> None:
        self._log(logging.ERROR, event, error, fields)

    def exception(self, event: str, /, **fields: Any) -> None:
        """As `error`, with the traceback of the exception being handled."""
        self._log(logging.ERROR, event, sys.exc_info()[1], fields)

    def _log(self, level: int, event: str, error: BaseException | None, fields: dict[str, Any]) -> None:
        if self._logger.isEnabledFor(level):
            self._logger.log(level, event, exc_info=error, extra={_FIELDS: fields}, stacklevel=3)


def set_up_logging(
    level: str = "info",
    format: Literal["text", "json"] = "text",
    *,
    instance: str = "",
    stream: TextIO | None = None,
) -> None:
    """Send every logger of the process to ``stream`` (stderr). Called once, by a process's main."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter(instance) if format == "json" else TextFormatter(instance))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z info indexer-1 event key=value``"""

    def __init__(self, instance: str) -> None:
        super().__init__()
        self._instance = instance

    def format(self, record: logging.LogRecord) -> str:
        parts = [_time(record), record.levelname.lower(), *([self._instance] if self._instance else [])]
        parts.append(record.getMessage())
        parts += [f"{key}={_text(value)}" for key, value in _fields(record).items()]
        line = " ".join(parts)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, instance, logger, event, and the event's fields."""

    def __init__(self, instance: str) -> None:
        super().__init__()
        self._instance = instance

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "instance": self._instance,
            "logger": record.name,
            "event": record.getMessage(),
        }
        for key, value in _fields(record).items():
            line.setdefault(key, value)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, _FIELDS, {})
    return {key: redact(key, value) for key, value in fields.items()}


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.") + f"{record.msecs:03.0f}Z"


def _text(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return json.dumps(text, ensure_ascii=False) if not text or _NEEDS_QUOTES & set(text) else text
