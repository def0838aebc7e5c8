"""Which bridges are asked for a snapshot, how many at once, and how soon again after a failure."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from services.indexer.effects import AskSnapshot


@dataclass(slots=True)
class _Wanted:
    """``ticket`` of the open question; ``wanted`` again since it was asked."""

    wanted: bool = True
    ticket: int | None = None
    failed: int = 0
    not_before: float = float("-inf")


class SnapshotQueue:
    """One question per worker at a time, ``at_once`` in all; after failures pauses double up to ``retry_max_s``."""

    def __init__(self, at_once: int, retry_s: float, retry_max_s: float) -> None:
        self._at_once = at_once
        self._retry_s = retry_s
        self._retry_max_s = retry_max_s
        self._entries: dict[str, _Wanted] = {}
        self._ticket = 0
        self._open = 0

    def want(self, worker: str) -> None:
        """A source of this worker needs a snapshot that is newer than any asked for before."""
        self._entries.setdefault(worker, _Wanted()).wanted = True

    def ask(self, now: float, known: Container[str]) -> list[AskSnapshot]:
        """Questions to be sent now; of ``known`` workers only, since only a live bridge answers."""
        questions: list[AskSnapshot] = []
        for worker, entry in self._entries.items():
            if self._open >= self._at_once:
                break
            if entry.wanted and entry.ticket is None and now >= entry.not_before and worker in known:
                self._ticket += 1
                self._open += 1
                entry.ticket, entry.wanted = self._ticket, False
                questions.append(AskSnapshot(worker, self._ticket))
        return questions

    def close(self, worker: str, ticket: int) -> bool:
        """An answer came; whether it is the one that is waited for."""
        entry = self._entries.get(worker)
        if entry is None or entry.ticket != ticket:
            return False
        entry.ticket = None
        self._open -= 1
        return True

    def succeeded(self, worker: str) -> None:
        """The last answer could be used."""
        entry = self._entries.get(worker)
        if entry is not None:
            entry.failed = 0

    def failed(self, worker: str, now: float) -> None:
        """The last answer could not be used: the next question waits."""
        entry = self._entries.get(worker)
        if entry is not None:
            entry.not_before = now + min(self._retry_max_s, self._retry_s * 2.0**entry.failed)
            entry.failed = min(entry.failed + 1, 32)

    def forget(self, worker: str) -> None:
        """The worker is gone; an answer that still comes is nobody's."""
        entry = self._entries.pop(worker, None)
        if entry is not None and entry.ticket is not None:
            self._open -= 1
