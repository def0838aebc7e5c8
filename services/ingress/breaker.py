"""Workers that are left alone for a while, because what was sent to them failed again and again.

closed ──`failures` in a row──▶ open ──its time is over──▶ half open ──one request goes there──▶ probing
  ▲                              ▲                                                                 │
  └────────── it answers ────────┼──────────────────── it answers ─────────────────────────────────┤
                                 └── it fails: twice as long as the time before ───────────────────┘

A failure is no connection, a connection that is lost, no answer in time, or a status of 500 and more (but 501). Any
other answer closes: a 4xx is the client's fault. Of a probe that says nothing (its client left) nothing is known, and
after the time for one the next goes. Each ingress judges for itself: a network may be cut between two of us only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

BreakerState = Literal["open", "half_open"]

FAILED_STATUSES = frozenset({*range(500, 600)} - {501})
FAILED_REASONS = frozenset(
    {"connect_error", "connect_timeout", "connection_lost", "bad_answer", "first_byte_timeout", "idle_timeout"}
)
"""Of `services.ingress.events.AnswerFailure`, those that are the worker's fault, or its network's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerRules:
    """``failures`` in a row open it (0: never) for ``open_s``, then for twice as long each time, ``longest_s`` at
    most."""

    failures: int = 5
    open_s: float = 5.0
    longest_s: float = 60.0


@dataclass(slots=True)
class _Known:
    failures: int = 0
    trips: int = 0
    until: float | None = None
    probing: bool = False


class Breaker:
    """Knows only workers that have failed since they last answered. Times in Unix seconds."""

    def __init__(self, rules: BreakerRules) -> None:
        self.trips = 0
        self._rules = rules
        self._known: dict[str, _Known] = {}
        self._now = float("-inf")

    def judge(self, worker: str, status: int | None, reason: str | None, now: float, *, unknown_api: bool) -> None:
        """Whether it has failed by this status or reason, or answers, or nothing is known. ``unknown_api``: what became
        of it there is its own affair: nobody takes a worker away from others by asking for it."""
        if status in FAILED_STATUSES and unknown_api:
            return
        if status in FAILED_STATUSES or reason in FAILED_REASONS:
            self.failed(worker, now)
        elif status is not None or reason == "api_not_served":
            self.answered(worker)

    def failed(self, worker: str, now: float) -> None:
        """One request failed there. While it is open, those that were under way when it opened say nothing new."""
        if not self._rules.failures:
            return
        self._clock(now)
        known = self._known.setdefault(worker, _Known())
        known.failures += 1
        enough = known.failures >= self._rules.failures
        if enough if known.until is None else known.probing or now >= known.until:
            open_s = min(self._rules.open_s * 2 ** min(known.trips, 32), self._rules.longest_s)
            known.until, known.probing = now + open_s, False
            known.trips += 1
            self.trips += 1

    def answered(self, worker: str) -> None:
        """It answers, or is gone, or another process under its old name."""
        self._known.pop(worker, None)

    def sent(self, worker: str, now: float) -> None:
        """A request goes there; where it is half open that is the probe, and no other goes for ``open_s``."""
        self._clock(now)
        known = self._known.get(worker)
        if known is not None and known.until is not None and now >= known.until:
            known.until, known.probing = now + self._rules.open_s, True

    def avoided(self, workers: Iterable[str], now: float) -> tuple[str, ...]:
        """Those of ``workers`` that get nothing now. None, where that would be all: a try is better than a refusal."""
        if not self._known:
            return ()
        self._clock(now)
        names = list(workers)
        shut = tuple(name for name in names if self._state(name, now) == "open")
        return shut if len(shut) < len(names) else ()

    def states(self, now: float) -> dict[str, BreakerState]:
        """Every worker whose breaker is not closed."""
        self._clock(now)
        found = {name: self._state(name, now) for name in self._known}
        return {name: state for name, state in found.items() if state is not None}

    def _clock(self, now: float) -> None:
        """Where the clock was set back, nobody is left alone for longer by that."""
        back_s, self._now = self._now - now, now
        if back_s > 0:
            for known in self._known.values():
                known.until = known.until if known.until is None else known.until - back_s

    def _state(self, worker: str, now: float) -> BreakerState | None:
        known = self._known.get(worker)
        if known is None or known.until is None:
            return None
        return "open" if now < known.until else "half_open"
