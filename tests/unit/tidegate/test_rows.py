"""Trace rows for people."""

from __future__ import annotations

from datetime import UTC
from typing import Literal

import msgspec
import pytest

from schemas.base import to_json
from schemas.decision import Candidate
from schemas.session import SessionKey
from schemas.trace import AgentContext, RequestMetrics, TracedDecision, TracedWorker, TraceRow
from tidegate.rows import RowFilter, one_line, read_row

KEY = SessionKey(family="dynamo", root="run", agent="a/b")
ROW = TraceRow(
    event_type="request_end",
    event_time_unix_ms=43_201_123,
    agent_context=AgentContext(session_id="run:child", parent_session_id="run", session=KEY),
    request=RequestMetrics(
        request_id="r",
        model="sim-8b",
        outcome="completed",
        worker=TracedWorker(worker="engine-1"),
        input_tokens=1200,
        cached_tokens=1104,
        output_tokens=32,
        ttft_ms=40.4,
        total_time_ms=210.0,
    ),
)

HOSTILE = "a\x1b[2J\nb\u202ec\u2028d"


def test_a_strangers_words_drive_no_terminal() -> None:
    """Ids may come from a request's body, and hold anything: one line, and nothing in it that a terminal obeys."""
    context = AgentContext(session_id=HOSTILE, parent_session_id=HOSTILE)
    line = one_line(msgspec.structs.replace(ROW, agent_context=context), UTC)
    assert line.isprintable()
    assert "a\\x1b[2J\\x0ab\\u202ec\\u2028d (of " in line


@pytest.mark.parametrize(
    ("wanted", "passes"),
    [
        (RowFilter(), True),
        (RowFilter(session="run:child"), True),
        (RowFilter(session=KEY.text()), True),
        (RowFilter(session="run"), False),
        (RowFilter(model="sim-8b", worker="engine-1"), True),
        (RowFilter(model="other"), False),
        (RowFilter(worker="engine-2"), False),
    ],
)
def test_filters(wanted: RowFilter, passes: bool) -> None:
    """By the id that the harness sent or the house's key, by model, by worker; all must hold."""
    assert wanted.passes(ROW) is passes


def test_a_row_without_identity_or_worker_passes_only_where_nothing_is_asked() -> None:
    """Refused requests ran nowhere; their rows are still shown when no filter excludes them."""
    bare = TraceRow(event_type="request_end", event_time_unix_ms=0, request=RequestMetrics(request_id="r"))
    assert RowFilter().passes(bare)
    assert not RowFilter(session="x").passes(bare)
    assert not RowFilter(worker="x").passes(bare)


def test_one_line_says_what_a_person_looks_for() -> None:
    """When, how it ended, where, whose, tokens, times."""
    assert one_line(ROW, UTC) == (
        "12:00:01.123  completed  engine-1  run:child (of run)  in 1200 (cached 1104, 92 %)  out 32  "
        "ttft 40 ms  total 210 ms"
    )


def test_holds_fallbacks_and_reasons_are_shown() -> None:
    """What was unusual about a request stands at the end of its line."""
    request = RequestMetrics(
        request_id="r",
        outcome="upstream_lost",
        hold_ms=12,
        hold_reason="kv_full",
        decision_mode="fallback",
        reason="reset",
    )
    line = one_line(TraceRow(event_type="request_end", event_time_unix_ms=0, request=request), UTC)
    assert line == "00:00:00.000  upstream_lost  -  -  held 12 ms (kv_full)  placed by fallback  reset"


@pytest.mark.parametrize(
    ("attempts", "hedged", "shown"),
    [
        (None, None, ""),
        (1, None, ""),
        (2, None, "  2 attempts"),
        (2, "won", "  hedged won"),
        (2, "lost", "  hedged lost"),
        (1, "lost", "  hedged lost"),
    ],
)
def test_what_was_sent_twice_says_so(attempts: int | None, hedged: Literal["won", "lost"] | None, shown: str) -> None:
    """A retry by its attempts, a second sending by how it ended; one attempt is nothing to tell."""
    request = RequestMetrics(request_id="r", outcome="completed", attempts=attempts, hedged=hedged)
    line = one_line(TraceRow(event_type="request_end", event_time_unix_ms=0, request=request), UTC)
    assert line == f"00:00:00.000  completed  -  -{shown}"


DECISION = TraceRow(
    event_type="decision",
    event_time_unix_ms=43_201_123,
    agent_context=AgentContext(session_id="run", session=SessionKey(family="dynamo", root="run")),
    decision=TracedDecision(
        request_id="r",
        grant_id="g",
        worker=TracedWorker(worker="engine-1"),
        model="sim-8b",
        input_tokens=1200,
        predicted_cached_tokens=1104,
        index_health="approximate",
        hold_ms=30,
        hold_reason="policy",
        decide_us=180,
        candidates_seen=4,
        candidates=(
            Candidate(worker="engine-1", rank=0, cost=6.0),
            Candidate(worker="engine-2", rank=1, cost=75.5),
            Candidate(worker="engine-3", rank=0, excluded="draining"),
        ),
    ),
)


def test_a_decision_says_where_and_what_elsewhere_would_have_cost() -> None:
    """The chosen rank's cost, then the others'; what was left out is counted."""
    assert one_line(DECISION, UTC) == (
        "12:00:01.123  decision  engine-1  run  in 1200 (expected cached 1104, 92 %)  "
        "cost 6 (engine-2/1 75.5, engine-3 draining, and 1 more)  held 30 ms (policy)  decided in 180 us  "
        "index approximate"
    )
    bare = msgspec.structs.replace(
        DECISION,
        decision=TracedDecision(
            request_id="r", grant_id="g", worker=TracedWorker(worker="w"), model="m", mode="fallback"
        ),
        agent_context=None,
    )
    assert one_line(bare, UTC) == "12:00:01.123  decision  w  -  in 0  decided in 0 us  placed by fallback"


def test_decisions_are_filtered_as_requests_are() -> None:
    """By the chosen worker, the model, the session."""
    assert RowFilter(session="run", model="sim-8b", worker="engine-1").passes(DECISION)
    assert not RowFilter(worker="engine-2").passes(DECISION)
    assert not RowFilter(model="other").passes(DECISION)


def test_what_is_no_row_is_none() -> None:
    """Junk in the stream ends nothing."""
    assert read_row(b"junk") is None
    assert read_row(to_json(ROW)) == ROW
