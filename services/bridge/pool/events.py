"""What happens to a pool's bridge: its master's socket and pages, and the steps of a reconcile."""

from __future__ import annotations

from dataclasses import dataclass

from services.bridge.events import Beat, EngineBatch, EngineConnected, EngineDisconnected, Stopping
from services.bridge.pool.report import PoolReport


@dataclass(frozen=True, slots=True)
class Polled:
    """The master answered status, metrics and segments."""

    report: PoolReport


@dataclass(frozen=True, slots=True)
class PollFailed:
    """The master did not answer, or not intelligibly."""

    reason: str


@dataclass(frozen=True, slots=True)
class KeysListed:
    """Whole lines of the key list of reconcile ``ticket``, as they come."""

    ticket: int
    keys: bytes


@dataclass(frozen=True, slots=True)
class ListEnded:
    """The key list came to its end; ``problem``: or did not."""

    ticket: int
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Compared:
    """What `effects.Compare` found: deltas, each of which can be applied by itself."""

    ticket: int
    deltas: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class GoOn:
    """Time for the next piece of a reconcile's work."""

    ticket: int


PoolEvent = (
    EngineBatch
    | EngineConnected
    | EngineDisconnected
    | Polled
    | PollFailed
    | KeysListed
    | ListEnded
    | Compared
    | GoOn
    | Beat
    | Stopping
)
"""The socket is polled as an engine's is (`services.bridge.shell.subscriber`), with one rank, 0."""
