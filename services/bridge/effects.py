"""What a bridge's core asks of its shell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcore import PreparedRanks
from services.bridge.endpoints import RankSource


@dataclass(frozen=True, slots=True)
class Publish:
    """One message on the bus."""

    subject: str
    payload: bytes
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PutWorker:
    """The worker's entry of the registry bucket changed."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class ScrapeNow:
    """Do not wait for the next turn: which process answers?"""


@dataclass(frozen=True, slots=True)
class Discover:
    """Ask the engine where its events are; answered by `SourcesFound`."""


@dataclass(frozen=True, slots=True)
class Subscribe:
    """Close the sockets there are and open these."""

    sources: tuple[RankSource, ...]


@dataclass(frozen=True, slots=True)
class FetchReplay:
    """Ask a rank's replay socket for everything from ``start``; answered by `ReplayAnswered` with this ``ticket``."""

    rank: int
    endpoint: str
    start: int
    ticket: int


@dataclass(frozen=True, slots=True)
class Discard:
    """What was restored is in use, or will not be: give back the rest."""

    prepared: PreparedRanks


@dataclass(frozen=True, slots=True)
class CallEngine:
    """POST ``body`` (JSON) to the engine's ``path`` for a hint; answered by `HintCallAnswered` with this ``ticket``, in
    time and whatever happens. Calls of one ``lane`` are made one after the other."""

    ticket: int
    lane: int
    path: str
    body: bytes


@dataclass(frozen=True, slots=True)
class Say:
    """One line of the log: an event name and its fields."""

    event: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    warning: bool = False


BridgeEffect = Publish | PutWorker | ScrapeNow | Discover | Subscribe | FetchReplay | Discard | CallEngine | Say
