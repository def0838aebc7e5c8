"""What becomes of a tool event: one fact of the right session and one row, once."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bus.subjects import tool, trace
from schemas.base import from_json
from schemas.request import RequestAccepted, RequestEnd
from schemas.session import Family, SessionIdentity, SessionKey
from schemas.tool import ToolEvent
from schemas.trace import ToolRun, TraceRow
from services.recorder.tool_events import (
    NoToolEvents,
    PublishToolFact,
    PublishToolRow,
    SessionNamed,
    ToolEffect,
    ToolEventCore,
    ToolReported,
    TurnEnded,
)
from services.recorder.tool_messages import ToolReport

NOW = 1_795_975_336.5
CHILD = SessionKey(family="claude_code", root="main", agent="agent-1")


def new_core(sessions: int = 8) -> ToolEventCore:
    return ToolEventCore("recorder-1", epoch=7, tenant="default", sessions=sessions)


def named(key: SessionKey, session_id: str, seq: int = 0, **more: Any) -> SessionNamed:
    identity = SessionIdentity(key=key, session_id=session_id, **more)
    return SessionNamed(
        RequestAccepted(
            source="ingress-1",
            epoch=1,
            seq=seq,
            at_ms=1,
            request_id="r",
            model="qwen",
            identity=identity,
            received_ms=1,
        )
    )


def report(session_id: str = "agent-1", call: str = "call_0", at_ms: int = 2_000, **more: Any) -> ToolReported:
    event_type = more.pop("event_type", "tool_end")
    parent = more.pop("parent", None)
    run = ToolRun(tool_call_id=call, tool_class="bash", **more)
    return ToolReported(
        ToolReport(event_type=event_type, at_ms=at_ms, session_id=session_id, parent_session_id=parent, tool=run)
    )


def fact_of(effects: list[ToolEffect]) -> tuple[str, ToolEvent]:
    (fact,) = [effect for effect in effects if isinstance(effect, PublishToolFact)]
    return fact.subject, from_json(fact.payload, ToolEvent)


def row_of(effects: list[ToolEffect]) -> tuple[str, TraceRow, str]:
    (row,) = [effect for effect in effects if isinstance(effect, PublishToolRow)]
    return row.subject, from_json(row.payload, TraceRow), row.message_id


def test_an_event_of_a_known_session_is_told_and_kept_under_its_key() -> None:
    """A harness says an agent's id; the house's key has its family and root, which a request has told before."""
    core = new_core()
    assert core.handle(named(CHILD, "agent-1"), NOW) == []
    effects = core.handle(report(duration_ms=150.0, parent="main", ended_at_unix_ms=2_000, status="error"), NOW)
    subject, fact = fact_of(effects)
    assert subject == tool("end", CHILD.text())
    assert (fact.session, fact.session_id, fact.status, fact.duration_ms) == (CHILD, "agent-1", "error", 150.0)
    assert (fact.source, fact.epoch, fact.seq, fact.at_ms) == ("recorder-1", 7, 0, 1_795_975_336_500)
    assert not fact.inferred
    subject, row, _ = row_of(effects)
    assert subject == trace("tool", "qwen", CHILD.text())
    assert (row.event_type, row.event_source, row.event_time_unix_ms) == ("tool_end", "harness", 2_000)
    assert row.request is None
    assert row.agent_context is not None
    assert (row.agent_context.session_id, row.agent_context.parent_session_id) == ("agent-1", "main")
    assert row.agent_context.session == CHILD
    assert row.tool is not None
    assert row.tool.status == "error"
    assert core.unknown_session == 0


def test_an_id_that_no_request_has_named_is_the_canonical_header() -> None:
    """The peer's plug-ins send that header; the row does not claim to know."""
    core = new_core()
    effects = core.handle(report("run-1"), NOW)
    assert fact_of(effects)[1].session == SessionKey(family="dynamo", root="run-1")
    subject, row, _ = row_of(effects)
    assert subject == trace("tool", "", SessionKey(family="dynamo", root="run-1").text())
    assert row.agent_context is not None
    assert row.agent_context.session is None
    assert core.unknown_session == 1


def test_what_a_harness_leaves_out_is_filled_into_the_fact_only() -> None:
    """A status is asked of a fact; a row says what was said."""
    core = new_core()
    for event_type, event, status in (
        ("tool_start", "start", "running"),
        ("tool_end", "end", "succeeded"),
        ("tool_error", "error", "error"),
    ):
        effects = core.handle(report(event_type=event_type), NOW)
        _, fact = fact_of(effects)
        _, row, _ = row_of(effects)
        assert (fact.event, fact.status, fact.seq) == (event, status, 0)
        assert row.tool is not None
        assert row.tool.status is None


def test_a_clock_that_was_set_back_teaches_nobody_a_time() -> None:
    """An end before its start is kept in the row; the fact has no pair to subtract."""
    effects = new_core().handle(report(started_at_unix_ms=5_000, ended_at_unix_ms=2_000), NOW)
    _, fact = fact_of(effects)
    assert (fact.started_at_ms, fact.ended_at_ms) == (None, 2_000)
    _, row, _ = row_of(effects)
    assert row.tool is not None
    assert row.tool.started_at_unix_ms == 5_000


def test_the_same_event_again_is_nothing() -> None:
    """A client that tries again, or both ways in: told once, kept once. Other times, calls and sessions are others."""
    core = new_core()
    first = core.handle(report(), NOW)
    assert core.handle(report(), NOW + 1) == []
    assert core.rejected == {"duplicate": 1}
    others = [report(at_ms=2_001), report(call="call_1"), report("agent-2"), report(event_type="tool_start")]
    marks = {row_of(core.handle(other, NOW))[2] for other in others} | {row_of(first)[2]}
    assert len(marks) == 5
    assert core.taken == {"end": 4, "start": 1}


def test_a_weak_or_foreign_name_does_not_take_a_session_over() -> None:
    """A body's guess never replaces a header's word; another tenant's session is not ours; a request is no session."""
    core = new_core()
    core.handle(named(CHILD, "agent-1"), NOW)
    core.handle(named(SessionKey(family="body", root="agent-1"), "agent-1", 1, weak=True), NOW)
    core.handle(named(SessionKey(tenant="other", family="dynamo", root="agent-1"), "agent-1", 2), NOW)
    core.handle(named(SessionKey(family="request", root="agent-1"), "agent-1", 3), NOW)
    assert fact_of(core.handle(report(), NOW))[1].session == CHILD
    core.handle(named(SessionKey(family="dynamo", root="agent-1"), "agent-1", 5), NOW)
    assert fact_of(core.handle(report(at_ms=1), NOW))[1].session.family == "dynamo"
    assert core.gaps.missed["request.accepted"] == 1


FAMILIES: tuple[Family, ...] = ("dynamo", "claude_code", "body")


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(FAMILIES), st.booleans()), max_size=60))
def test_the_table_is_a_bounded_map_of_what_was_named_last(steps: list[tuple[int, Family, bool]]) -> None:
    """Against a naive model: a list of (id, family), most lately named or asked for last, four at most."""
    core = new_core(sessions=4)
    model: list[tuple[str, Family]] = []
    for at, (number, family, asks) in enumerate(steps):
        session_id = f"s{number}"
        known = next((entry for entry in model if entry[0] == session_id), None)
        if asks:
            found = fact_of(core.handle(report(session_id, at_ms=at), NOW))[1].session
            assert found.family == (known[1] if known else "dynamo")
            if known:
                model = [entry for entry in model if entry != known] + [known]
            continue
        key = SessionKey(family=family, root=session_id)
        core.handle(named(key, session_id, at, weak=family == "body"), NOW)
        replaces = known is None or known[1] == "body" or family != "body"
        entry = known if known is not None and not replaces else (session_id, family)
        model = ([each for each in model if each[0] != session_id] + [entry])[-4:]
        assert len(core.sessions) == len(model)


def test_an_end_that_does_not_say_when_it_began_has_it_of_its_start() -> None:
    """Admission learns a duration from a pair; what an end says itself is believed first; the row stays as it was
    said."""
    core = new_core()
    core.handle(report(event_type="tool_start", at_ms=1_000), NOW)
    core.handle(report(event_type="tool_start", call="other", at_ms=1_500), NOW)
    effects = core.handle(report(at_ms=2_500), NOW)
    _, fact = fact_of(effects)
    assert (fact.started_at_ms, fact.ended_at_ms, fact.duration_ms) == (1_000, 2_500, None)
    _, row, _ = row_of(effects)
    assert row.tool == ToolRun(tool_call_id="call_0", tool_class="bash")
    _, again = fact_of(core.handle(report(at_ms=9_000), NOW))
    assert again.started_at_ms is None, "a start is of one end only"
    _, own = fact_of(core.handle(report(call="other", at_ms=3_000, duration_ms=7.0), NOW))
    assert (own.started_at_ms, own.ended_at_ms, own.duration_ms) == (None, None, 7.0)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["tool_start", "tool_end", "tool_error"]),
            st.sampled_from(["a", "b"]),
            st.sampled_from(["0", "1"]),
            st.integers(1_000, 5_000),
            st.none() | st.integers(1_000, 5_000),
        ),
        max_size=30,
    )
)
def test_pairs_are_those_of_a_naive_table(events: list[tuple[str, str, str, int, int | None]]) -> None:
    """Each end takes the last start of its call in its session that nobody took, unless that lies after it."""
    core = new_core(sessions=64)
    open_calls: dict[tuple[str, str], int] = {}
    for event_type, session, call, at_ms, started in events:
        effects = core.handle(
            report(session, call=call, at_ms=at_ms, event_type=event_type, started_at_unix_ms=started), NOW
        )
        if not effects:
            continue  # the same event again
        _, fact = fact_of(effects)
        if event_type == "tool_start":
            open_calls[session, call] = at_ms if started is None else started
            assert fact.started_at_ms == started
            continue
        began = open_calls.pop((session, call), None)
        wanted = started if started is not None else began if began is not None and began <= at_ms else None
        if wanted is not None and wanted > at_ms:
            wanted = None
        assert fact.started_at_ms == wanted


def test_starts_that_never_end_are_bounded() -> None:
    """A harness that only ever starts calls fills no memory; the last ones are known."""
    core = new_core(sessions=4)
    for number in range(100):
        core.handle(report(event_type="tool_start", call=str(number), at_ms=1_000 + number), NOW)
    starts = [fact_of(core.handle(report(call=str(number)), NOW))[1].started_at_ms for number in (50, 99)]
    assert starts == [None, 1_099]


def ended(number: int, tools: tuple[str, ...] = ("bash",)) -> TurnEnded:
    key = SessionKey(family="dynamo", root=f"run-{number}")
    return TurnEnded(
        RequestEnd(
            source="ingress-1",
            epoch=1,
            seq=number,
            at_ms=1,
            request_id=f"r{number}",
            model="qwen",
            identity=SessionIdentity(key=key, session_id=key.root),
            outcome="completed",
            tool_names=tools,
        )
    )


def test_silence_is_said_once() -> None:
    """User report (the peer's 9005): a plug-in's endpoint had another name than the server's, and nothing ever came."""
    core = ToolEventCore("recorder-1", 7, "default", 8, expects=True)
    effects = [effect for number in range(60) for effect in core.handle(ended(number), NOW)]
    assert effects == [NoToolEvents(20)]
    assert core.calling_turns == 60
    quiet = ToolEventCore("recorder-1", 7, "default", 8, expects=True)
    quiet.handle(report(), NOW)
    closed = new_core()
    for core in (quiet, closed):
        assert [effect for number in range(60) for effect in core.handle(ended(number), NOW)] == []
    nothing = ToolEventCore("recorder-1", 7, "default", 8, expects=True)
    assert [effect for number in range(60) for effect in nothing.handle(ended(number, ()), NOW)] == []
    assert nothing.calling_turns == 0
