"""Formats of others, written and read. Oracles: spec identity-and-traces §3.1, §3.2, §8.3, §8.4."""

from __future__ import annotations

import gzip
import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from load.sim.traces import load_trace
from tests.unit.tidegate.trace.making import BLOCK, SAMPLE, Row, problems_of, request_row, tool_row, trace_of, write
from tidegate.trace.agentic_mooncake import agentic_mooncake_lines
from tidegate.trace.dynamo import dynamo_lines, our_rows
from tidegate.trace.errors import TraceFileError
from tidegate.trace.mooncake import mooncake_lines, rows_of_mooncake
from tidegate.trace.reading import Trace, read_trace
from tidegate.trace.replayable import playable
from tidegate.trace.writing import write_lines

CONVERSATION = SAMPLE.with_name("mooncake_conversation_head.jsonl")
"""The first lines of the public Mooncake conversation trace."""

RUN = [
    request_row("a", 1_000, 1_100, "s", hashes=[11, 12], input_tokens=8),
    request_row("b", 1_300, 1_350, "s", hashes=[11, 12, 13], output_tokens=0),
    request_row("alone", 1_200, 1_250, hashes=[11, 99]),
]


def test_mooncake(tmp_path: Path) -> None:
    """A session's later lines have the delay after the one before; equal prefixes have equal ids."""
    lines = list(mooncake_lines(playable(trace_of(tmp_path, *RUN))))
    session: Row = {"session_id": "s"}
    assert lines == [
        {"request_id": "a", "timestamp": 0, "input_length": 8, "output_length": 2, "hash_ids": [0, 1], **session},
        {"request_id": "alone", "timestamp": 200, "input_length": 8, "output_length": 2, "hash_ids": [0, 2]},
        {"request_id": "b", "delay": 200, "input_length": 12, "output_length": 1, "hash_ids": [0, 1, 3], **session},
    ]


def test_mooncake_for_readers_that_add_turns_up(tmp_path: Path) -> None:
    """Open loop: every prompt whole, at its own time, of no session."""
    lines = list(mooncake_lines(playable(trace_of(tmp_path, *RUN)), open_loop=True))
    assert [(line["timestamp"], line.get("session_id"), "delay" in line) for line in lines] == [
        (0, None, False),
        (200, None, False),
        (300, None, False),
    ]


def test_mooncake_is_read_by_the_laboratory(tmp_path: Path) -> None:
    """What is exported of the peer's sample are its sessions and turns."""
    source = playable(read_trace([SAMPLE]))
    path = write(tmp_path / "m.jsonl", mooncake_lines(source))
    programs = load_trace(path, trace_block=source.block_size)
    assert sum(len(program.turns) for program in programs) == 18
    assert {program.name: len(program.turns) for program in programs}["run-1"] == 5


def test_agentic_mooncake(tmp_path: Path) -> None:
    """The peer's fixture of a sub-agent that overlaps its parent, with its header (version 2)."""
    rows = [
        request_row("root", 7_000, 7_020, "main", hashes=[5]),
        request_row("child", 7_005, 7_015, "sub", "main", hashes=[5, 6], model=None),
        request_row("join", 7_021, 7_030, "main", hashes=[5, 7]),
    ]
    header, *lines = agentic_mooncake_lines(playable(trace_of(tmp_path, *rows)))
    assert header == {
        "schema": "dynamo.agentic_mooncake",
        "version": 2,
        "block_size": BLOCK,
        "hash_id_scope": "local",
        "source": {"format": "tidegate.request.trace.v1", "digest": header["source"]["digest"]},
    }
    common = {"play_id": "main", "output_length": 2}
    assert lines == [
        {**common, "request_id": "root", "session_id": "main", "model": "tiny", "input_length": 4, "hash_ids": [0],
         "not_before_ms": 0, "dependencies": []},
        {**common, "request_id": "child", "session_id": "sub", "model": "unknown", "input_length": 8,
         "hash_ids": [0, 1], "not_before_ms": 0, "dependencies": [
             {"request_id": "root", "trigger": "dispatch", "delay_ms": 5, "relation": "spawn"}]},
        {**common, "request_id": "join", "session_id": "main", "model": "tiny", "input_length": 8, "hash_ids": [0, 2],
         "not_before_ms": 0, "dependencies": [
             {"request_id": "root", "trigger": "completion", "delay_ms": 1, "relation": "sequence"},
             {"request_id": "child", "trigger": "completion", "delay_ms": 1, "relation": "join"}]},
    ]  # fmt: skip


def test_agentic_mooncake_of_a_mixture() -> None:
    """Requests without identity are plays of their own, not an error; ids are unique and all that is named exists."""
    _, *lines = agentic_mooncake_lines(playable(read_trace([SAMPLE])), model="tiny")
    names = [line["request_id"] for line in lines]
    assert len(set(names)) == len(names) == 18
    assert {each["request_id"] for line in lines for each in line["dependencies"]} <= set(names)
    assert sum(line["play_id"].startswith("request:") for line in lines) == 4
    assert {line["play_id"] for line in lines if line["session_id"] in ("run-1", "run-1-sub")} == {"run-1"}


def test_dynamo_rows_without_identity(tmp_path: Path) -> None:
    """Exactly the peer's fields (spec §8.3), wrapped with the time since the first."""
    rows = [request_row("a", 1_000, 1_100, input_tokens=4, kind="turn"), request_row("b", 1_000, 1_250)]
    path = tmp_path / "theirs.jsonl"
    write_lines(dynamo_lines(playable(trace_of(tmp_path, *rows))), path)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["timestamp"] for line in lines] == [0, 150]
    assert lines[0]["event"] == {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": 1_100,
        "request": {
            "request_id": "a",
            "output_tokens": 2,
            "request_received_ms": 1_000,
            "replay": {"trace_block_size": BLOCK, "input_length": 4, "input_sequence_hashes": [1]},
        },
    }


PEERS_REQUEST = {
    "request_id", "x_request_id", "model", "input_tokens", "output_tokens", "cached_tokens", "request_received_ms",
    "prefill_wait_time_ms", "prefill_time_ms", "ttft_ms", "total_time_ms", "avg_itl_ms", "kv_hit_rate", "queue_depth",
    "worker", "replay", "finish_reason_metadata",
}  # fmt: skip


def test_dynamo_rows_of_agents(tmp_path: Path) -> None:
    """Only names of the peer; ours go, a worker's name that is no number too; tools are rows of the harness."""
    rows = [
        request_row("a", 0, 100, "s", worker={"worker": "engine-1"}, outcome="completed", hold_ms=4, ttft_ms=9.5),
        request_row("b", 200, 300, "s", worker={"worker": "77", "rank": 3}),
        tool_row("s", "call", 150, started_at_unix_ms=110, status="ok"),
    ]
    first, tool, second = dynamo_lines(playable(trace_of(tmp_path, *rows)), wrapped=False)
    assert set(first["request"]) <= PEERS_REQUEST
    assert "worker" not in first["request"]
    assert (first["event_source"], first["agent_context"]) == ("dynamo", {"session_id": "s"})
    assert second["request"]["worker"]["decode_worker_id"] == 77
    assert second["request"]["worker"]["decode_dp_rank"] == 3
    assert (tool["event_source"], tool["tool"]["status"], tool["tool"]["ended_at_unix_ms"]) == (
        "harness",
        "succeeded",
        150,
    )


def _identified(lines: Iterable[Row]) -> set[str]:
    return {line["agent_context"]["session_id"] for line in lines if line["event_type"] == "request_end"}


def test_dynamo_takes_no_parent_without_requests(tmp_path: Path) -> None:
    """Its reader refuses "child session references unknown parent session" (seen with 1.6.1)."""
    rows = [request_row("a", 0, 1, "s"), request_row("b", 2, 3, "t", "s"), request_row("c", 4, 5, "u", "gone")]
    lines = dynamo_lines(playable(trace_of(tmp_path, *rows)), wrapped=False)
    assert [line["agent_context"].get("parent_session_id") for line in lines] == [None, "s", None]


def test_dynamo_takes_no_mixture() -> None:
    """The peer's reader refuses files in which only some requests have a session: the others get one of their own."""
    lines = list(dynamo_lines(playable(read_trace([SAMPLE])), wrapped=False))
    assert len([name for name in _identified(lines) if name.startswith("request:")]) == 4


def _core(trace: Trace) -> list[tuple[Any, ...]]:
    return [
        (each.request_id, each.session, each.parent, each.start_ms, each.end_ms, each.replay, each.metrics.worker)
        for each in trace.requests
    ]


def test_rows_go_out_and_come_back(tmp_path: Path) -> None:
    """Import of the peer's sample, export as the peer's, and import again: the same requests and tools."""
    first = read_trace([SAMPLE])
    ours = read_trace([write(tmp_path / "ours.jsonl", our_rows(first))])
    assert _core(ours) == _core(first)
    assert [request.metrics.finish_reason_metadata for request in ours.requests] == [
        request.metrics.finish_reason_metadata for request in first.requests
    ]
    again = read_trace([write(tmp_path / "theirs.jsonl", dynamo_lines(playable(ours)))])
    known = set(first.sessions())
    named = [(*row[:2], row[2] if row[2] in known else None, *row[3:]) for row in _core(first) if row[1] is not None]
    assert [row for row in _core(again) if not row[1].startswith("request:")] == named
    assert [(tool.start_ms, tool.end_ms, tool.status, tool.fields.error_type) for tool in again.tools] == [
        (tool.start_ms, tool.end_ms, tool.status, tool.fields.error_type) for tool in first.tools
    ]


def test_rows_of_ours_come_back_whole(tmp_path: Path) -> None:
    """Of a run with tools, decisions and load samples: the same requests, tools, decisions and loads."""
    first = read_trace([SAMPLE.with_name("agents.jsonl.gz")])
    again = read_trace([write(tmp_path / "again.jsonl", our_rows(first))])
    assert [row.metrics for row in again.requests] == [row.metrics for row in first.requests]
    assert [row.context for row in again.requests] == [row.context for row in first.requests]
    assert [row.fields.tool_call_id for row in again.tools] == [row.fields.tool_call_id for row in first.tools]
    assert [(row.time_ms, row.context, row.decision) for row in again.decisions] == [
        (row.time_ms, row.context, row.decision) for row in first.decisions
    ]
    assert [(row.time_ms, row.load) for row in again.loads] == [(row.time_ms, row.load) for row in first.loads]
    assert (len(again.decisions), len(again.loads), again.skipped) == (len(again.requests), len(first.loads), {})


def test_rows_are_ours_after_import() -> None:
    """No field is null, the source stays."""
    rows = list(our_rows(read_trace([SAMPLE])))
    assert {row["schema"] for row in rows} == {"tidegate.request.trace.v1"}
    assert {row["event_source"] for row in rows} == {"dynamo", "harness"}
    assert "null" not in json.dumps(rows)


def test_what_cannot_be_played_is_left_out(tmp_path: Path) -> None:
    """Counted by reason; nothing at all is an error; sizes of blocks do not mix."""
    rows = [
        request_row("a", 0, 1),
        request_row("b", 0, 1, replay=None),
        request_row("c", 0, 1, replayable=False),
        request_row("d", 0, 1, kind="count_tokens"),
    ]
    source = playable(trace_of(tmp_path, *rows))
    assert [request.request_id for request in source.trace.requests] == ["a"]
    assert source.left_out == {"no replay block": 1, "not replayable": 1, "counts tokens only": 1}
    with pytest.raises(TraceFileError) as error:
        playable(trace_of(tmp_path, *rows[1:]))
    assert error.value.problems[0].rule == "nothing_to_write"
    other = {"trace_block_size": 6, "input_length": 6, "input_sequence_hashes": [1]}
    with pytest.raises(TraceFileError, match="blocks of 4 tokens here, which do not divide those of 6") as error:
        playable(trace_of(tmp_path, request_row("a", 0, 1), request_row("b", 0, 1, replay=other)))
    assert problems_of(error.value) == [("trace.jsonl", 1, "mixed_block_sizes")]


def _mooncake(tmp_path: Path, *lines: Row, block_size: int = BLOCK) -> Trace:
    rows = list(rows_of_mooncake([write(tmp_path / "m.jsonl", lines)], block_size=block_size, start_ms=50, model="m"))
    return read_trace([write(tmp_path / "ours.jsonl", rows)])


def test_convert_of_a_public_trace(tmp_path: Path) -> None:
    """Requests, tokens and prefixes of the Mooncake conversation trace; written again, it is the same trace."""
    trace = read_trace([write(tmp_path / "ours.jsonl", rows_of_mooncake([CONVERSATION], block_size=512))])
    told = [json.loads(line) for line in CONVERSATION.read_text().splitlines()]
    assert len(trace.requests) == len(told)
    written = list(mooncake_lines(playable(trace)))
    assert sorted((line["timestamp"], line["input_length"], line["output_length"]) for line in written) == sorted(
        (line["timestamp"], line["input_length"], line["output_length"]) for line in told
    )
    ids = sorted(line["hash_ids"] for line in told)
    assert sum(map(len, ids)) == sum(len(line["hash_ids"]) for line in written)
    assert len(set(itertools.chain(*ids))) == len(set(itertools.chain(*(line["hash_ids"] for line in written))))


def test_convert_of_sessions(tmp_path: Path) -> None:
    """A delay counts from the line before, and wins over a timestamp (the peer's fixture mooncake-delta.jsonl);
    other names of the fields; a prompt of which only whole blocks are hashed is as long as they are."""
    trace = _mooncake(
        tmp_path,
        {"session_id": "s", "timestamp": 100, "input_length": 11, "output_length": 3, "hash_ids": [1, 2]},
        {"session_id": "s", "timestamp": 999, "delay": 20, "input_tokens": 7, "output_tokens": 0, "hash_ids": [1, 3]},
        {"created_time": 130.0, "request_id": "own", "output_length": 1, "hash_ids": [4]},
    )
    found = [
        (each.request_id, each.session, each.start_ms, each.metrics.input_tokens, each.metrics.output_tokens)
        for each in trace.requests
    ]
    assert found == [("m.jsonl:1", "s", 150, 8, 3), ("m.jsonl:2", "s", 170, 7, 0), ("own", None, 180, 4, 1)]
    assert {request.metrics.model for request in trace.requests} == {"m"}


BAD_LINES: list[tuple[Row, str]] = [
    ({"output_length": 1}, "json"),
    ({"hash_ids": [1], "input_length": 4}, "fields"),
    ({"hash_ids": [1], "input_length": -4, "output_length": 1}, "fields"),
    ({"hash_ids": [1, 2], "input_length": 4, "output_length": 1}, "hash_count"),
    ({"hash_ids": [1, 2], "input_length": 12, "output_length": 1}, "hash_count"),
    ({"hash_ids": [-1], "input_length": 4, "output_length": 1}, "hash_range"),
    ({"hash_ids": [1], "output_length": 1, "timestamp": -1}, "times"),
    ({"hash_ids": [1], "output_length": 1, "session_id": "s", "delay": 5}, "times"),
]


@pytest.mark.parametrize(("line", "rule"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_mooncake_line_is_named(tmp_path: Path, line: Row, rule: str) -> None:
    """By file, line and rule; a wrong size of blocks says so."""
    with pytest.raises(TraceFileError) as error:
        _mooncake(tmp_path, {"hash_ids": [1], "output_length": 1}, line)
    assert problems_of(error.value) == [("m.jsonl", 2, rule)]


def test_a_damaged_mooncake_file_is_an_error(tmp_path: Path) -> None:
    """A published trace is whole, or not that trace."""
    path = tmp_path / "m.jsonl.gz"
    path.write_bytes(gzip.compress(CONVERSATION.read_bytes())[:-20])
    with pytest.raises(TraceFileError) as error:
        _run_out(rows_of_mooncake([path], block_size=512))
    assert [problem.rule for problem in error.value.problems] == ["file"]


def _run_out(rows: Iterator[Row]) -> int:
    return sum(1 for _ in rows)
