"""Blocks that are told by their hashes alone, in both twins."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import HashesError
from kvcore.events import Removed, Stored, Tier
from kvcore.hashing import pack_chain, unpack_chain
from tests.unit.kvcore.making import BLOCK_SIZE, batch, chain_of_names, tokens_of
from tests.unit.kvcore.twins import Twin

NAMES = [1, 2, 3, 4, 5, 6]
CHAIN = chain_of_names(NAMES)
OWNS = unpack_chain(CHAIN)


def packed(start: int, stop: int) -> tuple[bytes, bytes]:
    """Engine hashes and chain hashes of some blocks."""
    return pack_chain(range(100 + start, 100 + stop)), pack_chain(OWNS[start:stop])


def stored(start: int, stop: int, tier: Tier = Tier.DEVICE) -> Stored:
    """The same with tokens."""
    parent = 99 + start if start else None
    tokens = tokens_of(NAMES[start:stop])
    hashes = tuple(range(100 + start, 100 + stop))
    return Stored(hashes=hashes, parent=parent, tokens=tokens, block_size=BLOCK_SIZE, tier=tier)


RUNS = st.tuples(st.integers(0, 5), st.integers(1, 6)).map(lambda ends: (min(ends), max(max(ends), min(ends) + 1)))


@given(st.lists(st.tuples(RUNS, st.sampled_from(list(Tier)), st.booleans(), st.booleans()), max_size=12))
def test_given_hashes_are_as_good_as_tokens(twin: Twin, steps: list[tuple[tuple[int, int], Tier, bool, bool]]) -> None:
    """Whatever comes by hash or by tokens, in whatever order: a rank reaches as far as its blocks do."""
    index = twin.PrefixIndex()
    copies: dict[tuple[int, Tier], int] = {}
    by_tokens: set[int] = set()
    for (start, stop), tier, by_hash, remove in steps:
        blocks = range(start, stop)
        if remove:
            index.apply("w", 0, batch(Removed(hashes=tuple(100 + at for at in blocks), tier=tier)))
            for at in blocks:
                copies[at, tier] = max(copies.get((at, tier), 0) - 1, 0)
            continue
        if not by_hash and start and start - 1 not in by_tokens:
            by_hash = True  # tokens would wait for the parent
        if by_hash:
            result = index.apply_hashes("w", 0, *packed(start, stop), 99 + start if start else None, tier)
        else:
            result = index.apply("w", 0, batch(stored(start, stop, tier)))
        assert (result.stored, result.held) == (stop - start, 0)
        by_tokens.update(blocks)
        for at in blocks:
            copies[at, tier] = copies.get((at, tier), 0) + 1
    reach = 0
    while any(copies.get((reach, tier)) for tier in Tier):
        reach += 1
    assert [match.reach for match in index.match(CHAIN)] == ([reach] if reach else [])


def test_an_unknown_parent_is_a_hole_and_nothing_waits(twin: Twin) -> None:
    index = twin.PrefixIndex()
    result = index.apply_hashes("w", 0, *packed(2, 6), 101)
    assert (result.stored, result.held, index.stats().held, index.stats().holed) == (4, 0, 0, 1)
    assert list(index.match(CHAIN)) == []
    index.apply_hashes("w", 0, *packed(0, 2))
    assert [match.reach for match in index.match(CHAIN)] == [6]


def test_what_waited_for_the_blocks_waits_no_longer(twin: Twin) -> None:
    index = twin.PrefixIndex()
    assert index.apply("w", 0, batch(stored(2, 6))).held == 4
    index.apply_hashes("w", 0, *packed(0, 2))
    assert index.stats().held == 0
    assert [match.reach for match in index.match(CHAIN)] == [6]


def test_a_hash_with_another_meaning_is_a_conflict(twin: Twin) -> None:
    index = twin.PrefixIndex()
    index.apply("w", 0, batch(stored(0, 3)))
    result = index.apply_hashes("w", 0, pack_chain([101, 102]), pack_chain([7, 8]), 100)
    assert (result.stored, dict(result.rejected)) == (0, {"hash_conflict": 1})
    assert [match.reach for match in index.match(CHAIN)] == [3]


@pytest.mark.parametrize(
    ("hashes", "chain"), [(b"1234567", b"12345678"), (b"12345678", b"1234567"), (bytes(16), bytes(8))]
)
def test_hashes_that_do_not_fit_are_refused(twin: Twin, hashes: bytes, chain: bytes) -> None:
    index = twin.PrefixIndex()
    with pytest.raises(HashesError) as refused:
        index.apply_hashes("w", 0, hashes, chain)
    assert refused.value.reason == "bad_hashes"
    assert index.ranks() == []


@pytest.mark.parametrize("tier", [-1, 4])
def test_a_tier_that_is_none_is_refused(twin: Twin, tier: int) -> None:
    index = twin.PrefixIndex()
    with pytest.raises(ValueError, match="is not a valid Tier"):
        index.apply_hashes("w", 0, *packed(0, 1), None, tier)
    assert index.ranks() == []
