"""The simulated rank against the block-exact engine core, and its jumps against its steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from load.engine.core import CoreConfig
from load.engine.scheduler import SchedulingPolicy
from load.engine.timing import H100_8B, H100_70B, Profile
from load.sim.clock import PS_PER_MS, EventQueue
from load.sim.content import Chain
from load.sim.engine import Rank, RankConfig
from load.sim.requests import SimRequest
from load.sim.timing import LinearTiming, PeerTiming, Timing, Work
from services.admission.policies.engine_rules import EngineRules
from tests.integration.sim.exact import SIZE, TIMING, Arrival, Timeline, run_exact


def run_spans(
    arrivals: list[Arrival], config: RankConfig, chains: list[Chain], timing: Timing = TIMING
) -> tuple[Timeline, Rank]:
    """Drive one rank through ``arrivals``."""
    rank = Rank(config, timing)
    queue: EventQueue[tuple[str, SimRequest | None]] = EventQueue()
    requests = []
    for one in sorted(arrivals, key=lambda arrival: (arrival.time_ps, arrival.number)):
        request = SimRequest(one.number, one.chain, one.prompt, one.output, priority=one.priority)
        requests.append(request)
        queue.put(one.time_ps, ("arrival", request))
    timeline = Timeline()
    while len(queue):
        kind, arrived = queue.pop()
        now = queue.now
        if arrived is not None:
            rank.submit(arrived, now)
            if rank.due_ps is not None:
                queue.put(rank.due_ps, ("end", None), 1)
            else:
                queue.put(now, ("start", None), 2)
        elif kind == "end" and rank.due_ps == now:
            for finished in rank.finish(now).finished:
                timeline.finished[finished.number] = now
            queue.put(now, ("start", None), 2)
        elif kind == "loaded":
            rank.loaded(now)
            if rank.due_ps is not None:
                queue.put(rank.due_ps, ("end", None), 1)
            else:
                queue.put(now, ("start", None), 2)
        elif kind == "start" and rank.idle:
            rank.start(now)
            for due in rank.take_loads():
                queue.put(due, ("loaded", None))
            if rank.due_ps is not None:
                queue.put(rank.due_ps, ("end", None), 1)
    for request in requests:
        assert request.first_token_ps is not None
        assert request.cached_tokens is not None
        timeline.first_token[request.number] = request.first_token_ps
        timeline.cached[request.number] = request.cached_tokens
    timeline.preemptions = rank.counters.preemptions
    timeline.prefilled = rank.counters.prefill_tokens
    timeline.iterations = rank.counters.iterations
    timeline.free_blocks = rank.cache.free_blocks
    timeline.reach = {number: rank.cache.reach(chain, 200) for number, chain in enumerate(chains)}
    return timeline, rank


@st.composite
def scenes(draw: st.DrawFn) -> tuple[list[Arrival], list[Chain]]:
    """Requests on a few chains that fork off each other: sessions, sub-agents, repeats, parallel turns."""
    chains = [Chain()]
    for _ in range(draw(st.integers(0, 4))):
        parent = draw(st.sampled_from(chains))
        chains.append(Chain(parent, parent.fork + draw(st.integers(0, 6))) if draw(st.booleans()) else Chain())
    arrivals = []
    for number in range(draw(st.integers(1, 10))):
        prompt = draw(st.integers(1, 60))
        arrivals.append(
            Arrival(
                time_ps=draw(st.sampled_from([0, 0, 7, 8, 15, 40, 100, 300])) * PS_PER_MS + draw(st.integers(0, 2)),
                number=number,
                chain=draw(st.sampled_from(chains)),
                prompt=prompt,
                output=draw(st.integers(1, min(40, 100 - prompt))),
                priority=draw(st.integers(0, 2)),
            )
        )
    return arrivals, chains


@settings(max_examples=80, deadline=None)
@given(
    scenes(),
    st.integers(27, 60),
    st.sampled_from([3, 8, 32, 100]),
    st.sampled_from([2, 4, 256]),
    st.sampled_from(["fcfs", "priority"]),
    st.booleans(),
)
def test_a_rank_does_what_the_block_exact_engine_does(
    scene: tuple[list[Arrival], list[Chain]],
    blocks: int,
    budget: int,
    seats: int,
    policy: SchedulingPolicy,
    prefix_caching: bool,
) -> None:
    """Same times, hits, preemptions, evictions: spans and jumps are `load.engine`, only faster."""
    arrivals, chains = scene
    exact = run_exact(
        arrivals,
        CoreConfig(
            num_blocks=blocks,
            block_size=SIZE,
            token_budget=budget,
            max_num_seqs=seats,
            policy=policy,
            prefix_caching=prefix_caching,
        ),
        chains,
    )
    for jump in (False, True):
        config = RankConfig(
            num_blocks=blocks,
            block_size=SIZE,
            token_budget=budget,
            max_num_seqs=seats,
            rules=EngineRules(scheduling=policy),
            prefix_caching=prefix_caching,
            jump=jump,
        )
        spans, rank = run_spans(arrivals, config, chains)
        assert spans == exact
        assert rank.cache.used_blocks == 0


@settings(max_examples=40, deadline=None)
@given(scenes(), st.integers(27, 60), st.booleans())
def test_jumping_and_stepping_are_the_same(scene: tuple[list[Arrival], list[Chain]], blocks: int, linear: bool) -> None:
    """With both models of time, and with runs cut short by every bound."""
    arrivals, chains = scene
    timing: Timing = LinearTiming(H100_8B) if linear else PeerTiming(blocks * SIZE)
    results = []
    for jump in (False, True):
        config = RankConfig(num_blocks=blocks, block_size=SIZE, token_budget=64, jump=jump)
        results.append(run_spans(arrivals, config, chains, timing)[0])
    assert results[0] == results[1]


def test_a_long_decode_is_two_pieces_of_work() -> None:
    """A thousand tokens alone on a rank: one prefill, one iteration that begins the run, one jump."""
    chain = Chain()
    _, rank = run_spans([Arrival(0, 0, chain, 100, 1000)], RankConfig(num_blocks=1000), [chain])
    assert rank.counters.iterations == 1000
    assert rank.counters.scheduled <= 3


@given(st.integers(1, 10**6), st.integers(1, 256), st.integers(1, 5000))
def test_a_run_takes_as_long_as_its_steps(context: int, decodes: int, steps: int) -> None:
    """The closed form is the sum."""
    run = TIMING.decode_run(decodes, context, steps)
    few = min(steps, 50)
    total = sum(TIMING.step(Work(decodes=decodes, context=context + step * decodes)) for step in range(few))
    assert run.time(few) == total
    middle = run.time(steps) // 2
    found = run.steps_until(middle, steps)
    assert run.time(found) >= middle
    assert found == 1 or run.time(found - 1) < middle


def test_timing_is_that_of_the_engine() -> None:
    """Whole picoseconds agree with the engine's floating-point seconds."""
    for prefill, context, ahead in ((0, 50_000, 0), (2048, 0, 30_000), (512, 400_000, 1)):
        work = Work(prefill, prefill * (2 * ahead + prefill), 8, context)
        expected = H100_8B.step_s(prefill + 8, prefill * (ahead + prefill / 2), context)
        assert abs(TIMING.step(work) / 1e12 - expected) < 1e-9 * expected


@pytest.mark.parametrize(
    ("profile", "bodies", "prefills"),
    [
        (H100_8B, {512: 16.4, 1024: 27.1, 2048: 56.3}, {10_000: 0.31, 20_000: 0.73, 40_000: 1.87, 70_000: 4.4}),
        (H100_70B, {512: 40.5, 1024: 77.4, 2048: 148}, {10_000: 0.76, 20_000: 1.66, 40_000: 3.8, 70_000: 8.1}),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_times_are_those_that_were_measured(
    profile: Profile, bodies: dict[int, float], prefills: dict[int, float]
) -> None:
    """The table of scheduling §4.2: bodies of an iteration in ms, by its line; what a context takes alone in s."""
    timing = LinearTiming(profile)
    assert timing.step(Work(decodes=1)) == profile.floor_ms * PS_PER_MS
    for tokens, ms in bodies.items():
        assert abs(timing.step(Work(prefill=tokens)) / PS_PER_MS - ms) < 0.08 * ms
    for tokens, seconds in prefills.items():
        chain = Chain()
        config = RankConfig(num_blocks=30_000)
        timeline, _ = run_spans([Arrival(0, 0, chain, tokens, 1)], config, [chain], timing)
        assert abs(timeline.first_token[0] / 1e12 - seconds) < 0.06 * seconds


def test_the_peers_timing_probe() -> None:
    """Prefill and decode times of the peer on an empty engine (spec: peers §3), in ms."""
    timing = PeerTiming(16_384 * 64)
    seen = {64: 17.5, 512: 24.4, 1024: 32.5, 2048: 49.4, 4096: 85.8, 8192: 169.1}
    for tokens, ms in seen.items():
        assert abs(timing.step(Work(prefill=tokens, chunks=1, chunk_ends=tokens)) / PS_PER_MS - ms) < 0.06
    decodes = {1: 5.96, 2: 6.17, 4: 6.60, 8: 7.44, 16: 9.09, 32: 12.2, 64: 17.9, 128: 26.7}
    for batch, ms in decodes.items():
        step = timing.step(Work(decodes=batch, context=batch * 4_200)) / PS_PER_MS
        assert abs(step - ms) < 0.01 * ms
