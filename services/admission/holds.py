"""Turns that wait: one line per model in order of arrival, bounded in all.

A turn waits while every rank it may run on is at its limit, while an earlier turn of its own session has not been
placed, or while a fresh leader still listens.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from services.admission.asks import Ask
from services.admission.turn_counts import TurnCounts, is_main


class HoldQueue:
    """Lines of waiting turns, by model."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lines: dict[str, list[Ask]] = {}
        self._size = 0
        self.counts = TurnCounts()

    def __len__(self) -> int:
        return self._size

    @property
    def full(self) -> bool:
        return self._size >= self._limit

    def models(self) -> list[str]:
        """Models with somebody in line."""
        return list(self._lines)

    def line(self, model: str) -> list[Ask]:
        """The line of one model, first come first; a copy."""
        return list(self._lines.get(model, ()))

    def in_line(self) -> Iterator[tuple[int, Ask]]:
        """Everybody who waits, with the place in line counted from 1. Do not change the queue meanwhile."""
        for line in self._lines.values():
            yield from enumerate(line, start=1)

    def place(self, ask: Ask) -> int:
        """Place in line, counted from 1. Raises `ValueError` for somebody who does not wait."""
        return self._lines.get(ask.request.model, []).index(ask) + 1

    def add(self, ask: Ask) -> None:
        """Into the line, at the place that its arrival gives it. The bound is the caller's to keep (`full`)."""
        insort(self._lines.setdefault(ask.request.model, []), ask, key=lambda each: each.arrival)
        self._size += 1
        request = ask.request
        main = is_main(request.identity, request.kind)
        self.counts.add(request.model, request.identity.key.tenant, main=main)

    def remove(self, ask: Ask) -> None:
        """Out of the line. Raises `ValueError` for somebody who does not wait."""
        line = self._lines.get(ask.request.model, [])
        line.remove(ask)
        self._size -= 1
        request = ask.request
        main = is_main(request.identity, request.kind)
        self.counts.remove(request.model, request.identity.key.tenant, main=main)
        if not line:
            del self._lines[ask.request.model]
