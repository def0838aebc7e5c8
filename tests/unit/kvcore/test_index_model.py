"""The prefix index against a naive model: any history of stores, removals, clears, restarts, tier moves and reloads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.events import Cleared, Removed, Stored, Tier
from kvcore.index import IndexLimits, PrefixIndex
from kvcore.residency import best_tier
from tests.unit.kvcore.making import BLOCK_SIZE, batch, chain_of_names, tiers, tokens_of
from tests.unit.kvcore.twins import Twin

# A small forest of blocks: the parent of each.
PARENTS: tuple[int | None, ...] = (None, 0, 1, 2, 1, 4, 0, 6, None, 8)
RANKS = (("a", 0), ("a", 1), ("b", 0))
# (tier, held by a connector)
PLACES = ((Tier.DEVICE, False), (Tier.HOST, True), (Tier.DISK, False))


def path(node: int) -> list[int]:
    """Blocks from the root to ``node``."""
    parent = PARENTS[node]
    return [*([] if parent is None else path(parent)), node]


PATHS = [path(node) for node in range(len(PARENTS))]
CHAINS = [chain_of_names(names) for names in PATHS]


def operations(ranks: int, nodes: int, size: int) -> st.SearchStrategy[list[tuple[object, ...]]]:
    who, node = st.integers(0, ranks - 1), st.integers(0, nodes - 1)
    where, namespace = st.integers(0, len(PLACES) - 1), st.integers(0, 1)
    store = st.tuples(st.just("store"), who, node, st.integers(1, 4), where, st.booleans(), namespace)
    remove = st.tuples(st.just("remove"), who, node, where, namespace)
    rare = st.tuples(st.sampled_from(["clear", "restart", "reload"]), who)
    return st.lists(st.one_of(store, store, remove, remove, remove, rare), max_size=size)


def engine_hash(who: int, node: int, namespace: int) -> int:
    return 1 + node + 100 * namespace + 1000 * who


@dataclass
class NaiveRank:
    """Copies and parents per engine hash; identity is worked out when asked."""

    copies: Counter[tuple[int, int]] = field(default_factory=Counter)  # an entry of 0: once stored there
    nodes: dict[int, int] = field(default_factory=dict)
    parents: dict[int, int | None] = field(default_factory=dict)

    def identified(self, engine: int) -> bool:
        if engine not in self.parents:
            return False
        parent = self.parents[engine]
        return parent is None or self.identified(parent)

    def place_of(self, node: int) -> int | None:
        """Best place that holds the block, under whatever engine hash."""
        places = [
            place
            for (engine, place), count in self.copies.items()
            if count and self.identified(engine) and self.nodes[engine] == node
        ]
        return min(places, default=None)

    def clear_pool(self) -> None:
        if not any(PLACES[place][1] for _, place in self.copies):
            self.copies.clear()
            self.parents.clear()
        for engine, place in list(self.copies):
            if not PLACES[place][1] or not self.identified(engine):
                del self.copies[engine, place]
        # What waits for its parent waits no longer.
        self.parents = {engine: None for engine in self.parents if self.identified(engine)}


@pytest.mark.long
@given(operations(ranks=3, nodes=len(PARENTS), size=40), st.booleans())
def test_any_history_against_a_naive_model(
    twin: Twin, history: list[tuple[object, ...]], hidden_namespaces: bool
) -> None:
    """After every step each rank's match of every chain is the model's, whatever came in whatever order."""
    run(twin, history, IndexLimits(), hidden_namespaces=hidden_namespaces, exact=True)


@pytest.mark.long
@given(operations(ranks=1, nodes=4, size=60), st.booleans(), st.integers(0, 2), st.integers(1, 6), st.integers(3, 30))
def test_any_history_under_tight_bounds(
    twin: Twin, history: list[tuple[object, ...]], hidden_namespaces: bool, remembered: int, held: int, blocks: int
) -> None:
    """What is forgotten, dropped or evicted may shorten a match, never lengthen it, and the counts stay right."""
    limits = IndexLimits(max_blocks=blocks, max_held=held, max_remembered=remembered)
    run(twin, history, limits, hidden_namespaces=hidden_namespaces, exact=False)


def run(
    twin: Twin, history: list[tuple[object, ...]], limits: IndexLimits, *, hidden_namespaces: bool, exact: bool
) -> None:
    index = twin.PrefixIndex(limits)
    model = [NaiveRank() for _ in RANKS]
    for operation in history:
        match operation:
            case ("store", int(who), int(node), int(length), int(where), bool(with_tokens), int(namespace)):
                names = PATHS[node][-length:]
                space = namespace if hidden_namespaces else 0
                hashes = [engine_hash(who, name, space) for name in names]
                above = PARENTS[names[0]]
                parent = None if above is None else engine_hash(who, above, space)
                tier, connector = PLACES[where]
                event = Stored(
                    hashes=tuple(hashes),
                    parent=parent if with_tokens else None,
                    tokens=tokens_of(names) if with_tokens else b"",
                    block_size=BLOCK_SIZE if with_tokens else 0,
                    tier=tier,
                    connector=connector,
                )
                index.apply(*RANKS[who], batch(event))
                for name, engine in zip(names, hashes, strict=True):
                    model[who].nodes[engine] = name
                    model[who].copies[engine, where] += 1
                    if with_tokens and not model[who].identified(engine):
                        model[who].parents[engine] = parent
                    parent = engine
            case ("remove", int(who), int(node), int(where), int(namespace)):
                engine = engine_hash(who, node, namespace if hidden_namespaces else 0)
                held = model[who].copies.get((engine, where), 0) > 0
                if not held and hidden_namespaces:
                    continue  # copies of one block are shared between its names: an engine that lies takes another's
                result = index.apply(*RANKS[who], batch(Removed(hashes=(engine,), tier=PLACES[where][0])))
                assert result.removed + result.unknown_removed == 1
                assert result.removed == held if exact else result.removed <= held
                if held:
                    model[who].copies[engine, where] -= 1
            case ("clear", int(who)):
                index.apply(*RANKS[who], batch(Cleared()))
                model[who].clear_pool()
            case ("restart", int(who)):
                index.clear_rank(*RANKS[who])
                model[who] = NaiveRank()
            case ("reload", int(who)):
                fresh = twin.PrefixIndex(limits)
                fresh.load(index.dump())
                assert fresh.content() == index.content()
                index = fresh
        compare(index, model, exact=exact)
        check_bookkeeping(index)
    for rank in RANKS:
        index.remove_worker(rank[0])
    assert index.stats().known == index.stats().unique == 0


def compare(index: PrefixIndex, model: list[NaiveRank], *, exact: bool) -> None:
    places = [[rank.place_of(node) for node in range(len(PARENTS))] for rank in model]
    for names, chain in zip(PATHS, CHAINS, strict=True):
        expected: dict[tuple[str, int], tuple[int, ...]] = {}
        for who, rank in enumerate(RANKS):
            counts = [0, 0, 0, 0]
            for name in names:
                place = places[who][name]
                if place is None:
                    break
                counts[PLACES[place][0]] += 1
            if any(counts):
                expected[rank] = tuple(counts)
        found = tiers(index, chain)
        if exact:
            assert found == expected
        for rank, blocks in found.items():
            assert sum(blocks) <= sum(expected[rank])


def check_bookkeeping(index: PrefixIndex) -> None:
    """What is counted on the way equals what can be counted now; in the Python twin, of its innards too."""
    content, stats = index.content(), index.stats()
    assert set(content) == set(index.ranks())
    groups = Counter((rank, place[0]) for rank, held in content.items() for place in set(_groups(held)))
    assert stats.resident == groups.total()
    assert stats.unique == len({own for held in content.values() for own in held})
    for rank in content:
        assert index.resident(*rank) == max((count for (of, _), count in groups.items() if of == rank), default=0)
    if isinstance(index, PrefixIndex):
        check_innards(index)


def _groups(held: dict[int, tuple[tuple[int, int, int], ...]]) -> Iterator[tuple[int, int]]:
    """(group, chain hash) of each block that a rank holds."""
    for own, places in held.items():
        yield from {(group, own) for group, _, _ in places}


def check_innards(index: PrefixIndex) -> None:
    """Every count that the Python twin keeps, recounted."""
    presence: Counter[int] = Counter()
    for owner in index._ranks.values():
        for group in owner.groups.values():
            blocks = {id(block): block for block in group.blocks.values()}
            present = {key for key, block in blocks.items() if block.copies and block.own is not None}
            parents = {key: group.blocks.get(blocks[key].parent or 0) for key in present if blocks[key].parent}
            children = Counter(id(parent) for parent in parents.values())
            assert {key: block.children for key, block in blocks.items() if block.children} == dict(children)
            assert group.holes == sum(id(parent) not in present for parent in parents.values())
            assert group.present == len(present)
            owns = {blocks[key].own for key in present}
            assert len(owns) == len(present)
            presence.update({own: group.bit for own in owns if own is not None})
            assert group.lowered == sum(best_tier(blocks[key].copies) > 0 for key in present)
            assert bool(index._holed & group.bit) == (group.holes > 0 or group.ambiguous)
    assert index._masks.presence == dict(presence)
    stats = index.stats()
    assert stats.known == sum(len(group.blocks) for owner in index._ranks.values() for group in owner.groups.values())


@given(st.permutations(range(8)), st.sets(st.integers(0, 7)))
def test_order_of_stores_and_removals_does_not_matter(twin: Twin, order: list[int], gone: set[int]) -> None:
    """A chain stored block by block in any order, some blocks removed: the same content as in chain order."""

    def build(nodes: list[int]) -> PrefixIndex:
        index = twin.PrefixIndex()
        for node in nodes:
            parent = None if node == 0 else node
            event = Stored(hashes=(node + 1,), parent=parent, tokens=tokens_of([node]), block_size=BLOCK_SIZE)
            index.apply("w", 0, batch(event))
            if node in gone:
                index.apply("w", 0, batch(Removed(hashes=(node + 1,))))
        return index

    index = build(order)
    assert index.content() == build(sorted(order)).content()
    assert index.stats().held == 0
    holes = {node for node in range(1, 8) if node not in gone and node - 1 in gone}
    assert bool(index.stats().holed) == bool(holes)


def test_a_hole_healed_under_another_name(twin: Twin) -> None:
    """0 and 1 stored, 0 removed, stored under a second engine hash, then under the first again: one block, no hole."""

    def zero(engine: int) -> Stored:
        return Stored(hashes=(engine,), tokens=tokens_of([0]), block_size=BLOCK_SIZE)

    index = twin.PrefixIndex()
    one = Stored(hashes=(2,), parent=1, tokens=tokens_of([1]), block_size=BLOCK_SIZE)
    for events in ([zero(1), one], [Removed(hashes=(1,))], [zero(7)], [zero(1)], [Removed(hashes=(7,))]):
        index.apply("w", 0, batch(*events))
        check_bookkeeping(index)
    assert tiers(index, chain_of_names([0, 1])) == {("w", 0): (2, 0, 0, 0)}
    index.apply("w", 0, batch(Removed(hashes=(1,))))
    check_bookkeeping(index)
    assert tiers(index, chain_of_names([0, 1])) == {}
