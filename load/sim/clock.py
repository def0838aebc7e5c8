"""Virtual time: whole picoseconds, and a queue of events that is the same in every run.

Whole numbers, because a jump over a thousand iterations must end at exactly the time at which a thousand steps end.
"""

from __future__ import annotations

import heapq
from typing import Generic, TypeVar

PS_PER_S = 1_000_000_000_000
PS_PER_MS = 1_000_000_000

Event = TypeVar("Event")


def to_ps(seconds: float) -> int:
    """Whole picoseconds of ``seconds``."""
    return round(seconds * PS_PER_S)


def to_s(ps: int) -> float:
    """Seconds of ``ps`` picoseconds."""
    return ps / PS_PER_S


class EventQueue(Generic[Event]):
    """Events by (time, order, sequence): of those at one time, lower ``order`` first, then first come, first served."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Event]] = []
        self._sequence = 0
        self.now = 0

    def __len__(self) -> int:
        return len(self._heap)

    def put(self, time_ps: int, event: Event, order: int = 0) -> None:
        """Plan ``event``. Raises `ValueError` for the past."""
        if time_ps < self.now:
            raise ValueError(f"an event at {time_ps} ps is in the past: it is {self.now} ps")
        self._sequence += 1
        heapq.heappush(self._heap, (time_ps, order, self._sequence, event))

    def pop(self) -> Event:
        """The next event; ``now`` becomes its time. Raises `IndexError` when there is none."""
        self.now, _, _, event = heapq.heappop(self._heap)
        return event
