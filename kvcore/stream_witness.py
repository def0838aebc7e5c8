"""What heartbeats prove about batches: that some of them cannot have come from their publisher.

Batches and heartbeats travel on different subjects, so a heartbeat may be behind the batches. One that names less than
was heard `LATE_S` before it arrived is not late any more: it is a contradiction. One may have many reasons; `BEATS` in
a row are proof. Heartbeats that arrive in a burst (the reader was busy) count once per `APART_S`.
"""

from __future__ import annotations

from collections import deque

LATE_S = 1.5
"""How far a heartbeat may be behind the batches; the publisher beats once a second."""

APART_S = 0.5
BEATS = 3
"""Heartbeats in a row that must contradict a number."""

NAMED = 2
"""Heartbeats in a row that must name an incarnation that was thought to be over."""

MAX_RETIRED = 8


class Witness:
    """The heartbeats of one stream. ``now``: seconds, as everywhere in `kvcore.stream`."""

    def __init__(self) -> None:
        self._heard: deque[tuple[float, int]] = deque()
        self._against = 0
        self._retired: dict[str, float] = {}
        self._named = ("", 0)
        self._counted_at = float("-inf")

    def is_retired(self, incarnation: str) -> bool:
        """Whether ``incarnation`` is over."""
        return incarnation in self._retired

    def retire(self, incarnation: str, now: float) -> None:
        """``incarnation`` is over: what still comes of it is late."""
        self._retired.pop(incarnation, None)
        self._retired[incarnation] = now
        if len(self._retired) > MAX_RETIRED:
            del self._retired[next(iter(self._retired))]

    def restarted(self) -> None:
        """The publisher is another process: names may be used again, and numbers may be behind."""
        self._retired.clear()
        self.forget()

    def forget(self) -> None:
        """What was heard and counted until now is over."""
        self._heard.clear()
        self._against = 0
        self._named = ("", 0)

    def named(self, incarnation: str, now: float) -> bool:
        """A heartbeat names ``incarnation``. Whether it is to be followed: always, unless it was over; then when it has
        been named often and long enough, and it is over no more."""
        since = self._retired.get(incarnation)
        if since is None:
            self._named = ("", 0)
            return True
        name, times = self._named
        if name != incarnation:
            times = 0
        if 0 <= now - since < LATE_S or (times and not self._apart(now)):
            return False
        self._counted_at = now
        self._named = (incarnation, times + 1)
        if times + 1 < NAMED:
            return False
        del self._retired[incarnation]
        self._named = ("", 0)
        return True

    def contradicts(self, seq: int, heard: int, now: float) -> bool:
        """A heartbeat names ``seq`` while numbers up to ``heard`` were seen. Whether it is proven that not all of them
        were published."""
        if self._heard and now < self._heard[-1][0]:
            self.forget()  # the clock went back
        known = self._heard
        while len(known) > 1 and known[1][0] <= now - LATE_S:
            known.popleft()
        before = known[0][1] if known and known[0][0] <= now - LATE_S else -1
        if not known or now - known[-1][0] >= APART_S:
            known.append((now, heard))
        if seq >= before:
            self._against = 0
        elif not self._against or self._apart(now):
            self._against += 1
            self._counted_at = now
        return self._against >= BEATS

    def _apart(self, now: float) -> bool:
        return not self._counted_at <= now < self._counted_at + APART_S
