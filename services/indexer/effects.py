"""What an indexer's core asks of its shell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Publish:
    """One fact on the bus."""

    subject: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class AskSnapshot:
    """Ask a worker's bridge for its index; answered by `SnapshotReceived` or `SnapshotFailed` with this ``ticket``."""

    worker: str
    ticket: int


@dataclass(frozen=True, slots=True)
class Say:
    """One line of the log: an event name and its fields."""

    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    warning: bool = False


IndexerEffect = Publish | AskSnapshot | Say
