"""The native index against the Python twin: the same random histories, and every answer, count and dump compared."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import msgspec
import pytest
import tidegate_kvcore as native
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore import index as twin
from kvcore.errors import BadBatchError, BadDumpError
from kvcore.events import Batch, Cleared, Event, Removed, Stored, Tier, decode_batch
from kvcore.hashing import chain_hashes, pack_tokens
from kvcore.residency import ApplyResult
from tests.unit.kvcore import captured

BLOCK_SIZE = 4
# A forest of blocks: the parent of each.
PARENTS: tuple[int | None, ...] = (None, 0, 1, 2, 1, 4, 0, 6, None, 8, 9)
RANKS = (("a", 0), ("a", 1), ("b", 7))
SALTS = (None, "s")


def path(node: int) -> list[int]:
    """Blocks from the root to ``node``."""
    parent = PARENTS[node]
    return [*([] if parent is None else path(parent)), node]


def tokens_of(names: list[int], eagle: bool = False) -> bytes:
    tokens = [name * 10 + offset for name in names for offset in range(BLOCK_SIZE)]
    return pack_tokens([*tokens, 7] if eagle else tokens)


CHAINS = [
    chain_hashes(tokens_of(path(node), eagle), BLOCK_SIZE, salt=salt, mm=mm, eagle=eagle)
    for node in range(len(PARENTS))
    for salt in SALTS
    for mm, eagle in ((None, False), ({0: (5,)}, False), (None, True))
]
GROUPS: tuple[tuple[int | None, str | None], ...] = (
    (None, None),
    (0, None),
    (0, "full_attention"),
    (1, "mla_attention"),
    (2, "sliding_window"),
    (0, "sliding_window"),
    (3, None),
)
PLACES = ((Tier.DEVICE, False), (Tier.DEVICE, False), (Tier.HOST, True), (Tier.DISK, False), (Tier.EXTERNAL, True))


@st.composite
def stores(draw: st.DrawFn) -> Stored:
    """Some blocks below one another, with tokens or without, under one of two names each, in any namespace."""
    names = path(draw(st.integers(0, len(PARENTS) - 1)))[-draw(st.integers(1, 4)) :]
    other_name = 100 * draw(st.sampled_from([0, 0, 0, 1]))
    above = PARENTS[names[0]]
    parent = None if above is None else 1 + above + 100 * draw(st.sampled_from([0, 0, 0, 1]))
    with_tokens = draw(st.sampled_from([True, True, True, False]))
    eagle = with_tokens and draw(st.integers(0, 15)) == 0
    size = draw(st.sampled_from([BLOCK_SIZE] * 20 + [2])) if not eagle else BLOCK_SIZE
    tier, connector = draw(st.sampled_from(PLACES))
    group, kind = draw(st.sampled_from([GROUPS[0]] * 8 + list(GROUPS)))
    tokens = tokens_of(names, eagle)
    return Stored(
        hashes=tuple(1 + name + other_name for name in names),
        parent=parent,
        tokens=(tokens if size == BLOCK_SIZE else tokens[: len(tokens) // 2]) if with_tokens else b"",
        tier=tier,
        connector=connector,
        salt=draw(st.sampled_from([None, None, None, "s"])),
        mm=draw(st.sampled_from([{}] * 9 + [{0: (5,)}])),
        group=group,
        group_kind=kind,
        eagle=eagle,
        misaligned=draw(st.integers(0, 30)) == 0,
    )


removals = st.builds(
    lambda names, tier, group: Removed(hashes=tuple(names), tier=tier, group=group),
    st.lists(st.integers(1, len(PARENTS)) | st.integers(101, 100 + len(PARENTS)), min_size=1, max_size=4),
    st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, Tier.HOST, Tier.DISK, Tier.EXTERNAL]),
    st.sampled_from([None, None, None, 0, 1, 2]),
)
EVENTS: st.SearchStrategy[Event] = st.one_of(stores(), stores(), stores(), removals, removals)
BATCHES = st.builds(
    lambda events, cleared: Batch(ts=0.0, rank=None, events=(*events, Cleared()) if cleared else tuple(events)),
    st.lists(EVENTS, min_size=1, max_size=4),
    st.integers(0, 12).map(lambda number: number == 0),
)
STEPS = st.one_of(
    *[st.tuples(st.just("apply"), st.sampled_from(RANKS), BATCHES)] * 6,
    st.tuples(st.just("clear"), st.sampled_from(RANKS), st.none()),
    st.tuples(st.just("remove"), st.sampled_from(RANKS), st.none()),
    st.tuples(st.just("reload"), st.sampled_from(RANKS), st.none()),
)


def found(index: Any, chain: bytes) -> dict[tuple[str, int], tuple[int, int, int, int]]:
    matches = index.match(chain)
    answer = {(one.worker, one.rank): (one.device, one.host, one.disk, one.external) for one in matches}
    assert len(answer) == len(matches)
    return answer


def applied(result: Any) -> tuple[Any, ...]:
    return tuple(getattr(result, name) for name in ApplyResult.__dataclass_fields__)


def compare(one: Any, other: Any) -> None:
    """Everything that can be asked of an index."""
    assert one.content() == other.content()
    assert one.stats() == other.stats()
    assert other.stats() == one.stats()
    assert one.ranks() == other.ranks()
    for chain in CHAINS:
        assert found(one, chain) == found(other, chain)
    for rank in RANKS:
        assert one.resident(*rank) == other.resident(*rank)
        assert one.block_size(*rank) == other.block_size(*rank)


def run(steps: list[tuple[str, tuple[str, int], Any]], limits: twin.IndexLimits, *, exact: bool) -> None:
    pure: Any = twin.PrefixIndex(limits)
    fast: Any = native.PrefixIndex(limits)
    for what, rank, batch in steps:
        match what:
            case "apply":
                expected = pure.apply(*rank, batch)
                result = fast.apply(*rank, batch)
                if exact:
                    assert applied(result) == applied(expected)
                    assert result == expected
                    assert expected == result
            case "clear":
                pure.clear_rank(*rank)
                fast.clear_rank(*rank)
            case "remove":
                pure.remove_worker(rank[0])
                fast.remove_worker(rank[0])
            case _:
                # Each twin goes on from what the other one wrote.
                dumps = pure.dump(), fast.dump()
                if exact:
                    assert pure.load(dumps[1]) == fast.load(dumps[0])
        if exact:
            compare(fast, pure)
        else:
            assert fast.stats().known <= limits.max_blocks
            fast.load(fast.dump())
    for worker, _ in RANKS:
        pure.remove_worker(worker)
        fast.remove_worker(worker)
    stats = fast.stats()
    assert (stats.ranks, stats.resident, stats.unique, stats.known, stats.held, stats.holed) == (0, 0, 0, 0, 0, 0)


@settings(max_examples=300, deadline=None)
@given(st.lists(STEPS, max_size=25))
def test_any_history(steps: list[tuple[str, tuple[str, int], Any]]) -> None:
    """After every step both twins hold, count and answer the same, whatever came, and load each other's dumps."""
    run(steps, twin.IndexLimits(), exact=True)


@settings(max_examples=100, deadline=None)
@given(st.lists(STEPS, max_size=25), st.integers(0, 6))
def test_any_history_with_few_that_may_wait(steps: list[tuple[str, tuple[str, int], Any]], held: int) -> None:
    """The oldest that wait are dropped alike."""
    run(steps, twin.IndexLimits(max_held=held), exact=True)


def plainer(batch: Batch) -> Batch:
    """Without connectors: what they keep when a pool is cleared is remembered in an order of each twin's own."""
    events = [
        msgspec.structs.replace(event, connector=False) if isinstance(event, Stored) else event
        for event in batch.events
    ]
    return msgspec.structs.replace(batch, events=tuple(events))


@settings(max_examples=100, deadline=None)
@given(st.lists(STEPS.filter(lambda step: step[0] != "reload"), max_size=25), st.integers(0, 3))
def test_any_history_with_few_remembered(steps: list[tuple[str, tuple[str, int], Any]], remembered: int) -> None:
    """The oldest remembered blocks are forgotten alike."""
    steps = [(what, rank, plainer(batch) if batch else None) for what, rank, batch in steps]
    run(steps, twin.IndexLimits(max_remembered=remembered), exact=True)


@settings(max_examples=100, deadline=None)
@given(st.lists(STEPS, max_size=25), st.integers(0, 40), st.integers(0, 3))
def test_any_history_under_a_tight_bound(
    steps: list[tuple[str, tuple[str, int], Any]], blocks: int, remembered: int
) -> None:
    """Which blocks go beyond the bound is each twin's own affair; that they go, and that nothing is left, is not."""
    run(steps, twin.IndexLimits(max_blocks=blocks, max_remembered=remembered), exact=False)


def big_chain(first: int, blocks: int, parent: int | None = None, tier: Tier = Tier.DEVICE) -> Stored:
    hashes = tuple(range(first, first + blocks))
    tokens = pack_tokens([number * 3 + offset for number in hashes for offset in range(BLOCK_SIZE)])
    return Stored(hashes=hashes, parent=parent, tokens=tokens, tier=tier)


def batch(*events: Event) -> Batch:
    return Batch(ts=0.0, rank=None, events=events)


def both() -> tuple[Any, Any]:
    return twin.PrefixIndex(), native.PrefixIndex()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 69), st.integers(1, 700)), min_size=1, max_size=70),
    st.lists(st.tuples(st.integers(0, 69), st.integers(0, 699), st.booleans()), max_size=40),
    st.booleans(),
)
def test_long_chains_of_many_ranks(
    reaches: list[tuple[int, int]], gone: list[tuple[int, int, bool]], tail_first: bool
) -> None:
    """More ranks than a word has bits, each with another reach; some lose blocks in the middle, or move them to a
    lower tier; then all ends are found."""
    pure, fast = both()
    event = big_chain(1, 700)
    chain = chain_hashes(event.tokens, BLOCK_SIZE)
    for rank, reach in reaches:
        part = msgspec.structs.replace(event, hashes=event.hashes[:reach], tokens=event.tokens[: reach * 16])
        for index in (pure, fast):
            index.apply("w", rank, batch(part))
    for rank, at, moved in gone:
        events: list[Event] = [Removed(hashes=tuple(range(at + 1, 701)) if tail_first else (at + 1,))]
        if moved:
            events.insert(0, Stored(hashes=(at + 1,), tier=Tier.DISK, connector=True))
        for index in (pure, fast):
            index.apply("w", rank, batch(*events))
    for length in (0, 1, 2, 3, 49, 699, 700):
        asked = chain[: length * 8]
        assert found(fast, asked) == found(pure, asked)
    assert fast.stats() == pure.stats()


def test_many_copies() -> None:
    """Copies are counted to 65535 a tier, as by the twin."""
    pure, fast = both()
    root = big_chain(1, 2)
    for event in (
        root,
        Stored(hashes=(1,) * 300, tier=Tier.HOST),
        Removed(hashes=(1,)),
        Stored(hashes=(2,) * 255, tier=Tier.HOST),
        Stored(hashes=(2,) * 255, tier=Tier.DISK),
        Stored(hashes=(2,) * 255, tier=Tier.EXTERNAL),
        Stored(hashes=(2,) * 254),
        Stored(hashes=(1,) * 70_000, tier=Tier.EXTERNAL),
        Removed(hashes=(1,) * 299, tier=Tier.HOST),
        Removed(hashes=(2,) * 255),
        Removed(hashes=(1,), tier=Tier.HOST),
    ):
        assert fast.apply("w", 0, batch(event)) == pure.apply("w", 0, batch(event))
        assert fast.content() == pure.content()
    copy = native.PrefixIndex()
    copy.load(fast.dump())
    assert copy.content() == pure.content()


@pytest.mark.parametrize("make", [twin.PrefixIndex, native.PrefixIndex])
def test_children_of_a_block_with_several_names(make: Any) -> None:
    """0 under two names with a child under each, removed, back under a third name and then the first; its children
    go: the hole that this leaves is found, however the chain is searched."""

    def one(engine: int, names: list[int], parent: int | None = None) -> Stored:
        return Stored(hashes=(engine,), parent=parent, tokens=tokens_of(names))

    index = make()
    for event in (
        *(one(1, [0]), one(2, [0]), one(11, [1], 1), one(12, [2], 2), one(21, [3], 11)),
        *(Removed(hashes=(1, 2)), one(3, [0]), one(1, [0]), Removed(hashes=(12,)), Removed(hashes=(11,))),
    ):
        index.apply("w", 0, batch(event))
    assert found(index, chain_hashes(tokens_of([0, 1, 3]), BLOCK_SIZE)) == {("w", 0): (1, 0, 0, 0)}


def test_captured_streams() -> None:
    """Every captured payload, applied as bytes, as native batch and as batch of the Python twin: one and the same."""
    pure, fast = both()
    decoded, converted = native.PrefixIndex(), native.PrefixIndex()
    for row in [*captured.rows("payloads.jsonl"), *captured.rows("streams.jsonl")]:
        payload = row["payload"]
        try:
            expected = pure.apply_payload("w", 0, payload)
        except BadBatchError:
            with pytest.raises(BadBatchError):
                fast.apply_payload("w", 0, payload)
            continue
        assert fast.apply_payload("w", 0, payload) == expected
        assert decoded.apply("w", 0, native.decode_batch(payload)) == expected
        assert converted.apply("w", 0, decode_batch(payload)) == expected
    for index in (fast, decoded, converted):
        assert index.content() == pure.content()
        assert index.stats() == pure.stats()


def steps_of(steps: Generator[None, None, Any]) -> tuple[int, Any]:
    count = 0
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return count, end.value
        count += 1


def test_dumping_and_loading_in_steps() -> None:
    """Some thousands of blocks take several steps; both twins' dumps load; what was given up leaves nothing."""
    pure, fast = both()
    for index in (pure, fast):
        index.apply("w", 0, batch(big_chain(1, 5_000), Removed(hashes=(3, 4, 5))))
        index.apply("w", 1, batch(big_chain(1, 20), big_chain(9_000, 3, parent=8_999)))
    count, data = steps_of(fast.dump_steps())
    assert count > 2
    assert data == fast.dump()
    for dump in (data, pure.dump()):
        copy = native.PrefixIndex()
        steps = copy.prepare(dump)
        for _ in range(4):
            next(steps)
        steps.close()
        assert (copy.ranks(), copy.stats().unique) == ([], 0)
        count, prepared = steps_of(copy.prepare(dump, [("w", 0), ("x", 0)]))
        assert count > 4
        assert list(prepared.ranks) == [("w", 0)]
        assert copy.match(chain_hashes(big_chain(1, 9).tokens, BLOCK_SIZE)) == []
        assert copy.adopt(prepared, {("w", 0)}) == [("w", 0)]
        steps_of(copy.discard(prepared))
        assert copy.content() == {("w", 0): pure.content()["w", 0]}
        assert copy.load(dump) == [("w", 0), ("w", 1)]
        assert copy.content() == pure.content()
        copy.remove_worker("w")
        assert copy.stats().unique == copy.stats().known == 0


def test_prepared_ranks_that_nobody_discards() -> None:
    """They go with the object that holds them; an index of which nothing is left but its prepared ranks lives on."""
    index = native.PrefixIndex()
    index.apply("w", 0, batch(big_chain(1, 100)))
    dump = index.dump()
    index.clear_rank("w", 0)
    _, prepared = steps_of(index.prepare(dump))
    assert index.stats().unique == 100
    del prepared
    assert index.stats().unique == 0
    _, prepared = steps_of(index.prepare(dump))
    del index
    assert list(prepared.ranks) == [("w", 0)]


def test_a_dump_that_changes_on_the_way() -> None:
    """It is given up, with a word; other workers may change."""
    index = native.PrefixIndex()
    for worker in ("v", "w"):
        index.apply(worker, 0, batch(big_chain(1, 5_000)))
    steps = index.dump_steps("w")
    next(steps)
    index.apply("v", 0, batch(Removed(hashes=(5_000,))))
    next(steps)
    index.apply("w", 0, batch(Removed(hashes=(5_000,))))
    with pytest.raises(RuntimeError, match="changed"):
        next(steps)
    with pytest.raises(StopIteration):
        next(steps)


def test_matches_are_a_sequence() -> None:
    """Elements are made when asked for; lists of either twin's matches are equal to it."""
    pure, fast = both()
    for index in (pure, fast):
        index.apply("a", 0, batch(big_chain(1, 3)))
        index.apply("b", 1, batch(big_chain(1, 2)))
    chain = chain_hashes(big_chain(1, 3).tokens, BLOCK_SIZE)
    matches = fast.match(chain)
    ordered: list[Any] = sorted(matches, key=lambda match: match.worker)
    expected = sorted(pure.match(chain), key=lambda match: match.worker)
    assert isinstance(matches, Sequence)
    assert len(matches) == 2
    assert ordered == expected
    assert expected == ordered
    assert ordered[0] == native.RankMatch("a", 0, device=3) == twin.RankMatch("a", 0, device=3)
    assert ordered[0] != twin.RankMatch("a", 0, device=2)
    assert {ordered[0], native.RankMatch("a", 0, 3)} == {ordered[0]}
    assert (ordered[0].reach, repr(ordered[0])) == (3, "RankMatch('a', 0, device=3, host=0, disk=0, external=0)")
    assert matches == list(matches) == matches[:]
    assert matches[-1] == matches[1]
    assert matches[1] in matches
    with pytest.raises(IndexError):
        matches[2]
    fast.remove_worker("a")
    fast.apply("c", 0, batch(big_chain(1, 3)))
    assert {match.worker for match in matches} == {"a", "b"}  # as it was when asked


def test_results_read_well() -> None:
    """What a log line of them says."""
    index = native.PrefixIndex(twin.IndexLimits(max_held=1))
    result = index.apply("w", 0, batch(big_chain(1, 2), Stored(hashes=(9,), misaligned=True)))
    assert "stored=2" in repr(result)
    assert "'misaligned': 1" in repr(result)
    assert "unique=2" in repr(index.stats())
    assert index.limits == twin.IndexLimits(max_held=1)
    assert native.PrefixIndex().limits == twin.IndexLimits()


def test_memory() -> None:
    """At most 64 bytes a (worker, block), all tables included; nearly all of it comes back."""
    index = native.PrefixIndex()
    empty = index.memory_bytes()
    for worker in range(8):
        for number in range(10):
            start = 1 + 10_000 * number + (1_000_000 * worker if number > 5 else 0)
            index.apply(f"w{worker}", 0, batch(big_chain(start, 3_000)))
    stats = index.stats()
    assert stats.resident == 240_000
    assert stats.unique < 120_000
    assert index.memory_bytes() / stats.resident < 64
    for worker in range(8):
        index.remove_worker(f"w{worker}")
    assert index.memory_bytes() < empty + 100_000


def test_blocks_that_left_give_their_memory_back() -> None:
    """Also where the rank stays."""
    index = native.PrefixIndex()
    index.apply("w", 0, batch(big_chain(1, 60_000)))
    full = index.memory_bytes()
    for start in range(60_000, 6_000, -1_000):
        index.apply("w", 0, batch(Removed(hashes=tuple(range(start, start - 1_000, -1)))))
    assert index.resident("w", 0) == 6_000
    assert index.memory_bytes() < full * 0.6
    chain = chain_hashes(big_chain(1, 7_000).tokens, BLOCK_SIZE)
    assert found(index, chain) == {("w", 0): (6_000, 0, 0, 0)}


@pytest.mark.parametrize(
    "broken",
    [
        Stored(hashes=(1, 2), tokens=bytes(4)),
        Stored(hashes=(1,), tokens=b"abc"),
        Stored(hashes=(-1,)),
        Stored(hashes=(1,), tier=7),  # type: ignore[arg-type]
    ],
)
def test_events_made_by_hand_are_checked(broken: Stored) -> None:
    """What no decoder gives is refused before anything of the batch is applied."""
    index = native.PrefixIndex()
    with pytest.raises((ValueError, OverflowError)):
        index.apply("w", 0, batch(big_chain(1, 2), broken))
    assert index.ranks() == []


def test_refused_bytes_change_nothing() -> None:
    """A payload, or a dump, that is none."""
    index = native.PrefixIndex()
    with pytest.raises(BadBatchError):
        index.apply_payload("w", 0, b"junk")
    for junk in (b"", b"junk", b"\xdd\xff\xff\xff\xff", b"\x93\xaetidegate.index\xdd\xff\xff\xff\xff\x01"):
        with pytest.raises(BadDumpError):
            index.load(junk)
    assert index.ranks() == []
