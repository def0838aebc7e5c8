"""What each worker was asked to retain, until when, within a budget per worker.

Invariants: a session is retained on one rank at most; a worker never has more than its budget.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass

from schemas.session import SessionKey


@dataclass(frozen=True, slots=True)
class Retained:
    """One session's prefix on one rank. ``until``: Unix seconds."""

    session: SessionKey
    session_id: str
    worker: str
    rank: int
    until: float


class RetainedTable:
    """Retained sessions by key, the one that runs out first in front (one time to live for all)."""

    def __init__(self, max_per_worker: int, max_sessions: int) -> None:
        self._max_per_worker = max_per_worker
        self._max_sessions = max_sessions
        self._by_session: OrderedDict[SessionKey, Retained] = OrderedDict()
        self._per_worker: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._by_session)

    def get(self, session: SessionKey) -> Retained | None:
        return self._by_session.get(session)

    def on(self, worker: str) -> int:
        """Sessions retained on this worker."""
        return self._per_worker[worker]

    def workers(self) -> dict[str, int]:
        """Retained sessions by worker."""
        return dict(self._per_worker)

    def keep(self, entry: Retained) -> bool:
        """Retain, or retain for longer; ``False`` when the worker's budget, or the table, is used up.

        A session that is retained elsewhere must be dropped there first.
        """
        known = self._by_session.get(entry.session)
        if known is None and (
            self._per_worker[entry.worker] >= self._max_per_worker or len(self._by_session) >= self._max_sessions
        ):
            return False
        if known is None:
            self._per_worker[entry.worker] += 1
        elif known.worker != entry.worker:
            raise ValueError(f"the session is retained on {known.worker}")
        self._by_session[entry.session] = entry
        self._by_session.move_to_end(entry.session)
        return True

    def drop(self, session: SessionKey) -> Retained | None:
        """Retained no more; ``None`` when it was not."""
        entry = self._by_session.pop(session, None)
        if entry is not None:
            self._per_worker[entry.worker] -= 1
            if not self._per_worker[entry.worker]:
                del self._per_worker[entry.worker]
        return entry

    def expire(self, now: float) -> int:
        """Forget what has run out; how many."""
        expired = 0
        while self._by_session:
            session, entry = next(iter(self._by_session.items()))
            if entry.until > now:
                break
            self.drop(session)
            expired += 1
        return expired
