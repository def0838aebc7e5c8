"""One reconcile: the master's key list made into a second index, and what came meanwhile on top of it.

The subscription stands before the list is asked for. A list has no number, so batches that come while it is fetched are
applied at once, and once more on top of the list: for each key the last of them wins, for all others the list (spec:
pool-events §4.3). Those of which a status said, before the list was asked for, that they were published are older than
it, however late they come, and are left out. Then what differs is told as deltas. While that is computed and told, new
batches wait unnumbered, so that a delta never takes back what came after the list.
"""

from __future__ import annotations

from collections import Counter, deque
from typing import Literal

from kvcore import BadBatchError, PoolIndex, PoolLimits
from services.bridge.pool.triggers import Reason

Phase = Literal["listing", "replaying", "comparing", "telling", "releasing"]

KEPT_BYTES = 128
"""What keeping a batch takes beside its bytes, about: batches of a few bytes are bounded too."""

STEP_BATCHES = 16
"""Batches applied in one step: a millisecond or two."""


class Reconcile:
    """``covers``: number of a message that was published before the list was asked for, so that the list knows of it
    and of those before. ``buffer_bytes``: of batches that are kept for it; one that needs more is void."""

    def __init__(
        self,
        ticket: int,
        reasons: tuple[Reason, ...],
        began_at: float,
        limits: PoolLimits,
        *,
        covers: int,
        buffer_bytes: int,
    ) -> None:
        self.ticket = ticket
        self.reasons = reasons
        self.began_at = began_at
        self.phase: Phase = "listing"
        self.target = PoolIndex(limits)
        self.void: str | None = None
        """Why nothing will come of it."""
        self.listed = 0
        """Objects in the list that could be read."""
        self.unparsed = 0
        self.list_bytes = 0
        self.added = 0
        self.removed = 0
        self._buffer: deque[bytes] = deque()
        self._buffered = 0
        self._covers = covers
        self._buffer_bytes = buffer_bytes
        self._deltas: deque[bytes] = deque()

    def keys(self, lines: bytes, known: PoolIndex) -> None:
        """A piece of the list: whole lines. What ``known`` has on disk only stays there."""
        self.list_bytes += len(lines)
        taken = self.target.add_keys(lines, known=known)
        self.listed += taken.stored
        self.unparsed += taken.unparsed

    def heard(self, seq: int, payload: bytes) -> None:
        """A batch came and was applied to the picture; it belongs on top of the list too, unless the list is newer."""
        if seq <= self._covers or self.void is not None:
            return
        self._buffered += len(payload) + KEPT_BYTES
        if self._buffered > self._buffer_bytes:
            self.give_up("buffer_full")
        else:
            self._buffer.append(payload)

    def give_up(self, why: str) -> None:
        """Nothing comes of it; what was kept for it is forgotten."""
        self.void = self.void or why
        self._buffer.clear()
        self._deltas.clear()

    def replay(self) -> bool:
        """A few batches on top of the list; whether that was all."""
        for _ in range(min(STEP_BATCHES, len(self._buffer))):
            payload = self._buffer.popleft()
            try:
                self.target.apply_payload(payload)
            except BadBatchError:
                continue  # counted when it came
        return not self._buffer

    def compared(self, deltas: tuple[bytes, ...]) -> None:
        """What has to be told."""
        self._deltas.extend(deltas)
        self.phase = "telling"

    def next_delta(self) -> bytes | None:
        """The next one to be told; ``None``: that was all."""
        return self._deltas.popleft() if self._deltas else None


class Outcomes:
    """Reconciles since the start, by reason, and what the last one found."""

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()
        self.given_up: Counter[str] = Counter()
        self.added = 0
        self.removed = 0
        self.last_ms: int | None = None
        self.last_took_s = 0.0
        self.last_added = 0
        self.last_removed = 0
        self.last_listed = 0
        self.last_unparsed = 0

    def ended(self, done: Reconcile, now: float) -> None:
        """It came to its end."""
        self.finished.update(done.reasons)
        self.added += done.added
        self.removed += done.removed
        self.last_added, self.last_removed, self.last_listed = done.added, done.removed, done.listed
        self.last_unparsed = done.unparsed
        self.last_ms = round(done.began_at * 1000)
        self.last_took_s = now - done.began_at
