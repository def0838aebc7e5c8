"""The books of a soak: requests, rows, failures, marks, grants."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from load.soak.attribution import Failure, Fault, Mark, Symptom, explain, explained_mark
from load.soak.books import (
    Exchange,
    Level,
    failures_of,
    longest_excess_s,
    marks_of,
    recoveries,
    row_book,
    short_between,
)
from load.soak.plan import LEADER, Step, What
from load.soak.report import Observed, report
from schemas.trace import RequestMetrics, TracedWorker

FAILURE = Failure("ingress-1", 99.0, 101.0, "connection_lost")
DIED = replace(FAILURE, symptom="in_band", worker="engine-1", outcome="upstream_lost")
STARTING = replace(FAILURE, ended_at=103.0, symptom="status", reason="no_worker")
CLOSED = replace(FAILURE, began_at=100.01, ended_at=100.02, reason="connection_lost")
HUNG = replace(DIED, outcome="upstream_timeout")


def fault(what: What, target: str, name: str | None = None, began_at: float = 100.0) -> Fault:
    """Mended after 2 s, whole again after 5."""
    return Fault(Step(what, target, 2.0), name or target, began_at, began_at + 2.0, began_at + 5.0)


def exchange(number: int, symptom: Symptom | None = None) -> Exchange:
    return Exchange(
        f"sent-{number}", "ingress-1", "messages", 100.0, 101.0, request_id=f"r-{number}", status=200, symptom=symptom
    )


def row(number: int, outcome: str = "completed", worker: str = "engine-1") -> RequestMetrics:
    return RequestMetrics(
        request_id=f"r-{number}",
        x_request_id=f"sent-{number}",
        outcome=outcome,  # type: ignore[arg-type]  # from a table
        worker=TracedWorker(worker=worker, rank=0),
        request_received_ms=100_000,
    )


@pytest.mark.parametrize(
    ("what", "target", "failure", "expected"),
    [
        ("kill", "ingress-1", FAILURE, "ingress_killed"),
        ("kill", "ingress-1", replace(FAILURE, symptom="no_connection"), "ingress_killed"),
        ("kill", "ingress-1", replace(FAILURE, symptom="in_band"), None),
        ("kill", "ingress-2", FAILURE, None),
        ("kill", "ingress-1", replace(FAILURE, began_at=50.0, ended_at=60.0), None),
        ("kill", "ingress-1", replace(FAILURE, began_at=110.0, ended_at=111.0), None),
        ("stop", "ingress-1", replace(FAILURE, symptom="status", reason="stopping"), "ingress_stopped"),
        ("stop", "ingress-1", replace(FAILURE, symptom="no_connection"), "ingress_stopped"),
        ("stop", "ingress-1", FAILURE, None),
        ("stop", "ingress-1", CLOSED, "ingress_stopped"),
        ("stop", "ingress-1", replace(CLOSED, began_at=100.6), None),
        ("stop", "ingress-1", replace(CLOSED, status=200), None),
        ("stop", "ingress-1", replace(CLOSED, outcome="completed"), None),
        ("stop", "ingress-1", STARTING, "ingress_starting"),
        ("kill", "ingress-1", STARTING, "ingress_starting"),
        ("kill", "ingress-2", STARTING, None),
        ("kill", "ingress-1", replace(STARTING, ended_at=101.0), None),
        ("kill", "engine-1", DIED, "engine_killed"),
        ("kill", "engine-1", replace(DIED, symptom="cut_answer"), "engine_killed"),
        ("kill", "engine-1", replace(DIED, worker="engine-2"), None),
        ("kill", "engine-1", replace(DIED, symptom="status", outcome="upstream_error"), None),
        ("kill", "engine-1", FAILURE, None),
        ("hang", "engine-1", HUNG, "engine_hung"),
        ("hang", "engine-1", replace(FAILURE, symptom="timeout"), None),
        ("kill", LEADER, FAILURE, None),
        ("kill", "nats-1", FAILURE, None),
        ("partition", "ingress-1", FAILURE, None),
    ],
)
def test_which_failures_are_explained(what: What, target: str, failure: Failure, expected: str | None) -> None:
    """Only those of requests that the fault itself touched, in the way that was decided in advance."""
    found = explain(failure, [fault(what, target)])
    assert (found[1] if found else None) == expected


def test_marks_belong_to_the_newest_fault_that_allows_them() -> None:
    """A placement without a leader is owed to a leader that went, and only while that may last."""
    older, newer = fault("partition", "ingress-1", began_at=90.0), fault("kill", LEADER, "admission-1")
    mark = Mark(100.5, 101.5, "fallback")
    assert explained_mark(mark, [older, newer]) == newer
    assert explained_mark(replace(mark, received_at=200.0, decided_at=201.0), [older, newer]) is None
    assert explained_mark(mark, [fault("kill", "hints")]) is None
    assert explained_mark(replace(mark, mark="blind"), [fault("partition", "ingress-1")]) is None


@pytest.mark.long
@given(
    copies=st.lists(st.integers(0, 3), min_size=1, max_size=12),
    strangers=st.integers(0, 2),
)
def test_the_rows_book_counts_each_request_once(copies: list[int], strangers: int) -> None:
    """What has no row is lost, what has two is doubled, what nobody sent is unknown, whatever the order."""
    exchanges = [exchange(number) for number in range(len(copies))]
    rows = [row(number) for number, count in enumerate(copies) for _ in range(count)]
    rows += [row(1000 + number) for number in range(strangers)]
    book = row_book(exchanges, reversed(rows))
    assert len(book.lost) == copies.count(0)
    assert len(book.doubled) == sum(count > 1 for count in copies)
    assert len(book.unknown) == strangers
    assert book.rows == sum(copies) + strangers


def test_what_was_never_answered_owes_no_row() -> None:
    """A front door that was killed may have heard of it or not: one row or none are both right."""
    unanswered = replace(exchange(1, "no_connection"), request_id=None, status=None)
    assert row_book([unanswered], []).lost == ()
    assert row_book([unanswered], [row(1, "ingress_lost")]).ingress_lost == 1


def test_an_embeddings_decision_is_no_mark() -> None:
    """Nobody counts its tokens: its index health says nothing of a source."""
    base = row(1)
    blind = [
        RequestMetrics(request_id="a", request_received_ms=1000, index_health="blind", index_reason="no_chain"),
        RequestMetrics(request_id="b", request_received_ms=1000, index_health="blind", index_reason="no_events"),
        RequestMetrics(request_id="c", request_received_ms=1000, decision_mode="fallback", admission_wait_ms=2000.0),
        base,
    ]
    assert marks_of(blind) == [("b", Mark(1.0, 1.0, "blind")), ("c", Mark(1.0, 3.0, "fallback"))]


def test_recovery_is_counted_from_where_the_promise_says() -> None:
    """Behind a stand-in from the fault, else from the mending; the last request that suffered decides."""
    leader, door = fault("kill", LEADER, "admission-1"), fault("kill", "ingress-1", began_at=200.0)
    failures = failures_of([replace(exchange(1, "no_connection"), began_at=203.5, ended_at=203.6)], [])
    first, second = recoveries([leader, door], failures, [("a", Mark(101.0, 102.0, "fallback"))])
    assert (first.recovered_ms, first.marks, first.failures) == (1000, 1, 0)
    assert (second.recovered_ms, second.marks, second.failures) == (1500, 0, 1)
    assert second.whole_ms == 3000
    assert first.late(0.0) == []


def test_what_took_too_long_is_late_but_for_the_machines_share() -> None:
    """Seconds in which the machine was short of processors do not count."""
    leader = fault("kill", LEADER, "admission-1")
    (slow,) = recoveries([leader], [], [("a", Mark(104.0, 104.5, "fallback"))])
    assert slow.recovered_ms == 4000
    assert slow.late(0.0) == ["kill admission-1: requests suffered for 4000 ms, not 2000"]
    assert slow.late(2.5) == []


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30))
def test_a_leak_is_an_excess_that_never_goes(levels: list[tuple[int, int]]) -> None:
    """Excess is never longer than what was watched; one more open than there is, all the while, is seen whole."""
    watched = [Level(float(at), leader, ingresses) for at, (leader, ingresses) in enumerate(levels)]
    assert 0.0 <= longest_excess_s(watched) <= max(0, len(levels) - 1)
    leaking = [replace(level, leader=level.ingresses + 1) for level in watched]
    assert longest_excess_s(leaking) == max(0, len(levels) - 1)


def test_an_excess_is_counted_anew_where_facts_were_lost() -> None:
    """What ended while the bus was away is not named any more, and lapses some seconds later."""
    leaking = [Level(100.0 + at, 2, 1) for at in range(10)]
    assert longest_excess_s(leaking, [fault("kill", "nats-1")]) == 7.0
    assert longest_excess_s(leaking, [fault("kill", "hints")]) == 9.0


def test_a_shortage_is_read_when_the_kernel_has_added_it_up() -> None:
    """Totals grow every two seconds: what was short at the end of a fault shows a little later."""
    shortage = [(0.0, 10.0), (1.0, 10.5), (5.0, 12.0), (7.5, 13.0), (9.0, 20.0)]
    assert short_between(shortage, 1.5, 5.0) == 2.5
    assert short_between(shortage, -5.0, 100.0) == 10.0


def observed(**changes: object) -> Observed:
    base = Observed(
        seed=1,
        seconds=60.0,
        exchanges=[exchange(1)],
        rows=[row(1)],
        faults=[fault("kill", "hints")],
        short_s=[0.0],
        levels=[],
        two_leaders=0,
        still={"open_grants": 0},
    )
    return replace(base, **changes)  # type: ignore[arg-type]  # by name


def test_a_clean_soak_is_ok() -> None:
    """One request, one row, one fault that nobody noticed."""
    found = report(observed())
    assert found.ok
    assert found.problems == []
    assert found.summary["events"][0]["recovered_ms"] == 0


@pytest.mark.parametrize(("share", "while_short"), [(0.3, 0), (1.0, 1)])
def test_a_mark_while_nobody_had_a_processor_is_no_fault_of_the_system(share: float, while_short: int) -> None:
    """Seen at load 68 on 2 cores: the leader could not renew a lease of 2 s, outside of every fault. It is told."""
    marked = structs.replace(row(1), decision_mode="fallback")
    shortage = [(at / 2, share * at / 2) for at in range(160, 240)]
    found = report(observed(rows=[marked], shortage=shortage))
    assert (found.ok, found.summary["marks_while_short"]) == (while_short == 1, while_short)
    assert found.summary["unexplained_marks"] == 1 - while_short


@pytest.mark.parametrize(
    "changes",
    [
        {"exchanges": [exchange(1, "timeout")]},
        {"rows": []},
        {"rows": [row(1), row(1)]},
        {"rows": [row(1), row(2)]},
        {"still": {"open_grants": 1}},
        {"two_leaders": 1},
        {"levels": [Level(0.0, 2, 1), Level(30.0, 2, 1)]},
        {"faults": [Fault(Step("kill", "hints", 1.0), "hints", 1.0, 2.0, float("inf"))]},
        {"problems": ["recorder ended by itself"]},
    ],
)
def test_whatever_is_wrong_is_told(changes: dict[str, object]) -> None:
    """Each of the promises, broken alone, fails the soak and says so in a line."""
    found = report(observed(**changes))
    assert not found.ok
    assert len(found.problems) == 1
