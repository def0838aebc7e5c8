"""Memory below a rank, beside a naive model of single blocks: host, disk and a pool that two ranks share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from load.sim.block_store import BlockStore
from load.sim.content import Chain
from load.sim.tiers import Memory, Tier

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "store", "demote", "prefer", "drop", "fetch"]),
        st.integers(0, 1),
        st.integers(0, 4),
        st.integers(0, 9),
    ),
    max_size=25,
)


@given(EVENTS, st.booleans(), st.sampled_from([(3, 5, 7), (9, 2, 30), (1000, 1000, 1000)]))
def test_blocks_by_their_nearest_tier(
    events: list[tuple[str, int, int, int]], through: bool, sizes: tuple[int, int, int]
) -> None:
    """Nothing is found that was not stored, each position once and at the nearest tier that has it; no tier is ever
    larger than it is; with room for all, all that was stored and not dropped is found; what one rank has put into the
    pool the other finds."""
    root = Chain()
    chains = [root, Chain(root, 3), Chain(root, 6), Chain(), Chain()]
    pool = BlockStore(sizes[2])
    ranks = []
    for _ in range(2):
        tiers = [Tier("host", BlockStore(sizes[0]), 2), Tier("disk", BlockStore(sizes[1]), 5), Tier("pool", pool, 3)]
        ranks.append(Memory(tiers, pool_through=through))
    stored: list[set[tuple[Chain, int]]] = [set(), set()]
    shared: set[tuple[Chain, int]] = set()

    def owned(chain: Chain, end: int) -> set[tuple[Chain, int]]:
        return {(own, block) for own, lo, hi in chain.path for block in range(lo, min(hi, end))}

    history: set[tuple[Chain, int]] = set()
    for now, (what, which, number, end) in enumerate(events):
        memory, chain = ranks[which], chains[number]
        if what == "store":
            memory.store(chain, end, now)
            stored[which] |= owned(chain, end)
            shared |= owned(chain, end) if through else set()
        elif what == "demote":
            memory.demote(chain, end, "pool", now)
            shared |= owned(chain, end)
        elif what == "prefer":
            memory.prefer(chain, end - 1)
        elif what == "drop":
            memory.drop(chain)
            stored[which] = {block for block in stored[which] if block[0] is not chain}
            shared = {block for block in shared if block[0] is not chain}
        else:
            memory.fetch(chain, 0, end, now)
            found = memory.find(chain, 0, end)
            stored[which] |= owned(chain, found[-1].end if found else 0)
        history |= stored[which] | shared
        for rank, own in zip(ranks, stored, strict=True):
            for tier in rank.tiers:
                assert tier.store.used <= tier.store.blocks
            for each in chains:
                pieces = rank.find(each, 0, 12)
                at = 0
                for piece in pieces:
                    assert piece.first == at < piece.end
                    at = piece.end
                known = own | shared if sizes[0] == 1000 else history
                last = 0
                while last < 12 and owned(each, last + 1) <= known:
                    last += 1
                assert at == last if sizes[0] == 1000 else at <= last


def test_what_leaves_one_tier_goes_to_the_next() -> None:
    """Back to front, over each tier's own link; what nobody comes back to is not written down."""
    tiers = [Tier("host", BlockStore(4), 2), Tier("disk", BlockStore(3), 10), Tier("pool", BlockStore(3), 100)]
    memory, chain, other = Memory(tiers), Chain(), Chain()
    memory.store(chain, 4, now=0)
    memory.store(other, 4, now=0)
    assert [(piece.tier.name, piece.first, piece.end) for piece in memory.find(chain, 0, 9)] == [
        ("disk", 0, 3),
        ("pool", 3, 4),
    ]
    assert [tier.link.free_ps for tier in tiers] == [16, 40, 100]
    assert memory.load(chain, memory.find(chain, 0, 9), now=20) == 200
    memory.prefer(other, -1)
    memory.store(chain, 4, now=500)
    assert [(piece.tier.name, piece.first, piece.end) for piece in memory.find(chain, 0, 9)] == [("host", 0, 4)]
    assert memory.find(other, 0, 9) == []


def test_what_was_fetched_waits_for_its_copy() -> None:
    """Nearer from now on, and there when the slower link is done."""
    tiers = [Tier("host", BlockStore(8), 2), Tier("pool", BlockStore(8), 100)]
    memory, chain = Memory(tiers), Chain()
    memory.demote(chain, 4, "pool", now=0)
    assert memory.fetch(chain, 0, 9, now=400) == 4
    pieces = memory.find(chain, 0, 9)
    assert [piece.tier.name for piece in pieces] == ["host"]
    assert memory.load(chain, pieces, now=401) == 800
    assert memory.load(chain, pieces, now=900) == 908
