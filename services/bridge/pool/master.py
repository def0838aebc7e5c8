"""The bridge's picture of a pool's master: whether it answers, which process it is, and how far its stream has come.

A stream of numbers begins at 1 with each process (spec: pool-events §1). A smaller number than expected is another
process; so is a status that has published fewer messages than before, or than had come before it was asked. A status
that has published more than came is a lost tail, if it still is so one look later. What a page leaves out (another
release, a master that is going down) says nothing of either.
"""

from __future__ import annotations

from typing import Literal

from services.bridge.pool.report import LISTED_TENANT, PoolReport
from services.bridge.pool.triggers import Reason

UNREACHABLE_AFTER = 3
"""Looks in a row that fail until the master counts as gone."""

CONNECT_WAIT_S = 5.0
"""How long the first list of a process waits for the subscription to stand."""


class MasterView:
    """State of one master, as far as it was heard and seen."""

    def __init__(self) -> None:
        self.connected = False
        self.enabled: bool | None = None
        """Whether it publishes events; ``None``: not known yet."""
        self.problem: str | None = None
        self.gaps = 0
        self.restarts = 0
        self.other_tenants = False
        self._failed = 0
        self._kept_waiting = 0
        self._seen: PoolReport | None = None
        self._seen_since = 0.0
        self._evicted: int | None = None  # as the newest metrics said that said it
        self._last = 0
        self._newest = 0  # as the newest status said
        self._heard = 0  # had come when the look before this one ended
        self._covered = 0  # up to here a list will say, or has said, what may be missing

    @property
    def reachable(self) -> bool:
        """Whether it has answered, and still does."""
        return self._seen is not None and self._failed < UNREACHABLE_AFTER

    @property
    def silent(self) -> bool:
        """Whether nothing at all comes while a list is fetched: it may be busy with the list, or be gone."""
        return self._kept_waiting >= UNREACHABLE_AFTER

    @property
    def looked_for(self) -> bool:
        """Whether it was asked at all."""
        return self._seen is not None or self._failed > 0

    def may_list(self, now: float) -> bool:
        """Whether a key list may be asked for: it answers, and we have subscribed, or cannot."""
        if not self.reachable:
            return False
        return self.connected or self.enabled is False or now - self._seen_since >= CONNECT_WAIT_S

    def numbered(self, seq: int) -> Literal["restart", "gap"] | None:
        """A message with this number came."""
        last, self._last = self._last, seq
        if seq == last + 1:
            return None
        if last and seq <= last:
            self._new_process()
            self._last = seq
            return "restart"
        if not last and (self._seen is None or seq <= self._covered + 1):
            return None  # what came before us, the first list tells
        self.gaps += 1
        return "gap"

    def connected_now(self) -> bool:
        """The socket has shaken hands; whether something may have been lost."""
        self.connected = True
        return self._seen is not None

    def poll_failed(self, reason: str) -> None:
        """It did not answer."""
        self._failed += 1
        self.problem = reason
        self._heard = self._last

    def kept_waiting(self) -> None:
        """It did not answer while a list is fetched, as one that writes millions of keys may not."""
        self._kept_waiting += 1

    def listed(self) -> None:
        """A piece of a list came, or its proper end."""
        self._kept_waiting = 0

    def polled(self, report: PoolReport) -> bool:
        """It answered; whether another process did than before. To be followed by `noticed`."""
        self._failed = self._kept_waiting = 0
        self.problem = None
        self.other_tenants = any(tenant != LISTED_TENANT for tenant in report.metrics.tenants)
        newest, evicted = report.status.newest_seq, report.metrics.evicted
        restarted = (newest is not None and newest < max(self._newest, self._heard)) or (
            evicted is not None and self._evicted is not None and evicted < self._evicted
        )
        if restarted:
            self._new_process()
        return restarted

    def noticed(self, report: PoolReport, now: float) -> list[Reason]:
        """What of an answer gives reason to fetch the key list."""
        before, self._seen = self._seen, report
        if before is None:
            self._seen_since = now
        reasons: list[Reason] = []
        if self.enabled is not None and self.enabled is not report.status.enabled:
            reasons.append("enabled")
        self.enabled = report.status.enabled
        if self.enabled and self.connected and max(self._last, self._covered) < self._newest:
            self.gaps += 1
            self._covered = self._newest
            reasons.append("tail_lost")
        if report.status.newest_seq is not None:
            self._newest = report.status.newest_seq
        self._heard = self._last
        evicted = report.metrics.evicted
        if evicted is not None:
            if before is not None and evicted > (self._evicted or 0):  # the series begins with the first eviction
                reasons.append("eviction")
            self._evicted = evicted
        if before is not None:
            if report.segments != before.segments:
                reasons.append("segment")
            if report.metrics.liveness != before.metrics.liveness:
                reasons.append("client")
        return reasons

    def list_begins(self) -> int:
        """A key list is asked for: it knows of everything that was published until now. The number of a message of
        which that is sure: messages are counted, and numbers are never fewer."""
        self._covered = max(self._covered, self._newest)
        return (self._seen.status.published or 0) if self._seen else 0

    def _new_process(self) -> None:
        self.restarts += 1
        self._seen = self._evicted = None
        self._last = self._newest = self._heard = self._covered = 0
