"""The block-exact engine core of `load.engine`, driven as the simulated rank is; its tokens stand for blocks."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from load.engine.core import CoreConfig, EngineCore
from load.engine.requests import EngineRequest
from load.engine.timing import H100_8B, Profile
from load.sim.content import Chain
from load.sim.timing import LinearTiming, Work

SIZE = 4
TIMING = LinearTiming(H100_8B)


class Tokens:
    """Token ids of chains: block ``i`` of a chain always has the same, and no other block has them."""

    def __init__(self) -> None:
        self._numbers: dict[Chain, int] = {}

    def of(self, chain: Chain, count: int) -> array[int]:
        tokens = array("I")
        for own, first, end in chain.path:
            number = self._numbers.setdefault(own, len(self._numbers))
            for block in range(first, min(end, -(-count // SIZE))):
                tokens.extend((number << 20) + (block << 4) + offset for offset in range(SIZE))
        return tokens[:count]

    def request(self, number: int, chain: Chain, prompt: int, output: int, priority: int = 0) -> EngineRequest:
        tokens = self.of(chain, prompt + output)
        return EngineRequest(str(number), tokens[:prompt], tokens[prompt:], priority=priority)


@dataclass(frozen=True)
class WholePicoseconds(Profile):
    """`H100_8B`, but an iteration's time is the simulation's whole number."""

    def step_s(self, tokens: int, prefill_pairs: float, decode_context: int) -> float:
        return TIMING.step(Work(prefill=tokens, double_pairs=round(2 * prefill_pairs), context=decode_context))


def profile() -> WholePicoseconds:
    fields = {name: getattr(H100_8B, name) for name in H100_8B.__dataclass_fields__}
    return WholePicoseconds(**fields)


@dataclass
class Arrival:
    time_ps: int
    number: int
    chain: Chain
    prompt: int
    output: int
    priority: int = 0


@dataclass
class Timeline:
    """What a rank did, by request number."""

    first_token: dict[int, int] = field(default_factory=dict)
    finished: dict[int, int] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    preemptions: int = 0
    prefilled: int = 0
    iterations: int = 0
    free_blocks: int = 0
    reach: dict[int, int] = field(default_factory=dict)


def run_exact(arrivals: list[Arrival], config: CoreConfig, chains: list[Chain]) -> Timeline:
    """Step the block-exact core; arrivals at the end of an iteration are in the queue before the next begins."""
    tokens = Tokens()
    core = EngineCore(config, profile())
    timeline = Timeline()
    queue = sorted(arrivals, key=lambda arrival: (arrival.time_ps, arrival.number))
    now = 0
    while queue or core.unfinished:
        if not core.unfinished:
            now = max(now, queue[0].time_ps)
        while queue and queue[0].time_ps <= now:
            one = queue.pop(0)
            core.add_request(tokens.request(one.number, one.chain, one.prompt, one.output, one.priority))
        result = core.step()
        assert result is not None
        now += int(result.duration_s)
        timeline.iterations += 1
        timeline.prefilled += result.prefill_tokens
        timeline.preemptions += len(result.preempted)
        for name, cached in result.admitted:
            timeline.cached.setdefault(int(name), cached)
        for output in result.outputs:
            if output.produced == 1:
                timeline.first_token[int(output.request_id)] = now
            if output.finish_reason is not None:
                timeline.finished[int(output.request_id)] = now
    timeline.free_blocks = core.cache.pool.free_blocks
    for number, chain in enumerate(chains):
        probe = tokens.request(0, chain, 200 * SIZE + 1, 1)
        timeline.reach[number] = len(core.cache.lookup(probe))
    return timeline
