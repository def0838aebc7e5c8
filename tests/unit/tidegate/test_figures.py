"""The demo's figures."""

from __future__ import annotations

from typing import Any

import pytest

from load.workload.results import RequestResult
from schemas.trace import AgentContext, RequestMetrics, TracedWorker, TraceRow
from tidegate.demo.figures import Observed, measure, percentile, same_requests, sticky_ratio
from tidegate.demo.table import PROMISES, lines_of


def result(session: str, turn: int, **fields: Any) -> RequestResult:
    known: dict[str, Any] = {"request_id": f"{session}-{turn}", "input_tokens": 100, "cached_tokens": 90}
    return RequestResult(session_id=session, turn=turn, **{**known, **fields})


def row(session: str, turn: int, worker: str, predicted: int = 90) -> TraceRow:
    return TraceRow(
        event_type="request_end",
        event_time_unix_ms=1,
        agent_context=AgentContext(session_id=session),
        request=RequestMetrics(
            request_id=f"{session}-{turn}",
            worker=TracedWorker(worker=worker),
            predicted_cached_tokens=predicted,
            decision_ms=float(turn + 1),
        ),
    )


def observed(**fields: Any) -> Observed:
    results = tuple(result(session, turn) for session in "ab" for turn in range(3))
    workers = {"a": "engine-1", "b": "engine-2"}
    rows = {r.request_id or "": row(r.session_id, r.turn, workers[r.session_id]) for r in results}
    ids = {worker: [f"{session}-{turn}" for turn in range(3)] for session, worker in workers.items()}
    known: dict[str, Any] = {
        "results": results,
        "rows": rows,
        "stored": tuple(rows),
        "recorded": tuple(rows),
        "decisions": ids,
        "served": {worker: list(reversed(requests)) for worker, requests in ids.items()},
    }
    return Observed(**{**known, **fields})


def test_a_good_run_has_no_problems() -> None:
    """Every figure from the rows and results, and no broken promise."""
    figures = measure(observed())
    assert figures.problems == ()
    assert (figures.requests, figures.failed, figures.traces, figures.sessions) == (6, 0, 6, 2)
    assert (figures.cached_tokens_predicted, figures.cached_tokens_reported) == (540, 540)
    assert (figures.hit_ratio, figures.sticky_ratio) == (0.9, 1.0)
    assert (figures.decision_ms_p50, figures.decision_ms_p99) == (2.0, 3.0)
    assert figures.decisions_match_served is True


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"results": (result("a", 0, error="timeout: x"),), "rows": {}, "recorded": (), "decisions": {}}, "failed"),
        ({"results": (), "rows": {}, "recorded": (), "decisions": {}, "served": {}}, "no request"),
        ({"recorded": ("a-0", "a-1", "a-2", "b-0", "b-1", "b-1", "b-2")}, "7 rows were recorded for 6"),
        ({"recorded": ("a-0", "a-1", "a-2", "b-0", "b-1", "x")}, "do not hold the same"),
        ({"stored": ("a-0",)}, "the stream holds 1 rows"),
        ({"stored": ("a-0", "a-1", "a-2", "b-0", "b-1", "b-2", "b-2")}, "the stream holds 7 rows"),
        ({"stored": ("a-0", "a-1", "a-2", "b-0", "b-1", "b-1")}, "do not hold the same"),
        ({"decisions": {}, "served": {}}, "6 requests were served without a decision"),
        ({"decisions": {}, "served": None}, "6 requests were served without a decision"),
        ({"results": (result("a", 0),), "rows": {"a-0": row("a", 0, "engine-1")}}, "no second turn"),
        ({"served": {"engine-1": ["a-0"], "engine-2": []}}, "not the requests that the engines served"),
    ],
)
def test_a_broken_promise_is_named(change: dict[str, Any], said: str) -> None:
    """One sentence for each figure that is not as promised."""
    assert any(said in problem for problem in measure(observed(**change)).problems)


def test_prediction_hits_and_stickiness_have_their_thresholds() -> None:
    """2 % between predicted and reported, 0.8 of the input cached, 0.9 on the previous worker."""
    far = {r.request_id or "": row(r.session_id, r.turn, "engine-1", predicted=93) for r in observed().results}
    assert any("2% apart" in problem for problem in measure(observed(rows=far)).problems)
    cold = tuple(result(session, turn, cached_tokens=70) for session in "ab" for turn in range(3))
    assert any("hit_ratio 0.7" in problem for problem in measure(observed(results=cold)).problems)
    moving = {r.request_id or "": row(r.session_id, r.turn, f"engine-{r.turn}") for r in observed().results}
    assert any("sticky_ratio 0" in problem for problem in measure(observed(rows=moving)).problems)


def test_the_table_names_figures_and_marks_promises() -> None:
    """Names with units, the promised bound beside the figure it is about, and a mark by what `problems` found."""
    lines = {line.name: line for line in lines_of(measure(observed()))}
    hits = lines["input tokens from a cache"]
    assert (hits.value, hits.promise, hits.holds) == ("90.00 %", "at least 80 %", True)
    assert lines["time to first token, p50"].value == "not known"
    assert lines["decision time, p99"].value == "3 ms"
    assert lines["sessions"].holds is None
    cold = tuple(result(session, turn, cached_tokens=70) for session in "ab" for turn in range(3))
    broken = {line.name for line in lines_of(measure(observed(results=cold))) if line.holds is False}
    assert broken == {"input tokens from a cache", "cached tokens, reported"}
    unasked = {line.name: line for line in lines_of(measure(observed(served=None)))}
    assert unasked["decisions match the engines"].holds is None


def test_every_broken_promise_marks_a_line() -> None:
    """No problem of `problems` goes without a failed line in the table."""
    figures = measure(observed(results=(result("a", 0, error="x"),), stored=("a-0", "a-1"), decisions={}))
    marked = [line for line in lines_of(figures) if line.holds is False]
    assert {"requests failed", "rows recorded", "rows in the stream"} <= {line.name for line in marked}
    assert set(figures.broken) <= set(PROMISES)


def test_stickiness_counts_second_and_later_turns() -> None:
    """Two moves in four later turns; the order is the turns', not the results'."""
    results = [result("a", turn) for turn in (4, 0, 3, 1, 2)]
    workers = ["w1", "w1", "w2", "w2", "w1"]
    rows = {f"a-{turn}": row("a", turn, worker) for turn, worker in enumerate(workers)}
    assert sticky_ratio(results, rows) == 0.5
    assert sticky_ratio([], {}) == 0.0


def test_a_turn_whose_worker_is_not_known_did_not_stay() -> None:
    """A row that is missing, or names no worker, neither vanishes from the ratio nor joins its neighbours."""
    results = [result("a", turn) for turn in range(4)]
    rows = {f"a-{turn}": row("a", turn, "w1") for turn in (0, 1, 3)}
    assert sticky_ratio(results, rows) == pytest.approx(1 / 3)
    assert sticky_ratio(results, {}) == 0.0


def test_decisions_must_be_served_once_each() -> None:
    """A request decided twice, or on another worker than it ran on, does not match."""
    assert same_requests({"w": ["1", "2"]}, {"w": ["2", "1"], "idle": []})
    assert not same_requests({"w": ["1", "1"]}, {"w": ["1"]})
    assert not same_requests({"w": ["1"]}, {"v": ["1"]})


def test_percentiles_are_nearest_rank() -> None:
    """The value at rank ceil(p/100 n)."""
    assert percentile([], 50) is None
    assert percentile([3.0, 1.0, 2.0, 4.0], 50) == 2.0
    assert percentile([3.0, 1.0, 2.0, 4.0], 99) == 4.0
