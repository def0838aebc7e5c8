"""Which rows have been taken lately: how a redelivered row is told from a new one, also across a kill.

A row is known by a fingerprint of its bytes (`services.recorder.rows`), which can be read back from a segment; a stream
sequence could not, and starts again when the stream is created anew. Two rows with equal bytes are the same row (a row
names its request).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

State = Literal["new", "pending", "written"]


class Recent:
    """The last ``window`` fingerprints. JetStream redelivers only what is unacknowledged, which is fewer."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._written: dict[bytes, None] = {}
        self._pending: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._written) + len(self._pending)

    def state(self, key: bytes) -> State:
        """``pending``: taken and not yet written, so it must not be acknowledged."""
        if key in self._pending:
            return "pending"
        return "written" if key in self._written else "new"

    def take(self, key: bytes) -> None:
        """The row is in a batch."""
        self._pending.add(key)

    def write(self, keys: Iterable[bytes]) -> None:
        """The rows are where they belong. Forgets the oldest beyond the window."""
        keys = tuple(keys)
        self._pending.difference_update(keys)
        written = self._written
        for key in keys:
            written.pop(key, None)
            written[key] = None
        excess = len(written) - self._window
        if excess > 0:
            oldest = iter(written)
            for key in [next(oldest) for _ in range(excess)]:
                del written[key]
