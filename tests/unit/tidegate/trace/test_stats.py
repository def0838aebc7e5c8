"""Tables of a trace."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tidegate.trace.making import BLOCK, SAMPLE, Row, request_row, tool_row, trace_of
from tidegate.trace.errors import Place
from tidegate.trace.reading import Trace, read_trace
from tidegate.trace.rows import ToolSpan, read_request, read_tool
from tidegate.trace.stats import Percentiles, percentiles, reusable_tokens, trace_stats
from tidegate.trace.tables import stats_text
from tidegate.trace.tools import tool_uses


def test_the_peers_sample() -> None:
    """Sums agree with the rows; a session without rows of its own has no line."""
    trace = read_trace([SAMPLE])
    stats = trace_stats(trace)
    assert (stats.requests, stats.without_session, len(stats.sessions)) == (18, 4, 9)
    run = stats.sessions[0]
    assert (run.session, run.turns, run.tools, run.tool_ms) == ("run-1", 5, 4, 601)
    assert (run.tokens.input, run.tokens.cached) == (2944, 2912)
    assert [(tool.tool, tool.calls, tool.failed, tool.inferred) for tool in stats.tools] == [("bash", 4, 1, 0)]
    assert sum(model.requests for model in stats.models) == 18
    assert sum(worker.requests for worker in stats.workers) == 18


def test_percentiles_are_values() -> None:
    """By the nearest rank; what is not known does not count."""
    assert percentiles([None, float("nan")]) is None
    assert percentiles([7.0]) == Percentiles(count=1, p50=7, p90=7, p99=7, max=7)
    assert percentiles([float(value) for value in range(200, 0, -1)]) == Percentiles(
        count=200, p50=100, p90=180, p99=198, max=200
    )


def test_a_session_and_its_waits(tmp_path: Path) -> None:
    """Side requests are no turns; what failed, was held and took how long."""
    trace = trace_of(
        tmp_path,
        request_row("a", 0, 100, "s", input_tokens=10, cached_tokens=5, admission_wait_ms=4.0, hold_ms=3, ttft_ms=9.0),
        request_row("t", 20, 30, "s", kind="title", input_tokens=10, outcome="completed"),
        request_row("b", 400, 500, "s", input_tokens=30, cached_tokens=10, outcome="client_disconnect"),
        tool_row("s", "c", 200, duration_ms=90.0),
        tool_row("s", "d", 390),
    )
    stats = trace_stats(trace)
    session = stats.sessions[0]
    assert (session.requests, session.turns, session.failed, session.duration_ms) == (3, 2, 1, 500)
    assert (session.tools, session.tool_ms, session.held_ms) == (2, 90, 3)
    assert (session.tokens.input, session.tokens.cached, session.tokens.cache_hit) == (50, 15, 0.375)
    model = stats.models[0]
    assert (model.held, model.outcomes) == (1, {"?": 1, "completed": 1, "client_disconnect": 1})
    assert stats.tools[0].time_ms == Percentiles(count=1, p50=90, p90=90, p99=90, max=90)


@pytest.mark.parametrize(
    ("before", "later", "tokens"),
    [([1, 2], [1, 2, 3], 8), ([1, 2], [1, 9, 3], 4), ([1, 2], [3], 0), ([1, 2], [1, 2], 4)],
)
def test_reusable_tokens(tmp_path: Path, before: list[int], later: list[int], tokens: int) -> None:
    """Whole blocks in common; never the last token of a prompt."""
    trace = trace_of(tmp_path, request_row("a", 0, 1, hashes=before), request_row("b", 2, 3, hashes=later))
    assert reusable_tokens(*trace.requests) == tokens


def test_what_was_lost_while_a_session_was_away(tmp_path: Path) -> None:
    """By the length of the gap: what the next prompt had in common with the last and the engine had no more."""
    one, two = {"worker": "engine-1"}, {"worker": "engine-2"}
    trace = trace_of(
        tmp_path,
        request_row("a", 0, 1_000, "s", hashes=[1, 2, 3], cached_tokens=0, worker=one),
        request_row("b", 3_000, 4_000, "s", hashes=[1, 2, 3, 4], cached_tokens=4, worker=one),
        request_row("c", 94_000, 95_000, "s", hashes=[1, 2, 3, 4, 5], cached_tokens=0, worker=two),
        request_row("d", 95_500, 96_000, "s", hashes=[1, 2, 3, 4, 5, 6], worker=two),
        tool_row("s", "c", 2_000, duration_ms=500.0),
    )
    gaps = trace_stats(trace).gaps
    assert [(gap.up_to_s, gap.gaps, gap.with_tools, gap.moved) for gap in gaps] == [(10, 1, 1, 0), (300, 1, 0, 1)]
    assert [(gap.reusable, gap.found, gap.lost) for gap in gaps] == [(12, 4, 8), (16, 0, 16)]


def test_tables_as_text() -> None:
    """A line for each session, tool and worker; bounded in sessions, and says so."""
    stats = trace_stats(read_trace([SAMPLE]))
    text = stats_text(stats)
    assert "run-1-sub (of run-1)" in text
    assert "18 requests, 4 of them without a session" in text
    assert [line.split()[0] for line in text.splitlines() if line.startswith("  bash")] == ["bash"]
    assert "Sessions (the first 2 of 9)" in stats_text(stats, sessions=2)
    assert stats_text(trace_stats(read_trace([SAMPLE]))) == text


def test_an_id_of_thousands_of_characters_does_not_stretch_the_table(tmp_path: Path) -> None:
    """Ids are what clients chose; enough of beginning and end is left to tell them apart."""
    name = "begin" + "a" * 4_000 + "end"
    text = stats_text(trace_stats(trace_of(tmp_path, request_row("r", 0, 9, name, name + "2"))))
    assert "  begin" in text
    assert "end (of begin" in text
    assert "aend2)" in text
    assert max(map(len, text.splitlines())) < 250


def test_blocks_of_two_sizes_are_compared(tmp_path: Path) -> None:
    """A session whose prompt grows long has hashes of larger blocks from then on: every k-th of the same chain."""
    fine = list(range(1, 9))  # 4 tokens each; the eighth is the last of the second block of 16
    coarse: Row = {"trace_block_size": 16, "input_length": 40, "input_sequence_hashes": [4, 8, 99]}
    odd: Row = {"trace_block_size": 6, "input_length": 6, "input_sequence_hashes": [1]}
    trace = trace_of(
        tmp_path,
        request_row("a", 0, 1, hashes=fine),
        request_row("b", 2, 3, replay=coarse),
        request_row("c", 4, 5, replay=odd),
    )
    a, b, c = trace.requests
    assert (reusable_tokens(a, b), reusable_tokens(b, a), reusable_tokens(a, c)) == (32, 16, None)


def test_holds_and_decisions(tmp_path: Path) -> None:
    """Holds by their reason; what was predicted against what engines found; the work of a decision from its row."""
    told = {"decision_mode": "policy", "policy": "commit", "index_health": "synced"}
    trace = trace_of(
        tmp_path,
        request_row(
            "a", 0, 9, "s", hold_ms=7, hold_reason="memory", grant_id="g1", decision_ms=0.5, predicted_cached_tokens=4,
            cached_tokens=4, **told,
        ),
        request_row("b", 0, 9, "t", hold_ms=5, hold_reason="memory", outcome="refused"),
        request_row("c", 0, 9, decision_ms=1.5, predicted_cached_tokens=8, cached_tokens=4, **told),
        request_row("d", 0, 9, decision_mode="fallback"),
        {
            "schema": "tidegate.request.trace.v1", "event_type": "decision", "event_time_unix_ms": 1,
            "decision": {"request_id": "a", "grant_id": "g1", "model": "m", "worker": {"worker": "w2"},
                         "previous_worker": "w1", "decide_us": 80},
        },
    )  # fmt: skip
    stats = trace_stats(trace)
    held = stats.holds[0]
    assert (held.reason, held.requests, held.sessions, held.refused) == ("memory", 2, 2, 1)
    assert held.hold_ms == Percentiles(count=2, p50=5, p90=7, p99=7, max=7)
    placed, fallback = stats.decisions
    assert (placed.policy, placed.requests, placed.index_health, placed.moved) == ("commit", 2, {"synced": 2}, 1)
    assert (placed.compared, placed.exact, placed.predicted, placed.reported) == (2, 1, 12, 8)
    assert (placed.decision_ms, placed.decide_us) == (
        Percentiles(count=2, p50=0.5, p90=1.5, p99=1.5, max=1.5),
        Percentiles(count=1, p50=80, p90=80, p99=80, max=80),
    )
    assert (fallback.policy, fallback.mode, fallback.decide_us) == ("?", "fallback", None)
    text = stats_text(stats)
    assert "Held turns" in text
    assert "? (fallback)" in text


times = st.integers(0, 400_000)
names = st.sampled_from(["a", "b"])
rows = st.builds(
    lambda start, lasts, session, said: (start, start + lasts, session, said),
    times,
    st.integers(0, 2_000),
    st.none() | names,
    st.fixed_dictionaries(
        {
            "hashes": st.lists(st.integers(1, 2), max_size=4),
            "cached_tokens": st.none() | st.integers(0, 16),
            "input_tokens": st.none() | st.integers(0, 16),
            "kind": st.sampled_from([None, "turn", "title", "final"]),
            "outcome": st.sampled_from([None, "completed", "upstream_lost"]),
            "hold_ms": st.sampled_from([None, 0, 3, 9]),
            "hold_reason": st.sampled_from([None, "memory"]),
            "admission_wait_ms": st.none() | st.floats(0, 20),
            "ttft_ms": st.none() | st.floats(0, 20),
            "worker": st.sampled_from([None, {"worker": "w1", "rank": 0}, {"worker": "w2", "rank": 0}]),
        }
    ),
)


def told_tool(session: str, call: str, end_ms: int, name: str, lasts_ms: float | None) -> Row:
    said: dict[str, Any] = {} if lasts_ms is None else {"duration_ms": lasts_ms}
    return tool_row(session, call, end_ms, tool_class=name, **said)


tool_rows = st.builds(
    told_tool,
    names,
    st.sampled_from(["c0", "c1", "c2", "c3"]),
    times,
    st.sampled_from(["bash", "read"]),
    st.none() | st.integers(0, 90_000).map(float),
)


def naive_rank(values: list[float], percent: float) -> float:
    """The smallest value that so many percent of all are not above."""
    return min(value for value in values if sum(other <= value for other in values) * 100 >= percent * len(values))


@pytest.mark.long
@given(st.lists(rows, max_size=9), st.lists(tool_rows, max_size=5))
def test_tables_are_those_of_a_naive_recount(said: list[tuple[int, int, str | None, Row]], told: list[Row]) -> None:
    """Each number again from the rows themselves, one at a time."""
    here = Place("rows", 1)
    found = [
        read_request(here, request_row(str(number), start, end, session, **dict(more)))
        for number, (start, end, session, more) in enumerate(said)
    ]
    found.sort(key=lambda row: (row.start_ms, row.end_ms, row.request_id))
    spans = [span for row in told if isinstance(span := read_tool(here, row), ToolSpan)]
    stats = trace_stats(Trace(requests=tuple(found), tools=tuple(spans)))

    for session in stats.sessions:
        own = [row for row in found if row.session == session.session]
        assert session.requests == len(own)
        assert session.turns == sum(row.metrics.kind in (None, "turn", "final") for row in own)
        assert session.failed == sum(row.metrics.outcome == "upstream_lost" for row in own)
        assert session.tools == sum(span.session == session.session for span in spans)
        assert session.held_ms == sum(row.metrics.hold_ms or 0 for row in own)
        firsts = [row.metrics.ttft_ms for row in own if row.metrics.ttft_ms is not None]
        assert (session.ttft_ms is None) == (not firsts)
        if session.ttft_ms is not None:
            for percent, value in ((50, session.ttft_ms.p50), (90, session.ttft_ms.p90), (99, session.ttft_ms.p99)):
                assert value == naive_rank(firsts, percent)
    assert {row.session for row in found} - {None} == {session.session for session in stats.sessions}

    gaps = []
    for name in ("a", "b"):
        turns = [row for row in found if row.session == name and row.metrics.kind != "title"]
        for before, later in pairwise(turns):
            cached, first, second = later.metrics.cached_tokens, before.replay, later.replay
            if cached is None or later.start_ms < before.end_ms or first is None or second is None:
                continue
            same = 0
            while (
                same < min(len(first.input_sequence_hashes), len(second.input_sequence_hashes))
                and first.input_sequence_hashes[same] == second.input_sequence_hashes[same]
            ):
                same += 1
            reusable = min(same * BLOCK, max(0, (second.input_length - 1) // BLOCK * BLOCK))
            ran = {
                span.name
                for span in tool_uses(Trace(tools=tuple(spans)))
                if span.session == name and span.start_ms < later.start_ms and span.end_ms > before.end_ms
            }
            length = (later.start_ms - before.end_ms) / 1000
            gaps.append((length, ran, before.metrics.worker != later.metrics.worker, reusable, min(cached, reusable)))
    assert sum(each.gaps for each in stats.gaps) == len(gaps)
    bounds = (0.0, 1.0, 10.0, 60.0, 300.0, float("inf"))
    for each in stats.gaps:
        up_to = float("inf") if each.up_to_s is None else each.up_to_s
        within = [gap for gap in gaps if max(bound for bound in bounds if bound < up_to) < gap[0] <= up_to]
        within += [gap for gap in gaps if gap[0] == 0 and up_to == 1.0]
        assert (each.gaps, each.with_tools) == (len(within), sum(bool(gap[1]) for gap in within))
        assert each.moved == sum(gap[2] for gap in within)
        assert (each.reusable, each.found) == (sum(gap[3] for gap in within), sum(gap[4] for gap in within))
        assert each.lost == each.reusable - each.found
    for tool in stats.tools:
        within = [gap for gap in gaps if tool.tool in gap[1]]
        assert (tool.calls, tool.inferred) == (sum(span.name == tool.tool for span in spans), 0)
        assert (tool.gaps, tool.reusable) == (len(within), sum(gap[3] for gap in within))
        assert tool.lost == sum(gap[3] - gap[4] for gap in within)

    for worker in stats.workers:
        own = [row for row in found if row.metrics.worker is not None and row.metrics.worker.worker == worker.name]
        assert (worker.requests, worker.held) == (len(own), sum(row.metrics.hold_ms in (3, 9) for row in own))
        both = [row.metrics for row in own if row.metrics.cached_tokens is not None]
        asked = sum(each.input_tokens or 0 for each in both)
        cached = sum(each.cached_tokens or 0 for each in both if each.input_tokens is not None)
        assert worker.tokens.cache_hit == (round(cached / asked, 6) if asked else None)
    assert sum(each.requests for each in stats.holds) == sum(row.metrics.hold_ms in (3, 9) for row in found)
    for hold in stats.holds:
        own = [row for row in found if row.metrics.hold_ms and (row.metrics.hold_reason or "?") == hold.reason]
        assert hold.requests == len(own)
        assert hold.hold_ms is not None
        assert hold.hold_ms.max == max(row.metrics.hold_ms or 0 for row in own)
