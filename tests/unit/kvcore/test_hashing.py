"""Hash vectors of the peer's scheme, and the laws that the index relies on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import BlockSizeError, TokensError
from kvcore.hashing import SEED, pack_tokens, unpack_chain, unpack_tokens
from tests.unit.kvcore.twins import Twin

# Spec: index-and-routing §1.3: (tokens, block size, local hashes, chain hashes).
VECTORS: list[tuple[list[int], int, list[int], list[int]]] = [
    ([1, 2, 3, 4], 4, [14643705804678351452], [14643705804678351452]),
    (
        list(range(1, 17)),
        4,
        [14643705804678351452, 16777012769546811212, 483935686894639516, 135165725823939817],
        [14643705804678351452, 4945711292740353085, 12583592247330656132, 1921452330601040443],
    ),
    (
        list(range(1, 11)),
        4,
        [14643705804678351452, 16777012769546811212],
        [14643705804678351452, 4945711292740353085],
    ),
    (
        list(range(64)),
        16,
        [15310707395893867146, 15292316782987903195, 5532946206955930018, 14928757266181269122],
        [15310707395893867146, 13769157705258532664, 11879827756109914528, 3888788807566526800],
    ),
    (
        [0] * 48,
        16,
        [5523182284766269584] * 3,
        [5523182284766269584, 3102875163438626881, 12015872284175039520],
    ),
    (
        [151643, 198, 4294967295, 0, 7, 8, 9, 10],
        4,
        [210505804704918720, 1572364245376095490],
        [210505804704918720, 8211753976559459156],
    ),
    (
        list(range(1000, 1128)),
        64,
        [7337154364384838499, 8394412188204864904],
        [7337154364384838499, 11788397496893737194],
    ),
]


@pytest.mark.parametrize(("tokens", "block_size", "local", "chain"), VECTORS)
def test_vectors(twin: Twin, tokens: list[int], block_size: int, local: list[int], chain: list[int]) -> None:
    """Local and chain hashes equal the peer's published values."""
    packed = pack_tokens(tokens)
    assert twin.local_hashes(packed, block_size, seed=SEED) == local
    assert list(unpack_chain(twin.chain_hashes(packed, block_size))) == chain


@pytest.mark.parametrize(
    ("adapter", "salt", "expected"),
    [
        ("my-lora", None, 15671544057904749233),
        (None, "tenantA", 10762499492036540106),
        ("my-lora", "tenantA", 9879457845537818892),
        (None, "日本", 3689484987721190275),
        ("", "", 14643705804678351452),
    ],
)
def test_namespace_vectors(twin: Twin, adapter: str | None, salt: str | None, expected: int) -> None:
    """Adapter and salt enter through the seed; an empty string adds nothing."""
    tokens = pack_tokens([1, 2, 3, 4])
    assert twin.local_hashes(tokens, 4, seed=twin.seed_of(adapter, salt)) == [expected]
    assert unpack_chain(twin.chain_hashes(tokens, 4, adapter=adapter, salt=salt)) == (expected,)


def test_multimodal_vectors(twin: Twin) -> None:
    """Multimodal hashes are appended in ascending order, whatever order they come in."""
    tokens = pack_tokens([1, 2, 3, 4])
    assert twin.local_hashes(tokens, 4, mm={0: (0xDEADBEEF,)}) == [15207512089340001072]
    assert twin.local_hashes(tokens, 4, mm={0: (1, 2)}) == [5514711936906046382]
    assert twin.local_hashes(tokens, 4, mm={0: (2, 1)}) == [5514711936906046382]
    assert twin.local_hashes(tokens, 4, mm={1: (1, 2)}) == [14643705804678351452]


def test_multimodal_identifier(twin: Twin) -> None:
    """A 64-digit hex digest gives its first 16 digits; any other text is hashed."""
    assert twin.multimodal_hash("00000000deadbeef" + "0" * 48) == 0xDEADBEEF
    assert twin.multimodal_hash("mmhash0") == twin.multimodal_hash("mmhash0") != twin.multimodal_hash("mmhash1")
    assert twin.multimodal_hash("g" * 64) != twin.multimodal_hash("g" * 63)


def test_eagle_vector(twin: Twin) -> None:
    """Under Eagle a block's window is one token longer than its stride."""
    assert twin.local_hashes(pack_tokens(range(1, 10)), 4, eagle=True) == [1914873892905420881, 1929047464662796003]
    assert twin.local_hashes(pack_tokens(range(1, 9)), 4, eagle=True) == [1914873892905420881]
    assert twin.local_hashes(b"", 4, eagle=True) == []


def test_trace_vectors(twin: Twin) -> None:
    """Trace rows hash the partial tail as well (spec: identity-and-traces §2.5)."""
    full = (10773075109927122010, 5890102321129957602, 3801924459721183657)
    assert twin.sequence_hashes_with_tail(pack_tokens([1, 2, 3, 4, 5, 6]), 2) == full
    assert twin.sequence_hashes_with_tail(pack_tokens([1, 2, 3, 4, 5]), 2)[-1] == 2656991839890933969
    assert twin.sequence_hashes_with_tail(pack_tokens([1, 2, 1, 2]), 2) == (10773075109927122010, 8239003849983528482)
    assert twin.sequence_hashes_with_tail(b"", 2) == ()


@given(st.lists(st.integers(0, 2**32 - 1), max_size=60), st.integers(1, 9), st.integers(0, 60))
def test_a_chain_can_be_continued(twin: Twin, tokens: list[int], block_size: int, cut: int) -> None:
    """Hashing in two pieces from any block boundary equals hashing at once; a memoryview hashes like bytes."""
    packed = pack_tokens(tokens)
    whole = twin.chain_hashes(memoryview(packed), block_size, salt="s")
    blocks = min(cut // block_size, len(tokens) // block_size)
    head = twin.chain_hashes(packed[: blocks * block_size * 4], block_size, salt="s")
    parent = unpack_chain(head)[-1] if head else None
    assert whole == head + twin.chain_hashes(packed[blocks * block_size * 4 :], block_size, salt="s", parent=parent)
    assert unpack_tokens(packed) == tokens
    assert len(twin.sequence_hashes_with_tail(packed, block_size)) == -(-len(tokens) // block_size)


def test_bad_arguments(twin: Twin) -> None:
    """A block size below 1, half a token and a token beyond u32 are refused by name."""
    with pytest.raises(BlockSizeError):
        twin.chain_hashes(b"", 0)
    with pytest.raises(TokensError):
        twin.chain_hashes(b"abc", 4)
    with pytest.raises(TokensError):
        pack_tokens([2**32])
    with pytest.raises(TokensError):
        pack_tokens([-1])
