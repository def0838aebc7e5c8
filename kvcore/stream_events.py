"""What `kvcore.stream.StreamRecovery` is told (events) and what it says must be done (effects)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StreamState = Literal["synced", "catching_up", "blind"]
Recovery = Literal["replay", "snapshot"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds: batches and bytes held, failed fetches before giving up, seconds between a failure and the next fetch,
    delivered batches whose payload is remembered (to tell a duplicate from a restart)."""

    hold_batches: int = 10_000
    hold_bytes: int = 64 * 1024 * 1024
    attempts: int = 3
    backoff_s: float = 1.0
    remembered: int = 1024


@dataclass(frozen=True, slots=True)
class LiveBatch:
    """A batch as published. ``incarnation`` and ``first``: the bridge's marks, absent on the engine's hop."""

    seq: int
    payload: bytes
    incarnation: str = ""
    first: bool = False


@dataclass(frozen=True, slots=True)
class ReplayedBatch:
    """A batch of the past, answering the `Fetch` with this token."""

    token: int
    seq: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class ReplayEnded:
    """The engine has nothing more to answer."""

    token: int


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """The replay or snapshot failed or timed out; ``reason`` is stable (``replay_timeout``, ...). ``retry`` false: it
    will never work (no replay socket)."""

    token: int
    reason: str
    retry: bool = True


@dataclass(frozen=True, slots=True)
class Restored:
    """A snapshot that `StreamRecovery.accepts` was loaded: the rank's blocks as after ``seq`` of ``incarnation``."""

    token: int
    incarnation: str
    seq: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The publisher says how far it is (-1: nothing yet). A tail that is still missing at the next one was lost.
    ``settled`` false: it is itself on its way to where it was, so that its number proves nothing."""

    incarnation: str
    seq: int
    settled: bool = True


@dataclass(frozen=True, slots=True)
class Restarted:
    """The publisher is known to have restarted: what comes next is a new stream from 0."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The engine's sockets were connected, or connected again: find out what was published meanwhile."""


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """The batch just delivered emptied the engine's pool: from here on nothing is missing from the picture."""


@dataclass(frozen=True, slots=True)
class Tick:
    """`StreamRecovery.wake_at` has passed."""


StreamEvent = (
    LiveBatch
    | ReplayedBatch
    | ReplayEnded
    | FetchFailed
    | Restored
    | Heartbeat
    | Connected
    | Restarted
    | Rebuilt
    | Tick
)


@dataclass(frozen=True, slots=True)
class Deliver:
    """Apply this batch. ``first``: the first one since the start or the last `Clear`."""

    seq: int
    payload: bytes
    first: bool


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get what was published from ``from_seq`` on, and answer with ``token``; it replaces a fetch still running.
    ``fresh``: what was asked for before now is no answer, since what came since then may be false."""

    token: int
    from_seq: int
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class Clear:
    """Forget every block of the rank."""

    reason: str


@dataclass(frozen=True, slots=True)
class StateChanged:
    """How far the picture can be trusted from now on; ``reason`` is ``None`` only when synced."""

    state: StreamState
    reason: str | None


StreamEffect = Deliver | Fetch | Clear | StateChanged


@dataclass(slots=True)
class StreamCounters:
    """Since the start: gaps seen, restarts, duplicates and stale batches dropped, held batches given up, fetches."""

    gaps: int = 0
    restarts: int = 0
    duplicates: int = 0
    dropped: int = 0
    fetches: int = 0
    cleared: int = 0
