"""Batches that came in parts (larger than one bus message), put together again.

The parts of one batch follow each other on one subject, 0 first. A part that does not follow throws the unfinished
batch away and is counted; the hole in the sequence that it leaves is then noticed and repaired like any other.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from schemas.kv import KvHeaders

MAX_PARTS = 64
"""Parts of one batch; more is taken for a broken sender (64 x 8 MiB)."""

_OVERHEAD_BYTES = 1024
"""About what an unfinished batch, or a piece of one, costs besides its bytes."""

UNFINISHED_S = 10.0
"""The parts of a batch follow each other at once; a batch without a next part for this long is thrown away."""

MAX_OPEN_BYTES = 512 * 1024 * 1024
"""Bytes of all unfinished batches together; over it the oldest is thrown away."""


@dataclass(slots=True)
class _Unfinished:
    incarnation: str
    seq: int
    parts: int
    touched: float
    pieces: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class PartsAssembler:
    """At most one unfinished batch per (worker, rank). ``discarded`` counts the batches thrown away."""

    discarded: int = 0
    open_bytes: int = 0
    _open: dict[tuple[str, int], _Unfinished] = field(default_factory=dict)

    def add(self, headers: KvHeaders, payload: bytes, now: float) -> bytes | None:
        """One message at Unix time ``now``; the whole batch once it is complete, else ``None``."""
        key = (headers.worker, headers.rank)
        waiting = self._open.get(key)
        if headers.parts == 1:
            if waiting is not None:
                self._discard(key)
            return payload
        if headers.part == 0:
            if waiting is not None:
                self._discard(key)
            if not 1 < headers.parts <= MAX_PARTS:
                self.discarded += 1
                return None
            self._open[key] = _Unfinished(headers.incarnation, headers.seq, headers.parts, now, [payload])
            self._grown(len(payload))
            return None
        if waiting is None:
            # The batch was thrown away at an earlier part (or its start was lost); one count per batch.
            self.discarded += headers.part == headers.parts - 1
            return None
        follows = (waiting.incarnation, waiting.seq, waiting.parts, len(waiting.pieces)) == (
            headers.incarnation,
            headers.seq,
            headers.parts,
            headers.part,
        )
        if not follows:
            self._discard(key)
            return None
        if len(waiting.pieces) + 1 < waiting.parts:
            waiting.pieces.append(payload)
            waiting.touched = now
            self._grown(len(payload))
            return None
        return b"".join([*self._close(key), payload])

    def _grown(self, size: int) -> None:
        self.open_bytes += size + _OVERHEAD_BYTES
        while self.open_bytes > MAX_OPEN_BYTES:
            self._discard(next(iter(self._open)))

    def forget(self, worker: str) -> None:
        """The worker is gone; so are its unfinished batches."""
        for key in [key for key in self._open if key[0] == worker]:
            self._close(key)

    def expire(self, untouched_since: float) -> None:
        """Throw away batches of which nothing has come after ``untouched_since`` (Unix seconds)."""
        for key in [key for key, waiting in self._open.items() if waiting.touched <= untouched_since]:
            self._discard(key)

    def _discard(self, key: tuple[str, int]) -> None:
        self._close(key)
        self.discarded += 1

    def _close(self, key: tuple[str, int]) -> list[bytes]:
        pieces = self._open.pop(key).pieces
        self.open_bytes -= sum(len(piece) + _OVERHEAD_BYTES for piece in pieces)
        return pieces
