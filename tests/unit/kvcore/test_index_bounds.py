"""Memory of the prefix index: every bound, what goes first, what is given back; and dumps as untrusted bytes."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.dump import decode_dump
from kvcore.errors import BadDumpError
from kvcore.events import Stored, Tier
from kvcore.hashing import chain_hashes
from kvcore.index import MAX_GROUPS, IndexLimits
from tests.unit.kvcore.making import batch, chain_of_names, reach, removed, stored, tiers
from tests.unit.kvcore.twins import PYTHON, Twin


def chain_event(first: int, blocks: int, parent: int | None = None) -> Stored:
    """A chain of its own, by the number of its first engine hash."""
    tokens = b"".join(number.to_bytes(16, "little") for number in range(first, first + blocks))
    return Stored(hashes=tuple(range(first, first + blocks)), parent=parent, tokens=tokens, block_size=4)


def test_the_oldest_chain_goes_first_and_from_its_tail() -> None:
    """Over the bound the oldest blocks go that nothing resident hangs on; a shared prefix stays with its children.

    The native twin may take them in another order.
    """
    index = PYTHON.PrefixIndex(IndexLimits(max_blocks=64))
    index.apply("w", 0, batch(stored(range(8)), stored([8, 9], 7)))
    index.apply("w", 0, batch(chain_event(1000, 30), chain_event(2000, 10)))
    index.apply("w", 0, batch(stored([10], 7)))
    result = index.apply("w", 0, batch(chain_event(3000, 20)))
    stats = index.stats()
    assert stats.known <= 64
    assert result.evicted == stats.evicted > 0
    assert stats.holed == 0
    assert reach(index, [*range(8), 10]) == 9
    newest = chain_event(3000, 20)
    assert tiers(index, chain_hashes(newest.tokens, 4)) == {("w", 0): (20, 0, 0, 0)}


@pytest.mark.parametrize("blocks", [16, 100, 257])
def test_what_goes_leaves_no_hole(twin: Twin, blocks: int) -> None:
    """Whatever order of leaves a twin drops in: the bound holds, what is left of each chain is a prefix, all is
    counted, and what was stored last is whole."""
    index = twin.PrefixIndex(IndexLimits(max_blocks=blocks))
    events = [chain_event(1000 * (number + 1), 3 + number % 11) for number in range(60)]
    stored_blocks = evicted = 0
    for event in events:
        result = index.apply("w", 0, batch(event))
        stored_blocks += result.stored
        evicted += result.evicted
    stats = index.stats()
    assert stats.known <= blocks
    assert (stats.holed, stats.evicted, stats.resident) == (0, evicted, stored_blocks - evicted)
    reached = [sum(match.reach for match in index.match(chain_hashes(event.tokens, 4))) for event in events]
    assert sum(reached) == index.resident("w", 0) == stats.resident
    assert reached[-1] == len(events[-1].hashes)


def test_the_fullest_rank_pays(twin: Twin) -> None:
    """A rank that floods the index loses its own blocks, not its neighbour's."""
    index = twin.PrefixIndex(IndexLimits(max_blocks=200))
    index.apply("small", 0, batch(chain_event(1, 20)))
    for number in range(20):
        index.apply("big", 0, batch(chain_event(10_000 * (number + 1), 30)))
    assert index.resident("small", 0) == 20
    assert index.stats().known <= 200
    assert index.stats().evicted >= 400


def test_orphans_are_bounded(twin: Twin) -> None:
    """Events whose parent never comes are dropped, the oldest first, and counted."""
    index = twin.PrefixIndex(IndexLimits(max_held=10))
    dropped = sum(
        index.apply("w", 0, batch(chain_event(100 * number, 4, parent=100 * number + 50))).dropped
        for number in range(1, 6)
    )
    assert dropped == index.stats().dropped == 12
    assert index.stats().held == index.stats().known == 8
    index.apply("w", 0, batch(chain_event(450, 1), chain_event(150, 1)))
    assert index.resident("w", 0) == 2 + 4


def test_placeholders_without_removals_are_bounded(twin: Twin) -> None:
    """A connector that stores without tokens and never removes cannot fill the memory (spec: engine-events §2.7)."""
    index = twin.PrefixIndex(IndexLimits(max_held=100))
    for number in range(1000):
        index.apply("w", 0, batch(Stored(hashes=(number,), tier=Tier.EXTERNAL, connector=True)))
    assert index.stats().known == index.stats().held == 100


def test_blocks_that_left_are_remembered_within_a_bound(twin: Twin) -> None:
    """A block that left can still be a parent; the oldest are forgotten, but none (here 0) with resident children."""
    index = twin.PrefixIndex(IndexLimits(max_remembered=4))
    index.apply("w", 0, batch(stored(range(10)), removed([0])))
    index.apply("w", 0, batch(removed(range(9, 2, -1))))
    assert index.stats().known == 2 + 4 + 1
    index.apply("w", 0, batch(stored([3], 2), stored([0])))
    assert reach(index, range(10)) == 4
    assert index.stats().holed == 0


@pytest.mark.long
def test_memory_is_given_back() -> None:
    """Removing the workers returns what their blocks took, shared table included (here the Python twin's, which can be
    traced)."""
    tracemalloc.start()
    try:
        index = PYTHON.PrefixIndex()
        empty = tracemalloc.get_traced_memory()[0]
        for worker in range(4):
            for number in range(1, 3):
                index.apply(f"w{worker}", 0, batch(chain_event(100_000 * number + 10_000_000 * worker, 1_800)))
        full = tracemalloc.get_traced_memory()[0] - empty
        assert full / index.stats().resident < 400
        for worker in range(4):
            index.remove_worker(f"w{worker}")
        assert tracemalloc.get_traced_memory()[0] - empty < full / 50
    finally:
        tracemalloc.stop()


def test_places_are_used_again(twin: Twin) -> None:
    """Workers that come and go do not make the masks longer."""
    index = twin.PrefixIndex()
    for number in range(200):
        index.apply(f"w{number}", 0, batch(stored([0, 1])))
        if number >= 3:
            index.remove_worker(f"w{number - 3}")
        assert set(tiers(index, chain_of_names([0, 1]))) == {
            (f"w{kept}", 0) for kept in range(max(0, number - 2), number + 1)
        }
    if twin is PYTHON:
        assert max(index._masks.presence.values()).bit_length() <= 4


def test_load_replaces_only_what_is_asked_for(twin: Twin) -> None:
    """A snapshot of one worker leaves the others alone, and of its ranks only those named are replaced."""
    source = twin.PrefixIndex()
    source.apply("w", 0, batch(stored([0, 1, 2]), stored([7], 6)))
    source.apply("w", 1, batch(stored([0])))
    source.apply("x", 0, batch(stored([5])))
    index = twin.PrefixIndex()
    index.apply("w", 0, batch(stored([0]), stored([9], 0)))
    index.apply("w", 1, batch(stored([0, 1])))
    index.apply("y", 0, batch(stored([0])))
    assert index.load(source.dump("w"), [("w", 0)]) == [("w", 0)]
    assert tiers(index, chain_of_names([0, 1, 2])) == {
        ("w", 0): (3, 0, 0, 0),
        ("w", 1): (2, 0, 0, 0),
        ("y", 0): (1, 0, 0, 0),
    }
    index.apply("w", 0, batch(stored([6])))
    assert reach(index, [6]) == 1
    assert index.stats().held == 0
    assert index.load(source.dump("w")) == [("w", 0), ("w", 1)]
    assert index.resident("w", 1) == 1


def test_a_loaded_index_goes_on_like_its_source(twin: Twin) -> None:
    """Orphans, holes, remembered blocks, other groups and the block size survive a dump."""
    source = twin.PrefixIndex()
    source.apply(
        "w",
        0,
        batch(
            stored([0, 1, 2, 3], group=1, kind="full_attention", salt="s"),
            stored([0], group=0, kind="sliding_window"),
            removed([1, 3], group=1),
            stored([6], 5, group=1),
        ),
    )
    copy = twin.PrefixIndex()
    copy.load(source.dump())
    assert copy.stats() == source.stats()
    assert copy.block_size("w", 0) == 4
    for index in (source, copy):
        result = index.apply(
            "w",
            0,
            batch(stored([1], 0, group=1), stored([4], 3, group=1), stored([5], 4, group=1), removed([0], group=0)),
        )
        assert result.other_groups == 1
        assert tiers(index, chain_of_names(range(7), salt="s")) == {("w", 0): (3, 0, 0, 0)}
        index.apply("w", 0, batch(stored([3], 2, tier=Tier.HOST, group=1, with_tokens=False)))
        assert tiers(index, chain_of_names(range(7), salt="s")) == {("w", 0): (6, 1, 0, 0)}
    assert copy.content() == source.content()


def test_damaged_dumps_change_nothing(twin: Twin) -> None:
    """Other bytes, other versions and columns that contradict each other are refused by name."""
    index = twin.PrefixIndex()
    index.apply("w", 0, batch(stored([0, 1, 2])))
    before = index.content()
    good = msgspec.msgpack.decode(index.dump())
    group = good[1][0]["groups"][0]
    bad: list[bytes] = [b"", b"junk", index.dump()[:-3], msgspec.msgpack.encode([good[0], good[1], 2])]
    for column, value in (
        ("engines", group["engines"][:-3]),
        ("engines", group["engines"][:8] * 3),
        ("numbers", b"\xff" * 12),
        ("seeds", b"\x07\0\0\0" * 3),
        ("owns", group["owns"][8:]),
        ("copies", b""),
        ("roots", b""),
        ("connector_copies", -1),
        ("block_size", 0),
        ("seed_values", [-1]),
    ):
        changed = msgspec.msgpack.decode(index.dump())
        changed[1][0]["groups"][0][column] = value
        bad.append(msgspec.msgpack.encode(changed))
    for data in bad:
        with pytest.raises(BadDumpError):
            index.load(data)
        assert index.content() == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hashes", []),
        ("hashes", [-1]),
        ("tokens", b"abc"),
        ("tokens", bytes(4)),
        ("tokens", bytes(32)),
        ("parent", -1),
        ("eagle", True),
        ("misaligned", True),
        ("tier", 4),
        ("mm", {0: [-1]}),
    ],
)
def test_a_dump_brings_in_no_event_that_could_not_wait(twin: Twin, field: str, value: object) -> None:
    """Found by fuzzing: such an event was loaded, and raised when its parent came at last."""
    source = twin.PrefixIndex()
    source.apply("w", 0, batch(stored([0]), stored([6], 5)))
    dump = msgspec.msgpack.decode(source.dump())
    [event] = dump[1][0]["groups"][0]["waiting"]
    event[field] = value
    index = twin.PrefixIndex()
    with pytest.raises(BadDumpError):
        index.load(msgspec.msgpack.encode(dump))
    assert index.ranks() == []


@pytest.mark.parametrize("rank", [-1, 2**32])
def test_a_dump_brings_in_no_rank_that_is_none(twin: Twin, rank: int) -> None:
    """Ranks are u32, as in every batch."""
    source = twin.PrefixIndex()
    source.apply("w", 0, batch(stored([0])))
    dump = msgspec.msgpack.decode(source.dump())
    dump[1][0]["rank"] = rank
    with pytest.raises(BadDumpError):
        twin.PrefixIndex().load(msgspec.msgpack.encode(dump))


@given(st.data())
def test_any_damage_is_survived(twin: Twin, data: st.DataObject) -> None:
    """A dump with changed bytes is refused, or loads into an index that still works."""
    source = twin.PrefixIndex()
    source.apply("w", 0, batch(stored([0, 1, 2]), stored([5], 4), removed([2])))
    dump = bytearray(source.dump())
    for _ in range(data.draw(st.integers(1, 3))):
        dump[data.draw(st.integers(0, len(dump) - 1))] = data.draw(st.integers(0, 255))
    index = twin.PrefixIndex()
    try:
        index.load(bytes(dump))
    except BadDumpError:
        return
    for worker, rank in index.ranks():
        index.apply(worker, rank, batch(stored([0, 1, 2, 3]), removed([0, 1])))
        index.match(chain_of_names([0, 1, 2]))
        index.remove_worker(worker)
    assert index.stats().unique == 0


def test_groups_of_a_rank_are_bounded(twin: Twin) -> None:
    """An engine that names a new group with every event: the first ones are kept, the others are counted."""
    index = twin.PrefixIndex()
    result = index.apply(
        "w",
        0,
        batch(
            *(stored([0], group=number, kind="full_attention") for number in range(1000)),
            *(stored([0], group=number, kind="sliding_window") for number in range(1000, 2000)),
        ),
    )
    assert result.rejected["too_many_groups"] == 1000 - MAX_GROUPS
    assert index.stats().resident == MAX_GROUPS
    [dump] = decode_dump(index.dump()).ranks
    assert len(dump.other_kinds) <= MAX_GROUPS
    assert result.other_groups == 1000


def test_a_dropped_placeholder_leaves_those_who_wait_for_its_parent(twin: Twin) -> None:
    """Offloaded blocks without tokens may name a parent too: dropping them forgets nobody who waits for that parent."""
    index = twin.PrefixIndex(IndexLimits(max_held=2))
    index.apply("w", 0, batch(stored([5], 4, with_tokens=False)))
    index.apply("w", 0, batch(stored([6], 4)))
    assert index.apply("w", 0, batch(stored([7], 4))).dropped == 1
    index.apply("w", 0, batch(stored([4])))
    assert reach(index, [4, 6]) == reach(index, [4, 7]) == 2
