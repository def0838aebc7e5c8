"""Trace rows for people."""

from __future__ import annotations

from datetime import UTC

import pytest

from schemas.base import to_json
from schemas.session import SessionKey
from schemas.trace import AgentContext, RequestMetrics, TracedWorker, TraceRow
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


def test_what_is_no_row_is_none() -> None:
    """Junk in the stream ends nothing."""
    assert read_row(b"junk") is None
    assert read_row(to_json(ROW)) == ROW
