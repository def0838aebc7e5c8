"""What a replica asks of its shell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from schemas.index import SourceHealth


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Ask a worker's bridge for its index; answered by `SnapshotReceived` or `SnapshotFailed` with this ``ticket``."""

    worker: str
    ticket: int


@dataclass(frozen=True, slots=True)
class AskPoolSnapshot:
    """Ask a pool's bridge for its index; answered by `PoolSnapshotReceived` or `PoolSnapshotFailed` with this
    ``ticket``."""

    pool: str
    ticket: int


@dataclass(frozen=True, slots=True)
class SourceChanged:
    """How far a source is trusted has changed: its health, its reason, its incarnation, or that it is gone.

    ``applied``: number of the last batch, -1 for none. ``blocks``: what it holds.
    """

    worker: str
    rank: int
    health: SourceHealth
    reason: str | None
    incarnation: str
    applied: int
    blocks: int


@dataclass(frozen=True, slots=True)
class Say:
    """One line of the log: an event name and its fields."""

    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    warning: bool = False


ReplicaEffect = AskSnapshot | AskPoolSnapshot | SourceChanged | Say
