"""Asks that come while this process does not lead: where the leader has died nobody answers them, until we lead."""

from __future__ import annotations

from collections import deque

from bus.interface import BusMessage

WAITS_S = 2.0
"""So long an ingress waits for the first answer to an ask (its ``admit_idle_s``), in seconds."""
MOST = 2048


class Unanswered:
    """The asks of the last `WAITS_S`, as they came; at most ``most``. ``dropped``: those that went too early.

    A leader that lives has answered them, and a standby knows: to ask again for what was granted, or is over, is safe
    (`schemas.admit`).
    """

    def __init__(self, most: int = MOST) -> None:
        self.dropped = 0
        self._most = most
        self._asks: deque[tuple[float, BusMessage]] = deque()

    def __len__(self) -> int:
        return len(self._asks)

    def add(self, message: BusMessage, now: float) -> None:
        """``now``: monotonic seconds."""
        self._forget(now)
        if len(self._asks) >= self._most:
            self._asks.popleft()
            self.dropped += 1
        self._asks.append((now, message))

    def take(self, now: float) -> list[BusMessage]:
        """Those that somebody may still wait for, in order; none is kept."""
        self._forget(now)
        asks = [message for _, message in self._asks]
        self._asks.clear()
        return asks

    def _forget(self, now: float) -> None:
        while self._asks and now - self._asks[0][0] > WAITS_S:
            self._asks.popleft()
