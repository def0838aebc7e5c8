"""`TraceStats` as tables of text for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rich.cells import cell_len

from tidegate.safe_text import safe
from tidegate.trace.stats import (
    DecisionStats,
    GapStats,
    HoldStats,
    Percentiles,
    ServedStats,
    SessionStats,
    Tokens,
    ToolStats,
    TraceStats,
)

MOST_SESSIONS = 40
"""Of those that a terminal shows; ``--json`` has all."""

_NAME_WIDTH = 48
R = TypeVar("R", SessionStats, ToolStats, ServedStats, GapStats, HoldStats, DecisionStats)
Column = tuple[str, Callable[[R], str]]


def stats_text(stats: TraceStats, *, sessions: int = MOST_SESSIONS) -> str:
    """Tables that have rows, with a heading each."""
    head = f"{stats.requests} requests, {stats.without_session} of them without a session"
    if stats.skipped:
        head += "; other rows: " + ", ".join(f"{count} {safe(kind)}" for kind, count in sorted(stats.skipped.items()))
    parts = [head]
    if stats.sessions:
        shown = stats.sessions[:sessions]
        more = f" (the first {len(shown)} of {len(stats.sessions)})" if len(shown) < len(stats.sessions) else ""
        parts.append(_table(f"Sessions{more}", shown, _SESSIONS))
    if stats.tools:
        parts.append(_table("Tools", stats.tools, _TOOLS))
    if stats.gaps:
        parts.append(_table("Between a session's turns, and what its cache lost meanwhile", stats.gaps, _GAPS))
    if stats.holds:
        parts.append(_table("Held turns", stats.holds, _HOLDS))
    if stats.decisions:
        parts.append(_table("Decisions", stats.decisions, _DECISIONS))
    if stats.models:
        parts.append(_table("Models", stats.models, _SERVED))
    if stats.workers:
        parts.append(_table("Workers", stats.workers, _SERVED))
    return "\n\n".join(parts)


def _table(title: str, rows: Sequence[R], columns: Sequence[Column[R]]) -> str:
    """The first column to the left, figures to the right."""
    found: list[list[str]] = [[safe(text(row)) for _, text in columns] for row in rows]
    cells: list[list[str]] = [[name for name, _ in columns], *found]
    return "\n".join([title, *_aligned(cells)])


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for first, *figures in cells:
        right = [figure.rjust(width) for figure, width in zip(figures, widths[1:], strict=True)]
        lines.append("  " + "  ".join([first + " " * (widths[0] - cell_len(first)), *right]).rstrip())
    return lines


def _short(name: str) -> str:
    """A client's id, which may have thousands of characters: enough of its beginning and end to find it by."""
    text = safe(name)
    return text if len(text) <= _NAME_WIDTH else f"{text[: _NAME_WIDTH - 13]}…{text[-12:]}"


def _duration(ms: float) -> str:
    if ms < 1_000:
        return f"{ms:.0f} ms" if ms >= 10 or ms == 0 else f"{ms:.1f} ms"
    return f"{ms / 1000:.1f} s" if ms < 600_000 else f"{ms / 60_000:.0f} min"


def _p50(found: Percentiles | None) -> str:
    return _duration(found.p50) if found is not None else "-"


def _p99(found: Percentiles | None) -> str:
    return _duration(found.p99) if found is not None else "-"


def _p90(found: Percentiles | None) -> str:
    return _duration(found.p90) if found is not None else "-"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _hit(tokens: Tokens) -> str:
    return f"{100 * tokens.cache_hit:.0f} %" if tokens.cache_hit is not None else "-"


_SESSIONS: tuple[Column[SessionStats], ...] = (
    ("session", lambda row: f"{_short(row.session)} (of {_short(row.parent)})" if row.parent else _short(row.session)),
    ("turns", lambda row: str(row.turns)),
    ("requests", lambda row: str(row.requests)),
    ("failed", lambda row: str(row.failed)),
    ("input", lambda row: str(row.tokens.input)),
    ("cached", lambda row: _hit(row.tokens)),
    ("output", lambda row: str(row.tokens.output)),
    ("tools", lambda row: str(row.tools)),
    ("tool time", lambda row: _duration(row.tool_ms)),
    ("held", lambda row: _duration(row.held_ms)),
    ("away", lambda row: _duration(row.away_ms)),
    ("ttft p50", lambda row: _p50(row.ttft_ms)),
    ("lasted", lambda row: _duration(row.duration_ms)),
)
_TOOLS: tuple[Column[ToolStats], ...] = (
    ("tool", lambda row: _short(row.tool)),
    ("calls", lambda row: str(row.calls)),
    ("inferred", lambda row: str(row.inferred)),
    ("failed", lambda row: str(row.failed)),
    ("sessions", lambda row: str(row.sessions)),
    ("p50", lambda row: _p50(row.time_ms)),
    ("p90", lambda row: _p90(row.time_ms)),
    ("p99", lambda row: _p99(row.time_ms)),
    ("longest", lambda row: _duration(row.time_ms.max) if row.time_ms else "-"),
    ("cache lost meanwhile", lambda row: _share(row.lost, row.reusable)),
)
_SERVED: tuple[Column[ServedStats], ...] = (
    ("name", lambda row: _short(row.name)),
    ("requests", lambda row: str(row.requests)),
    ("completed", lambda row: str(row.outcomes.get("completed", 0) + row.outcomes.get("?", 0))),
    ("sessions", lambda row: str(row.sessions)),
    ("input", lambda row: str(row.tokens.input)),
    ("cached", lambda row: _hit(row.tokens)),
    ("output", lambda row: str(row.tokens.output)),
    ("held", lambda row: str(row.held)),
    ("wait p99", lambda row: _p99(row.wait_ms)),
    ("ttft p50", lambda row: _p50(row.ttft_ms)),
    ("ttft p99", lambda row: _p99(row.ttft_ms)),
    ("itl p50", lambda row: _p50(row.itl_ms)),
    ("total p50", lambda row: _p50(row.total_ms)),
    ("total p99", lambda row: _p99(row.total_ms)),
)
_GAPS: tuple[Column[GapStats], ...] = (
    ("gap", lambda row: f"up to {row.up_to_s:.0f} s" if row.up_to_s is not None else "longer"),
    ("gaps", lambda row: str(row.gaps)),
    ("with tools", lambda row: str(row.with_tools)),
    ("moved", lambda row: str(row.moved)),
    ("reusable", lambda row: str(row.reusable)),
    ("found", lambda row: str(row.found)),
    ("lost", lambda row: str(row.lost)),
    ("lost of it", lambda row: _share(row.lost, row.reusable)),
)
_HOLDS: tuple[Column[HoldStats], ...] = (
    ("reason", lambda row: row.reason),
    ("requests", lambda row: str(row.requests)),
    ("sessions", lambda row: str(row.sessions)),
    ("refused", lambda row: str(row.refused)),
    ("p50", lambda row: _p50(row.hold_ms)),
    ("p90", lambda row: _p90(row.hold_ms)),
    ("p99", lambda row: _p99(row.hold_ms)),
    ("longest", lambda row: _duration(row.hold_ms.max) if row.hold_ms else "-"),
)
_DECISIONS: tuple[Column[DecisionStats], ...] = (
    ("policy", lambda row: row.policy if row.mode == "policy" else f"{row.policy} ({row.mode})"),
    ("requests", lambda row: str(row.requests)),
    ("moved", lambda row: str(row.moved)),
    ("index synced", lambda row: _share(row.index_health.get("synced", 0), row.requests)),
    ("predicted", lambda row: str(row.predicted)),
    ("reported", lambda row: str(row.reported)),
    ("exact", lambda row: _share(row.exact, row.compared)),
    ("decision p50", lambda row: _p50(row.decision_ms)),
    ("decision p99", lambda row: _p99(row.decision_ms)),
    ("decide p99", lambda row: f"{row.decide_us.p99:.0f} µs" if row.decide_us else "-"),
)
