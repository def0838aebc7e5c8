"""Host memory below the KV cache: what it keeps, what a load takes, and that jumps stay steps."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from load.sim import workloads
from load.sim.block_store import BlockStore
from load.sim.clock import PS_PER_S
from load.sim.content import Chain
from load.sim.engine import Rank, RankConfig
from load.sim.requests import SimRequest
from load.sim.results import Result
from load.sim.run import SimConfig, simulate
from load.sim.tiers import Memory, Tier
from load.sim.timing import Work
from services.admission.policies.registry import make_policy
from tests.integration.sim.exact import SIZE, TIMING, Arrival
from tests.integration.sim.test_engine import run_spans, scenes


def host(blocks: int, block_ps: int) -> tuple[Memory, Tier]:
    """Host memory alone."""
    tier = Tier("host", BlockStore(blocks), block_ps)
    return Memory([tier]), tier


def reach(memory: Memory, chain: Chain, first: int, limit: int) -> int:
    pieces = memory.find(chain, first, limit)
    return pieces[-1].end if pieces else first


def test_what_is_there() -> None:
    """A chain is there from its beginning on, up to what was stored; a fork only together with what it forks off."""
    root = Chain()
    fork = Chain(root, 4)
    memory, tier = host(10, 5)
    memory.store(fork, 7, now=0)
    assert (tier.store.used, tier.link.free_ps) == (7, 35)
    assert reach(memory, fork, 0, 100) == 7
    assert reach(memory, root, 0, 100) == 4
    assert reach(memory, fork, 5, 6) == 6
    other = Chain()
    memory.store(other, 5, now=100)
    assert tier.store.used == 10
    assert [reach(memory, chain, 0, 100) for chain in (other, fork, root)] == [5, 5, 4]


def test_one_link() -> None:
    """Copies in both directions wait for each other; what is there already is not copied again."""
    chain = Chain()
    memory, tier = host(100, 10)
    memory.store(chain, 6, now=0)
    assert memory.load(chain, memory.find(chain, 2, 6), now=5) == 60 + 40
    memory.store(chain, 8, now=300)
    assert tier.link.free_ps == 320
    assert (tier.stored, tier.loaded) == (8, 4)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12), st.integers(0, 12)), max_size=25),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8)), min_size=1, max_size=5),
    st.sampled_from([3, 9, 1000]),
)
def test_blocks_one_by_one(events: list[tuple[int, int, int]], forks: list[tuple[int, int]], capacity: int) -> None:
    """Against a set of blocks: with room for all it is the same, with less never more, and never beyond its size."""
    chains = [Chain()]
    for parent, fork in forks:
        above = chains[parent % len(chains)]
        chains.append(Chain(above, above.fork + fork))
    memory, tier = host(capacity, 1)
    there: set[tuple[Chain, int]] = set()

    def owner(chain: Chain, block: int) -> tuple[Chain, int]:
        return next((own, block) for own, first, end in chain.path if first <= block < end)

    for which, end, first in events:
        chain = chains[which % len(chains)]
        memory.store(chain, end, now=0)
        there.update(owner(chain, block) for block in range(end))
        assert tier.store.used <= capacity
        for asked in chains:
            last = first
            while last < 20 and owner(asked, last) in there:
                last += 1
            seen = reach(memory, asked, first, 20)
            assert seen == last if capacity == 1000 else first <= seen <= last
    assert tier.store.used == len(there) or capacity < 1000


def test_a_load_in_place_of_a_prefill() -> None:
    """Another request has pushed a session out: its next turn waits for 20 blocks, then computes the rest."""
    session, other = Chain(), Chain()
    arrivals = [
        Arrival(0, 0, session, 20 * SIZE, 1),
        Arrival(PS_PER_S, 1, other, 40 * SIZE, 1),
        Arrival(2 * PS_PER_S, 2, session, 22 * SIZE, 1),
    ]
    timelines = {}
    for host in (0, 200):
        config = RankConfig(num_blocks=41, block_size=SIZE, host_blocks=host, host_block_ps=1_000_000)
        timelines[host], rank = run_spans(arrivals, config, [session, other])
        assert rank.counters.loaded_tokens == (20 * SIZE if host else 0)
        assert rank.cache.used_blocks == 0
    start = 2 * PS_PER_S
    computed = TIMING.step(Work(prefill=2 * SIZE, double_pairs=2 * SIZE * (20 + 22) * SIZE))
    assert timelines[200].first_token[2] == start + 20 * 1_000_000 + computed
    assert (timelines[200].cached[2], timelines[0].cached[2]) == (20 * SIZE, 0)


@settings(max_examples=60, deadline=None)
@given(
    scenes(),
    st.integers(27, 60),
    st.sampled_from([3, 8, 100]),
    st.sampled_from([2, 256]),
    st.sampled_from([5, 30, 500]),
)
def test_jumps_are_steps(
    scene: tuple[list[Arrival], list[Chain]], blocks: int, budget: int, seats: int, host: int
) -> None:
    """Loads end runs where a step would have met them; everything ends, and nothing is held in the end."""
    arrivals, chains = scene
    results = []
    for jump in (False, True):
        config = RankConfig(
            num_blocks=blocks,
            block_size=SIZE,
            token_budget=budget,
            max_num_seqs=seats,
            jump=jump,
            host_blocks=host,
            host_block_ps=3_000_000_000,
        )
        timeline, rank = run_spans(arrivals, config, chains)
        assert len(timeline.finished) == len(arrivals)
        assert rank.cache.used_blocks == 0
        results.append((timeline, rank.counters.loaded_tokens, rank.counters.stored_tokens))
    assert results[0] == results[1]


def pressed(policy: str, host_tokens: int, gbps: float = 50.0) -> Result:
    programs = workloads.generate("swe", count=12, rate_per_s=0.5, seed=3)
    config = SimConfig(kv_tokens=120_000, host_tokens=host_tokens, host_gbps=gbps)
    return simulate(programs, make_policy(policy), config)


def test_reload_is_cheap_and_queueing_remains() -> None:
    """S7: with room for everything on the host next to nothing is computed twice, and turns still queue. A smaller
    memory helps less; over a link that is slower than computing (1 GB/s: 7,600 tokens/s) it does harm."""
    without, large = pressed("kv", 0), pressed("kv", 10_000_000)
    slow, small = pressed("kv", 10_000_000, gbps=1.0), pressed("kv", 200_000)
    ratios = {
        name: float(str(result.summary()["recompute_ratio"]))
        for name, result in {"without": without, "large": large, "slow": slow, "small": small}.items()
    }
    assert ratios["large"] < 1.05 < ratios["small"] < ratios["without"]

    def mean(result: Result) -> float:
        return sum(row.jct_s for row in result.roots) / len(result.roots)

    assert mean(large) < mean(without) < mean(slow)
    assert float(str(large.summary()["queue_share"])) > 0.1


def test_policies_are_told() -> None:
    """commit takes kappa 2 where there is a host tier (spec policy §4, KAPPA)."""
    kappas = []
    for host_tokens in (0, 500_000):
        programs = workloads.generate("swe", count=2, rate_per_s=0.5, seed=3)
        policy = make_policy("commit")
        simulate(programs, policy, SimConfig(kv_tokens=120_000, host_tokens=host_tokens))
        kappas.append(policy.book.seats[0].steering.value)  # type: ignore[attr-defined]
    assert kappas[0] < 2.0 == kappas[1]


def test_who_goes_away_while_it_loads() -> None:
    """Its blocks are free at once, the end of its load moves nobody, and what came with it can be hit."""
    session, other = Chain(), Chain()
    rank = Rank(RankConfig(num_blocks=41, block_size=SIZE, host_blocks=200, host_block_ps=PS_PER_S), TIMING)
    now = 0
    for number, (chain, blocks) in enumerate(((session, 20), (other, 40))):
        rank.submit(SimRequest(number, chain, blocks * SIZE, 1), now)
        rank.start(now)
        assert rank.due_ps is not None
        now = rank.due_ps
        rank.finish(now)
    leaves, stays = (SimRequest(number, session, 21 * SIZE, 1) for number in (2, 3))
    now += 100 * PS_PER_S
    rank.submit(leaves, now)
    rank.start(now)
    assert (rank.idle, rank.unfinished, rank.cache.used_blocks) == (True, 1, 20)
    (due,) = rank.take_loads()
    assert due == now + 20 * PS_PER_S
    rank.abort(leaves, now)
    assert (rank.unfinished, rank.cache.used_blocks) == (0, 0)
    rank.loaded(due)
    rank.start(due)
    assert rank.idle
    rank.submit(stays, due)
    rank.start(due)
    assert stays.reused_tokens == 20 * SIZE
