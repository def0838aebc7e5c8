"""Trace files and their rows, as short as a test wants them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tidegate.trace.errors import TraceFileError
from tidegate.trace.reading import Trace, read_trace

BLOCK = 4
SAMPLE = Path(__file__).parents[3] / "fixtures" / "recorded_traces" / "request_trace_sample.jsonl"
"""Rows that the peer wrote: 18 requests of harnesses and of nobody, 4 tools."""

Row = dict[str, Any]


def request_row(
    name: str, start_ms: int, end_ms: int, session: str | None = None, parent: str | None = None, **said: Any
) -> Row:
    """A bare request_end of ours. ``hashes``: of the prompt, in whole blocks; other names go into ``request``."""
    hashes = said.pop("hashes", [1])
    request: Row = {
        "request_id": name,
        "model": "tiny",
        "output_tokens": 2,
        "request_received_ms": start_ms,
        "total_time_ms": end_ms - start_ms,
        "replay": {
            "trace_block_size": BLOCK,
            "input_length": len(hashes) * BLOCK,
            "input_sequence_hashes": hashes,
        },
        **said,
    }
    row: Row = {
        "schema": "tidegate.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": end_ms,
        "event_source": "tidegate",
        "request": {key: value for key, value in request.items() if value is not None},
    }
    if session is not None:
        row["agent_context"] = {"session_id": session} | ({} if parent is None else {"parent_session_id": parent})
    return row


def tool_row(session: str, call: str, end_ms: int, event_type: str = "tool_end", **said: Any) -> Row:
    """A bare tool row as a harness sends it."""
    return {
        "schema": "dynamo.request.trace.v1",
        "event_type": event_type,
        "event_time_unix_ms": end_ms,
        "event_source": "harness",
        "agent_context": {"session_id": session},
        "tool": {"tool_call_id": call, "tool_class": "bash", **said},
    }


def write(path: Path, rows: Iterable[Row]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trace_of(path: Path, *rows: Row) -> Trace:
    """Of rows that are written to the folder ``path`` and read again."""
    return read_trace([write(path / "trace.jsonl", rows)])


def problems_of(error: TraceFileError) -> list[tuple[str, int, str]]:
    """(file's name, line, rule) of each."""
    return [(Path(each.place.file).name, each.place.line, each.rule) for each in error.problems]
