"""What the reader of the view has asked for, what a key makes of it, and which sessions that shows. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from tidegate.top.snapshot import STATES, SessionRow

MAX_FILTER = 64

_ORDER = {state: place for place, state in enumerate(STATES)}

SORTS: dict[str, tuple[Callable[[SessionRow], Any], bool]] = {
    "state": (lambda row: (_ORDER[row.state], -(row.for_ms or 0)), False),
    "for": (lambda row: row.for_ms, True),
    "session": (lambda row: row.session_id, False),
    "context": (lambda row: row.context_tokens, True),
    "turns": (lambda row: row.turns, True),
    "hit": (lambda row: row.hit_ratio, True),
    "lease": (lambda row: row.lease_ms, True),
    "worker": (lambda row: (row.worker, row.rank or 0) if row.worker is not None else None, False),
    "tenant": (lambda row: row.tenant, False),
}
"""By name: what of a row, and whether the largest comes first. Rows that have none come last, either way."""


@dataclass(frozen=True, slots=True)
class Controls:
    """``pattern`` and ``tenant``: as the command was given; ``filter``: typed, part of any word of a row.

    ``typing``: keys go into the filter. ``first``: the row at the top. ``workers``, ``sessions``: panes that are shown.
    """

    sort: str = "state"
    reverse: bool = False
    filter: str = ""
    typing: bool = False
    paused: bool = False
    first: int = 0
    workers: bool = True
    sessions: bool = True
    quit: bool = False
    pattern: str | None = None
    tenant: str | None = None


def press(controls: Controls, key: str, *, rows: int, page: int) -> Controls:
    """After a key. ``rows``: sessions that pass the filter; ``page``: how many are shown at once."""
    if controls.typing:
        return _type(controls, key)
    last = max(0, rows - page)
    first = min(controls.first, last)
    moves = {
        "up": first - 1,
        "down": first + 1,
        "page_up": first - page,
        "page_down": first + page,
        "home": 0,
        "end": last,
    }
    if key in moves:
        return replace(controls, first=min(last, max(0, moves[key])))
    names = list(SORTS)
    match key:
        case "q" | "Q":
            return replace(controls, quit=True)
        case "s":
            sort = names[(names.index(controls.sort) + 1) % len(names)]
            return replace(controls, sort=sort, reverse=False, first=0)
        case "r":
            return replace(controls, reverse=not controls.reverse, first=0)
        case "/":
            return replace(controls, typing=True)
        case "escape":
            return replace(controls, filter="", first=0)
        case "p" | " ":
            return replace(controls, paused=not controls.paused)
        case "w":
            return replace(controls, workers=not controls.workers)
        case "t":
            return replace(controls, sessions=not controls.sessions)
    return controls


def _type(controls: Controls, key: str) -> Controls:
    match key:
        case "enter":
            return replace(controls, typing=False)
        case "escape":
            return replace(controls, typing=False, filter="", first=0)
        case "backspace":
            return replace(controls, filter=controls.filter[:-1], first=0)
    if len(key) == 1 and len(controls.filter) < MAX_FILTER:
        return replace(controls, filter=controls.filter + key, first=0)
    return controls


def select(rows: Iterable[SessionRow], controls: Controls) -> list[SessionRow]:
    """The sessions that are wanted, in the order that is."""
    wanted = [row for row in rows if _passes(row, controls)]
    value, descending = SORTS[controls.sort]
    known = [row for row in wanted if value(row) is not None]
    unknown = [row for row in wanted if value(row) is None]
    known.sort(key=lambda row: row.session)
    known.sort(key=value, reverse=descending != controls.reverse)
    return known + sorted(unknown, key=lambda row: row.session)


def _passes(row: SessionRow, controls: Controls) -> bool:
    if controls.tenant is not None and row.tenant != controls.tenant:
        return False
    if controls.pattern is not None and not any(
        _matches(controls.pattern, text) for text in (row.session_id, row.session)
    ):
        return False
    if not controls.filter:
        return True
    words = (
        row.session_id,
        row.agent,
        row.parent,
        row.tenant,
        row.state,
        row.worker,
        row.tool,
        row.hold_reason,
        row.pause_reason,
        row.model,
    )
    sought = controls.filter.casefold()
    return any(sought in word.casefold() for word in words if word)


def _matches(pattern: str, text: str) -> bool:
    """A shell pattern of the whole, or without its signs a part of it."""
    return fnmatchcase(text, pattern) if any(sign in pattern for sign in "*?[") else pattern in text
