"""The scheduler of a rank with memory below its KV cache (`load.sim.tiers`): loads in place of prefills, and copies
that somebody asked for ahead of a request.

A request whose prefix reaches further below than on the device takes blocks for all of it, waits for its load, and then
runs on from there; others run meanwhile. An engine loads whatever it costs. Who hits blocks that are still on their way
to the device waits until they are there, whoever asked for them; computed ones can be hit when they are scheduled.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from load.engine.scheduler import Batch
from load.sim.content import Chain
from load.sim.pinning import PinningScheduler
from load.sim.requests import SimRequest
from load.sim.span_cache import SpanCache
from load.sim.tiers import Memory
from services.admission.policies.engine_rules import EngineRules


@dataclass(frozen=True, slots=True)
class Copy:
    """Blocks ``first`` to ``end`` of ``chain`` that are on their way to the device until ``due``. ``holder`` holds
    those that nobody asked for yet meanwhile; others are held by their request."""

    due: int
    chain: Chain
    first: int
    end: int
    holder: SimRequest | None = None

    def has(self, ends: dict[Chain, int]) -> bool:
        """Whether it brings any of those blocks: of each chain's own part, up to the number."""
        return any(
            own in ends and max(lo, self.first) < min(hi, self.end, ends[own]) for own, lo, hi in self.chain.path
        )


class TieredScheduler(PinningScheduler):
    """A request that loads holds its blocks and a place among those that run, but takes no part in iterations.

    ``now``: set by the owner before it asks. ``loads``: when loads and fetches that began since the owner looked last
    will be over.
    """

    def __init__(
        self, cache: SpanCache, memory: Memory, *, token_budget: int, max_num_seqs: int, rules: EngineRules
    ) -> None:
        super().__init__(cache, token_budget=token_budget, max_num_seqs=max_num_seqs, rules=rules)
        self.memory = memory
        self._spans = cache
        self.now = 0
        self.loads: list[int] = []
        self.loading: list[tuple[int, int, SimRequest]] = []
        """When each is there, its arrival, and who waits for it; in order."""
        self._copies: list[Copy] = []

    @property
    def in_flight(self) -> int:
        return len(self.running) + len(self.loading)

    def next_batch(self) -> Batch[SimRequest]:
        self.arrive()
        while self.loading and self.loading[0][0] <= self.now:
            self.running.append(self.loading.pop(0)[-1])
        return super().next_batch()

    def arrive(self) -> None:
        """What was fetched ahead and is there is held no more."""
        for copy in [copy for copy in self._copies if copy.due <= self.now]:
            self._copies.remove(copy)
            if copy.holder is not None:
                self.cache.free(copy.holder)

    # Ahead of a request

    def fetching(self, chain: Chain) -> bool:
        """Whether blocks of ``chain`` that were fetched ahead are on their way to the device."""
        return any(copy.chain is chain and copy.holder is not None for copy in self._copies)

    def fetch(self, chain: Chain, limit: int) -> int:
        """Brings what is below of the first ``limit`` blocks to the device, as far as there is room; how many."""
        holder = SimRequest(-1, chain, limit * self.cache.block_size + 1, 1)
        hits = self.cache.lookup(holder)
        found = len(hits)
        pieces = self.memory.find(chain, found, min(limit, found + self._spans.free_blocks - hits.free))
        if not pieces:
            return 0
        end = pieces[-1].end
        self._hold(holder, hits_end=end)
        due = max(self._due(chain, found), self.memory.load(chain, pieces, self.now))
        self._on_its_way(Copy(due, chain, found, end, holder))
        return end - found

    def receive(self, chain: Chain, end: int, due: int) -> None:
        """The first ``end`` blocks come from elsewhere, and are there at ``due``. There must be room for them."""
        holder = SimRequest(-1, chain, end * self.cache.block_size + 1, 1)
        found = self._hold(holder, hits_end=end)
        self._on_its_way(Copy(due, chain, found, end, holder))

    def _hold(self, holder: SimRequest, *, hits_end: int) -> int:
        """Takes room for the blocks that are not there; how many were."""
        hits = self.cache.lookup(holder)
        taken = self.cache.allocate(holder, (hits_end - len(hits)) * self.cache.block_size, hits)
        assert taken
        return len(hits)

    def _on_its_way(self, copy: Copy) -> None:
        self._copies.append(copy)
        self.loads.append(copy.due)

    def _due(self, chain: Chain, found: int) -> int:
        """When the first ``found`` blocks of ``chain`` are there, which are on the device or on their way to it."""
        if not self._copies:
            return 0
        ends = {own: min(end, found) for own, first, end in chain.path if first < found}
        return max((copy.due for copy in self._copies if copy.has(ends)), default=0)

    # Requests

    def _take_next(self, batch: Batch[SimRequest], budget: int) -> int | None:
        request = self.waiting.head()
        hits = self.cache.lookup(request)
        found, size = len(hits), self.cache.block_size
        pieces = self.memory.find(request.chain, found, (request.length - 1) // size)
        there = self._due(request.chain, found)
        if not pieces and there <= self.now:
            return super()._take_next(batch, budget)
        end = pieces[-1].end if pieces else found
        if not self.cache.allocate(request, (end - found) * size, hits):
            return 0 if self.make_room(request, runs=False) else None
        self.waiting.pop()
        request.computed = end * size
        due = max(there, self.memory.load(request.chain, pieces, self.now))
        self._on_its_way(Copy(due, request.chain, found, end))
        insort(self.loading, (due, request.arrival, request), key=lambda entry: entry[:2])
        batch.admitted.append(request)
        self._found(request, end * size)
        return 0

    def remove(self, request: SimRequest) -> None:
        for place, (_, _, other) in enumerate(self.loading):
            if other is request:
                del self.loading[place]
                self.cache.free(request)
                return
        if request in self.running:
            self._store(request)
        super().remove(request)

    def _preempt(self, request: SimRequest) -> None:
        self._store(request)
        super()._preempt(request)

    def _store(self, request: SimRequest) -> None:
        self.memory.store(request.chain, request.computed // self.cache.block_size, self.now)
