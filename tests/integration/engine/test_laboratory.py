"""Memory below the device: the block-exact engine against the laboratory's spans, in virtual time."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from load.engine.core import CoreConfig, EngineCore
from load.engine.tiers import TierConfig
from load.sim.clock import PS_PER_MS
from load.sim.content import Chain
from load.sim.engine import RankConfig
from services.admission.policies.engine_rules import EngineRules
from tests.integration.sim.exact import SIZE, Arrival, Timeline, Tokens, profile
from tests.integration.sim.test_engine import run_spans, scenes

PLENTY = 10_000


def run_tiered(arrivals: list[Arrival], config: CoreConfig) -> Timeline:
    """Step the block-exact core from load to load and arrival to arrival. Times are picoseconds."""
    tokens = Tokens()
    core = EngineCore(config, profile())
    timeline = Timeline()
    queue = sorted(arrivals, key=lambda arrival: (arrival.time_ps, arrival.number))
    now = 0
    while queue or core.unfinished:
        while queue and queue[0].time_ps <= now:
            one = queue.pop(0)
            core.add_request(tokens.request(one.number, one.chain, one.prompt, one.output, one.priority))
        result = core.step(float(now))
        if result is None:
            nexts = [queue[0].time_ps] if queue else []
            nexts += [int(core.next_due)] if core.unfinished and core.next_due is not None else []
            now = max(now, min(nexts))
            continue
        now += int(result.duration_s)
        timeline.prefilled += result.prefill_tokens
        timeline.preemptions += len(result.preempted)
        for name, cached in result.admitted:
            timeline.cached.setdefault(int(name), cached)
        for output in result.outputs:
            if output.produced == 1:
                timeline.first_token[int(output.request_id)] = now
            if output.finish_reason is not None:
                timeline.finished[int(output.request_id)] = now
    return timeline


@settings(max_examples=40, deadline=None)
@given(
    scenes(),
    st.integers(27, 60),
    st.sampled_from([8, 32, 100]),
    st.sampled_from([2, 256]),
    st.sampled_from([0, PS_PER_MS // 10, 3 * PS_PER_MS]),
)
def test_a_rank_with_a_host_tier_does_what_the_block_exact_engine_does(
    scene: tuple[list[Arrival], list[Chain]], blocks: int, budget: int, seats: int, block_ps: int
) -> None:
    """Same hits, loads, waits and finish times, while others run; the host has room for everything."""
    arrivals, chains = scene
    exact = run_tiered(
        arrivals,
        CoreConfig(
            num_blocks=blocks,
            block_size=SIZE,
            token_budget=budget,
            max_num_seqs=seats,
            tiers=TierConfig(host_blocks=PLENTY, host_block_s=float(block_ps)),
        ),
    )
    spans, _ = run_spans(
        arrivals,
        RankConfig(
            num_blocks=blocks,
            block_size=SIZE,
            token_budget=budget,
            max_num_seqs=seats,
            rules=EngineRules(),
            host_blocks=PLENTY,
            host_block_ps=block_ps,
        ),
        chains,
    )
    assert spans.cached == exact.cached
    assert spans.first_token == exact.first_token
    assert spans.finished == exact.finished
    assert (spans.preemptions, spans.prefilled) == (exact.preemptions, exact.prefilled)
