"""When a pool's key list is fetched: on whatever lets the picture be wrong, but neither often nor twice at a time.

A reason that comes up while a list is being fetched stays for the next one: the list may be older than it.
"""

from __future__ import annotations

from typing import Literal

Reason = Literal[
    "first",  # nothing is known yet
    "restart",  # the master is another process
    "gap",  # numbers are missing: batches were lost on the way, or dropped by the master
    "tail_lost",  # the master has published more than came, and no later batch shows the hole
    "reconnect",  # the socket was away: what was published meanwhile is not missed by number if it came last
    "bad_batch",  # a message could not be read
    "held_full",  # batches were dropped here, because too many came while a comparison was told
    "eviction",  # the counter of silent evictions rose
    "segment",  # a segment went or came, and with it its keys
    "client",  # a client is suspected, lost or back, and its keys are hidden, gone or there again
    "enabled",  # events were switched on, or off
    "timer",  # the last list is too old
]

URGENT: frozenset[str] = frozenset({"first", "restart", "gap", "tail_lost", "reconnect", "held_full", "enabled"})
"""Until the list is there, the picture is known to be wrong in an unknown place: these do not wait for the share."""

DOUBTED: frozenset[str] = frozenset({"gap", "tail_lost", "reconnect", "bad_batch", "held_full", "segment", "client"})
"""While one of these stands, the pool's health says so."""

SHARE = 0.2
"""Of the time that is spent at most on lists nobody needs urgently: a pool that is full evicts all the time."""

MAX_DOUBLINGS = 6


class Triggers:
    """Reasons that stand, and the earliest time for the next list. Times in seconds."""

    def __init__(self, every_s: float, least_s: float) -> None:
        self._every_s = every_s
        self._least_s = least_s
        self._standing: dict[Reason, float] = {"first": 0.0}
        self._running: tuple[Reason, ...] = ()
        self._ended_at = float("-inf")
        self._done_at: float | None = None
        self._took_s = 0.0
        self._failed = 0

    @property
    def doubt(self) -> Reason | None:
        """The oldest reason for which the picture is doubted now, those of a running reconcile included."""
        return next((reason for reason in (*self._running, *self._standing) if reason in DOUBTED), None)

    @property
    def failed(self) -> int:
        """Lists in a row that came to nothing."""
        return self._failed

    def want(self, reason: Reason, now: float) -> None:
        """Something happened."""
        self._standing.setdefault(reason, now)

    def due(self, now: float) -> tuple[Reason, ...]:
        """The reasons for which a list is to be fetched now; empty: not yet. The caller sees to it that none runs."""
        if self._done_at is not None and now - self._done_at >= self._every_s:
            self.want("timer", now)
        if not self._standing or now < self._ended_at + self._least_s * 2 ** min(self._failed, MAX_DOUBLINGS):
            return ()
        urgent = any(reason in URGENT for reason in self._standing)
        if not urgent and now < self._ended_at + min(self._took_s * (1 / SHARE - 1), self._every_s):
            return ()
        return tuple(self._standing)

    def began(self) -> None:
        """A list is being fetched: it answers all that stands."""
        self._running = tuple(self._standing)
        self._standing = {}

    def ended(self, now: float, took_s: float) -> None:
        """The picture agrees with the list."""
        self._running = ()
        self._ended_at = self._done_at = now
        self._took_s = took_s
        self._failed = 0

    def given_up(self, now: float, *, failed: bool) -> None:
        """It came to nothing: its reasons stand again. ``failed``: and the next try waits longer each time."""
        self._standing = {**dict.fromkeys(self._running, now), **self._standing}
        self._running = ()
        self._ended_at = now
        self._failed += failed
