"""Token buckets that several processes of one machine take from, in memory that they share, without a lock (ADR 0030).

Let T be all that was ever taken, r the rate, and V(t) = T - r t. A bucket of size s that fills up to its size holds
s - (V(t) - the least V so far): V only falls between two takings, so that its least value stands just before one. Each
process therefore writes two numbers of its own, what it took and the least V that it saw before it took, and reads
those of the others. Nobody waits for anybody; two that look at the same moment may both take what was there once.

A place is found by a fingerprint of whose bucket it is and of its limits: other limits are another bucket. Only giving
places out needs a lock, which is the caller's. A place that nobody took from for `STALE_S` may become another's.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable

PLACES = 1 << 18
PROBES = 256
STALE_S = 3600.0
_DOUBLE = 8
_FINGERPRINT = 16
_HEAD = 3
"""Doubles before the members' own: the fingerprint is two, then the time of the last look."""


def memory_bytes(count: int) -> int:
    """What `SharedBuckets` of so many processes needs; pages that are never touched cost nothing."""
    return PLACES * _width(count) * _DOUBLE


def _width(count: int) -> int:
    return _HEAD + 2 * count


class SharedBucket:
    """One process's view of a bucket; see `services.ingress.limits.TokenBucket`. ``at``: its first double."""

    def __init__(
        self,
        doubles: memoryview[float],
        at: int,
        member: int,
        count: int,
        fingerprint: tuple[float, float],
        rule: tuple[float, float],
    ) -> None:
        self._doubles = doubles
        self._at = at
        self._taken = at + _HEAD + member
        self._first, self._end = at + _HEAD, at + _HEAD + count
        self._fingerprint = fingerprint
        self.per_s, self.size = rule

    @property
    def ours(self) -> bool:
        """Whether the place has not become another's."""
        return (self._doubles[self._at], self._doubles[self._at + 1]) == self._fingerprint

    def level(self, now: float) -> float:
        """What is there now; less than nothing: a debt."""
        doubles, count = self._doubles, self._end - self._first
        doubles[self._at + 2] = now
        value = sum(doubles[self._first : self._end]) - self.per_s * now
        own_least = self._taken + count
        if value < doubles[own_least]:
            doubles[own_least] = value
        return float(self.size - (value - min(doubles[self._end : self._end + count])))

    def wait_s(self, amount: float, now: float) -> float:
        """How long until ``amount`` (or a full bucket) is there; 0: now."""
        return max(0.0, (min(amount, self.size) - self.level(now)) / self.per_s)

    def take(self, amount: float) -> None:
        """Without asking; a negative amount is given back. Nothing once the place is another's."""
        if self.ours:
            self._doubles[self._taken] += amount


class SharedBuckets:
    """``memory``: `memory_bytes` of it, zero at first. ``member``: from 1 to ``count``. ``locked``: runs what it is
    given while no other process runs such a thing, and says whether it did; it never waits."""

    def __init__(
        self, memory: memoryview, member: int, count: int, locked: Callable[[Callable[[], None]], bool]
    ) -> None:
        self._doubles = memory.cast("d")
        self._member = member - 1
        self._count = count
        self._locked = locked

    def allot(self, name: str, per_s: float, size: float, used: float, now: float) -> SharedBucket | None:
        """The bucket of this name and these limits; one that is new lacks ``used``. ``None``: not now (another process
        gives a place out at this moment, or there is none)."""
        digest = hashlib.blake2b(f"{name} {per_s!r} {size!r}".encode(), digest_size=_FINGERPRINT).digest()
        # Two finite doubles, never both zero: compared as numbers.
        fingerprint = tuple(1.0 + half / 2.0**64 for half in struct.unpack("<2Q", digest))
        found: list[int] = []
        if not self._locked(lambda: found.extend(self._place(digest, fingerprint, per_s, used, now))) or not found:
            return None
        return SharedBucket(self._doubles, found[0], self._member, self._count, fingerprint, (per_s, size))

    def _place(self, digest: bytes, fingerprint: tuple[float, ...], per_s: float, used: float, now: float) -> list[int]:
        doubles, width = self._doubles, _width(self._count)
        start = int.from_bytes(digest[:4], "little")
        usable = None
        for probe in range(PROBES):
            at = (start + probe) % PLACES * width
            head = (doubles[at], doubles[at + 1])
            if head == fingerprint:
                return [at]
            empty = head == (0.0, 0.0)
            if usable is None and (empty or doubles[at + 2] < now - STALE_S):
                usable = at
            if empty:
                break
        if usable is None:
            return []
        doubles[usable] = doubles[usable + 1] = 0.5  # whose it was sees that it is not any more
        first = usable + _HEAD
        for each in range(self._count):
            doubles[first + each] = 0.0
            doubles[first + self._count + each] = math.inf
        doubles[first + self._count + self._member] = -per_s * now - used
        doubles[usable + 2] = now
        doubles[usable + 1] = fingerprint[1]
        doubles[usable] = fingerprint[0]
        return [usable]
