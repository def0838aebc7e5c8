"""Log lines: an event and its fields, as text or JSON, without secrets."""

from __future__ import annotations

import io
import json
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from bus.log import INFO_LINES, LINES, VALUE_CHARS, EventLog, set_up_logging, tell_left_out
from bus.log_limit import OTHERS, LineLimit


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """The root logger's handlers and level are as before afterwards."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)


def test_text(stream: io.StringIO) -> None:
    """Time, level, instance, event, then fields; quoted where they would be ambiguous."""
    set_up_logging("info", "text", instance="indexer-1", stream=stream)
    log = EventLog("x")
    log.debug("not_shown")
    log.info("gap_found", worker="w 1", rank=0, seconds=0.25, empty="", api_token="hunter2")
    logging.getLogger("library").warning("said %s", "this")
    first, second = stream.getvalue().splitlines()
    assert first.split(" ", 1)[1] == 'info indexer-1 gap_found worker="w 1" rank=0 seconds=0.25 empty="" api_token=***'
    assert second.endswith("warning indexer-1 said this")
    assert first[:4].isdigit()
    assert first.split(" ", 1)[0].endswith("Z")


def test_json(stream: io.StringIO) -> None:
    """One object a line, also for errors; a field cannot overwrite the line's own keys."""
    set_up_logging("debug", "json", instance="indexer-1", stream=stream)
    log = EventLog("bus.x")
    log.debug("seen", worker="w1", url="nats://u:hunter2@h", event="mine")
    try:
        raise ValueError("bad")
    except ValueError:
        log.exception("failed", worker="w1")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["event"], first["level"], first["logger"], first["worker"]) == ("seen", "debug", "bus.x", "w1")
    assert first["url"] == "nats://***@h"
    assert second["event"] == "failed"
    assert "ValueError: bad" in second["traceback"]


@dataclass
class Clock:
    """Seconds, set by hand."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def lines_of(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


@pytest.mark.long
def test_a_flood_of_one_kind_is_cut_off_and_counted(stream: io.StringIO) -> None:
    """A tester's case: 20,000 bad messages were 20,000 lines, 3.6 MB. The first of a minute are written, then one line
    says how many were not; another kind, and the next minute, have lines of their own."""
    clock = Clock()
    set_up_logging("info", "json", stream=stream, clock=clock)
    log = EventLog("replica.shell")
    for number in range(20_000):
        clock.now = number / 1_000
        log.warning("message_rejected", subject=f"tg.v1.kv.w{number}.0", reason="bad_headers", detail=str(number))
    log.warning("message_rejected", subject="tg.v1.kv.w.0", reason="bad_payload")
    log.error("message_rejected", subject="tg.v1.placed.w", reason="bad_headers")
    lines = lines_of(stream)
    assert [line["detail"] for line in lines[:-2]] == [str(number) for number in range(LINES)]
    assert [line["reason"] for line in lines[-2:]] == ["bad_payload", "bad_headers"]
    clock.now = 59.9
    tell_left_out()
    assert len(lines_of(stream)) == LINES + 2
    clock.now = 60.0
    tell_left_out()
    *_, told = lines_of(stream)
    assert (told["event"], told["of"], told["of_logger"]) == ("lines_left_out", "message_rejected", "replica.shell")
    assert (told["reason"], told["subject"], told["lines"]) == ("bad_headers", "kv", 20_000 - LINES)
    log.warning("message_rejected", subject="tg.v1.kv.w.0", reason="bad_headers", detail="again")
    clock.now = 1_000.0
    tell_left_out()
    assert lines_of(stream)[-1]["detail"] == "again"
    assert len(lines_of(stream)) == LINES + 4


@pytest.mark.long
def test_errors_and_libraries_are_limited_and_the_process_own_life_is_not(stream: io.StringIO) -> None:
    """An error with its traceback, and a library's line by its text without arguments; leadership always, and debug
    lines, which somebody asked for."""
    set_up_logging("debug", "json", stream=stream, clock=Clock())
    log = EventLog("x")
    for number in range(1_000):
        log.error("failed", error=ValueError("bad"))
        logging.getLogger("library").warning("attempt %d failed", number)
        log.info("leadership", epoch=number)
        log.debug("seen")
        log.info("source", worker=f"w{number}")
    events = Counter(line["event"].split()[0] for line in lines_of(stream))
    expected = {"failed": LINES, "attempt": LINES, "leadership": 1_000, "seen": 1_000, "source": INFO_LINES}
    assert events == expected
    for handler in logging.getLogger().handlers:
        handler.close()
    told = {line["of"]: line["lines"] for line in lines_of(stream) if line["event"] == "lines_left_out"}
    assert told == {"failed": 980, "attempt %d failed": 980, "source": 800}


def test_the_table_of_kinds_is_bounded() -> None:
    """Whoever invents reasons gets as many kinds as there is room for; the rest is one kind, and nothing is forgotten
    uncounted."""
    limit = LineLimit(window_s=60, kinds=10)
    written = sum(limit.take(("x", "rejected", str(number % 500)), 2, 0.0) for number in range(5_000))
    assert written == 22
    told = limit.due(60.0)
    assert len(told) == 11
    assert dict(told)[OTHERS] == 4_900 - 2
    assert written + sum(lines for _, lines in told) == 5_000
    assert limit.due(1e9) == limit.rest() == []


@pytest.mark.parametrize("format", ["text", "json"])
def test_long_values_are_cut(stream: io.StringIO, format: Literal["text", "json"]) -> None:
    """Their beginning and their length; numbers and what is short stay as they are."""
    set_up_logging("info", format, stream=stream)
    EventLog("x").info("seen", detail="a" * 100_000, names=["b" * 2_000], short="c" * VALUE_CHARS, number=10**600)
    line = stream.getvalue()
    assert "a" * VALUE_CHARS + "... (100000 characters)" in line
    assert "(2004 characters)" in line
    assert "c" * VALUE_CHARS in line
    assert len(line) < 3_000
