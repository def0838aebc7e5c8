"""A snapshot as lines of a terminal of any size: columns that do not fit are left out, the least needed first. Pure.

Whatever strangers wrote goes through `tidegate.safe_text` and stays in its cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.text import Text

from tidegate.top.columns import SESSION_COLUMNS, WORKER_COLUMNS, Column, Row
from tidegate.top.controls import Controls, select
from tidegate.top.snapshot import Headline, Snapshot, WorkerRow
from tidegate.top.text import amount, cut, duration, fit, percent

MIN_WIDTH = 20
_GAP = 1


def frame(
    snapshot: Snapshot,
    controls: Controls,
    width: int,
    height: int | None,
    *,
    where: str = "",
    clock: str = "",
    note: str = "",
    keys: bool = True,
) -> list[Text]:
    """All lines, at most ``width`` cells each. ``height``: exactly so many (``None``: as many as there is to show).

    ``note``: what is to be said besides, of the bus for example. ``keys``: a last line says what can be pressed.
    """
    width = max(MIN_WIDTH, width)
    rows = select(snapshot.sessions, controls)
    trouble = "; ".join(part for part in (note, _trouble(snapshot.headline)) if part)
    lines = _head(snapshot.headline, controls, width, where, clock)
    if trouble:
        lines.append(Text(cut(trouble, width), style="bold red"))
    room = layout(snapshot, controls, height, head=len(lines), keys=keys)
    if controls.workers:
        lines += [Text(), *_table(WORKER_COLUMNS, _first(snapshot.workers, room.workers), width)]
        if room.workers < len(snapshot.workers):
            lines.append(Text(cut(f"… {len(snapshot.workers) - room.workers + 1} more", width), style="dim"))
    first = min(controls.first, max(0, len(rows) - room.sessions))
    shown = rows[first : first + room.sessions]
    if controls.sessions:
        mark = "▲" if controls.reverse else "▼"
        lines += [Text(), *_table(SESSION_COLUMNS, shown, width, controls.sort, mark)]
    if height is not None:
        lines = lines[: max(0, height - keys)]
        lines += [Text() for _ in range(height - keys - len(lines))]
    if keys:
        lines.append(_foot(controls, width, first, len(shown), len(rows)))
    return lines


@dataclass(frozen=True, slots=True)
class Layout:
    """Rows of each pane; of workers with the line that says how many more there are."""

    workers: int
    sessions: int


def layout(snapshot: Snapshot, controls: Controls, height: int | None, *, head: int, keys: bool = True) -> Layout:
    """How many rows there is room for. ``head``: lines above the panes. A pane has a blank line and a title."""
    workers = len(snapshot.workers)
    if height is None:
        return Layout(workers, max(1, len(snapshot.sessions)))
    left = height - head - keys - 2 * (controls.workers + controls.sessions)
    if not controls.sessions:
        return Layout(max(1, min(workers, left)), 1)
    if not controls.workers:
        return Layout(0, max(1, left))
    shown = min(workers, max(1, left // 3))
    return Layout(shown, max(1, left - shown))


def page_of(snapshot: Snapshot, controls: Controls, height: int, *, note: str = "") -> int:
    """How many sessions a frame of this height shows."""
    return layout(snapshot, controls, height, head=3 + bool(note or _trouble(snapshot.headline))).sessions


def _first(workers: Sequence[WorkerRow], room: int) -> Sequence[WorkerRow]:
    return workers if len(workers) <= room else workers[: room - 1]


def _head(headline: Headline, controls: Controls, width: int, where: str, clock: str) -> list[Text]:
    states = ", ".join(f"{count} {state}" for state, count in headline.states.items()) or "none yet"
    ttft = "TTFT –"
    if headline.ttft_ms_p50 is not None and headline.ttft_ms_p95 is not None:
        ttft = f"TTFT p50 {_ms(headline.ttft_ms_p50)} p95 {_ms(headline.ttft_ms_p95)}"
    predicted, reported = amount(headline.cached_tokens_predicted), amount(headline.cached_tokens_reported)
    cached = f"cached {predicted} predicted, {reported} reported"
    front = f"{headline.ingresses} ingress{'' if headline.ingresses == 1 else 'es'}"
    return [
        _line(["tidegate top", clock, "PAUSED" if controls.paused else "", where, front], width, "bold"),
        _line(
            [
                f"{headline.in_flight} in flight, {headline.held} held",
                f"{headline.ended_per_s:.1f} req/s",
                ttft,
                f"{headline.failed} failed",
            ],
            width,
        ),
        _line([f"hits {percent(headline.hit_ratio) or '–'}", cached, f"sessions: {states}"], width),
    ]


def _trouble(headline: Headline) -> str:
    """What this view does not know, and why."""
    counts = (
        ("facts missed", headline.facts_missed),
        ("dropped here", headline.facts_dropped),
        ("unreadable", headline.facts_unreadable),
        ("requests without an end", headline.requests_vanished),
        ("sessions forgotten", headline.sessions_forgotten),
        ("requests forgotten", headline.requests_forgotten),
        ("workers forgotten", headline.workers_forgotten),
    )
    return ", ".join(f"{what} {amount(count)}" for what, count in counts if count)


def _line(parts: Sequence[str], width: int, style: str = "") -> Text:
    """Parts with a dot between, as far as there is room."""
    return Text(cut(" · ".join(filter(None, parts)), width), style=style)


def _ms(value: float) -> str:
    return f"{value:.0f} ms" if value < 10_000 else duration(value)


def _table(
    columns: Sequence[Column[Row]], rows: Sequence[Row], width: int, sort: str = "", mark: str = ""
) -> list[Text]:
    """Titles and rows; ``mark`` stands behind the title of the column that ``sort`` names."""
    chosen = _choose(columns, width)
    title = Text(style="bold reverse")
    for place, (column, cells) in enumerate(chosen):
        name = column.title
        if sort and column.sort == sort:
            name = name[: cells - 1] + mark
        title.append((" " * _GAP if place else "") + fit(name, cells, right=column.right))
    lines = [title]
    for row in rows:
        line = Text()
        for place, (column, cells) in enumerate(chosen):
            line.append(" " * _GAP if place else "")
            line.append(fit(column.text(row), cells, right=column.right), style=column.style(row))
        line.rstrip()
        lines.append(line)
    return lines


def _choose(columns: Sequence[Column[Row]], width: int) -> list[tuple[Column[Row], int]]:
    """Those that fit, by need, in their order, and the cells of each; what is left over goes to those that may grow."""
    kept: list[Column[Row]] = []
    left = width + _GAP
    for column in sorted(columns, key=lambda column: column.need):
        if column.width + _GAP > left and kept:
            break
        kept.append(column)
        left -= column.width + _GAP
    growing = [column for column in sorted(kept, key=lambda column: column.need) if column.most]
    cells = {id(column): min(column.width, width) for column in kept}
    for column in growing:
        more = max(0, min(left, column.most - column.width))
        cells[id(column)] += more
        left -= more
    return [(column, cells[id(column)]) for column in columns if id(column) in cells]


def _foot(controls: Controls, width: int, first: int, count: int, rows: int) -> Text:
    if controls.typing:
        return Text(cut(f"filter: {controls.filter}_   (Enter keeps it, Esc drops it)", width), style="reverse")
    shown = f"{first + 1}-{first + count} of {rows}" if rows else "no sessions"
    filtered = f"  filter '{controls.filter}'" if controls.filter else ""
    sort = f"  sort {controls.sort}" if controls.sort not in _shown_sorts(width) else ""
    keys = "q quit  s sort  r reverse  / filter  p pause  w t panes  ↑↓ scroll"
    help_text = f"{shown}{sort}{filtered}  {keys}"
    return Text(cut(help_text, width), style="dim")


def _shown_sorts(width: int) -> set[str]:
    """Orders whose column is there, and marked."""
    return {column.sort for column, _ in _choose(SESSION_COLUMNS, width)}
