"""The native index against the Python twin: the same random histories, and every answer, count and dump compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import tidegate_kvcore as native
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcore import index as twin
from kvcore.dump import decode_dump
from kvcore.errors import KvCoreError
from kvcore.events import Batch, Cleared, Event, Removed, Stored, Tier
from kvcore.hashing import chain_hashes, pack_tokens

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
    return tuple(getattr(result, name) for name in twin.ApplyResult.__dataclass_fields__)


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
    pure, fast = twin.PrefixIndex(limits), native.PrefixIndex(limits)
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
