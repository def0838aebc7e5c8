"""Rows as spans: which trace, which parent, which names; the same whoever makes them, and in whatever order."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.schemas import Schemas

from schemas.session import Family, SessionKey
from schemas.trace import (
    AgentContext,
    ChoiceFinish,
    FinishMetadata,
    ReplayBlock,
    RequestMetrics,
    ToolCall,
    ToolRun,
    TracedDecision,
    TracedLoad,
    TracedWorker,
    TraceRow,
    TurnFacts,
)
from services.recorder.span_builder import SpanBuilder, log_records
from services.recorder.spans import SCHEMA_URL, Runs, Span

RUNS = Runs()


def context(session: str, parent: str | None = None, family: Family = "dynamo", **key: str) -> AgentContext:
    return AgentContext(
        session_id=session,
        parent_session_id=parent,
        session=SessionKey(family=family, **{"root": session, **key}),
        turn=TurnFacts(agent_name=f"agent {session}"),
    )


def request(
    name: str, whose: AgentContext | None, start_ms: int = 1_000, calls: tuple[str, ...] = (), **said: object
) -> TraceRow:
    metrics = RequestMetrics(
        request_id=name,
        model="sim-8b",
        endpoint="chat_completions",
        outcome="completed",
        request_received_ms=start_ms,
        total_time_ms=50.5,
        worker=TracedWorker(worker="engine-1"),
        finish_reason_metadata=FinishMetadata(
            finish_reason="tool_calls", tool_calls=tuple(ToolCall(id=call, name="bash") for call in calls)
        ),
        replay=ReplayBlock(trace_block_size=16, input_length=16, input_sequence_hashes=(123456789123,)),
    )
    fields = {each: getattr(metrics, each) for each in metrics.__struct_fields__} | said
    return TraceRow(
        event_type="request_end",
        event_time_unix_ms=start_ms + 50,
        agent_context=whose,
        request=RequestMetrics(**fields),
    )


def tool(call: str, whose: AgentContext, end_ms: int = 2_000, event_type: str = "tool_end", **said: object) -> TraceRow:
    run = ToolRun(tool_call_id=call, tool_class="bash", **said)  # type: ignore[arg-type]
    return TraceRow(event_type=event_type, event_time_unix_ms=end_ms, agent_context=whose, tool=run)  # type: ignore[arg-type]


def spans(*rows: TraceRow, runs: Runs = RUNS) -> dict[str, Span]:
    """By what they are of: ``session <id>``, else the request's or tool call's id."""
    return {name_of(span): span for span in SpanBuilder(runs).spans(rows)[0]}


def name_of(span: Span) -> str:
    said = span.attributes
    if said["gen_ai.operation.name"] == "invoke_agent":
        return f"session {said['session.id']}"
    return str(said.get("tidegate.request.id") or said["gen_ai.tool.call.id"])


def test_a_run_is_one_trace() -> None:
    """A session below nothing, its requests below it, their tools below them, a sub-agent below its parent."""
    found = spans(
        request("r1", context("run"), 1_000, calls=("c1",)),
        tool("c1", context("run"), 1_900, started_at_unix_ms=1_100, output_bytes=0),
        tool("c9", context("run"), 1_950, event_type="tool_error", duration_ms=10.0, error_type="exit_1"),
        request("r2", context("child", parent="run"), 1_200),
    )
    assert len({span.trace_id for span in found.values()}) == 1
    root = found["session run"]
    assert (root.parent_id, root.name, root.start_ns, root.end_ns) == (
        None,
        "invoke_agent agent run",
        1_000_000_000,
        1_950_000_000,
    )
    assert found["r1"].parent_id == root.span_id
    assert found["c1"].parent_id == found["r1"].span_id
    assert found["c9"].parent_id == root.span_id
    assert found["session child"].parent_id == root.span_id
    assert found["r2"].parent_id == found["session child"].span_id
    assert (found["c1"].start_ns, found["c1"].end_ns) == (1_100_000_000, 1_900_000_000)
    assert (found["c9"].start_ns, found["c9"].error) == (1_940_000_000, "exit_1")
    assert found["c1"].attributes["tidegate.tool.output_bytes"] == 0


def test_a_request_that_was_sent_twice_says_so() -> None:
    """Two attempts alone would be a worker that failed."""
    attributes = spans(request("r", None, attempts=2, hedged="won"))["r"].attributes
    assert (attributes["tidegate.request.attempts"], attributes["tidegate.request.hedged"]) == (2, "won")
    assert "tidegate.request.hedged" not in spans(request("r", None))["r"].attributes


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        # Agents of a harness whose key has the root: at any depth.
        (context("root"), context("a", parent="b", family="codex", root="root", agent="a"), True),
        # Sessions whose harness names the parent only: one level of what a row says.
        (context("root"), context("a", parent="root"), True),
        (context("root"), context("b", parent="a"), False),
        (context("root"), context("other"), False),
        (context("root"), context("root", tenant="other"), False),
    ],
)
def test_which_rows_share_a_trace(first: AgentContext, second: AgentContext, same: bool) -> None:
    found = spans(request("r1", first), request("r2", second))
    assert (found["r1"].trace_id == found["r2"].trace_id) is same


def test_who_knows_all_parents_finds_the_root() -> None:
    """An export has the whole tree; a circle of parents ends somewhere."""
    runs = Runs(parents={"a": "root", "b": "a", "x": "y", "y": "x"})
    found = spans(
        *(request(f"r-{name}", context(name)) for name in ("root", "a", "b", "x")),
        runs=runs,
    )
    assert found["r-root"].trace_id == found["r-a"].trace_id == found["r-b"].trace_id
    assert found["session b"].parent_id == found["session a"].span_id
    assert found["r-x"].trace_id != found["r-root"].trace_id


@pytest.mark.parametrize("whose", [None, context("r1", family="request")])
def test_a_request_without_identity_is_a_trace_by_itself(whose: AgentContext | None) -> None:
    """Rows written by the ingress have no context then, those for a dead ingress have one of family ``request``."""
    (span,) = SpanBuilder(RUNS).spans([request("r1", whose)])[0]
    assert (span.parent_id, "session.id" in span.attributes) == (None, False)
    (record,), _ = log_records([request("r1", whose)], RUNS)
    assert record.place == (span.trace_id, span.span_id)


def test_what_a_request_says() -> None:
    """Names of the conventions; what is not known is absent, 0 is a value; events at their times."""
    row = request(
        "r1",
        context("run"),
        1_000,
        cached_tokens=0,
        ttft_ms=30.25,
        hold_ms=7,
        hold_reason="policy",
        admission_wait_ms=8.0,
        prefill_wait_time_ms=0.0,
        max_output_tokens=1 << 80,
        status=200,
    )
    span = spans(row)["r1"]
    said = span.attributes
    assert (span.name, span.kind, span.error) == ("chat sim-8b", "client", None)
    assert said["gen_ai.usage.cache_read.input_tokens"] == 0
    assert said["gen_ai.response.time_to_first_chunk"] == 0.03025
    assert said["gen_ai.response.finish_reasons"] == ("tool_calls",)
    assert "gen_ai.usage.input_tokens" not in said
    assert "gen_ai.request.max_tokens" not in said  # more than 64 bits: nobody could read it
    assert [(event.name, event.time_ns) for event in span.events] == [
        ("held", 1_008_000_000),
        ("dispatched", 1_000_000_000),
        ("first_token", 1_030_250_000),
    ]
    assert span.end_ns == 1_050_500_000


def test_names_are_those_of_the_pinned_conventions() -> None:
    """Every ``gen_ai.*`` name is one that the installed conventions know, and they know the schema."""
    names = {value for value in vars(gen_ai_attributes).values() if isinstance(value, str)}
    row = request(
        "r1",
        context("run"),
        stream=True,
        choices=2,
        input_tokens=1,
        output_tokens=1,
        cached_tokens=1,
        reasoning_tokens=1,
        max_output_tokens=1,
        ttft_ms=1.0,
        response_id="x",
    )
    found = spans(row, tool("c", context("run")))
    said = {name for span in found.values() for name in span.attributes if name.startswith("gen_ai.")}
    assert len(said) == 18
    assert said - names == set()
    assert SCHEMA_URL in {schema.value for schema in Schemas}


@pytest.mark.parametrize(
    ("outcome", "reason", "error", "severity"),
    [
        ("completed", None, None, "info"),
        ("client_disconnect", None, None, "info"),
        ("refused", "queue_full", "refused: queue_full", "warn"),
        ("upstream_lost", None, "upstream_lost", "error"),
    ],
)
def test_outcomes(outcome: str, reason: str | None, error: str | None, severity: str) -> None:
    """A client that left is no error of ours."""
    row = request("r1", context("run"), outcome=outcome, reason=reason)
    span = spans(row)["r1"]
    assert span.error == error
    assert span.attributes.get("error.type") == (None if error is None else reason or outcome)
    (record,), _ = log_records([row], RUNS)
    assert record.severity == severity


def test_reasons_of_several_choices() -> None:
    finish = FinishMetadata(
        finish_reason="stop",
        choices=(
            ChoiceFinish(choice_index=0, finish_reason="length"),
            ChoiceFinish(choice_index=1, finish_reason="stop"),
        ),
    )
    row = request("r1", None, finish_reason_metadata=finish, choices=2)
    assert spans(row)["r1"].attributes["gen_ai.response.finish_reasons"] == ("length", "stop")


def test_log_records() -> None:
    """One of each row, at its request's span; the row in JSON, without hashes; samples of load are none."""
    run = context("run")
    decision = TracedDecision(request_id="r1", grant_id="g", worker=TracedWorker(worker="engine-1"), model="sim-8b")
    rows = [
        request("r1", run),
        TraceRow(event_type="decision", event_time_unix_ms=1_000, agent_context=run, decision=decision),
        tool("c1", run, event_type="tool_start"),
        TraceRow(event_type="worker_load", event_time_unix_ms=1, worker_load=TracedLoad(worker="engine-1", model="m")),
    ]
    records, bad = log_records(rows, RUNS)
    assert bad == 0
    assert [record.event_name for record in records] == [
        "tidegate.request_end",
        "tidegate.decision",
        "tidegate.tool_start",
    ]
    found = spans(*rows)
    at = (found["r1"].trace_id, found["r1"].span_id)
    assert [record.place for record in records] == [at, at, (at[0], found["session run"].span_id)]
    assert json.loads(records[0].body)["request"]["request_id"] == "r1"
    assert "123456789123" not in records[0].body
    assert records[1].attributes["tidegate.worker"] == "engine-1"


def test_rows_that_are_none_are_counted() -> None:
    """Times before the epoch, beyond 64 bits of ns, or not a number; rows without what their type says."""
    rows = [
        request("a", None, start_ms=-5),
        request("b", None, start_ms=1 << 62),
        request("c", None, total_time_ms=float("nan")),
        TraceRow(event_type="request_end", event_time_unix_ms=1),
        TraceRow(event_type="tool_end", event_time_unix_ms=1),
        request("good", None),
    ]
    found, bad = SpanBuilder(RUNS).spans(rows)
    assert ([name_of(span) for span in found], bad) == (["good"], 5)


ROWS = [
    request("r1", context("run"), 1_000, calls=("c1", "c2")),
    tool("c1", context("run"), 1_500),
    request("r2", context("run"), 1_600),
    tool("c2", context("run"), 1_700, duration_ms=20.0),
    request("r3", context("child", parent="run"), 1_650, calls=("c1",)),
    tool("c1", context("child", parent="run"), 1_800),
    request("r4", None, 1_700),
]


@given(rows=st.permutations(ROWS), cuts=st.sets(st.integers(1, len(ROWS) - 1)), restart=st.booleans())
def test_order_batches_and_restarts_change_no_id(rows: list[TraceRow], cuts: set[int], restart: bool) -> None:
    """Nothing but a session's times, and whose child a tool is when it is told before its request."""
    wanted = {span.span_id: span for span in SpanBuilder(RUNS).spans(ROWS)[0]}
    builder = SpanBuilder(RUNS)
    found: list[Span] = []
    bounds = [0, *sorted(cuts), len(rows)]
    for first, last in pairwise(bounds):
        found += builder.spans(rows[first:last])[0]
        if restart:
            builder = SpanBuilder(RUNS)
    assert {span.span_id for span in found} == set(wanted)
    if not restart:
        assert len(found) == len(wanted)
    for span in found:
        like = wanted[span.span_id]
        assert (span.trace_id, span.name, span.attributes) == (like.trace_id, like.name, like.attributes)
        if "gen_ai.tool.name" not in span.attributes:
            assert span.parent_id == like.parent_id


def test_a_tools_row_that_knows_less_places_no_session() -> None:
    """Harnesses name a session by its id alone: the run that it is of is told by its requests."""
    keyless = AgentContext(session_id="agent", parent_session_id="other-agent")
    agent = context("agent", parent="other-agent", root="run", agent="agent")
    builder = SpanBuilder(RUNS)
    (early,) = builder.spans([tool("c0", keyless, 900)])[0]
    later = {
        name_of(span): span for span in builder.spans([request("r1", agent, calls=("c1",)), tool("c1", keyless)])[0]
    }
    assert early.parent_id == later["session agent"].span_id
    assert later["session agent"].trace_id == later["r1"].trace_id == later["c1"].trace_id


def test_what_is_remembered_is_bounded() -> None:
    """A session that was forgotten has its span again, with the same id."""
    builder = SpanBuilder(RUNS, limit=2)
    first = builder.spans([request("r0", context("s0"))])[0][0]
    for number in range(1, 4):
        builder.spans([request(f"r{number}", context(f"s{number}"))])
    again = builder.spans([request("r9", context("s0"))])[0]
    assert [span.span_id for span in again if span.name.startswith("invoke_agent")] == [first.span_id]
    assert len(builder.spans([request("r8", context("s0"))])[0]) == 1
