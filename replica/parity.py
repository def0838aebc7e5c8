"""Does the index agree with what the engine reports? Predicted against reported cached tokens, per worker and rank.

Over the last ``window`` ended requests that carry both numbers: when the sums differ by more than ``alarm_ratio`` of
the larger one, and by more than ``floor_tokens`` a request, the source is `approximate` with reason ``parity`` until
the difference falls under half of that ratio (user case A14: another tokenizer or template than the engine's).

What is judged is always the index itself: what its events said when the request was placed (`Placed.indexed`), also
while the source is approximate and answered for from what was sent there. So the switch does not change what is
measured, and the way back is the same measure under the lower threshold. Requests that were placed without asking the
index (fallback, text, no chain, a source that was catching up) are not judged. What a request has in common with others
that were on their way to the same rank when it was placed (siblings of a fan-out) may be cached by the time it is
computed, or not: any report from what the index said up to that is agreement. So is what the index has learned of the
request's chain by its end: an engine's events were on their way when it was placed, late and not wrong. Blocks that no
event ever told of do not get there, for a request's own events tell only of what was not cached.
A bridge that is gone tells of nothing, and that is no fault of the index: what a request shows counts when the second
heartbeat after its end has come, and not if a hole was found or heartbeats stayed away meanwhile.

And: ``silent_requests`` requests that should each have stored a block, without one event, mean that events are off or
lost (``no_events``). Any event ends that, and a snapshot. Ends of requests may overtake events, so it is the bridge
that is asked: its heartbeat says that it has forwarded nothing, and they had ended before the heartbeat before it. Only
requests count that were placed since the source has gone on without a hole.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field

MAX_ON_THEIR_WAY = 32
"""Chains remembered per source of requests that have not ended, each up to `MAX_CHAIN_BYTES`."""
MAX_CHAIN_BYTES = 128 * 1024

BEATS_APART_S = 0.5
"""Heartbeats that come faster than this (the reader was busy) are one."""
BEATS_STAY_AWAY_S = 3.0
"""Heartbeats further apart than this say nothing about what ended between them (a bridge beats each second)."""

_HASH_BYTES = 8


def shared_blocks(one: bytes, other: bytes, at_least: int = 0) -> int:
    """How many blocks two chains have in common from their start, or ``at_least`` if that is more.

    A chain hash stands for everything before it, so that one look tells whether it is more at all.
    """
    low, high = at_least, min(len(one), len(other)) // _HASH_BYTES
    following = slice(low * _HASH_BYTES, (low + 1) * _HASH_BYTES)
    if low >= high or one[following] != other[following]:
        return low
    while low < high:
        middle = (low + high + 1) // 2
        place = slice((middle - 1) * _HASH_BYTES, middle * _HASH_BYTES)
        if one[place] == other[place]:
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True)
class ParityRules:
    """``min_requests``: how many numbers are needed before the alarm may ring."""

    window: int = 32
    min_requests: int = 8
    alarm_ratio: float = 0.25
    floor_tokens: int = 32
    silent_requests: int = 16


@dataclass(frozen=True, slots=True)
class Expected:
    """A request on its way: where it went, the ``blocks`` of ``block_size`` tokens that the index saw there, and how
    many there may be once those before it are computed (``most``). ``judged``: whether the index was asked at all.
    ``spell``: of the source's time without a hole, see `replica.source.Source`."""

    worker: str
    rank: int
    blocks: int
    most: int
    block_size: int
    judged: bool = True
    spell: int = 0

    def cached_tokens(self, input_tokens: int, reported: int) -> int:
        """What the engine should report as cached: of all that would be right, what is next to ``reported``. The last
        token of a prompt is always computed."""
        whole = max(0, input_tokens - 1) // max(1, self.block_size)
        least, most = (min(blocks, whole) * self.block_size for blocks in (self.blocks, self.most))
        return max(least, min(reported, most))


class Expectations:
    """Requests that have not ended, the oldest forgotten first; those are not judged."""

    def __init__(self, most: int = 32_768) -> None:
        self._most = most
        self._requests: OrderedDict[str, Expected] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def placed(self, request_id: str, expected: Expected) -> None:
        """The request was placed."""
        self._requests[request_id] = expected
        if len(self._requests) > self._most:
            self._requests.popitem(last=False)

    def over(self, request_id: str) -> Expected | None:
        """What was expected of a request that has ended, wherever that was, or is placed anew."""
        return self._requests.pop(request_id, None)


@dataclass(slots=True)
class SourceParity:
    """The record of one (worker, rank)."""

    rules: ParityRules
    on_their_way: OrderedDict[str, bytes] = field(default_factory=OrderedDict)
    numbers: deque[tuple[int, int]] = field(default_factory=deque)
    predicted: int = 0
    reported: int = 0
    since_event: int = 0
    silent: bool = False
    alarmed: bool = False
    heard_at: float = float("-inf")
    _waited: int = 0
    _forwarded: int | None = None
    _beat_at: float = float("-inf")
    _fresh: list[tuple[int, int]] = field(default_factory=list)
    _seasoned: list[tuple[int, int]] = field(default_factory=list)

    def placed(self, request_id: str, chain: bytes) -> int:
        """A request goes to this source. Returns how many blocks of its chain those before it will have computed."""
        common = 0
        for other in self.on_their_way.values():
            common = shared_blocks(chain, other, common)
        self.on_their_way[request_id] = chain[:MAX_CHAIN_BYTES]
        if len(self.on_their_way) > MAX_ON_THEIR_WAY:
            self.on_their_way.popitem(last=False)
        return common

    def over(self, request_id: str) -> bytes:
        """The request has ended, here or elsewhere. Returns its chain, empty where it is not known (any more)."""
        return self.on_their_way.pop(request_id, b"")

    def stores(self, new_tokens: int, block_size: int) -> None:
        """A request ended well on this source that had so many tokens that were not cached."""
        if 0 < block_size <= new_tokens:
            self.since_event += 1

    def beat(self, seq: int, now: float) -> None:
        """The source's bridge says that it has forwarded batches up to ``seq``. ``now``: seconds."""
        self._count(now)
        if seq != self._forwarded:
            self._forwarded = seq
            self.event()
        elif not self._beat_at <= now < self._beat_at + BEATS_APART_S:
            self.silent = self._waited >= self.rules.silent_requests
            self._waited = self.since_event
            self._beat_at = now

    def ended(self, predicted: int | None, reported: int | None) -> None:
        """A request ended well on this source; cached tokens, ``None`` where not known or not to be judged."""
        if predicted is None or reported is None:
            return
        self._fresh.append((predicted, reported))
        del self._fresh[: -self.rules.window]

    def interrupted(self) -> None:
        """The source has a hole: whether what ended lately was judged by a whole index is not known."""
        self._fresh.clear()
        self._seasoned.clear()

    def event(self) -> None:
        """A batch of events of this source was applied, or is known to be on its way, or a snapshot stands for it."""
        self.since_event = self._waited = 0
        self.silent = False

    def restarted(self) -> None:
        """The source began anew: what was measured of the old one says nothing."""
        self.on_their_way.clear()
        self.interrupted()
        self.numbers.clear()
        self.predicted = self.reported = 0
        self.alarmed = False
        self.event()

    @property
    def problem(self) -> str | None:
        """``parity``, ``no_events``, or ``None``."""
        if self.alarmed:
            return "parity"
        return "no_events" if self.silent else None

    def _count(self, now: float) -> None:
        """A heartbeat came: what ended before the one before it counts."""
        if self.heard_at <= now < self.heard_at + BEATS_APART_S:
            return
        if not self.heard_at <= now <= self.heard_at + BEATS_STAY_AWAY_S:
            self.interrupted()
        self.heard_at = now
        for predicted, reported in self._seasoned:
            self.numbers.append((predicted, reported))
            self.predicted += predicted
            self.reported += reported
            if len(self.numbers) > self.rules.window:
                old = self.numbers.popleft()
                self.predicted -= old[0]
                self.reported -= old[1]
            self._judge()
        self._seasoned, self._fresh = self._fresh, []

    def _judge(self) -> None:
        count = len(self.numbers)
        larger = max(self.predicted, self.reported)
        differ = abs(self.predicted - self.reported)
        if self.alarmed:
            self.alarmed = differ > larger * self.rules.alarm_ratio / 2
        elif count >= self.rules.min_requests:
            self.alarmed = differ > larger * self.rules.alarm_ratio and differ > self.rules.floor_tokens * count
