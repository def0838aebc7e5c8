"""Pages hashed as SGLang's storage hashes them: every vector known, and the rules around them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest

from kvcore.errors import BlockSizeError, TokensError
from kvcore.hashing import pack_tokens
from kvcore.page_hash import namespace_seed, page_digests
from tests.unit.kvcore.pool_making import FOLDER, POOL_TWINS, PoolTwin

VECTORS: list[dict[str, Any]] = json.loads((FOLDER / "page_hashes.json").read_text("utf-8"))
WIDE = 1 << 32

pytestmark = pytest.mark.parametrize("twin", POOL_TWINS, ids=str)


def hexed(pages: bytes, size: int) -> list[str]:
    return [pages[at : at + size].hex() for at in range(0, len(pages), size)]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: str(vector["name"])[:1])
def test_captured_vectors(twin: PoolTwin, vector: dict[str, Any]) -> None:
    """The six of the compiled extension of sglang 0.5.23 (spec: pool-events §6), first 16 bytes as the index has
    them."""
    tokens, size, pairs, salt = vector["tokens"], vector["page_size"], vector["pairs"], vector["salt"]
    assert hexed(page_digests(tokens, size, pairs=pairs, salt=salt), 32) == vector["page_hashes"]
    if max(tokens) < WIDE:
        pages = twin.page_hashes(pack_tokens(tokens), size, pairs=pairs, salt=salt)
        assert hexed(pages, 16) == [page[:32] for page in vector["page_hashes"]]
        assert page_digests(pack_tokens(tokens), size, pairs=pairs, salt=salt).hex() == "".join(vector["page_hashes"])


@pytest.mark.parametrize(
    ("tokens", "size", "pairs", "begins"),
    [
        (range(1, 11), 4, False, ("cf97adee", "4ebfa8a1")),
        (range(10, 15), 2, True, ("4bde8267", "75ab93a7")),
    ],
    ids=["plain", "pairs"],
)
def test_vectors_of_the_peer(twin: PoolTwin, tokens: range, size: int, pairs: bool, begins: tuple[str, ...]) -> None:
    """Those of index-and-routing §1.4; the pairs cover one token more than they are."""
    pages = hexed(twin.page_hashes(pack_tokens(tokens), size, pairs=pairs), 16)
    assert tuple(page[:8] for page in pages) == begins


def test_the_captured_set_was_written_under_these_pages(twin: PoolTwin) -> None:
    """The tokens of the captured HiCache keys give the hashes in them."""
    for case in json.loads((FOLDER / "hicache_pages.json").read_text("utf-8")).values():
        first, last = map(int, case["tokens"].split(".."))
        pages = twin.page_hashes(pack_tokens(range(first, last + 1)), case["page"])
        assert hexed(pages, 16) == [page[:32] for page in case["pages"]]


def test_a_namespace_changes_every_page(twin: PoolTwin) -> None:
    """The seed is the one of the spec; adapter and salt are told apart, and nothing is the same as an empty text."""
    assert namespace_seed(salt="tenant-a").hex() == "9d303df3761a7561353e2ae7459eb4ab12a08abb37951b696aa4f0c059c7caaa"
    tokens = pack_tokens(range(8))
    names = [{}, {"adapter": "é"}, {"salt": "é"}, {"adapter": "é", "salt": "é"}, {"adapter": "éé"}]
    pages = [page for name in names for page in hexed(twin.page_hashes(tokens, 4, **name), 16)]
    assert len(set(pages)) == len(pages) == 10
    assert twin.page_hashes(tokens, 4, adapter="", salt="") == twin.page_hashes(tokens, 4)


def test_only_full_pages(twin: PoolTwin) -> None:
    """A tail has no page, and with pairs the last token has no pair."""
    assert twin.page_hashes(b"", 4) == twin.page_hashes(pack_tokens(range(3)), 4) == b""
    assert len(twin.page_hashes(pack_tokens(range(7)), 4)) == 16
    assert twin.page_hashes(pack_tokens(range(4)), 4, pairs=True) == b""
    assert len(twin.page_hashes(pack_tokens(range(5)), 4, pairs=True)) == 16


def test_any_buffer_will_do(twin: PoolTwin) -> None:
    """Tokens are taken from wherever they lie."""
    tokens = pack_tokens(range(9))
    expected = twin.page_hashes(tokens, 4)
    assert twin.page_hashes(bytearray(tokens), 4) == twin.page_hashes(memoryview(tokens), 4) == expected
    digest = hashlib.sha256(tokens[:16]).digest()
    assert expected == digest[:16] + hashlib.sha256(digest + tokens[16:32]).digest()[:16]


def test_bad_arguments(twin: PoolTwin) -> None:
    """Each says whose fault it is."""
    with pytest.raises(BlockSizeError):
        twin.page_hashes(b"", 0)
    with pytest.raises(TokensError):
        twin.page_hashes(b"abc", 4)
    with pytest.raises(TokensError):
        page_digests([-1], 1)
