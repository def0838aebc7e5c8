"""The timeline: everything is on it, nothing overlaps on a lane, stages nest, in the order that a reader wants."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tidegate.trace.making import SAMPLE, Row, request_row, tool_row, trace_of
from tests.unit.tidegate.trace.timeline_format import Counters, FlowEnd, FlowStart, Instant, Metadata, Timeline, checked
from tidegate.trace.dependencies import dependency_graph
from tidegate.trace.errors import Place
from tidegate.trace.perfetto import perfetto_events, session_order, stages
from tidegate.trace.reading import Trace, read_trace
from tidegate.trace.rows import Request, ToolSpan, read_decision, read_load, read_request, read_tool
from tidegate.trace.tools import tool_uses

Calls = tuple[tuple[str, str], ...]


def timeline(trace: Trace) -> Timeline:
    return checked(list(perfetto_events(trace, dependency_graph(trace))))


def names(found: Timeline, kind: str) -> list[str]:
    """Of ``process`` or ``thread``, in the order in which they are shown."""
    metadata = [event for event in found.traceEvents if isinstance(event, Metadata)]
    places = {(each.pid, each.tid): each.args["sort_index"] for each in metadata if each.name == f"{kind}_sort_index"}
    named = [each for each in metadata if each.name == f"{kind}_name"]
    return [each.args["name"] for each in sorted(named, key=lambda each: places[each.pid, each.tid])]


def counter_values(found: Timeline) -> dict[str, list[tuple[int, dict[str, float]]]]:
    values: dict[str, list[tuple[int, dict[str, float]]]] = {}
    for event in found.traceEvents:
        if isinstance(event, Counters):
            values.setdefault(event.name, []).append((event.ts, event.args))
    return values


def marks(found: Timeline, category: str = "tidegate.mark") -> list[tuple[str, int]]:
    return [(each.name, each.ts) for each in found.traceEvents if isinstance(each, Instant) and each.cat == category]


def decision_row(request: str, time_ms: int, worker: str = "engine-1", **said: Any) -> Row:
    grant = said.pop("grant_id", f"grant-{request}")
    return {
        "schema": "tidegate.request.trace.v1",
        "event_type": "decision",
        "event_time_unix_ms": time_ms,
        "event_source": "tidegate",
        "decision": {
            "request_id": request,
            "grant_id": grant,
            "worker": {"worker": worker, "rank": 0},
            "model": "tiny",
            **said,
        },
    }


def load_row(worker: str, time_ms: int, *loads: tuple[int, int, float], kv_tokens: int | None = 1_000) -> Row:
    ranks = [
        {"rank": rank, "running": running, "waiting": waiting, "kv_usage": usage}
        for rank, (running, waiting, usage) in enumerate(loads)
    ]
    load = {"worker": worker, "model": "tiny", "kv_tokens": kv_tokens, "loads": ranks}
    return {
        "schema": "tidegate.request.trace.v1",
        "event_type": "worker_load",
        "event_time_unix_ms": time_ms,
        "event_source": "tidegate",
        "worker_load": {key: value for key, value in load.items() if value is not None},
    }


def test_the_peers_sample() -> None:
    """Every request, tool and session is there; the sub-agent hangs on its parent by an arrow and stands behind it."""
    trace = read_trace([SAMPLE])
    found = timeline(trace)
    shown = {event.args["request_id"] for event in found.of("request")}
    assert shown == {request.request_id for request in trace.requests}
    assert len(found.of("tool")) == 4
    lanes = names(found, "thread")
    assert {"request-only requests", "run-1 tools", "↳ run-1-sub requests"} <= set(lanes)
    assert {lane.removeprefix("↳ ").rsplit(" ", 1)[0].split(" [")[0] for lane in lanes} == {
        *trace.sessions(),
        "request-only",
    }
    assert lanes.index("↳ run-1-sub requests") == lanes.index("run-1 tools") + 1
    assert names(found, "process")[-1] == "Sessions"
    flows = [event for event in found.traceEvents if isinstance(event, FlowStart | FlowEnd)]
    assert [event.name for event in flows].count("spawn") == 4


def test_a_run_of_ours() -> None:
    """All of a recording with decisions, load samples, tools told and inferred, and a sub-agent."""
    trace = read_trace([SAMPLE.with_name("agents.jsonl.gz")])
    found = timeline(trace)
    assert (len(found.of("request")), len(found.of("tool")), len(trace.sessions())) == (21, 17, 4)
    assert sum(tool.args["inferred"] for tool in found.of("tool")) == 5
    assert len(marks(found, "tidegate.decision")) == len(trace.decisions) == 21
    assert names(found, "process") == ["Worker engine-1", "Worker engine-2", "Sessions"]
    assert set(counter_values(found)) == {"requests running", "requests waiting", "KV use (%)", "KV tokens"}
    samples = sum(len(values) for name, values in counter_values(found).items() if name == "KV tokens")
    assert samples == len(trace.loads)
    assert all("cost" in request.args["decision"] for request in found.of("request"))


def test_stages_nest_in_their_request(tmp_path: Path) -> None:
    """Held, queued, prefill, decode, one after the other; and what the numbers of a row cannot be is cut."""
    trace = trace_of(
        tmp_path,
        request_row("a", 0, 100, "s", admission_wait_ms=10.0, hold_ms=8, prefill_wait_time_ms=30.0, ttft_ms=45.0),
        request_row("b", 0, 50, "t", admission_wait_ms=70.0, ttft_ms=900.0, prefill_wait_time_ms=800.0),
        request_row("c", 0, 20, "u", hold_ms=20, outcome="refused"),
        request_row("d", 0, 20, "v", ttft_ms=5.0),
        request_row("e", 0, 20, "w", admission_wait_ms=2.0, prefill_wait_time_ms=4.0, ttft_ms=5.0),
        request_row("f", 0, 20, "x", admission_wait_ms=2.0, prefill_wait_time_ms=4.0, outcome="upstream_lost"),
    )
    assert {request.request_id: stages(request) for request in trace.requests} == {
        "a": [("held", 0, 8), ("queued", 8, 30), ("prefill", 30, 45), ("decode", 45, 100)],
        "b": [("queued", 0, 50)],
        "c": [("held", 0, 20)],
        "d": [("prefill", 0, 5), ("decode", 5, 20)],
        "e": [("queued", 0, 4), ("prefill", 4, 5), ("decode", 5, 20)],
        "f": [("queued", 0, 4)],
    }
    found = timeline(trace)
    for stage in found.of("stage"):
        assert any(
            request.tid == stage.tid and request.ts <= stage.ts and stage.end <= request.end
            for request in found.of("request")
        )


def test_what_overlaps_gets_lanes(tmp_path: Path) -> None:
    """User report (the peer's issue 10802): requests of one session that overlap lay on top of each other."""
    rows = [request_row(str(number), number * 10, number * 10 + 25, "s") for number in range(6)]
    found = timeline(trace_of(tmp_path, *rows))
    assert names(found, "thread") == ["s requests", "s [lane 2] requests", "s [lane 3] requests"]


def called(*calls: tuple[str, str]) -> Row:
    return {
        "finish_reason": "tool_calls",
        "tool_calls": [
            {"id": call, "name": name, "tool_call_index": place} for place, (call, name) in enumerate(calls)
        ],
    }


def test_inferred_tools(tmp_path: Path) -> None:
    """From the answer that asked to the session's next request, where no end was told; else a moment, said so. Where
    its start was told, from there.

    User report (the peer's issue 9817): a harness that sends no tool events showed no tools at all.
    """
    trace = trace_of(
        tmp_path,
        request_row("a", 0, 10, "s", finish_reason_metadata=called(("c1", "bash"), ("c2", "read"), ("c4", "grep"))),
        request_row("b", 60, 70, "s", finish_reason_metadata=called(("c3", "bash"))),
        tool_row("s", "c2", 40, started_at_unix_ms=12, ended_at_unix_ms=40),
        tool_row("s", "c4", 20, "tool_start"),
        tool_row("s", "c5", 80, "tool_start"),
    )
    tools = {event.args["tool_call_id"]: event for event in timeline(trace).of("tool")}
    assert {call: (event.name, event.ts, event.dur) for call, event in tools.items()} == {
        "c1": ("tool bash", 10_000, 50_000),
        "c2": ("tool bash", 12_000, 28_000),
        "c3": ("tool bash", 70_000, 1_000),
        "c4": ("tool bash", 20_000, 40_000),
        "c5": ("tool bash", 80_000, 1_000),
    }
    assert [tools[call].args["inferred"] for call in ("c1", "c2", "c3", "c4", "c5")] == [True, False, True, True, True]
    assert [call for call, tool in tools.items() if "duration_unknown" in tool.args] == ["c3", "c5"]


def test_workers_without_samples_are_estimated(tmp_path: Path) -> None:
    """Requests running and their tokens, from grant to end, and the name says that it is an estimate; what waited at
    admission."""
    worker = {"worker": "engine-1", "rank": 0}
    trace = trace_of(
        tmp_path,
        request_row("a", 0, 40, worker=worker, input_tokens=10, admission_wait_ms=5.0, hold_ms=4, queue_depth=3),
        request_row("b", 20, 40, worker=worker, input_tokens=20),
    )
    found = timeline(trace)
    assert {name: [(at, *args.values()) for at, args in values] for name, values in counter_values(found).items()} == {
        "requests running (estimate)": [(5_000, 1), (20_000, 2), (40_000, 0)],
        "KV tokens of running requests (estimate)": [(5_000, 12), (20_000, 34), (40_000, 0)],
        "turns held": [(0, 1), (4_000, 0)],
        "queue met by turns": [(0, 3)],
    }
    assert names(found, "process") == ["Worker engine-1", "Admission", "Sessions"]


def test_counters_are_what_bridges_said(tmp_path: Path) -> None:
    """All requests of a worker, KV of each of its ranks; no estimate beside them; nothing once it tells no more."""
    trace = trace_of(
        tmp_path,
        request_row("a", 0, 40, worker={"worker": "engine-1", "rank": 0}, input_tokens=10),
        load_row("engine-1", 10, (2, 1, 0.25)),
        load_row("engine-1", 20),
        load_row("engine-2", 10, (2, 1, 0.25), (3, 0, 0.5), kv_tokens=None),
    )
    found = timeline(trace)
    assert counter_values(found) == {
        "requests running": [(10_000, {"value": 2}), (20_000, {"value": 0}), (10_000, {"value": 5})],
        "requests waiting": [(10_000, {"value": 1}), (20_000, {"value": 0}), (10_000, {"value": 1})],
        "KV use (%)": [(10_000, {"value": 25}), (20_000, {"value": 0}), (10_000, {"rank 0": 25, "rank 1": 50})],
        "KV tokens": [(10_000, {"value": 250}), (20_000, {"value": 0})],
    }
    assert names(found, "process") == ["Worker engine-1", "Worker engine-2", "Sessions"]


def test_a_request_says_what_was_decided(tmp_path: Path) -> None:
    """Cost and its parts of the chosen rank, who came second, how many were seen; a mark for each decision, and one for
    a retry, a failure, a compaction, a fork."""
    candidates = [
        {"worker": "engine-1", "rank": 0, "cost": 3.0, "parts": {"prefill": 2.0}, "open_grants": 4},
        {"worker": "engine-2", "rank": 1, "cost": 5.5},
        {"worker": "engine-3", "rank": 0, "excluded": "left"},
    ]
    grant = "grant-2"
    failed = request_row(
        "a",
        100,
        200,
        "s",
        input_tokens=8,
        cached_tokens=4,
        attempts=2,
        grant_id=grant,
        outcome="upstream_lost",
        reason="died",
        kind="turn",
    )
    fork = request_row("f", 300, 400, "forked", kind="compaction")
    fork["agent_context"] |= {
        "turn": {"forked_from_session_id": "s", "forked_from_ordinal": 3},
        "compaction": {"trigger": "auto", "reason": "context_limit"},
    }
    trace = trace_of(
        tmp_path,
        failed,
        fork,
        decision_row("a", 105, "engine-9", grant_id="grant-1"),
        decision_row(
            "a", 120, attempt=1, grant_id=grant, candidates=candidates, candidates_seen=7, previous_worker="engine-9"
        ),
        decision_row("a", 120, attempt=1, grant_id=grant),
    )
    found = timeline(trace)
    first, second = found.of("request")
    assert (first.name, second.name) == ("turn 1 · 50 % cached · upstream_lost", "compaction")
    said = first.args["decision"]
    assert (said["worker"], said["cost"], said["parts"], said["candidates_seen"]) == ("engine-1", 3, {"prefill": 2}, 7)
    assert (said["runner_up"], said["runner_up_cost"], said["open_grants"]) == ("engine-2/1", 5.5, 4)
    assert second.args["forked_from"] == "s"
    assert marks(found, "tidegate.decision") == [
        ("decided engine-9", 105_000),
        ("decided engine-1, was at engine-9", 120_000),
    ]
    assert marks(found) == [
        ("retry (attempt 2)", 120_000),
        ("upstream_lost", 199_999),
        ("fork of s", 300_000),
        ("compaction", 300_000),
    ]
    assert [event.name for event in found.traceEvents if isinstance(event, FlowStart)] == ["fork"]


def test_sessions_stand_in_the_order_of_their_beginning(tmp_path: Path) -> None:
    """Sub-agents behind their parent, and deeper; a parent without requests is none; who name each other come last."""
    trace = trace_of(
        tmp_path,
        request_row("1", 0, 1, "late-parent", "nobody"),
        request_row("2", 5, 6, "child", "root"),
        request_row("3", 2, 3, "root"),
        request_row("4", 6, 7, "grandchild", "child"),
        request_row("5", 1, 2, "x", "y"),
        request_row("6", 1, 2, "y", "x"),
    )
    order = session_order(trace)
    assert list(order) == ["late-parent", "root", "child", "grandchild", "x", "y"]
    assert [depth for _, depth in order.values()] == [0, 0, 1, 2, 0, 1]


HERE = Place("rows", 1)
ids = st.sampled_from(["a", "b", "c"])
times = st.integers(0, 60)


@st.composite
def requests(draw: st.DrawFn) -> list[Row]:
    rows = []
    for number in range(draw(st.integers(1, 12))):
        start, session = draw(times), draw(st.none() | ids)
        row = request_row(
            str(number),
            start,
            start + draw(times),
            session,
            draw(st.none() | st.just({"a": "b", "b": "c", "c": None}.get(session or ""))),
            admission_wait_ms=draw(st.none() | st.floats(0, 90)),
            hold_ms=draw(st.none() | st.integers(0, 90)),
            ttft_ms=draw(st.none() | st.floats(0, 90)),
            prefill_wait_time_ms=draw(st.none() | st.floats(0, 90)),
            outcome=draw(st.sampled_from([None, "completed", "client_disconnect"])),
            attempts=draw(st.sampled_from([None, 1, 2])),
            input_tokens=draw(st.none() | st.integers(0, 9)),
            cached_tokens=draw(st.none() | st.integers(0, 9)),
            kind=draw(st.sampled_from([None, "turn", "title", "compaction"])),
            worker=draw(st.sampled_from([None, {"worker": "w1"}, {"worker": "w2", "rank": 1}])),
            finish_reason_metadata=draw(st.sampled_from([None, called(("c0", "bash"), ("c1", "read"))])),
        )
        rows.append(row)
    return rows


tools = st.builds(
    tool_row,
    ids,
    st.sampled_from(["c0", "c1", "c2"]),
    times,
    st.sampled_from(["tool_start", "tool_end", "tool_error"]),
    duration_ms=st.none() | st.floats(0, 50),
)


@pytest.mark.long
@given(
    requests(),
    st.lists(tools, max_size=6),
    st.lists(st.builds(decision_row, st.sampled_from("0123"), times, attempt=st.integers(0, 1)), max_size=3),
    st.lists(st.builds(load_row, st.sampled_from(["w1", "w3"]), times), max_size=3),
)
def test_whatever_the_rows_say_the_file_is_right(
    rows: list[Row], tool_rows: list[Row], decided: list[Row], loads: list[Row]
) -> None:
    """Each request, tool, session and decision is there once; every rule of the format holds."""
    spans = [read_tool(HERE, row) for row in tool_rows]
    found_requests: list[Request] = [read_request(HERE, row) for row in rows]
    by_grant = {row["decision"]["grant_id"]: read_decision(HERE, row) for row in reversed(decided)}
    trace = Trace(
        requests=tuple(sorted(found_requests, key=lambda row: (row.start_ms, row.end_ms, row.request_id))),
        tools=tuple(span for span in spans if isinstance(span, ToolSpan)),
        decisions=tuple(by_grant.values()),
        loads=tuple(sorted((read_load(HERE, row) for row in loads), key=lambda row: row.time_ms)),
    )
    found = timeline(trace)
    assert Counter(event.args["request_id"] for event in found.of("request")) == Counter(
        request.request_id for request in trace.requests
    )
    assert len(found.of("tool")) == len(tool_uses(trace))
    known = {request.request_id for request in trace.requests}
    assert len(marks(found, "tidegate.decision")) == sum(row.decision.request_id in known for row in by_grant.values())
    assert {event.args.get("session") for event in found.of("request")} - {None} == set(trace.sessions())


@pytest.mark.parametrize("session", ["", 'a"b\\', "\u2028 </script>", "x" * 4_096])
def test_hostile_ids(session: str, tmp_path: Path) -> None:
    """Names that clients choose break neither JSON nor the order."""
    found = timeline(trace_of(tmp_path, request_row("a", 0, 1, session)))
    assert found.of("request")[0].args["session"] == session
