"""What a memory below the device holds, beside a naive model of single blocks."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from load.sim.block_store import BlockStore
from load.sim.content import Chain
from load.sim.preferences import Preferences


class Blocks:
    """Single blocks: which are there, by chain, and each chain's priority and last use."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.there: dict[Chain, set[int]] = {}
        self.priority: dict[Chain, int] = {}
        self.used: dict[Chain, int] = {}
        self.uses = 0

    def put(self, chain: Chain, first: int, end: int, priority: int) -> None:
        if end <= first:
            return
        if not self.there.get(chain):
            self.priority[chain] = priority
        self.there.setdefault(chain, set()).update(range(first, end))
        self.touch(chain)

    def touch(self, chain: Chain) -> None:
        if self.there.get(chain):
            self.uses += 1
            self.used[chain] = self.uses

    def drop(self, chain: Chain, first: int) -> None:
        self.there[chain] = {block for block in self.there.get(chain, set()) if block < first}

    def shrink(self) -> Counter[tuple[Chain, int]]:
        gone: Counter[tuple[Chain, int]] = Counter()
        while sum(map(len, self.there.values())) > self.limit:
            kept = [chain for chain, blocks in self.there.items() if blocks]
            chain = min(kept, key=lambda each: (self.priority[each], self.used[each]))
            last = max(self.there[chain])
            self.there[chain].remove(last)
            gone[chain, last] += 1
        return gone


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "touch", "prefer", "drop"]),
        st.integers(0, 3),
        st.integers(0, 9),
        st.integers(0, 9),
    ),
    max_size=30,
)


@given(EVENTS, st.sampled_from([1, 4, 15, 100]))
def test_ranges_are_blocks(events: list[tuple[str, int, int, int]], limit: int) -> None:
    """The same blocks are there, and the same leave, whatever came before."""
    chains = [Chain() for _ in range(4)]
    store, model = BlockStore(limit), Blocks(limit)
    for what, which, first, more in events:
        chain = chains[which]
        if what == "put":
            before = len(model.there.get(chain, ()))
            model.put(chain, first, first + more, which - 1)
            assert store.put(chain, first, first + more, which - 1) == len(model.there.get(chain, ())) - before
        elif what == "touch":
            store.touch(chain)
            model.touch(chain)
        elif what == "prefer" and model.there.get(chain):
            store.prefer(chain, more)
            model.priority[chain] = more
        elif what == "drop":
            before = len(model.there.get(chain, ()))
            model.drop(chain, first)
            assert store.drop(chain, first) == before - len(model.there[chain])
        left = Counter({(own, block): 1 for own, lo, hi in store.shrink() for block in range(lo, hi)})
        assert left == model.shrink()
        assert store.used == sum(map(len, model.there.values())) <= limit
        for each in chains:
            blocks = model.there.get(each, set())
            for start in range(20):
                end = start
                while end in blocks:
                    end += 1
                assert store.reach(each, start) == end


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(-1, 2)), max_size=20))
def test_what_is_needed_stays_as_long_as_who_needs_it(wishes: list[tuple[int, int]]) -> None:
    """A wish for a fork is one for what it forks off; one to let go takes nothing else with it."""
    root = Chain()
    middle = Chain(root, 3)
    chains = [root, middle, Chain(root, 5), Chain(middle, 7), Chain(middle, 2)]
    preferences = Preferences()
    known = dict.fromkeys(chains, 0)
    for which, priority in wishes:
        preferences.wish(chains[which], priority)
        known[chains[which]] = priority
        for chain in chains:
            above = [
                known[each] for each in chains if each is not chain and any(part[0] is chain for part in each.path)
            ]
            assert preferences.of(chain) == max([known[chain] or 0, *(each for each in above if each > 0)])
    for chain in chains:
        preferences.wish(chain, 0)
    assert not preferences
    assert all(preferences.of(chain) == 0 for chain in chains)
