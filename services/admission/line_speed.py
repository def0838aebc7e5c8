"""When a refused client may ask again: as long as the line is, at the speed at which it moves.

The speed of a model's line is its grants a second, each forgotten by half in `HALF_LIFE_S`. Whoever is refused counts
as one more in the line for as long, so that many who are refused together are not told to come back together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

HALF_LIFE_S = 15.0
_DECAY = math.log(2) / HALF_LIFE_S
MOST_MODELS = 1024


@dataclass(slots=True)
class _Line:
    since: float
    at: float
    grants: float = 0.0
    refusals: float = 0.0

    def age(self, now: float) -> None:
        kept = math.exp(-_DECAY * max(0.0, now - self.at))
        self.grants *= kept
        self.refusals *= kept
        self.at = max(self.at, now)

    def rate(self) -> float:
        """Grants a second; a line that is watched for less than a second counts as watched for one."""
        watched = max(1.0, self.at - self.since)
        return self.grants * _DECAY / (1 - math.exp(-_DECAY * watched))


class LineSpeeds:
    """``least`` and ``most``: seconds that anybody is told. ``now`` (Unix seconds) is the time of what happens next."""

    def __init__(self, least: int, most: int) -> None:
        self.now = 0.0
        self._least = least
        self._most = max(least, most)
        self._lines: dict[str, _Line] = {}

    def granted(self, model: str, now: float) -> None:
        self.now = now
        self._line(model).grants += 1

    def retry_after_s(self, model: str, waiting: int) -> int:
        """Somebody is refused while so many wait. Without a grant yet nobody knows: ``least``."""
        if model not in self._lines:
            return self._least
        line = self._line(model)
        ahead, rate = waiting + line.refusals, line.rate()
        line.refusals += 1
        if ahead >= self._most * rate:
            return self._most
        return max(self._least, math.ceil(ahead / rate))

    def _line(self, model: str) -> _Line:
        line = self._lines.get(model)
        if line is None:
            while len(self._lines) >= MOST_MODELS:
                del self._lines[next(iter(self._lines))]
            line = self._lines[model] = _Line(self.now, self.now)
        line.age(self.now)
        return line
