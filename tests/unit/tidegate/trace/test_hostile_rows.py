"""Rows that anybody may have written: every command either does its work or says what is wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.unit.tidegate.trace.making import SAMPLE, Row, request_row, tool_row
from tidegate.trace.agentic_mooncake import agentic_mooncake_lines
from tidegate.trace.dependencies import dependency_graph
from tidegate.trace.dynamo import dynamo_lines, our_rows
from tidegate.trace.errors import TraceFileError
from tidegate.trace.mooncake import mooncake_lines
from tidegate.trace.perfetto import perfetto_events
from tidegate.trace.reading import Trace, read_trace
from tidegate.trace.replayable import playable
from tidegate.trace.stats import trace_stats
from tidegate.trace.tables import stats_text
from tidegate.trace.writing import write_lines

_LINES = [json.loads(line)["event"] for line in SAMPLE.read_text().splitlines()]
_ROWS: list[Row] = [
    _LINES[0],
    next(row for row in _LINES if row["event_type"] == "tool_start"),
    next(row for row in _LINES if row["event_type"] == "tool_end"),
    request_row("full", 5, 90, "s", "p", hold_ms=3, admission_wait_ms=4.0, queue_depth=2, ttft_ms=7.0, grant_id="g"),
    tool_row("s", "call", 50, duration_ms=3.0, claude={"source_request_id": "full", "child_session_id": "s"}),
    {
        "schema": "tidegate.request.trace.v1",
        "event_type": "decision",
        "event_time_unix_ms": 7,
        "agent_context": {"session_id": "s"},
        "decision": {
            "request_id": "full",
            "grant_id": "g",
            "worker": {"worker": "w", "rank": 0},
            "model": "tiny",
            "decide_us": 9,
            "candidates": [{"worker": "w", "rank": 0, "cost": 2.5, "parts": {"prefill": 1.5}}],
        },
    },
    {
        "schema": "tidegate.request.trace.v1",
        "event_type": "worker_load",
        "event_time_unix_ms": 8,
        "worker_load": {"worker": "w", "model": "tiny", "kv_tokens": 64, "loads": [{"rank": 0, "kv_usage": 0.5}]},
    },
]
_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.sampled_from([1e308, -1e308, 0.5, -1, 0, 1 << 53, 1 << 64, (1 << 64) - 1]),
    st.text(max_size=4),
    st.builds(list),
    st.builds(dict),
)


def paths(row: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(row, dict):
        for key, value in row.items():
            yield (*path, key)
            yield from paths(value, (*path, key))


def everything(trace: Trace, folder: Path) -> None:
    """What commands do with a trace."""
    stats_text(trace_stats(trace))
    write_lines(perfetto_events(trace, _graph(trace)), folder / "timeline")
    write_lines(our_rows(trace), folder / "ours")
    source = playable(trace)
    for lines in (dynamo_lines(source), mooncake_lines(source), agentic_mooncake_lines(source)):
        write_lines(lines, folder / "lines")


def _graph(trace: Trace) -> Any:
    try:
        return dependency_graph(trace)
    except TraceFileError:
        return ()


CHANGES = [(place, path) for place, row in enumerate(_ROWS) for path in paths(row)]


@pytest.mark.long
@given(st.lists(st.tuples(st.sampled_from(CHANGES), _VALUES), min_size=1, max_size=2))
@example([((2, ("tool", "started_at_unix_ms")), 1 << 62)])
@example([((4, ("tool", "duration_ms")), 1e308)])
@example([((3, ("request", "queue_depth")), 1 << 70)])
@example([((3, ("request", "ttft_ms")), 1e308)])
@example([((3, ("request", "hold_ms")), -(1 << 70))])
@example([((0, ("request", "request_received_ms")), -1)])
def test_changed_rows(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[tuple[int, tuple[str, ...]], Any]]
) -> None:
    """One or two fields of good rows have other values."""
    rows = copy.deepcopy(_ROWS)
    for (place, path), value in changes:
        inner: Any = rows[place]
        for key in path[:-1]:
            inner = inner.get(key, {}) if isinstance(inner, dict) else {}
        if isinstance(inner, dict):
            inner[path[-1]] = value
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "trace.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with suppress(TraceFileError):
        everything(read_trace([folder / "trace.jsonl"]), folder)


@given(st.binary(max_size=200), st.booleans())
@example(b"[" * 100_000, False)
@example(b"null\n1\n", False)
def test_any_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes, gzipped: bool) -> None:
    """Damage or problems, never a crash."""
    path = tmp_path_factory.mktemp("bytes") / "trace.jsonl"
    path.write_bytes((b"\x1f\x8b" if gzipped else b"") + data)
    with suppress(TraceFileError):
        assert read_trace([path]).requests == ()
