"""Which bridges are asked for a snapshot, how many at once, and how soon again after a failure."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from replica.effects import AskSnapshot


@dataclass(slots=True)
class _Worker:
    """``live``: its bridge was heard, so it can answer. ``ticket`` of the open question; ``wanted`` again since it was
    asked. ``queued``: it has its place in the queue."""

    live: bool = False
    wanted: bool = False
    queued: bool = False
    ticket: int | None = None
    failed: int = 0
    not_before: float = float("-inf")


class SnapshotQueue:
    """One question per worker at a time, ``at_once`` in all; after failures pauses double up to ``retry_max_s``.

    Those that wait for their question are kept by the time at which they may be asked, so that nobody is walked over
    in vain: `ask` runs once per batch.
    """

    def __init__(self, at_once: int, retry_s: float, retry_max_s: float) -> None:
        self._at_once = at_once
        self._retry_s = retry_s
        self._retry_max_s = retry_max_s
        self._workers: dict[str, _Worker] = {}
        self._queue: list[tuple[float, int, str, _Worker]] = []
        self._now = float("-inf")
        self._turn = 0
        self._ticket = 0
        self._open = 0

    @property
    def newest(self) -> int:
        """Number of the last question, of any worker; 0: none."""
        return self._ticket

    def seen(self, worker: str) -> None:
        """Its bridge is there. Only a live one is asked."""
        entry = self._workers.setdefault(worker, _Worker())
        entry.live = True
        self._wait(worker, entry)

    def want(self, worker: str) -> None:
        """A source of this worker needs a snapshot that is newer than any asked for before."""
        entry = self._workers.setdefault(worker, _Worker())
        entry.wanted = True
        self._wait(worker, entry)

    def ask(self, now: float) -> list[AskSnapshot]:
        """Questions to be sent now."""
        self._clock(now)
        questions: list[AskSnapshot] = []
        while self._queue and self._open < self._at_once and self._queue[0][0] <= now:
            _, _, worker, entry = heappop(self._queue)
            if self._workers.get(worker) is not entry or not entry.queued:
                continue  # forgotten meanwhile, or asked already
            entry.queued = False
            if entry.not_before > now:
                self._wait(worker, entry)
                continue
            self._ticket += 1
            self._open += 1
            entry.ticket, entry.wanted = self._ticket, False
            questions.append(AskSnapshot(worker, self._ticket))
        return questions

    def close(self, worker: str, ticket: int) -> bool:
        """An answer came; whether it is the one that is waited for."""
        entry = self._workers.get(worker)
        if entry is None or entry.ticket != ticket:
            return False
        entry.ticket = None
        self._open -= 1
        self._wait(worker, entry)
        return True

    def succeeded(self, worker: str) -> None:
        """The last answer could be used."""
        entry = self._workers.get(worker)
        if entry is not None:
            entry.failed = 0

    def failed(self, worker: str, now: float) -> None:
        """The last answer could not be used: the next question waits."""
        self._clock(now)
        entry = self._workers.get(worker)
        if entry is not None:
            entry.not_before = now + min(self._retry_max_s, self._retry_s * 2.0**entry.failed)
            entry.failed = min(entry.failed + 1, 32)

    def began_again(self, worker: str) -> None:
        """Its bridge is another process: an open question is nobody's and asked again at once."""
        entry = self._workers.get(worker)
        if entry is None:
            return
        if entry.ticket is not None:
            entry.ticket, entry.wanted = None, True
            self._open -= 1
        entry.failed, entry.not_before, entry.queued = 0, float("-inf"), False
        self._wait(worker, entry)

    def asked_in_vain(self, worker: str) -> None:
        """Its bridge has another connection to the bus: an open question may have gone to the old one, and is asked
        again."""
        entry = self._workers.get(worker)
        if entry is not None and entry.ticket is not None:
            entry.ticket, entry.wanted = None, True
            self._open -= 1
            self._wait(worker, entry)

    def forget(self, worker: str) -> None:
        """The worker is gone; an answer that still comes is nobody's."""
        entry = self._workers.pop(worker, None)
        if entry is not None and entry.ticket is not None:
            self._open -= 1

    def _clock(self, now: float) -> None:
        """Where the clock was set back, pauses are as long as they were."""
        back_s, self._now = self._now - now, now
        if back_s > 0:
            for entry in self._workers.values():
                entry.not_before -= back_s
            self._queue = [(each.not_before, turn, worker, each) for _, turn, worker, each in self._queue]
            heapify(self._queue)

    def _wait(self, worker: str, entry: _Worker) -> None:
        if entry.live and entry.wanted and entry.ticket is None and not entry.queued:
            entry.queued = True
            self._turn += 1
            heappush(self._queue, (entry.not_before, self._turn, worker, entry))
