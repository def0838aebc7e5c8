"""Log lines: an event and its fields, as text or JSON, without secrets."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from bus.log import EventLog, set_up_logging


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
