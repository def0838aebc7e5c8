"""Numbers on facts: given by their source, checked by a receiver, so that a lost fact is seen.

A family is what one receiver subscribes to as a whole (``request.end``, ``worker.state``, ...): `subject_family`.
"""

from __future__ import annotations

from collections import Counter
from typing import TypedDict

from bus.subjects import ROOT
from schemas.base import Fact

_TWO_TOKENS = frozenset({"worker", "ingress", "index", "request", "session", "tool", "trace", "policy"})


def subject_family(subject: str) -> str:
    """``tg.v1.request.end.<model>`` is of ``request.end``; ``tg.v1.decision.<worker>`` of ``decision``."""
    tokens = subject.removeprefix(f"{ROOT}.").split(".")
    two = tokens[0] in _TWO_TOKENS or (tokens[:2] == ["hint", "result"] and len(tokens) == 3)
    return ".".join(tokens[: 2 if two else 1])


class Stamp(TypedDict):
    """The fields of `schemas.base.Fact`: ``RequestEnd(**numbers.stamp("request.end", now), ...)``."""

    source: str
    epoch: int
    seq: int
    at_ms: int


class FactNumbers:
    """Numbers the facts of one source in one epoch, from 0 per family."""

    def __init__(self, source: str, epoch: int) -> None:
        self.source = source
        self.epoch = epoch
        self._next: Counter[str] = Counter()

    def stamp(self, family: str, now: float) -> Stamp:
        """The next number of ``family``; ``now`` in Unix seconds."""
        seq = self._next[family]
        self._next[family] = seq + 1
        return Stamp(source=self.source, epoch=self.epoch, seq=seq, at_ms=int(now * 1000))


class GapCounter:
    """Follows the numbers of many sources. Late joiners miss nothing: counting begins with the first fact seen.

    `missed` and `stale` (repeated, late, or of an older epoch) are by family. At most ``sources`` are followed, the one
    heard longest ago is forgotten first.
    """

    def __init__(self, sources: int = 4_096) -> None:
        self._limit = sources
        self._last: dict[tuple[str, str], tuple[int, int]] = {}
        self.missed: Counter[str] = Counter()
        self.stale: Counter[str] = Counter()

    def see(self, family: str, fact: Fact) -> int:
        """How many facts of this source were lost just before this one; 0 also for a stale one."""
        key = (family, fact.source)
        last = self._last.pop(key, None)
        if last is None:
            while len(self._last) >= self._limit:
                del self._last[next(iter(self._last))]
            self._last[key] = (fact.epoch, fact.seq)
            return 0
        epoch, seq = last
        if (fact.epoch, fact.seq) <= (epoch, seq):
            self._last[key] = last
            self.stale[family] += 1
            return 0
        self._last[key] = (fact.epoch, fact.seq)
        missed = fact.seq - seq - 1 if fact.epoch == epoch else fact.seq
        self.missed[family] += missed
        return missed
