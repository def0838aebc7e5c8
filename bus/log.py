"""Logging of every process: one event a line, as text (``event key=value``) or JSON, to stderr.

The vocabulary of keys is the project's: ``session``, ``request``, ``worker``, ``rank``, ``model``, ``reason``.
Values of keys that look like secrets are never written, long ones are cut.

Of one kind (logger, event, ``reason``, family of the ``subject``) at most `LINES` warnings and errors, and `INFO_LINES`
other lines, are written a minute: whoever can send us nonsense shall not fill our disk. At the end of that minute one
line says how many were left out (``lines_left_out``). What a process says of its own life is always written, and so are
debug lines.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any, Literal, TextIO

from bus.facts import subject_family
from bus.log_limit import WINDOW_S, Kind, LineLimit
from bus.settings import redact

LINES = 20
"""Warnings and errors of one kind that are written in a minute."""
INFO_LINES = 200
"""Other lines of one kind that are written in a minute."""
VALUE_CHARS = 500
"""Characters of a value that are written; of a longer one its length follows."""
LIFECYCLE = frozenset(
    {
        "bus_connected",
        "bus_disconnected",
        "bus_lost",
        "bus_reconnected",
        "http_listening",
        "kvcore",
        "leadership",
        "lines_left_out",
        "service_failed",
        "service_started",
        "service_stopped",
        "stop_asked",
        "stop_failed",
        "stop_timed_out",
    }
)
"""Events of a process's own life."""
_KIND_CHARS = 100
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
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Send every logger of the process to ``stream`` (stderr). Called once, by a process's main. ``clock``: seconds."""
    handler = LimitedHandler(stream or sys.stderr, clock)
    handler.setFormatter(JsonFormatter(instance) if format == "json" else TextFormatter(instance))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def tell_left_out() -> None:
    """Write what was left out in minutes that are over. Called now and then by a process that may fall silent."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LimitedHandler):
            handler.tell_left_out()


class LimitedHandler(logging.StreamHandler[TextIO]):
    """Writes at most so many lines of one kind a minute. What is left out is said at the latest when it is closed."""

    def __init__(self, stream: TextIO, clock: Callable[[], float]) -> None:
        super().__init__(stream)
        self._clock = clock
        self._limit = LineLimit()

    def emit(self, record: logging.LogRecord) -> None:
        now = self._clock()
        self._tell(self._limit.due(now))
        lines = LINES if record.levelno >= logging.WARNING else INFO_LINES
        always = record.levelno < logging.INFO or record.msg in LIFECYCLE
        if always or self._limit.take(_kind(record), lines, now):
            super().emit(record)

    def tell_left_out(self) -> None:
        """See the function of this name."""
        with self.lock or nullcontext():
            self._tell(self._limit.due(self._clock()))

    def close(self) -> None:
        with self.lock or nullcontext():
            self._tell(self._limit.rest())
        super().close()

    def _tell(self, left_out: list[tuple[Kind, int]]) -> None:
        for (logger, event, *more), lines in left_out:
            fields = {"of": event, "of_logger": logger, **dict(zip(("reason", "subject"), more, strict=False))}
            fields = {key: value for key, value in fields.items() if value}
            super().emit(
                logging.makeLogRecord(
                    {
                        "name": __name__,
                        "levelno": logging.WARNING,
                        "levelname": "WARNING",
                        "msg": "lines_left_out",
                        _FIELDS: {**fields, "lines": lines, "within_s": WINDOW_S},
                    }
                )
            )


def _kind(record: logging.LogRecord) -> Kind:
    """Of a library's line the text before its arguments are put in counts as the event."""
    fields: dict[str, Any] = getattr(record, _FIELDS, {})
    subject = fields.get("subject")
    return (
        record.name,
        str(record.msg)[:_KIND_CHARS],
        str(fields.get("reason") or "")[:_KIND_CHARS],
        subject_family(subject)[:_KIND_CHARS] if isinstance(subject, str) else "",
    )


class TextFormatter(logging.Formatter):
    """``2026-01-31T12:00:00.123Z info indexer-1 event key=value``"""

    def __init__(self, instance: str) -> None:
        super().__init__()
        self._instance = instance

    def format(self, record: logging.LogRecord) -> str:
        parts = [_time(record), record.levelname.lower(), *([self._instance] if self._instance else [])]
        parts.append(str(_cut(record.getMessage())))
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
            "event": _cut(record.getMessage()),
        }
        for key, value in _fields(record).items():
            line.setdefault(key, value)
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, _FIELDS, {})
    return {key: _cut(redact(key, value)) for key, value in fields.items()}


def _cut(value: Any) -> Any:
    """A value whose text is too long: its beginning, and how long it is."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    return value if len(text) <= VALUE_CHARS else f"{text[:VALUE_CHARS]}... ({len(text)} characters)"


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).strftime("%Y-%m-%dT%H:%M:%S.") + f"{record.msecs:03.0f}Z"


def _text(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return json.dumps(text, ensure_ascii=False) if not text or _NEEDS_QUOTES & set(text) else text
