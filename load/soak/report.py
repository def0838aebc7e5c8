"""The outcome of a soak as one JSON object, and in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from load.soak.attribution import Fault
from load.soak.books import (
    Exchange,
    FailureBook,
    Level,
    Recovery,
    RowBook,
    failure_book,
    failures_of,
    is_starved,
    longest_excess_s,
    marks_of,
    recoveries,
    row_book,
    stray_marks,
)
from load.soak.plan import WHOLE_MS
from schemas.trace import RequestMetrics

EXCESS_BOUND_S = 10.0
"""What its front door no longer names goes after 3 to 4 s, what nobody names after 8; the load goes on meanwhile."""

_SAID = 10
"""Of each kind of problem, so many are told."""


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that was seen. ``short_s``: seconds for each fault in which the machine was short of processors (10
    times the bounds where it does not say), ``shortage``: as `load.soak.watch.Watch` has it. ``still``: what was in
    flight at the end, by name. ``problems``: what the run itself noticed, in words."""

    seed: int
    seconds: float
    exchanges: Sequence[Exchange]
    rows: Sequence[RequestMetrics]
    faults: Sequence[Fault]
    short_s: Sequence[float]
    levels: Sequence[Level]
    two_leaders: int
    still: dict[str, int]
    problems: Sequence[str] = ()
    shortage: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """``summary``: the JSON object; ``problems``: why it is not ok, a line each."""

    summary: dict[str, Any]
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.summary["ok"])


def report(seen: Observed) -> Report:
    """All books read."""
    failures = failures_of(seen.exchanges, seen.rows)
    marks = marks_of(seen.rows)
    owed = recoveries(seen.faults, failures, marks)
    book, rows = failure_book(failures, seen.faults), row_book(seen.exchanges, seen.rows)
    stray = stray_marks(marks, seen.faults)
    unexplained = [
        f"{request} was {mark.mark} at {mark.decided_at:.2f}"
        for request, mark in stray
        if not is_starved(seen.shortage, mark.decided_at)
    ]
    excess_s = longest_excess_s(seen.levels, seen.faults)
    problems = [
        *seen.problems,
        *_some("not explained", book.unexplained),
        *_some("without a row", rows.lost),
        *_some("with two rows", rows.doubled),
        *_some("a row of nobody's request", rows.unknown),
        *_some("marked outside of every fault", unexplained),
        *(words for each, short in zip(owed, seen.short_s, strict=True) for words in each.late(short)),
        *(f"in flight at the end: {name} {count}" for name, count in seen.still.items() if count),
    ]
    if seen.two_leaders:
        problems.append(f"two admissions led at the same time, seen {seen.two_leaders} times")
    if excess_s > EXCESS_BOUND_S:
        problems.append(f"the leader counted more requests than there were for {excess_s:.1f} s on end")
    outside = (len(unexplained), len(stray) - len(unexplained))
    return Report(_summary(seen, book, rows, owed, outside, excess_s, ok=not problems), problems)


def _summary(
    seen: Observed,
    book: FailureBook,
    rows: RowBook,
    owed: Sequence[Recovery],
    outside: tuple[int, int],
    excess_s: float,
    *,
    ok: bool,
) -> dict[str, Any]:
    failed = sum(exchange.symptom is not None for exchange in seen.exchanges)
    start = min((exchange.began_at for exchange in seen.exchanges), default=0.0)
    return {
        "ok": ok,
        "seed": seen.seed,
        "seconds": round(seen.seconds, 1),
        "requests": len(seen.exchanges),
        "succeeded": len(seen.exchanges) - failed,
        "aborted": sum(exchange.aborted for exchange in seen.exchanges),
        "failed_explained": book.explained,
        "unexplained_failures": len(book.unexplained),
        "unexplained_marks": outside[0],
        "marks_while_short": outside[1],
        "rows": rows.rows,
        "rows_lost": len(rows.lost),
        "rows_doubled": len(rows.doubled),
        "rows_unknown": len(rows.unknown),
        "rows_ingress_lost": rows.ingress_lost,
        "events": [_event(each, start) for each in owed],
        "budget": {
            **seen.still,
            "longest_excess_s": round(excess_s, 1),
            "excess_bound_s": EXCESS_BOUND_S,
            "two_leaders": seen.two_leaders,
        },
    }


def _event(each: Recovery, start: float) -> dict[str, Any]:
    fault = each.fault
    return {
        "at_s": round(fault.began_at - start, 1),
        "what": fault.step.what,
        "target": fault.name,
        "role": fault.step.kind,
        "lasted_s": round(fault.mended_at - fault.began_at, 1),
        "recovered_ms": each.recovered_ms,
        "bound_ms": fault.promise.bound_ms,
        "counted_from": "fault" if fault.promise.stands_in else "mending",
        "whole_ms": each.whole_ms,
        "whole_bound_ms": WHOLE_MS,
        "takeover_ms": each.takeover_ms if each.takeover_ms != float("inf") else None,
        "failures": each.failures,
        "marks": each.marks,
    }


def _some(what: str, found: Sequence[str]) -> list[str]:
    told = [f"{what}: {each}" for each in found[:_SAID]]
    return [*told, f"{what}: {len(found) - _SAID} more"] if len(found) > _SAID else told
