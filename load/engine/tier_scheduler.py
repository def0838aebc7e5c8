"""The scheduler of an engine with memory below the device, and with pins.

A request whose prefix reaches further below than on the device takes blocks for all of it, waits for its load, and then
runs on from there; others run meanwhile. It holds a seat, and takes no part in iterations. So does one that hits blocks
that are still being loaded for somebody else. Pins hold blocks as a request would. They give way only where nothing
else runs (rule A of spec scheduling §1.6, with its emergency release). Without tiers and pins it is the plain one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from load.engine.kv_cache import BlockContent, KvCache
from load.engine.requests import EngineRequest
from load.engine.scheduler import Batch, Scheduler, SchedulingPolicy
from load.engine.sessions import SessionChains
from load.engine.tiers import LowerTiers
from load.engine.tool_pins import ToolTimes


@dataclass(frozen=True, slots=True)
class Pin:
    """Blocks of a session, referenced until ``until``. ``order``: grows with time."""

    blocks: list[int]
    until: float
    order: int


@dataclass(frozen=True, slots=True)
class PoolPut:
    """Pages of ``contents`` (a sequence from its first block on) that are to go into the shared pool, from block
    ``first`` on; at ``due`` they will have been copied."""

    contents: tuple[BlockContent, ...]
    first: int
    session_id: str | None
    due: float


class TierScheduler(Scheduler[EngineRequest, list[int]]):
    """Owns loads and pins. ``now``, in seconds of the engine's clock, is set by the owner before it asks for anything.

    ``puts``: what is to go into the shared pool; the owner takes it. ``pins_lost`` counts pins that gave way.
    """

    cache: KvCache

    def __init__(
        self,
        cache: KvCache,
        tiers: LowerTiers,
        *,
        token_budget: int,
        max_num_seqs: int,
        policy: SchedulingPolicy,
        tool_pin_s: float = 0.0,
    ) -> None:
        super().__init__(cache, token_budget=token_budget, max_num_seqs=max_num_seqs, policy=policy)
        self.tiers = tiers
        self.sessions = SessionChains()
        self.tool_times = ToolTimes(tool_pin_s) if tool_pin_s else None
        self.now = 0.0
        self.clock_rate = 1.0
        """Seconds of the engine's clock in one of everybody's."""
        self.loading: list[tuple[float, EngineRequest]] = []
        self.fetching: list[tuple[float, list[int]]] = []
        """Blocks that hints had loaded onto the device, held until they are there."""
        self.pins: dict[str, Pin] = {}
        self.pins_lost = 0
        self.puts: list[PoolPut] = []
        self.found = {"device": 0, "host": 0, "disk": 0, "pool": 0}
        """Prompt tokens that were not computed, by where they were found."""
        self._pinned = 0
        if tiers.config.host_write == "evict":
            cache.on_evict = self._write_back

    @property
    def in_flight(self) -> int:
        return len(self.running) + len(self.loading)

    @property
    def next_due(self) -> float | None:
        """When the next load is over."""
        return min((due for due, _ in (*self.loading, *self.fetching)), default=None)

    def tick(self, now: float) -> None:
        """Loads that are over, and pins that are."""
        self.now = max(self.now, now)
        due = [entry for entry in self.loading if entry[0] <= self.now]
        if due:
            self.loading = [entry for entry in self.loading if entry[0] > self.now]
            self.running.extend(request for _, request in sorted(due, key=lambda entry: (entry[0], entry[1].arrival)))
        for _, blocks in [entry for entry in self.fetching if entry[0] <= self.now]:
            self.cache.pool.release(blocks)
        self.fetching = [entry for entry in self.fetching if entry[0] > self.now]
        arriving = self.cache.arriving
        if arriving:
            self.cache.arriving = {digest: due for digest, due in arriving.items() if due > self.now}
        self.tiers.arrived(self.now)
        for session_id in [session_id for session_id, pin in self.pins.items() if pin.until <= self.now]:
            self.unpin(session_id)

    def next_batch(self) -> Batch[EngineRequest]:
        self.tick(self.now)
        return super().next_batch()

    def add(self, request: EngineRequest) -> None:
        if self.tool_times is not None and request.job_step is not None:
            self.tool_times.began(request.job_step, self.now / self.clock_rate)
        super().add(request)

    # Coming in

    def _take_next(self, batch: Batch[EngineRequest], budget: int) -> int | None:
        request = self.waiting.head()
        hits = self.cache.lookup(request)
        found, size = len(hits), self.cache.block_size
        limit = (request.length - 1) // size if self.cache.prefix_caching else 0
        pieces = self.tiers.pieces(request.digests, found, limit, request.in_pool)
        due = self._arrival_of(request, found)
        if not pieces and due <= self.now:
            return super()._take_next(batch, budget)
        end = pieces[-1].end if pieces else found
        if not self.cache.allocate(request, (end - found) * size, hits):
            return 0 if self.make_room(request, runs=False) else None
        self.waiting.pop()
        request.computed = end * size
        due = max(due, self.tiers.load(request.digests, pieces, self.now))
        for digest in request.digests[found:end]:
            self.cache.arriving[digest] = due
        self.loading.append((due, request))
        batch.admitted.append(request)
        if request.cached_tokens is None:
            for piece in pieces:
                self.found[piece.source] += piece.blocks * size
            self.prefix_hits -= (end - found) * size  # what `_found` counts is the device's
        self._found(request, end * size, loaded=(end - found) * size)
        return 0

    def _arrival_of(self, request: EngineRequest, found: int) -> float:
        """When the first ``found`` blocks of the request, all on the device, have all been loaded."""
        arriving = self.cache.arriving
        if not arriving:
            return self.now
        return max((arriving.get(digest, self.now) for digest in request.digests[:found]), default=self.now)

    def _found(self, request: EngineRequest, cached: int, loaded: int = 0) -> None:
        if request.cached_tokens is None:
            self.found["device"] += cached - loaded
        super()._found(request, cached)

    def make_room(self, request: EngineRequest, *, runs: bool) -> bool:
        if self.loading or len(self.running) > (1 if runs else 0) or not self.pins:
            return False
        others = [session_id for session_id in self.pins if session_id != request.session_id]
        self.unpin(max(others or self.pins, key=lambda session_id: self.pins[session_id].order))
        self.pins_lost += 1
        return True

    # Going out

    def remove(self, request: EngineRequest) -> None:
        if self._stop_loading(request):
            self.cache.free(request)
            return
        if request in self.running:
            self._settle(request, ended=True)
        super().remove(request)

    def _preempt(self, request: EngineRequest) -> None:
        self._settle(request, ended=False)
        super()._preempt(request)

    def preempt_all(self) -> list[EngineRequest]:
        for _, request in self.loading[::-1]:
            self._stop_loading(request)
            self.cache.free(request)
            request.preemptions += 1
            self.waiting.put_back(request)
        return super().preempt_all()

    def _stop_loading(self, request: EngineRequest) -> bool:
        kept = [entry for entry in self.loading if entry[1] is not request]
        if len(kept) == len(self.loading):
            return False
        self.loading = kept
        return True

    def _settle(self, request: EngineRequest, *, ended: bool) -> None:
        """A request lets its blocks go: what it computed is copied down, and its session has it."""
        if not self.cache.prefix_caching:
            return
        contents = self.cache.contents_of(request, request.computed // self.cache.block_size)
        if self.tiers.config.host_write == "through":
            self.tiers.store(contents, self.now, request.session_id)
        first = (request.cached_tokens or 0) // self.cache.block_size
        if self.tiers.config.pool and len(contents) > first:
            self.put(contents, first, request.session_id)
        if ended and request.session_id is not None:
            self.sessions.note(request.session_id, contents)
        step = request.job_step
        if ended and step is not None and self.tool_times is not None:
            ttl_s = self.tool_times.ended(step, self.now / self.clock_rate)
            self.unpin(step.job_id)
            if ttl_s:
                self.pin(step.job_id, contents, ttl_s * self.clock_rate)

    def put(self, contents: Sequence[BlockContent], first: int, session_id: str | None) -> None:
        """Have the pages of ``contents`` from block ``first`` on copied into the shared pool."""
        due = self.tiers.pool_link.copy(len(contents) - first, self.now)
        self.puts.append(PoolPut(tuple(contents), first, session_id, due))

    def _write_back(self, content: BlockContent) -> None:
        self.tiers.store([content], self.now)

    # Pins

    def let_go(self) -> None:
        """Of everything that no request holds: pins, and what hints had loaded."""
        for session_id in list(self.pins):
            self.unpin(session_id)
        for _, blocks in self.fetching:
            self.cache.pool.release(blocks)
        self.fetching = []

    @property
    def pinned_blocks(self) -> int:
        """Blocks that pins hold, those of several pins several times."""
        return sum(len(pin.blocks) for pin in self.pins.values())

    def pin(self, session_id: str, contents: Sequence[BlockContent], ttl_s: float) -> int:
        """What is on the device of ``contents`` stays, in place of the session's older pin; how many blocks."""
        pool = self.cache.pool
        blocks = [block for content in contents if (block := pool.find(content.digest)) is not None]
        pool.touch(blocks)
        self.unpin(session_id)
        if blocks:
            self._pinned += 1
            self.pins[session_id] = Pin(blocks, self.now + ttl_s, self._pinned)
        return len(blocks)

    def unpin(self, session_id: str) -> bool:
        """Let go of what is pinned for a session; whether anything was."""
        pin = self.pins.pop(session_id, None)
        if pin is not None:
            self.cache.pool.release(pin.blocks)
        return pin is not None
