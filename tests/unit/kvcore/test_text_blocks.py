"""Chains over text: whole whatever the pieces, a prefix's chain is a prefix, and no namespace shares with another."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import BlockSizeError
from kvcore.hashing import chain_hashes, unpack_chain
from kvcore.text_blocks import TextChain

LARGE = 1 << 20
PINNED = (15476724154935090918, 7595051239275224833, 15458847491286740680)


def chain_of(
    *pieces: bytes, size: int = 8, limit: int = LARGE, adapter: str | None = None, salt: str | None = None
) -> bytes:
    chain = TextChain(size, max_bytes=limit, adapter=adapter, salt=salt)
    for piece in pieces:
        chain.feed(piece)
    return chain.chain()


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 20), st.integers(0, 100))
def test_pieces_do_not_matter(pieces: list[bytes], size: int, limit: int) -> None:
    """However the text comes, its chain is that of the whole; over the bound, that of its beginning."""
    whole = b"".join(pieces)[:limit]
    assert chain_of(*pieces, size=size, limit=limit) == chain_of(whole, size=size)
    assert len(chain_of(whole, size=size)) == len(whole) // size * 8


@given(st.binary(max_size=100), st.binary(max_size=100), st.binary(max_size=100))
def test_a_longer_text_s_chain_begins_with_the_shorter_s(text: bytes, one: bytes, other: bytes) -> None:
    """A conversation that grows keeps its prefix; two that part have equal blocks up to where they part."""
    assert chain_of(text + one).startswith(chain_of(text))
    shared = len(text) // 8
    assert unpack_chain(chain_of(text + one))[:shared] == unpack_chain(chain_of(text + other))[:shared]


def test_namespaces() -> None:
    """Salt, adapter, both, neither, and tokens of the very same bytes: five chains without a common hash."""
    text = bytes(range(64))
    chains = [
        chain_of(text),
        chain_of(text, salt="a"),
        chain_of(text, adapter="a"),
        chain_of(text, adapter="a", salt="a"),
        chain_hashes(text, 2),
    ]
    hashes = [value for chain in chains for value in unpack_chain(chain)]
    assert len(set(hashes)) == len(hashes) == 5 * 8
    assert chain_of(text, salt="", adapter=None) == chains[0]


def test_the_chain_is_the_one_of_before() -> None:
    """Pinned: replicas of different versions must agree on it."""
    assert unpack_chain(chain_of(b"You are a helpful assistant.")) == PINNED


def test_full_and_unusable_sizes() -> None:
    """It says when further text would be ignored; a block has a byte at least."""
    chain = TextChain(4, max_bytes=6)
    chain.feed(b"12345")
    said = [chain.full]
    chain.feed(b"6789")
    assert [*said, chain.full] == [False, True]
    assert len(chain.chain()) == 8
    with pytest.raises(BlockSizeError):
        TextChain(0, max_bytes=1)
