"""The native hashing against the published vectors and against the Python twin."""

from __future__ import annotations

import sys
import threading
import time
from array import array

import pytest
import tidegate_kvcore as native
from hypothesis import given
from hypothesis import strategies as st

from kvcore import hashing as twin
from kvcore.errors import BlockSizeError, TokensError
from tests.unit.kvcore.test_hashing import VECTORS

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=80).map(twin.pack_tokens)
TEXTS = st.none() | st.text(max_size=8) | st.text(st.characters(), max_size=4)
U64 = st.integers(0, 2**64 - 1)
MULTIMODAL = st.none() | st.dictionaries(st.integers(-1, 9), st.lists(U64, max_size=4), max_size=4)


@pytest.mark.parametrize(("tokens", "block_size", "local", "chain"), VECTORS)
def test_vectors(tokens: list[int], block_size: int, local: list[int], chain: list[int]) -> None:
    """Local and chain hashes equal the peer's published values (spec: index-and-routing §1.3)."""
    packed = twin.pack_tokens(tokens)
    assert native.local_hashes(packed, block_size) == local
    assert native.chain_hashes(packed, block_size) == twin.pack_chain(chain)


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
def test_namespace_vectors(adapter: str | None, salt: str | None, expected: int) -> None:
    """Adapter and salt enter through the seed; an empty string adds nothing."""
    tokens = twin.pack_tokens([1, 2, 3, 4])
    assert native.chain_hashes(tokens, 4, adapter=adapter, salt=salt) == expected.to_bytes(8, "little")


def test_other_vectors() -> None:
    """Multimodal objects in any order, Eagle windows, and trace rows with a tail."""
    four = twin.pack_tokens([1, 2, 3, 4])
    assert native.local_hashes(four, 4, mm={0: (0xDEADBEEF,)}) == [15207512089340001072]
    assert native.local_hashes(four, 4, mm={0: (2, 1)}) == [5514711936906046382]
    nine = twin.pack_tokens(range(1, 10))
    assert native.local_hashes(nine, 4, eagle=True) == [1914873892905420881, 1929047464662796003]
    five = twin.pack_tokens([1, 2, 3, 4, 5])
    assert native.sequence_hashes_with_tail(five, 2)[-1] == 2656991839890933969


@given(TOKENS, st.integers(1, 12), TEXTS, TEXTS, MULTIMODAL, st.none() | U64, st.booleans())
def test_as_the_twin(
    tokens: bytes,
    block_size: int,
    adapter: str | None,
    salt: str | None,
    mm: dict[int, list[int]] | None,
    parent: int | None,
    eagle: bool,
) -> None:
    """Whatever the arguments, both twins give the same hashes."""
    seed = twin.seed_of(adapter, salt)
    assert native.seed_of(adapter, salt) == seed
    local = twin.local_hashes(tokens, block_size, seed=seed, mm=mm, eagle=eagle)
    assert native.local_hashes(tokens, block_size, seed=seed, mm=mm, eagle=eagle) == local
    assert native.chain_hashes(
        tokens, block_size, adapter=adapter, salt=salt, mm=mm, parent=parent, eagle=eagle
    ) == twin.chain_hashes(tokens, block_size, adapter=adapter, salt=salt, mm=mm, parent=parent, eagle=eagle)
    assert native.sequence_hashes_with_tail(tokens, block_size) == twin.sequence_hashes_with_tail(tokens, block_size)


@pytest.mark.parametrize("block_size", [1, 16, 59, 60, 61, 64, 128, 300, 1024])
def test_every_way_through_the_hash(block_size: int) -> None:
    """Short, middle and long blocks take different ways through XXH3."""
    tokens = twin.pack_tokens(range(7, 3_000))
    for eagle in (False, True):
        expected = twin.chain_hashes(tokens, block_size, salt="s", eagle=eagle)
        assert native.chain_hashes(tokens, block_size, salt="s", eagle=eagle) == expected


HEX = st.text(st.sampled_from("0123456789abcdefABCDEF"), min_size=64, max_size=64)
NEARLY_HEX = st.text(st.sampled_from("0aF \t\nxé"), min_size=60, max_size=66)


@given(st.text(max_size=70) | HEX | NEARLY_HEX | st.text(st.sampled_from("aF \n"), min_size=64, max_size=64))
def test_multimodal_identifiers(identifier: str) -> None:
    """Digests, texts, and texts that are nearly digests."""
    assert native.multimodal_hash(identifier) == twin.multimodal_hash(identifier)


def test_lone_surrogates() -> None:
    """A text that is not UTF-8 has a hash as well."""
    assert native.seed_of("\ud800", "\udfff") == twin.seed_of("\ud800", "\udfff")
    assert native.multimodal_hash("\ud800") == twin.multimodal_hash("\ud800")


def test_kinds_of_buffers() -> None:
    """Bytes, bytearray, memoryview and array hash alike, above and below the size at which the GIL is released."""
    for count in (64, 20_000):
        tokens = twin.pack_tokens(range(count))
        expected = twin.chain_hashes(tokens, 16)
        words = array("I")
        words.frombytes(tokens)
        for buffer in (tokens, bytearray(tokens), memoryview(tokens), words if sys.byteorder == "little" else tokens):
            assert native.chain_hashes(buffer, 16) == expected
    with pytest.raises(ValueError, match="contiguous"):
        native.chain_hashes(memoryview(bytes(64))[::2], 4)
    with pytest.raises(TypeError):
        native.chain_hashes([1, 2, 3, 4], 4)  # type: ignore[arg-type]  # what the type checker refuses


def test_the_gil_is_released() -> None:
    """While a large buffer is hashed, another thread runs Python code."""
    tokens = bytes(64 * 1024 * 1024)
    ticks = 0
    meanwhile: list[int] = []

    def hash_all() -> None:
        before = ticks
        native.chain_hashes(tokens, 16)
        meanwhile.append(ticks - before)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(100.0)  # a thread that holds the GIL is not asked to give it up
    try:
        thread = threading.Thread(target=hash_all)
        thread.start()
        while thread.is_alive():
            ticks += 1
            time.sleep(0)  # gives the GIL up by itself
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert meanwhile[0] > 10


def test_bad_arguments() -> None:
    """A block size below 1 and half a token are refused by name, with the reasons of the twin."""
    for block_size in (0, -1):
        with pytest.raises(BlockSizeError) as caught:
            native.chain_hashes(b"", block_size)
        assert caught.value.reason == "bad_block_size"
        assert caught.value.block_size == block_size
    with pytest.raises(TokensError, match="3 bytes"):
        native.sequence_hashes_with_tail(b"abc", 4)
    assert native.local_hashes(bytes(64), 2**62) == []
    assert native.sequence_hashes_with_tail(bytes(8), 2**62) == twin.sequence_hashes_with_tail(bytes(8), 2**62)
    with pytest.raises(OverflowError):
        native.chain_hashes(bytes(16), 4, parent=-1)
