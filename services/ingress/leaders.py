"""Whose answers count: those of the newest admission leader that was heard.

Two may lead for a while where the bus is cut in two (`bus.leadership`). Who hears both goes by the higher epoch.
"""

from __future__ import annotations

REMEMBERED_S = 5.0
"""For how long an epoch is the newest after it was heard last, in seconds: a bus that lost its store counts from 1."""


class Leaders:
    """Times in seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._newest = 0
        self._heard = 0.0

    def counts(self, epoch: int, now: float) -> bool:
        """Whether an answer of this epoch does; a newer one's do from now on."""
        if epoch < self._newest and now - self._heard < REMEMBERED_S:
            return False
        self._newest, self._heard = epoch, now
        return True
