"""The scheduler of a simulated rank with pins: their place in the queue's order, and who gives way for whom.

Without pins and with the plain rules it is `load.engine.scheduler`. Source: spec scheduling §1.6; see
`services.admission.policies.engine_rules`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from load.engine.scheduler import Scheduler, WaitingQueue
from load.sim.requests import SimRequest
from load.sim.span_cache import Hits, SpanCache
from services.admission.policies.engine_rules import EngineRules


@dataclass(frozen=True, slots=True)
class Pinned:
    """Blocks that stay for a program: referenced by ``holder``. ``until_ps``: ``None`` for ever.

    ``order``: priority of its program's last request, then a number that grows with time; the largest arrived last.
    """

    holder: SimRequest
    until_ps: int | None
    order: tuple[int, int]


class RuledQueue:
    """Pre-empted requests first, then those of pinned programs, then by priority, then by arrival, as the rules say."""

    def __init__(self, rules: EngineRules, pins: dict[str, Pinned]) -> None:
        self._rules = rules
        self._pins = pins
        self._heap: list[tuple[bool, bool, int, int, SimRequest]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: SimRequest) -> None:
        late = self._rules.preempted_first and request.preemptions == 0
        unpinned = self._rules.pinned_first and request.owner not in self._pins
        heapq.heappush(self._heap, (late, unpinned, request.priority, request.arrival, request))

    put_back = add

    def head(self) -> SimRequest:
        return self._heap[0][-1]

    def pop(self) -> SimRequest:
        return heapq.heappop(self._heap)[-1]

    def remove(self, request: SimRequest) -> bool:
        kept = [entry for entry in self._heap if entry[-1] is not request]
        if len(kept) == len(self._heap):
            return False
        heapq.heapify(kept)
        self._heap = kept
        return True

    def reorder(self, owner: str) -> None:
        """The pin of ``owner`` came or went."""
        for request in [entry[-1] for entry in self._heap if entry[-1].owner == owner]:
            self.remove(request)
            self.add(request)

    def waits(self, owner: str) -> bool:
        """Whether a request of ``owner`` is in the queue."""
        return any(entry[-1].owner == owner for entry in self._heap)


class PinningScheduler(Scheduler[SimRequest, Hits]):
    """Owns the pins. ``pins_lost`` counts those that gave way."""

    def __init__(self, cache: SpanCache, *, token_budget: int, max_num_seqs: int, rules: EngineRules) -> None:
        self.rules = rules
        self.pins: dict[str, Pinned] = {}
        self.pins_lost = 0
        self._pinned = 0
        super().__init__(cache, token_budget=token_budget, max_num_seqs=max_num_seqs, policy=rules.scheduling)

    def make_queue(self) -> WaitingQueue[SimRequest]:
        if self.rules.pinned_first or self.rules.preempted_first:
            return RuledQueue(self.rules, self.pins)
        return super().make_queue()

    def pin(self, owner: str, holder: SimRequest, priority: int, until_ps: int | None) -> None:
        """What ``holder`` references stays, in place of the owner's older pin."""
        self.unpin(owner)
        self._pinned += 1
        self.pins[owner] = Pinned(holder, until_ps, (priority, self._pinned))
        self._reorder(owner)

    def unpin(self, owner: str | None) -> None:
        """Lets go of what is pinned for ``owner``, if anything is."""
        pinned = self.pins.pop(owner, None) if owner is not None else None
        if owner is not None and pinned is not None:
            self.cache.free(pinned.holder)
            self._reorder(owner)

    def waits(self, owner: str) -> bool:
        """Whether a request of ``owner`` is in the queue: its pin does not expire meanwhile."""
        return isinstance(self.waiting, RuledQueue) and self.waiting.waits(owner)

    def _reorder(self, owner: str) -> None:
        if isinstance(self.waiting, RuledQueue):
            self.waiting.reorder(owner)

    def make_room(self, request: SimRequest, *, runs: bool) -> bool:
        owners = [owner for owner in self.pins if owner != request.owner]
        if not owners:  # its own pin is the last to go, and only where nothing else could
            if runs or self.running or request.owner not in self.pins:
                return False
            self._give_way(request.owner)
            return True
        if self.rules.pressure != "B" and len(self.running) > (1 if runs else 0):
            return False
        if self.rules.pressure == "C":
            self._give_way(max(owners, key=lambda owner: self._expiry(owner)))
        else:
            self._give_way(max(owners, key=lambda owner: self.pins[owner].order))
        return True

    def _expiry(self, owner: str) -> tuple[bool, int, tuple[int, int]]:
        pinned = self.pins[owner]
        return pinned.until_ps is None, pinned.until_ps or 0, pinned.order

    def _give_way(self, owner: str | None) -> None:
        self.pins_lost += 1
        self.unpin(owner)
