"""The columns of the two tables: what each says, how wide it is, and how much it is needed. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tidegate.top.snapshot import SessionRow, WorkerRow
from tidegate.top.text import amount, duration, percent

Row = TypeVar("Row")

_STATE_STYLES = {
    "held": "yellow",
    "running": "green",
    "paused": "magenta",
    "acting": "cyan",
    "leased": "blue",
    "idle": "",
    "closed": "dim",
}
_HEALTH_STYLES = {
    "ready": "green",
    "synced": "green",
    "starting": "yellow",
    "catching_up": "yellow",
    "approximate": "yellow",
    "unknown": "dim",
    "left": "dim",
}


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """``need``: columns with the lowest are left out last. ``most``: cells that it may grow to; ``sort``: its name in
    `tidegate.top.controls.SORTS`."""

    title: str
    width: int
    need: int
    text: Callable[[Row], str]
    right: bool = False
    most: int = 0
    style: Callable[[Row], str] = lambda row: ""
    sort: str = ""


def _place(row: SessionRow) -> str:
    if row.worker is None:
        return ""
    return f"{row.worker}/{row.rank}" if row.rank else row.worker


def _doing(row: SessionRow) -> str:
    """Why it is in its state: the tool that runs, what holds it back."""
    if row.state == "held":
        return row.hold_reason or ""
    if row.state == "paused":
        return row.pause_reason or ""
    if row.tool is None:
        return ""
    more = f"+{row.tools - 1}" if row.tools > 1 else ""
    guess = "?" if row.tool_inferred else ""
    return f"{row.tool[:200]}{guess}{more}"


def _last_hold(row: SessionRow) -> str:
    if not row.last_hold_ms:
        return ""
    return f"{duration(row.last_hold_ms)} {row.last_hold_reason or ''}".strip()


def _who(row: SessionRow) -> str:
    """A sub-agent that shares its session's id is told by its own."""
    return f"{row.session_id[:200]}:{row.agent}" if row.agent and row.agent != row.session_id else row.session_id


SESSION_COLUMNS: tuple[Column[SessionRow], ...] = (
    Column("STATE", 7, 0, lambda row: row.state, style=lambda row: _STATE_STYLES[row.state], sort="state"),
    Column("FOR", 4, 1, lambda row: duration(row.for_ms), right=True, sort="for"),
    Column("SESSION", 14, 0, _who, most=48, sort="session"),
    Column("PARENT", 12, 11, lambda row: row.parent or "", most=24),
    Column("DOING", 14, 2, _doing, most=28),
    Column("LEASE", 5, 6, lambda row: duration(row.lease_ms), right=True, sort="lease"),
    Column("KEPT", 5, 9, lambda row: amount(row.lease_tokens), right=True),
    Column("CTX", 5, 4, lambda row: amount(row.context_tokens), right=True, sort="context"),
    Column("TURNS", 5, 5, lambda row: str(row.turns) if row.turns < 100_000 else "99999", right=True, sort="turns"),
    Column("HIT", 4, 7, lambda row: percent(row.hit_ratio), right=True, sort="hit"),
    Column("WORKER", 10, 3, _place, most=20, sort="worker"),
    Column("TENANT", 8, 8, lambda row: row.tenant, most=16, sort="tenant"),
    Column("LAST HELD", 14, 10, _last_hold, most=24),
    Column("MODEL", 10, 12, lambda row: row.model or "", most=24),
)

WORKER_COLUMNS: tuple[Column[WorkerRow], ...] = (
    Column("WORKER", 10, 0, lambda row: row.worker, most=24),
    Column("HEALTH", 9, 0, lambda row: row.health, style=lambda row: _HEALTH_STYLES.get(row.health, "bold red")),
    Column("INDEX", 11, 3, lambda row: row.index or "?", style=lambda row: _HEALTH_STYLES.get(row.index or "", "red")),
    Column("KV", 4, 1, lambda row: percent(row.kv_usage), right=True),
    Column("USED", 5, 6, lambda row: amount(row.kv_used_tokens), right=True),
    Column("OF", 5, 7, lambda row: amount(row.kv_tokens), right=True),
    Column("RUN", 4, 2, lambda row: amount(row.running), right=True),
    Column("WAIT", 4, 2, lambda row: amount(row.waiting), right=True),
    Column("GRANTS", 6, 4, lambda row: amount(row.open_grants), right=True),
    Column("LEASED", 6, 5, lambda row: amount(row.lease_tokens), right=True),
    Column("DEC/S", 6, 8, lambda row: f"{row.decisions_per_s:.1f}"[:6], right=True),
    Column("HINTS", 11, 9, lambda row: f"{amount(row.hints_accepted)}/{amount(row.hints_other)}", right=True),
    Column("RANKS", 5, 12, lambda row: str(row.ranks), right=True),
    Column("ENGINE", 9, 13, lambda row: row.engine or ""),
    Column("MODEL", 10, 11, lambda row: row.model or "", most=24),
    Column("WHY", 10, 10, lambda row: row.reason or row.index_reason or "", most=40),
)
