"""One rank of an engine in virtual time: the scheduler of `load.engine` over spans, decodes fast-forwarded.

The owner calls `submit`, and `start`, `finish` when their times come (``due_ps``):

    rank.submit(request, now)          # maybe changes when the iteration in progress is to be looked at
    rank.start(now)                    # begins an iteration, or a run of decodes; due_ps is its end
    outcome = rank.finish(now)         # at due_ps: who got its first token, who finished

A run: while nothing but decodes happens, nobody finishes, nobody can be admitted and blocks suffice, iterations differ
in nothing but the length of contexts. They are jumped over, with the exact sum of their times. A request that arrives
meanwhile ends the run with the iteration in progress, as it would find it step by step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from load.engine.scheduler import Batch
from load.sim.block_store import BlockStore
from load.sim.content import Chain
from load.sim.pinning import PinningScheduler
from load.sim.requests import SimRequest
from load.sim.span_cache import SpanCache
from load.sim.tiered import TieredScheduler
from load.sim.tiers import Depths, Memory, Tier
from load.sim.timing import DecodeRun, Timing, Work
from services.admission.policies.engine_rules import FCFS, EngineRules
from services.admission.scheduling.interface import WorkerFacts


class TooLargeError(ValueError):
    """The request can never fit: prompt and output need more blocks than there are (the workload's fault)."""

    reason = "request_too_large"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankConfig:
    """Sizes of one rank. ``num_blocks`` includes the null block.

    ``host_blocks``, ``disk_blocks``: of memory below it, and picoseconds to copy one (`load.sim.tiers`); 0: there is
    none. ``pool_block_ps``: to copy one to or from a pool, where there is one, which is written through or back.
    ``rules``: order of the queue, and what gives way. ``whole_prompt``: a request leaves the queue when all its tokens
    have room, not only its first chunk (a peer's rule). ``jump``: fast-forward decodes (same results).
    """

    num_blocks: int
    block_size: int = 16
    token_budget: int = 2048
    max_num_seqs: int = 256
    rules: EngineRules = FCFS
    prefix_caching: bool = True
    whole_prompt: bool = False
    jump: bool = True
    host_blocks: int = 0
    host_block_ps: int = 0
    disk_blocks: int = 0
    disk_block_ps: int = 0
    pool_block_ps: int = 0
    pool_through: bool = True

    @property
    def facts(self) -> WorkerFacts:
        """What a router learns of it."""
        return WorkerFacts(self.kv_tokens, self.block_size, host_tokens=self.host_blocks * self.block_size)

    @property
    def kv_tokens(self) -> int:
        return (self.num_blocks - 1) * self.block_size


@dataclass(slots=True)
class Outcome:
    """What ended at one time: requests that got their first token, and those that finished."""

    first_tokens: list[SimRequest] = field(default_factory=list)
    finished: list[SimRequest] = field(default_factory=list)


@dataclass(slots=True)
class RankCounters:
    """Since the beginning. ``prefill_tokens`` counts recomputed ones too; ``busy_ps``: time of all iterations;
    ``loaded_tokens`` came from memory below the device, of them ``pool_tokens`` from the pool and ``disk_tokens`` from
    a disk; ``stored_tokens`` went there. ``pins_lost``: gave way before their time."""

    iterations: int = 0
    scheduled: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    preemptions: int = 0
    busy_ps: int = 0
    loaded_tokens: int = 0
    stored_tokens: int = 0
    disk_tokens: int = 0
    pool_tokens: int = 0
    pins_lost: int = 0


class Rank:
    """Owns a scheduler, a cache and at most one iteration (or run) in progress, which ends at ``due_ps``."""

    def __init__(self, config: RankConfig, timing: Timing, pool: BlockStore | None = None) -> None:
        self.config = config
        self.timing = timing
        self.cache = SpanCache(
            config.num_blocks, config.block_size, config.prefix_caching, whole_prompt=config.whole_prompt
        )
        tiers = _tiers(config, pool) if config.prefix_caching else []
        self.tiered: TieredScheduler | None = None
        if tiers:
            self.tiered = TieredScheduler(
                self.cache,
                Memory(tiers, pool_through=config.pool_through),
                token_budget=config.token_budget,
                max_num_seqs=config.max_num_seqs,
                rules=config.rules,
            )
        self.scheduler = self.tiered or PinningScheduler(
            self.cache, token_budget=config.token_budget, max_num_seqs=config.max_num_seqs, rules=config.rules
        )
        self._counters = RankCounters()
        self.due_ps: int | None = None
        self._batch: Batch[SimRequest] | None = None
        self._run: DecodeRun | None = None
        self._steps = 0
        self._started_ps = 0
        self._arrivals = 0

    @property
    def idle(self) -> bool:
        """No iteration is in progress."""
        return self._batch is None

    @property
    def counters(self) -> RankCounters:
        """As they stand."""
        counters = self._counters
        counters.pins_lost = self.scheduler.pins_lost
        if self.tiered is not None:
            size, tiers = self.config.block_size, self.tiered.memory.tiers
            loaded = {tier.name: tier.loaded * size for tier in tiers}
            counters.loaded_tokens = sum(loaded.values())
            counters.disk_tokens, counters.pool_tokens = loaded.get("disk", 0), loaded.get("pool", 0)
            counters.stored_tokens = sum(tier.stored for tier in tiers) * size
        return counters

    @property
    def unfinished(self) -> int:
        return self.scheduler.in_flight + len(self.scheduler.waiting)

    def submit(self, request: SimRequest, now: int) -> None:
        """Queue ``request``. Raises `TooLargeError`."""
        if request.longest > self.config.kv_tokens:
            raise TooLargeError(f"{request.longest} tokens never fit in a KV cache of {self.config.kv_tokens}")
        self._arrivals += 1
        request.arrival = self._arrivals
        request.submitted_ps = now
        blocked = len(self.scheduler.waiting) > 0 and self.config.rules.scheduling == "fcfs"
        self.scheduler.add(request)
        if self._run is not None and not blocked:
            self._end_run(now)

    def abort(self, request: SimRequest, now: int) -> None:
        """Drop ``request`` wherever it is; an iteration in progress goes on without its outcome."""
        if self._run is not None:
            self._end_run(now)
        self._tell_time(now)
        self.scheduler.remove(request)
        if self._batch is not None:
            self._batch.tokens.pop(request, None)

    def pin(
        self, owner: str, chain: Chain, tokens: int, now: int, *, priority: int = 0, until_ps: int | None = None
    ) -> None:
        """Keep what is resident of the first ``tokens`` of ``chain``, until a request of ``owner`` is scheduled or it
        is let go. Replaces the older pin of ``owner``. ``until_ps`` and ``priority`` only say who gives way."""
        self.pause(now)
        self.scheduler.pin(owner, self.cache.hold(chain, tokens), priority, until_ps)

    def unpin(self, owner: str, now: int) -> None:
        """Let go of what is pinned for ``owner``, if anything is."""
        self.pause(now)
        self.scheduler.unpin(owner)

    def expire(self, owner: str, now: int) -> None:
        """`unpin`, unless a request of ``owner`` waits for what is pinned."""
        if not self.scheduler.waits(owner):
            self.unpin(owner, now)

    def pause(self, now: int) -> None:
        """The cache is as at ``now``, and may be changed: what is jumped over ends with the iteration in progress."""
        self._tell_time(now)
        self._settle(now)
        if self._run is not None:
            self._end_run(now)

    def reach(self, chain: Chain, limit: int, now: int) -> int:
        """Blocks of the prefix of ``chain`` that are resident at ``now``, at most ``limit``."""
        self._settle(now)
        return self.cache.reach(chain, limit)

    def depths(self, chain: Chain, limit: int, now: int) -> Depths:
        """Blocks of the prefix of ``chain`` by tier at ``now``, together at most ``limit``: what an index knows."""
        device = self.reach(chain, limit, now)
        if self.tiered is None:
            return Depths(device)
        below = {"host": 0, "disk": 0, "pool": 0}
        for piece in self.tiered.memory.find(chain, device, limit):
            below[piece.tier.name] += piece.blocks
        return Depths(device, **below)

    def reaches(self, now: int) -> dict[Chain, int]:
        """The end, in blocks, of what is resident at ``now`` of each chain."""
        self._settle(now)
        return self.cache.reaches()

    def take_away(self, count: int, now: int) -> int:
        """At most ``count`` free blocks are somebody else's from now on; how many that were."""
        self.pause(now)
        return self.cache.take_away(count)

    def give_back(self, count: int, now: int) -> None:
        """Of those that were taken away, ``count`` are free again."""
        self.pause(now)
        self.cache.give_back(count)

    def _settle(self, now: int) -> None:
        """Take the blocks of those iterations of a run that have begun by ``now``: what they evict is gone."""
        if self._run is not None and self._batch is not None:
            steps = self._run.steps_until(now - self._started_ps, self._steps)
            for request in self._batch.tokens:
                self.cache.allocate(request, steps)

    def _end_run(self, now: int) -> None:
        """The run ends with the iteration that is in progress at ``now``."""
        assert self._run is not None
        self._steps = self._run.steps_until(now - self._started_ps, self._steps)
        self.due_ps = self._started_ps + self._run.time(self._steps)

    def start(self, now: int) -> None:
        """Begin the next iteration, if there is anything to do. Where all room is pinned, there is nothing."""
        if not self.unfinished:
            return
        self._tell_time(now)
        batch = self.scheduler.next_batch()
        self._counters.preemptions += len(batch.preempted)
        for request in batch.admitted:
            self.scheduler.unpin(request.owner)
            request.reused_tokens = min(request.computed, request.prompt_tokens)
            if request.admitted_ps is None:
                request.admitted_ps = now
        if not batch.tokens and not batch.preempted:
            return
        work = self._work(batch)
        self._batch = batch
        self._started_ps = now
        self._steps = 1
        self._run = None
        steps = self._jump(batch, work)
        if steps > 1:
            self._steps = steps
            self._run = self.timing.decode_run(work.decodes, work.context, steps)
            self.due_ps = now + self._run.time(steps)
        else:
            self.due_ps = now + self.timing.step(work)

    def take_loads(self) -> list[int]:
        """When copies to the device will be over that began since the last call; `loaded` is to be told then."""
        if self.tiered is None:
            return []
        loads, self.tiered.loads = self.tiered.loads, []
        return loads

    def loaded(self, now: int) -> None:
        """A load is over: who waited for it takes part from the next iteration on."""
        self.pause(now)
        if self.tiered is not None:
            self.tiered.arrive()

    def _tell_time(self, now: int) -> None:
        if self.tiered is not None:
            self.tiered.now = now

    def _work(self, batch: Batch[SimRequest]) -> Work:
        work = Work()
        for request, count in batch.tokens.items():
            if count == 1 and request.computed >= request.prompt_tokens:
                work.decodes += 1
                work.context += request.computed
                continue
            start, end = request.computed, request.computed + count
            work.prefill += count
            work.double_pairs += count * (start + end)
            if start < request.prompt_tokens:
                work.chunks += 1
                work.chunk_starts += start
                work.chunk_ends += min(end, request.prompt_tokens)
            elif end == request.length:
                work.late += 1
                work.late_context += end
        return work

    def _jump(self, batch: Batch[SimRequest], work: Work) -> int:
        """How many iterations can be taken at once, this one included."""
        if work.prefill or batch.preempted or batch.admitted or not batch.tokens or not self.config.jump:
            return 1
        running = self.scheduler.running
        if work.decodes < len(running):
            return 1
        steps = min(request.output_tokens - request.produced for request in running)
        steps = min(steps, self.timing.longest_run)
        if steps < 2 or not self._apart(running):
            return 1
        free = self.cache.free_blocks
        if self._blocks_wanted(steps) > free:
            low = 1
            while low < steps:
                middle = (low + steps + 1) // 2
                if self._blocks_wanted(middle) <= free:
                    low = middle
                else:
                    steps = middle - 1
        return steps

    def _apart(self, running: list[SimRequest]) -> bool:
        """Whether nobody writes blocks that matter to another: no two requests write the same ones (their order within
        an iteration would count), and nobody writes those that the next in the queue could hit (it would fit then)."""
        chains = {request.chain for request in running}
        if len(chains) < len(running) or any(request.registered < request.chain.fork for request in running):
            return False
        if not self.scheduler.waiting:
            return True
        head = self.scheduler.waiting.head()
        limit = (head.length - 1) // self.config.block_size
        ends = {chain: min(end, limit) for chain, _, end in head.chain.path if chain in chains}
        return not ends or all(request.registered >= ends.get(request.chain, 0) for request in running)

    def _blocks_wanted(self, steps: int) -> int:
        """Blocks that ``steps`` iterations take beyond those that are held already."""
        size = self.config.block_size
        return sum(-(-(request.computed + steps) // size) - request.held for request in self.scheduler.running)

    def finish(self, now: int) -> Outcome:
        """End what is in progress. Only at ``due_ps``."""
        batch, steps = self._batch, self._steps
        assert batch is not None
        self._tell_time(now)
        outcome = Outcome()
        counters = self._counters
        counters.iterations += steps
        counters.scheduled += 1
        counters.busy_ps += now - self._started_ps
        if self._run is not None:
            self._decode(batch, steps, now, outcome)
        else:
            self._step(batch, now, outcome)
        self._batch = self._run = self.due_ps = None
        return outcome

    def _step(self, batch: Batch[SimRequest], now: int, outcome: Outcome) -> None:
        counters = self._counters
        for request, count in batch.tokens.items():
            if count == 1 and request.computed >= request.prompt_tokens:
                counters.decode_tokens += 1
            else:
                counters.prefill_tokens += count
            request.computed += count
            if request.computed < request.length:
                continue
            request.produced += 1
            request.length += 1
            if request.first_token_ps is None:
                request.first_token_ps = now
                outcome.first_tokens.append(request)
            if request.produced == request.output_tokens:
                self._over(request, now, outcome)

    def _decode(self, batch: Batch[SimRequest], steps: int, now: int, outcome: Outcome) -> None:
        """``steps`` decodes of every request: blocks for all but the first of them, and their tokens."""
        self._counters.decode_tokens += steps * len(batch.tokens)
        for request in batch.tokens:
            if steps > 1:
                self.cache.allocate(request, steps)
            request.computed += steps
            request.produced += steps
            request.length += steps
        for request in batch.tokens:
            if request.produced == request.output_tokens:
                self._over(request, now, outcome)

    def _over(self, request: SimRequest, now: int, outcome: Outcome) -> None:
        request.finished_ps = now
        self.scheduler.remove(request)
        outcome.finished.append(request)


def _tiers(config: RankConfig, pool: BlockStore | None) -> list[Tier]:
    """Those that the rank has, the nearest first."""
    tiers = []
    if config.host_blocks:
        tiers.append(Tier("host", BlockStore(config.host_blocks), config.host_block_ps))
    if config.disk_blocks:
        tiers.append(Tier("disk", BlockStore(config.disk_blocks), config.disk_block_ps))
    if pool is not None:
        tiers.append(Tier("pool", pool, config.pool_block_ps))
    return tiers
