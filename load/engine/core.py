"""The engine core of one rank: pure, deterministic, without a clock. Requests in, iterations out.

    core = EngineCore(CoreConfig(num_blocks=1000), H100_8B)
    core.add_request(EngineRequest("r1", prompt, output))
    while core.unfinished:
        result = core.step(now)    # what one iteration did, and how long a real engine would have taken

The process (`rank.py`) waits for ``duration_s`` after each step; a simulation advances its own clock by it. ``now`` is
the engine's clock, in seconds; without memory below the device and without hints it does not matter.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from load.engine.block_hash import ChainHasher
from load.engine.errors import DuplicateRequestError, TooLargeError
from load.engine.hint_actions import HintActions
from load.engine.kv_cache import KvCache
from load.engine.kv_events import KvEvent
from load.engine.requests import EngineRequest, FinishReason
from load.engine.scheduler import Batch, SchedulingPolicy
from load.engine.tier_scheduler import PoolPut, TierScheduler
from load.engine.tiers import LowerTiers, TierConfig
from load.engine.timing import H100_8B, Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreConfig:
    """Sizes of one rank. ``token_budget``: tokens of one iteration. ``num_blocks`` includes the null block.

    ``max_pinned_ratio``: of the device's blocks, that hints may pin. ``tool_pin_s``: seconds for which the engine pins
    a job's blocks by itself (`load.engine.tool_pins`); 0: it does not.
    """

    num_blocks: int
    block_size: int = 16
    token_budget: int = 2048
    max_num_seqs: int = 256
    policy: SchedulingPolicy = "fcfs"
    prefix_caching: bool = True
    hash_seed: str = ""
    tiers: TierConfig = field(default_factory=TierConfig)
    max_pinned_ratio: float = 0.5
    tool_pin_s: float = 0.0


class TokenOutput(NamedTuple):
    """One token of one request; ``finish_reason`` with the last one. ``produced`` counts from 1."""

    request_id: str
    token: int
    produced: int
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class StepResult:
    """One iteration. ``admitted``: (request id, cached tokens at its first admission) of those that left the queue.
    ``puts``: what is to go into the shared pool."""

    duration_s: float
    outputs: list[TokenOutput]
    events: list[KvEvent]
    admitted: list[tuple[str, int]]
    preempted: list[str]
    prefill_tokens: int
    decode_tokens: int
    puts: list[PoolPut] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class CoreStats:
    """Gauges and counters of one rank; ``kv_usage`` (0..1) counts blocks that running requests, loads and pins hold.
    ``waiting`` counts those that wait for a load too. ``found_tokens``: prompt tokens that were not computed, by where
    they were found; ``tier_blocks``: blocks in each tier below the device."""

    running: int
    waiting: int
    kv_usage: float
    prefix_queries: int
    prefix_hits: int
    preemptions: int
    prompt_tokens: int
    generation_tokens: int
    pinned_blocks: int = 0
    pins_lost: int = 0
    found_tokens: dict[str, int] = field(default_factory=dict)
    tier_blocks: dict[str, int] = field(default_factory=dict)


class EngineCore:
    """One rank: `add_request`, `abort`, `step`."""

    def __init__(self, config: CoreConfig, profile: Profile = H100_8B) -> None:
        self.config = config
        self.profile = profile
        self.cache = KvCache(config.num_blocks, ChainHasher(config.block_size, config.hash_seed), config.prefix_caching)
        self.tiers = LowerTiers(config.tiers, self.cache.emit)
        self._scheduler = TierScheduler(
            self.cache,
            self.tiers,
            token_budget=config.token_budget,
            max_num_seqs=config.max_num_seqs,
            policy=config.policy,
            tool_pin_s=config.tool_pin_s,
        )
        self.hints = HintActions(self._scheduler, max_pinned_ratio=config.max_pinned_ratio)
        self._requests: dict[str, EngineRequest] = {}
        self._arrivals = 0
        self._preemptions = 0
        self._prompt_tokens = 0
        self._generation_tokens = 0

    @property
    def unfinished(self) -> int:
        """Requests waiting or running."""
        return len(self._requests)

    def request(self, request_id: str) -> EngineRequest | None:
        return self._requests.get(request_id)

    def add_request(self, request: EngineRequest) -> None:
        """Queue ``request``. Raises `DuplicateRequestError`, `TooLargeError`."""
        if request.request_id in self._requests:
            raise DuplicateRequestError(f"request {request.request_id!r} is already running")
        capacity = self.cache.pool.usable * self.config.block_size
        if request.longest > capacity:
            raise TooLargeError(f"{request.longest} tokens never fit in a KV cache of {capacity}")
        self._arrivals += 1
        request.arrival = self._arrivals
        self._requests[request.request_id] = request
        self._scheduler.add(request)

    def abort(self, request_id: str) -> bool:
        """Drop a request wherever it is; ``False`` when it is not here."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self._scheduler.remove(request)
        return True

    def reset_prefix_cache(self, *, reset_running: bool = False) -> bool:
        """Forget the prefix cache. Refused while requests run, unless ``reset_running`` preempts them first."""
        if reset_running:
            self._preemptions += len(self._scheduler.preempt_all())
        self._scheduler.let_go()
        if not self.cache.reset():
            return False
        if self.config.tiers.cleared_with_device:
            self.tiers.clear()
        return True

    def tell_time(self, now: float) -> None:
        """``now`` in seconds of the engine's clock: what was to end by then has ended."""
        self._scheduler.tick(now)
        self.hints.expire(now)

    def set_clock_rate(self, rate: float) -> None:
        """How many seconds of the engine's clock are one of everybody's, in which hints say how long."""
        self._scheduler.clock_rate = rate

    @property
    def next_due(self) -> float | None:
        """When a load ends: until then `step` may have nothing to do, although there are requests."""
        return self._scheduler.next_due

    def local_reach(self, request: EngineRequest) -> int:
        """Blocks of the request's prefix that are here, on the device or below, without a gap."""
        found = self.cache.find_prefix(request)
        pieces = self.tiers.pieces(request.digests, found, (request.length - 1) // self.config.block_size)
        return pieces[-1].end if pieces else found

    def take_puts(self) -> list[PoolPut]:
        """What is to go into the shared pool since the last call."""
        puts, self._scheduler.puts = self._scheduler.puts, []
        return puts

    def step(self, now: float = 0.0) -> StepResult | None:
        """One iteration; ``None`` when there is nothing to do (before `next_due`, if that is a time)."""
        self.tell_time(now)
        if not self._requests:
            return None
        batch = self._scheduler.next_batch()
        self._preemptions += len(batch.preempted)
        idle = not batch.tokens and not batch.preempted and self._scheduler.next_due is not None
        if idle and not batch.admitted:
            return None
        duration_s, prefill, decode = (0.0, 0, 0) if idle else self._time(batch)
        self._scheduler.now += duration_s
        admitted = [(request.request_id, request.cached_tokens or 0) for request in batch.admitted]
        outputs = self._advance(batch)
        return StepResult(
            duration_s=duration_s,
            outputs=outputs,
            events=self.cache.take_events(),
            admitted=admitted,
            preempted=[request.request_id for request in batch.preempted],
            prefill_tokens=prefill,
            decode_tokens=decode,
            puts=self.take_puts(),
        )

    def _time(self, batch: Batch[EngineRequest]) -> tuple[float, int, int]:
        """Seconds, prefill tokens and decode tokens of ``batch``."""
        prefill = decode = decode_context = 0
        pairs = 0.0
        for request, count in batch.tokens.items():
            if count == 1 and request.computed >= request.prompt_tokens:
                decode += 1
                decode_context += request.computed
            else:
                prefill += count
                pairs += count * (request.computed + count / 2)
        return self.profile.step_s(prefill + decode, pairs, decode_context), prefill, decode

    def _advance(self, batch: Batch[EngineRequest]) -> list[TokenOutput]:
        """Count what was computed; whoever has no token left to compute gets its next one."""
        outputs: list[TokenOutput] = []
        for request, count in batch.tokens.items():
            request.computed += count
            self._prompt_tokens += self._new_prompt_tokens(request, count)
            if request.remaining:
                continue
            token = request.output[request.produced]
            request.produced += 1
            request.tokens.append(token)
            finished = request.produced == len(request.output)
            reason = request.finish_reason if finished else None
            outputs.append(TokenOutput(request.request_id, token, request.produced, reason))
            if finished:
                del self._requests[request.request_id]
                self._scheduler.remove(request)
        self._generation_tokens += len(outputs)
        return outputs

    @staticmethod
    def _new_prompt_tokens(request: EngineRequest, count: int) -> int:
        """Prompt tokens of a first prefill, counted once when it ends (cached ones included, as vLLM counts)."""
        before = request.computed - count
        ended = before < request.prompt_tokens <= request.computed
        return request.prompt_tokens if ended and request.produced == 0 else 0

    def stats(self) -> CoreStats:
        pool = self.cache.pool
        return CoreStats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting) + len(self._scheduler.loading),
            kv_usage=pool.used_blocks / pool.usable,
            prefix_queries=self._scheduler.prefix_queries,
            prefix_hits=self._scheduler.prefix_hits,
            preemptions=self._preemptions,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            pinned_blocks=self._scheduler.pinned_blocks,
            pins_lost=self._scheduler.pins_lost,
            found_tokens=dict(self._scheduler.found),
            tier_blocks={tier.name: len(tier) for tier in self.tiers.tiers},
        )
