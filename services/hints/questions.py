"""Questions about sessions to an indexer: what is open, and when nobody answers, a pause."""

from __future__ import annotations

from schemas.session import SessionKey
from services.hints.effects import AskSession

REST_S = 30.0
"""After a question that nobody answered: everything works without."""
FORGOTTEN_AFTER_S = 10.0
"""A question whose end nobody told, if only its timer was lost."""


class SessionQuestions:
    """At most ``limit`` are open at once (0: none are asked). ``skipped``: not asked for that, or while it rests."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._open: dict[SessionKey, float] = {}
        self._rests_until = float("-inf")
        self.asked = 0
        self.unanswered = 0
        self.skipped = 0

    def __len__(self) -> int:
        return len(self._open)

    def ask(self, session: SessionKey, now: float) -> list[AskSession]:
        """The question, if it may be put."""
        if not self._limit:
            return []
        while self._open and (oldest := next(iter(self._open.items())))[1] <= now - FORGOTTEN_AFTER_S:
            del self._open[oldest[0]]
        if now < self._rests_until or session in self._open or len(self._open) >= self._limit:
            self.skipped += 1
            return []
        self._open[session] = now
        self.asked += 1
        return [AskSession(session)]

    def answered(self, session: SessionKey, is_answered: bool, now: float) -> None:
        """The question is over."""
        self._open.pop(session, None)
        if not is_answered:
            self.unanswered += 1
            self._rests_until = now + REST_S

    def forget(self, session: SessionKey) -> None:
        """Nobody wants to know any more."""
        self._open.pop(session, None)
