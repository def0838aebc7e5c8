"""A replay's report for people: the two sides beside each other. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from tidegate.replay.report import ReplayReport
from tidegate.trace.figures import Figures, Spread


class Line(NamedTuple):
    """One line: its name, what came of the replay, what was recorded, and by how much that differs."""

    name: str
    replayed: str
    recorded: str
    change: str


_COUNTS: tuple[tuple[str, Callable[[Figures], float | None], str], ...] = (
    ("requests answered", lambda side: side.requests, ",.0f"),
    ("plays completed", lambda side: side.plays, ",.0f"),
    ("input tokens", lambda side: side.input_tokens, ",.0f"),
    ("output tokens", lambda side: side.output_tokens, ",.0f"),
    ("cached tokens", lambda side: side.cached_tokens, ",.0f"),
    ("computed tokens", lambda side: side.computed_tokens, ",.0f"),
    ("prefix hit ratio", lambda side: side.prefix_hit_ratio, ".4f"),
    ("wall time s", lambda side: side.wall_s, ",.2f"),
    ("requests / s", lambda side: side.requests_per_s, ",.2f"),
    ("output tokens / s", lambda side: side.output_tokens_per_s, ",.1f"),
)
_TIMES: tuple[tuple[str, Callable[[Figures], Spread | None]], ...] = (
    ("time to first token ms", lambda side: side.ttft_ms),
    ("between tokens ms", lambda side: side.itl_ms),
    ("request ms", lambda side: side.latency_ms),
    ("play ms", lambda side: side.jct_ms),
)


def lines_of(report: ReplayReport) -> Iterator[Line]:
    """The whole table."""
    for name, figure, form in _COUNTS:
        yield _line(name, figure(report.replayed), figure(report.recorded), form)
    for name, spread in _TIMES:
        now, then = spread(report.replayed), spread(report.recorded)
        if now is None and then is None:
            continue
        for part in ("p50", "p90", "p99"):
            yield _line(f"{name}, {part}", getattr(now, part, None), getattr(then, part, None), ",.1f")


def _line(name: str, now: float | None, then: float | None, form: str) -> Line:
    change = f"{100 * (now / then - 1):+.1f} %" if now is not None and then else ""
    return Line(name, _text(now, form), _text(then, form), change)


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def notes_of(report: ReplayReport) -> Iterator[str]:
    """What a reader of the table must know: in the order of its weight."""
    if report.interrupted:
        yield f"interrupted: {report.unsent} requests were not sent, {report.cut} were cut"
    for reason, count in report.failures.items():
        yield f"{count} failed: {reason}: {report.examples.get(reason, '')}"
    if report.plays_failed:
        yield f"{report.plays_failed} plays failed, and {report.skipped} of their requests were not sent"
    for reason, count in report.left_out.items():
        yield f"{count} rows left out: {reason}"
    if report.answers_not_told:
        yield (
            f"{report.answers_not_told} answers are in later prompts, but the endpoint did not tell their tokens: "
            "fewer are found cached than were recorded"
        )
    late = report.lateness_ms
    if late is not None:
        yield f"sent after their time: p50 {late.p50:.1f} ms, p99 {late.p99:.1f} ms, most {late.max:.1f} ms"
    if report.player_cpu > 0.8:
        yield f"the player used {100 * report.player_cpu:.0f} % of a processor: its times may be its own"
