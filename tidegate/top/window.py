"""Figures of the last minute, in slots of a second. Pure; bounded whatever comes."""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

from load.nearest_rank import nearest_rank

WINDOW_S = 60
MAX_SAMPLES = 512
"""Times to first token of one second that are kept: the first ones."""


@dataclass(slots=True)
class _Slot:
    second: int
    ended: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    predicted: int = 0
    reported: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    decisions: Counter[str] = field(default_factory=Counter)
    hints_accepted: Counter[str] = field(default_factory=Counter)
    hints_other: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Minute:
    """Sums of the window. ``window_s``: how much of it there was."""

    window_s: float
    ended: int
    failed: int
    input_tokens: int
    cached_tokens: int
    predicted: int
    reported: int
    ttft_ms: list[float]
    decisions: Counter[str]
    hints_accepted: Counter[str]
    hints_other: Counter[str]

    def percentile(self, percent: float) -> float | None:
        """Nearest rank of the times to first token; ``None`` without any."""
        if not self.ttft_ms:
            return None
        return nearest_rank(self.ttft_ms, percent)


class Window:
    """Counts by second of the clock that hears (Unix seconds), which may stand still but is not taken back."""

    def __init__(self) -> None:
        self._slots: deque[_Slot] = deque()
        self._since: float | None = None

    def at(self, now: float) -> _Slot:
        """The slot to count in."""
        second = int(now)
        self._since = now if self._since is None else self._since
        if not self._slots or second > self._slots[-1].second:
            self._slots.append(_Slot(second))
            self._forget(second)
        return self._slots[-1]

    def begin(self, now: float) -> None:
        """Watching begins: rates are of the time since then."""
        self._since = now if self._since is None else self._since

    def first_token(self, ttft_ms: float, now: float) -> None:
        """A request's time to first token."""
        samples = self.at(now).ttft_ms
        if len(samples) < MAX_SAMPLES and math.isfinite(ttft_ms):
            samples.append(ttft_ms)

    def sums(self, now: float) -> Minute:
        """Of the last `WINDOW_S`."""
        self._forget(int(now))
        slots = self._slots
        since = now if self._since is None else self._since
        decisions: Counter[str] = Counter()
        accepted: Counter[str] = Counter()
        other: Counter[str] = Counter()
        for slot in slots:
            decisions.update(slot.decisions)
            accepted.update(slot.hints_accepted)
            other.update(slot.hints_other)
        return Minute(
            window_s=min(float(WINDOW_S), max(0.0, now - since)),
            ended=sum(slot.ended for slot in slots),
            failed=sum(slot.failed for slot in slots),
            input_tokens=sum(slot.input_tokens for slot in slots),
            cached_tokens=sum(slot.cached_tokens for slot in slots),
            predicted=sum(slot.predicted for slot in slots),
            reported=sum(slot.reported for slot in slots),
            ttft_ms=sorted(sample for slot in slots for sample in slot.ttft_ms),
            decisions=decisions,
            hints_accepted=accepted,
            hints_other=other,
        )

    def _forget(self, second: int) -> None:
        while self._slots and self._slots[0].second <= second - WINDOW_S:
            self._slots.popleft()
