"""The device's cache with preferences: who is evicted first; what is there of a chain is still its beginning."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from load.sim.content import Chain
from load.sim.requests import SimRequest
from load.sim.span_cache import SpanCache

SIZE = 4


def run(cache: SpanCache, chain: Chain, blocks: int) -> bool:
    """A request of so many full blocks that is over at once."""
    request = SimRequest(0, chain, blocks * SIZE + 1, 1)
    if not cache.allocate(request, request.length - len(hits := cache.lookup(request)) * SIZE, hits):
        return False
    cache.free(request)
    return True


EVENTS = st.lists(
    st.tuples(st.sampled_from(["run", "run", "run", "prefer", "drop"]), st.integers(0, 4), st.integers(-1, 9)),
    max_size=40,
)


@given(EVENTS)
def test_the_least_preferred_goes_first(events: list[tuple[str, int, int]]) -> None:
    """While anything free of lower priority is there, nothing of a higher one is evicted; blocks are never lost."""
    root = Chain()
    chains = [root, Chain(root, 3), Chain(), Chain(), Chain()]
    cache = SpanCache(25, SIZE)
    priority = dict.fromkeys(chains, 0)
    for what, which, number in events:
        chain, before = chains[which], cache.reaches()
        if what == "run" and run(cache, chain, max(1, number)):
            after = cache.reaches()
            of = {each: priority[each] for each in chains}
            of[root] = max(of[root], of[chains[1]])
            parts = {own for own, _, _ in chain.path}
            lost = [each for each, end in before.items() if after.get(each, each.fork) < end and each not in parts]
            least = min((of[each] for each in after if each not in parts), default=9)
            assert all(of[each] <= least for each in lost)
        elif what == "prefer":
            priority[chain] = min(number, 2)
            cache.prefer(chain, priority[chain])
        elif what == "drop":
            gone = before.get(chain, chain.fork) - chain.fork
            assert cache.drop(chain) >= gone  # copies too
            assert chain not in cache.reaches()
        assert cache.free_blocks == cache.usable
        for each, end in cache.reaches().items():
            assert end > each.fork
    for chain in chains:
        cache.drop(chain)
    assert cache.reaches() == {}
    assert run(cache, Chain(), 23)


def test_what_is_in_use_is_not_dropped() -> None:
    """A request holds its blocks, and what continues them goes."""
    cache, chain = SpanCache(30, SIZE), Chain()
    assert run(cache, chain, 10)
    holder = cache.hold(chain, 4 * SIZE)
    assert cache.drop(chain) == 6
    assert cache.reach(chain, 100) == 4
    cache.free(holder)
    assert cache.drop(chain) == 4
    assert cache.free_blocks == cache.usable
