"""When a segment is left, and which segments are removed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rolling:
    """A segment is left before the line that would take it over ``most_bytes`` (uncompressed) or ``most_lines``, and
    before the first line that comes ``most_age_s`` after its first. A line alone may exceed the bytes; 0: no limit."""

    most_bytes: int = 268_435_456
    most_lines: int = 0
    most_age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Retention:
    """Which segments stay: the newest ``most_segments``, in all at most ``most_bytes`` (compressed, as they lie on the
    disk), none whose last line is older than ``most_age_s``. 0: no limit. The newest always stays."""

    most_segments: int = 0
    most_bytes: int = 0
    most_age_s: float = 0.0

    @property
    def keeps_all(self) -> bool:
        return not (self.most_segments or self.most_bytes or self.most_age_s)


@dataclass(frozen=True, slots=True)
class OnDisk:
    """One segment as it lies there: compressed bytes, Unix time of the last write."""

    index: int
    size: int
    written_s: float


class Filling:
    """How full the segment is that is being written. ``index``: the first to write."""

    def __init__(self, rolling: Rolling, index: int) -> None:
        self._rolling = rolling
        self.index = index
        self._bytes = 0
        self._lines = 0
        self._since_s = 0.0

    def fits(self, lines: Sequence[bytes], now: float) -> int:
        """How many of ``lines`` (not empty; without their ends) go into the segment at Unix time ``now``. 0: none, it
        is to be left."""
        rules = self._rolling
        if self._lines and rules.most_age_s and now - self._since_s >= rules.most_age_s:
            return 0
        count = len(lines)
        if rules.most_lines:
            count = min(count, rules.most_lines - self._lines)
        if not rules.most_bytes:
            return count
        room = rules.most_bytes - self._bytes
        total = sum(map(len, lines)) + len(lines)
        if total <= room:
            return count
        for place in range(count):
            room -= len(lines[place]) + 1
            if room < 0:
                return max(place, 0 if self._lines else 1)
        return count

    def add(self, lines: Sequence[bytes], now: float) -> None:
        """They are written."""
        if not self._lines:
            self._since_s = now
        self._since_s = min(self._since_s, now)  # a clock that is set back must not keep a segment open
        self._lines += len(lines)
        self._bytes += sum(map(len, lines)) + len(lines)

    def leave(self) -> None:
        """The next segment, empty."""
        self.index += 1
        self._bytes = self._lines = 0


def too_many(segments: Sequence[OnDisk], retention: Retention, now: float) -> list[OnDisk]:
    """Those of ``segments`` (in the order of their indices) that go, oldest first; never the last."""
    kept = list(segments)
    total = sum(segment.size for segment in kept)
    gone: list[OnDisk] = []
    while len(kept) > 1:
        oldest = kept[0]
        over = retention.most_segments and len(kept) > retention.most_segments
        over = over or (retention.most_bytes and total > retention.most_bytes)
        if not over and not (retention.most_age_s and now - oldest.written_s > retention.most_age_s):
            break
        gone.append(kept.pop(0))
        total -= oldest.size
    return gone
