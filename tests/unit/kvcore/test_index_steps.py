"""Dumping and loading in steps while the index lives on: a part that is being loaded or given back answers nothing."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore import dump, residency
from kvcore.errors import BadDumpError
from kvcore.events import Cleared, Event, Removed, Stored, Tier
from kvcore.index import PrefixIndex
from tests.unit.kvcore.making import batch, chain_of_names, stored, tiers
from tests.unit.kvcore.test_index_model import PARENTS, PATHS, check_bookkeeping
from tests.unit.kvcore.twins import Twin

RANKS = (("a", 0), ("a", 1), ("b", 0))
CHAINS = [chain_of_names(names) for names in PATHS]


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of two blocks, so that small indexes take many."""
    monkeypatch.setattr(dump, "SLICE_BLOCKS", 2)
    monkeypatch.setattr(residency, "_CLEARED_AT_ONCE", 2)


def store(node: int, tier: Tier, twin: bool) -> Stored:
    """A block below its parent; ``twin``: under a second engine hash, with the same chain hash."""
    parent = PARENTS[node]
    event = stored([node], parent, tier)
    return msgspec.structs.replace(event, hashes=(1000 + node,)) if twin else event


nodes = st.integers(0, len(PARENTS) - 1)
places = st.sampled_from([Tier.DEVICE, Tier.HOST])
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(store, nodes, places, st.booleans()),
    st.builds(store, nodes, places, st.just(False)),
    st.builds(lambda node, tier: Removed(hashes=(100 + node,), tier=tier), nodes, places),
    st.just(Cleared()),
)
histories = st.lists(st.tuples(st.sampled_from(RANKS), events), max_size=30)


def told(twin: Twin, history: list[tuple[tuple[str, int], Event]]) -> PrefixIndex:
    index = twin.PrefixIndex()
    for rank, event in history:
        index.apply(*rank, batch(event))
    return index


@pytest.mark.long
@given(before=histories, source=histories, live=histories, wanted=st.sets(st.sampled_from(RANKS)))
def test_an_index_lives_on_while_ranks_are_prepared(
    twin: Twin,
    before: list[tuple[tuple[str, int], Event]],
    source: list[tuple[tuple[str, int], Event]],
    live: list[tuple[tuple[str, int], Event]],
    wanted: set[tuple[str, int]],
) -> None:
    """Between any two steps batches of any rank are applied, and every answer is that of an index that nothing is
    loaded into; adopted ranks then hold what was dumped, all others what they were told."""
    index, plain, origin = told(twin, before), told(twin, before), told(twin, source)
    news: Iterator[tuple[tuple[str, int], Event]] = iter(live)

    def live_on(ranks: set[tuple[str, int]]) -> None:
        for rank, event in news:
            if rank in ranks:
                index.apply(*rank, batch(event))
                plain.apply(*rank, batch(event))
                break

    steps = index.prepare(origin.dump())
    try:
        while True:
            next(steps)
            live_on(set(RANKS))
            assert [tiers(index, chain) for chain in CHAINS] == [tiers(plain, chain) for chain in CHAINS]
    except StopIteration as end:
        prepared = end.value
    adopted = index.adopt(prepared, wanted)
    assert set(adopted) == wanted & set(origin.ranks())
    for _ in index.discard(prepared):
        live_on(set(RANKS) - wanted)
    expected = {**plain.content(), **{rank: origin.content()[rank] for rank in adopted}}
    assert index.content() == expected
    check_bookkeeping(index)
    assert prepared.ranks == {}
    for worker in ("a", "b"):
        index.remove_worker(worker)
    assert index.stats().known == index.stats().unique == 0


@pytest.mark.long
@given(source=histories)
def test_steps_of_a_dump_and_of_a_load_add_up(twin: Twin, source: list[tuple[tuple[str, int], Event]]) -> None:
    """In whatever steps, a dump loads into the same content, and dumps alike again."""
    index, copy = told(twin, source), twin.PrefixIndex()
    copy.load(index.dump())
    assert copy.content() == index.content()
    again = twin.PrefixIndex()
    again.load(copy.dump())
    assert again.content() == index.content()
    check_bookkeeping(again)


def test_what_was_prepared_in_vain_is_given_back(twin: Twin) -> None:
    """A damaged column that is found halfway, or a caller who gives up: the index is as before."""
    origin = told(twin, [(("w", 0), store(node, Tier.DEVICE, False)) for node in range(8)])
    index = twin.PrefixIndex()
    steps = index.prepare(origin.dump())
    next(steps)
    steps.close()
    damaged = dump.decode_dump(origin.dump())
    group = damaged.ranks[0].groups[0]
    group.numbers = group.numbers[:-4] + b"\xff" * 4
    with pytest.raises(BadDumpError):
        index.load(dump.encode_dump(damaged))
    assert (index.ranks(), index.stats().unique) == ([], 0)
    index.load(origin.dump())
    assert index.content() == origin.content()
    check_bookkeeping(index)


def test_a_rank_stands_once_in_a_dump(twin: Twin) -> None:
    """Two contradicting pictures of one rank are no picture."""
    twice = dump.decode_dump(told(twin, [(("w", 0), store(0, Tier.DEVICE, False))]).dump())
    twice.ranks *= 2
    with pytest.raises(BadDumpError, match="twice"):
        twin.PrefixIndex().load(dump.encode_dump(twice))
