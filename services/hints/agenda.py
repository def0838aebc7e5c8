"""What is to be done about sessions later: a bounded heap. An entry whose session has moved on is passed over."""

from __future__ import annotations

import heapq
from typing import Literal, NamedTuple

from schemas.session import SessionKey

Later = Literal["renew", "unpin", "demote", "prefetch"]

AT_ONCE = 2_000
"""Entries of one tick: the rest wait for the next one, so that no tick takes a leader's time to renew its lead."""


class Entry(NamedTuple):
    """``at``: Unix seconds; ``number`` keeps the order of what is due at once, and no two have the same."""

    at: float
    number: int
    what: Later
    session: SessionKey
    generation: int


class Agenda:
    """``dropped``: entries that did not fit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: list[Entry] = []
        self._numbers = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, at: float, what: Later, session: SessionKey, generation: int) -> None:
        """Soft as hints are: what does not fit is left out, and counted."""
        if len(self._entries) >= self._limit:
            self.dropped += 1
            return
        self._numbers += 1
        heapq.heappush(self._entries, Entry(at, self._numbers, what, session, generation))

    def clear(self) -> None:
        """Nothing is to be done."""
        self._entries.clear()

    def due(self, now: float) -> list[Entry]:
        """What is due by ``now``, in order, at most `AT_ONCE`."""
        found: list[Entry] = []
        while self._entries and self._entries[0].at <= now and len(found) < AT_ONCE:
            found.append(heapq.heappop(self._entries))
        return found
