"""Chains over text, for prompts whose tokens nobody has counted: blocks of so many bytes of UTF-8 instead of tokens.

Hashed and chained like blocks of tokens (`kvcore.hashing`; spec: index-and-routing §1.2), under a seed of their own, so
that no text chain is ever taken for a chain of tokens: local hash = XXH3-64 of the block's bytes, its seed carrying
adapter and salt; chain hash = that of the first block, then XXH3-64 over LE64(chain hash before) and LE64(local hash).
Only full blocks have an identity.
"""

from __future__ import annotations

from struct import Struct

from xxhash import xxh3_64_intdigest

from kvcore.errors import BlockSizeError
from kvcore.hashing import SEED, seed_of

TEXT_SEED = int.from_bytes(b"tg.text\x01", "little")
"""Seed of the chain, and added to the seed of the local hashes."""

BYTES_PER_TOKEN = 4
"""A token is about so many bytes of English or code."""

_MASK64 = (1 << 64) - 1
_PAIR = Struct("<QQ")
_HASH = Struct("<Q")

Text = bytes | bytearray | memoryview


class TextChain:
    """Takes a prompt's text in pieces and chains its blocks; of the text it keeps less than a block.

    ``max_bytes``: of a longer text its beginning is chained. Raises `BlockSizeError`.
    """

    def __init__(
        self, block_bytes: int, *, max_bytes: int, adapter: str | None = None, salt: str | None = None
    ) -> None:
        if block_bytes < 1:
            raise BlockSizeError(block_bytes)
        self._block_bytes = block_bytes
        self._left = max_bytes
        self._seed = (seed_of(adapter, salt) - SEED + TEXT_SEED) & _MASK64
        self._partial = bytearray()
        self._parent: int | None = None
        self._chain = bytearray()

    @property
    def full(self) -> bool:
        """Whether further text would be ignored."""
        return self._left <= 0

    def feed(self, text: Text) -> None:
        """The next bytes of the text, UTF-8; they may end anywhere."""
        view = memoryview(text)[: self._left]
        self._left -= len(view)
        size = self._block_bytes
        if self._partial:
            missing = size - len(self._partial)
            self._partial += view[:missing]
            if len(self._partial) < size:
                return
            self._add(self._partial)
            self._partial = bytearray()
            view = view[missing:]
        whole = len(view) // size * size
        for start in range(0, whole, size):
            self._add(view[start : start + size])
        self._partial += view[whole:]

    def chain(self) -> bytes:
        """Chain hashes of the full blocks so far, u64 little-endian back to back."""
        return bytes(self._chain)

    def _add(self, block: Text) -> None:
        local = xxh3_64_intdigest(block, self._seed)
        parent = self._parent
        self._parent = local if parent is None else xxh3_64_intdigest(_PAIR.pack(parent, local), TEXT_SEED)
        self._chain += _HASH.pack(self._parent)
