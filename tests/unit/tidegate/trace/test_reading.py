"""Files and rows of ours and of the peer."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from schemas.base import to_json
from schemas.session import ImplicitIdentity, SessionKey
from schemas.trace import (
    AgentContext,
    FinishMetadata,
    ReplayBlock,
    RequestMetrics,
    ToolCall,
    ToolRun,
    TracedWorker,
    TraceRow,
)
from segments.format import member, segment_name, wrap
from tests.unit.tidegate.trace.making import SAMPLE, Row, problems_of, request_row, tool_row, trace_of, write
from tidegate.trace.errors import MOST_PROBLEMS, TraceFileError
from tidegate.trace.reading import read_trace


def test_rows_of_the_peer() -> None:
    """A real sample: every request and tool, with the peer's placement and in the order of beginning."""
    trace = read_trace([SAMPLE])
    assert (len(trace.requests), len(trace.tools), len(trace.open_tools)) == (18, 4, 0)
    first = trace.requests[0]
    assert (first.session, first.metrics.input_tokens, first.metrics.cached_tokens) == ("run-1", 458, 448)
    assert first.metrics.worker is not None
    assert (first.metrics.worker.worker, first.metrics.worker.rank) == ("3919353549270590803", 0)
    assert [request.session for request in trace.requests].count(None) == 4
    assert trace.parents()["run-1-sub"] == "run-1"
    assert [tool.status for tool in trace.tools] == ["succeeded", "succeeded", "error", "succeeded"]


def test_wrapped_and_bare_rows_are_the_same(tmp_path: Path) -> None:
    """Both, and files of both, whatever the order of lines (spec identity-and-traces §2.2)."""
    rows = [request_row("b", 20, 30, "s"), request_row("a", 0, 10, "s")]
    bare = trace_of(tmp_path, *rows)
    wrapped = trace_of(tmp_path, *({"timestamp": 5, "event": row} for row in rows))
    assert bare.requests == wrapped.requests
    assert [request.request_id for request in bare.requests] == ["a", "b"]


@pytest.mark.parametrize(
    "context",
    [
        {"session_id": "child", "parent_session_id": "root"},
        {"session_id": "run", "trajectory_id": "child", "parent_trajectory_id": "root"},
        {"program_id": "child", "parent_program_id": "root"},
        {"session_id": "child", "parent_session_id": "root", "agent_headers": {"x": ["y"]}, "compaction": None},
    ],
)
def test_earlier_names_of_a_session(tmp_path: Path, context: Row) -> None:
    """``trajectory_id`` and ``program_id`` are sessions; what is not known is left aside."""
    trace = trace_of(tmp_path, request_row("a", 0, 10) | {"agent_context": context})
    assert (trace.requests[0].session, trace.requests[0].parent) == ("child", "root")


def test_many_gzip_members_and_folders(tmp_path: Path) -> None:
    """Segments of many members, read from their folder in the order of their names."""
    lines = [json.dumps(request_row(str(number), number, number + 1)).encode() + b"\n" for number in range(4)]
    (tmp_path / "t.000001.jsonl.gz").write_bytes(gzip.compress(lines[0]) + gzip.compress(lines[1] + lines[2]))
    (tmp_path / "t.000002.jsonl.gz").write_bytes(gzip.compress(lines[3]))
    (tmp_path / "notes.txt").write_text("no trace")
    trace = read_trace([tmp_path, tmp_path / "t.000002.jsonl.gz"])
    assert [request.request_id for request in trace.requests] == ["0", "1", "2", "3"]
    assert trace.damaged == ()


@pytest.mark.parametrize("lost", [1, 9, 40])
def test_a_damaged_tail_is_read_up_to_there(tmp_path: Path, lost: int) -> None:
    """A process was killed while it wrote its last member: whole members before it count, and it is said where."""
    lines = [json.dumps(request_row(str(number), number, number + 1)).encode() + b"\n" for number in range(3)]
    members = [gzip.compress(line) for line in lines]
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(b"".join(members)[:-lost])
    trace = read_trace([path])
    assert [request.request_id for request in trace.requests][:2] == ["0", "1"]
    assert [(problem.place.file, problem.rule) for problem in trace.damaged] == [(str(path), "file")]


def test_damaged_bytes_end_a_file(tmp_path: Path) -> None:
    """What is no gzip behind a member is damage, not a crash of ours."""
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(json.dumps(request_row("0", 0, 1)).encode() + b"\n") + b"\x1f\x8bgarbage-garbage")
    trace = read_trace([path])
    assert (len(trace.requests), len(trace.damaged)) == (1, 1)


def test_half_a_last_line_is_damage(tmp_path: Path) -> None:
    """Of a plain file whose writer was killed; the same in the middle is an error."""
    whole = json.dumps(request_row("0", 0, 1))
    path = tmp_path / "t.jsonl"
    path.write_text(f"{whole}\n{whole[:50]}")
    trace = read_trace([path])
    assert (len(trace.requests), [problem.place.line for problem in trace.damaged]) == (1, [2])
    path.write_text(f"{whole[:50]}\n{whole}\n")
    with pytest.raises(TraceFileError) as error:
        read_trace([path])
    assert problems_of(error.value) == [("t.jsonl", 1, "json")]


def test_payload_rows_and_other_schemas_are_counted(tmp_path: Path) -> None:
    """The peer's dynamo-standard fixture begins with a bare payload row without a schema (spec §8.4)."""
    trace = trace_of(
        tmp_path,
        {"event_type": "request_payload"},
        request_row("a", 0, 1),
        {"schema": "somebody.else.v7", "event_type": "request_end"},
        {"schema": "dynamo.request.trace.v1", "event_type": "decision", "event_time_unix_ms": 4},
        {"timestamp": 1, "event": {"schema": "dynamo.request.trace.v1", "event_type": "request_payload"}},
    )
    assert len(trace.requests) == 1
    assert trace.skipped == {"request_payload": 2, "schema somebody.else.v7": 1, "decision": 1}


def replayed(size: int, length: int, hashes: list[int]) -> Row:
    """A request with that replay block."""
    block = {"trace_block_size": size, "input_length": length, "input_sequence_hashes": hashes}
    return request_row("a", 0, 1, replay=block)


BAD_ROWS: list[tuple[Row, str]] = [
    (replayed(4, 9, [1, 2]), "hash_count"),
    (replayed(0, 0, []), "block_size"),
    (replayed(4, -1, []), "hash_count"),
    (request_row("a", 0, 1, hashes=[1 << 64]), "hash_range"),
    (request_row("a", 0, 1, hashes=[-1]), "hash_range"),
    (request_row("a", 0, 1, output_tokens=-2), "fields"),
    (request_row("a", 0, 1, input_tokens="many"), "fields"),
    (request_row("a", 0, 1, total_time_ms=-3.0), "times"),
    (request_row("a", 0, 1, request_received_ms=-3), "times"),
    (request_row("a", 0, 1) | {"request": None}, "fields"),
    (request_row("a", 0, 1) | {"event_time_unix_ms": "now"}, "fields"),
    (request_row("a", 0, 1) | {"agent_context": ["s"]}, "fields"),
    (tool_row("s", "c", 5) | {"agent_context": None}, "fields"),
    (tool_row("s", "c", 5) | {"tool": {"tool_class": "bash"}}, "fields"),
    (tool_row("s", "c", 5, duration_ms="long"), "fields"),
]


@pytest.mark.parametrize(("row", "rule"), BAD_ROWS, ids=range(len(BAD_ROWS)))
def test_a_bad_row_is_named(tmp_path: Path, row: Row, rule: str) -> None:
    """By file, line and rule."""
    with pytest.raises(TraceFileError) as error:
        trace_of(tmp_path, request_row("good", 0, 1), row)
    assert problems_of(error.value) == [("trace.jsonl", 2, rule)]
    assert f"trace.jsonl:2: {error.value.problems[0].text} [{rule}]" in str(error.value)


def test_a_request_twice_is_an_error_over_all_files(tmp_path: Path) -> None:
    first = write(tmp_path / "one.jsonl", [request_row("a", 0, 1)])
    second = write(tmp_path / "two.jsonl", [request_row("b", 0, 1), request_row("a", 0, 1)])
    with pytest.raises(TraceFileError, match=r"one\.jsonl:1") as error:
        read_trace([first, second])
    assert problems_of(error.value) == [("two.jsonl", 2, "duplicate_request_id")]


def test_problems_are_bounded(tmp_path: Path) -> None:
    """The first are told, the rest is counted."""
    with pytest.raises(TraceFileError) as error:
        trace_of(tmp_path, *[request_row("a", 0, 1)] * (MOST_PROBLEMS + 4))
    assert (len(error.value.problems), error.value.more) == (MOST_PROBLEMS, 3)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    """A missing file, and a folder without traces."""
    for path in (tmp_path / "nothing.jsonl", tmp_path):
        with pytest.raises(TraceFileError) as error:
            read_trace([path])
        assert error.value.problems[0].rule == "file"


def test_times_of_tools(tmp_path: Path) -> None:
    """Own times; else time and duration; else the start that was told before; a status by any of its names."""
    trace = trace_of(
        tmp_path,
        tool_row("s", "0", 100, started_at_unix_ms=10, ended_at_unix_ms=90, status="ok"),
        tool_row("s", "1", 100, started_at_unix_ms=10, duration_ms=50.0, status="timeout"),
        tool_row("s", "2", 100, duration_ms=30.0, status="failed"),
        tool_row("s", "3", 60, "tool_start", status="running"),
        tool_row("s", "3", 100, "tool_error"),
        tool_row("s", "4", 100),
        tool_row("s", "5", 70, "tool_start"),
    )
    times = {tool.fields.tool_call_id: (tool.start_ms, tool.end_ms, tool.timed, tool.status) for tool in trace.tools}
    assert times == {
        "0": (10, 90, True, "succeeded"),
        "1": (10, 60, True, "cancelled"),
        "2": (70, 100, True, "error"),
        "3": (60, 100, True, "error"),
        "4": (100, 100, False, "succeeded"),
    }
    assert [start.fields.tool_call_id for start in trace.open_tools] == ["5"]


def test_compact_tool_rows(tmp_path: Path) -> None:
    """The session at the row's top, as public plug-ins send it (spec §2.7)."""
    row = tool_row("x", "c", 5) | {"agent_context": None, "session_id": "s", "parent_session_id": "p"}
    tool = trace_of(tmp_path, row).tools[0]
    assert (tool.session, tool.parent) == ("s", "p")


def test_rows_of_our_own_recorder(tmp_path: Path) -> None:
    """Every field that a row has is read as it was written, of requests and of tools."""
    request = TraceRow(
        event_type="request_end",
        event_time_unix_ms=1_090,
        agent_context=AgentContext(
            session_id="s",
            parent_session_id="p",
            session_final=True,
            input_trigger="tool_result",
            turn_id="t",
            session=SessionKey(family="codex", root="s"),
            implicit=ImplicitIdentity(relation="continues", confidence=0.5),
        ),
        request=RequestMetrics(
            request_id="r",
            kind="turn",
            outcome="client_disconnect",
            output_tokens=4,
            request_received_ms=1_000,
            admission_wait_ms=2.5,
            decision_mode="policy",
            total_time_ms=90.25,
            worker=TracedWorker(worker="engine-1", rank=2),
            replay=ReplayBlock(trace_block_size=16, input_length=17, input_sequence_hashes=(1, (1 << 64) - 1)),
            replayable=True,
            finish_reason_metadata=FinishMetadata(tool_calls=(ToolCall(id="c", name="bash"),)),
        ),
    )
    tool = TraceRow(
        event_type="tool_error",
        event_time_unix_ms=2_000,
        agent_context=AgentContext(session_id="s"),
        tool=ToolRun(tool_call_id="c", tool_class="bash", status="cancelled", duration_ms=3.0, inferred=True),
        event_source="harness",
    )
    lines = b"".join(wrap(to_json(row), place) + b"\n" for place, row in enumerate((request, tool)))
    path = tmp_path / segment_name("t", 3)
    path.write_bytes(member(lines))
    trace = read_trace([tmp_path])
    read = trace.requests[0]
    assert (read.metrics, read.context, read.end_ms) == (request.request, request.agent_context, 1_090.25)
    assert tool.tool is not None
    assert to_json(trace.tools[0].fields) == to_json(tool.tool)
    assert (trace.tools[0].start_ms, trace.tools[0].status) == (1_997, "cancelled")
