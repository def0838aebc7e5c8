"""Which rows have been taken lately: how a redelivered row is told from a new one, also across a kill.

A row is known by the BLAKE2b-128 of its bytes, which can be read back from a segment; a stream sequence could not, and
starts again when the stream is created anew. Two rows with equal bytes are the same row (a row names its request).
"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from typing import Literal

State = Literal["new", "pending", "written"]


def fingerprint(row: bytes) -> bytes:
    """16 bytes that stand for a row's bytes (as `services.recorder.segment.one_line` returns them)."""
    return blake2b(row, digest_size=16).digest()


class Recent:
    """The last ``window`` fingerprints. JetStream redelivers only what is unacknowledged, which is fewer."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._written: OrderedDict[bytes, None] = OrderedDict()
        self._pending: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._written) + len(self._pending)

    def state(self, key: bytes) -> State:
        """``pending``: taken and not yet on disk, so it must not be acknowledged."""
        if key in self._pending:
            return "pending"
        return "written" if key in self._written else "new"

    def take(self, key: bytes) -> None:
        """The row is in a batch."""
        self._pending.add(key)

    def write(self, key: bytes) -> None:
        """The row is on disk. Forgets the oldest beyond the window."""
        self._pending.discard(key)
        self._written[key] = None
        self._written.move_to_end(key)
        while len(self._written) > self._window:
            self._written.popitem(last=False)
