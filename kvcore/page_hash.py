"""A page's identity in a shared pool: SGLang's SHA-256 chain over token ids.

- digest of page 0: SHA-256 of (namespace seed, if there is one, and) the page's tokens; of page i: SHA-256 of the raw
  32 bytes of the digest before it and the page's tokens (spec: pool-events §6 "Page hash", index-and-routing §1.4);
- tokens as u32 little-endian; a page in which one is larger: one byte 0xFF, then all of the page as u64 little-endian;
- pairs (EAGLE): the unit is (token, token after it), both written; a page of P units covers P + 1 tokens;
- namespace seed, only with an adapter (SGLang's ``extra_key``) or a salt: SHA-256 of
  ``sglang-cache-namespace-v1``, part(adapter), part(salt); part of nothing is 00, of a text 01, its length as u64
  little-endian, and its UTF-8. An empty text is nothing.

Only full pages have an identity. The index keeps 16 bytes of a digest (`kvcore.pool_keys`), so `page_hashes` gives the
first 16; the chain itself goes over all 32.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from kvcore.errors import BlockSizeError, TokensError
from kvcore.hashing import Tokens, unpack_tokens

PAGE_BYTES = 16
"""Bytes of a page's identity in the index."""

_NAMESPACE = b"sglang-cache-namespace-v1"
_TOKEN_BYTES = 4
_U32 = 1 << 32
_U64 = 1 << 64


def page_hashes(
    tokens: Tokens, page_size: int, *, adapter: str | None = None, salt: str | None = None, pairs: bool = False
) -> bytes:
    """Identity of every full page of ``tokens`` (u32 little-endian), 16 bytes each, back to back: what
    `kvcore.pool_index.PoolIndex.match` takes. ``page_size`` in tokens (with ``pairs``: in pairs). Raises
    `BlockSizeError`, `TokensError`."""
    return b"".join(digest[:PAGE_BYTES] for digest in _digests(tokens, page_size, adapter, salt, pairs))


def page_digests(
    tokens: Tokens | Sequence[int],
    page_size: int,
    *,
    adapter: str | None = None,
    salt: str | None = None,
    pairs: bool = False,
) -> bytes:
    """As `page_hashes`, but the whole digests, 32 bytes each; takes token ids as numbers too, up to u64."""
    return b"".join(_digests(tokens, page_size, adapter, salt, pairs))


def namespace_seed(adapter: str | None = None, salt: str | None = None) -> bytes:
    """What comes before the first page's tokens: 32 bytes, or none in the common namespace."""
    if not adapter and not salt:
        return b""
    return hashlib.sha256(_NAMESPACE + _part(adapter) + _part(salt)).digest()


def _part(text: str | None) -> bytes:
    if not text:
        return b"\0"
    encoded = text.encode("utf-8", "surrogatepass")
    return b"\1" + struct.pack("<Q", len(encoded)) + encoded


def _digests(
    tokens: Tokens | Sequence[int], page_size: int, adapter: str | None, salt: str | None, pairs: bool
) -> list[bytes]:
    if page_size < 1:
        raise BlockSizeError(page_size)
    digest = namespace_seed(adapter, salt)
    digests: list[bytes] = []
    for page in _pages(tokens, page_size, pairs):
        digest = hashlib.sha256(digest + page).digest()
        digests.append(digest)
    return digests


def _pages(tokens: Tokens | Sequence[int], page_size: int, pairs: bool) -> list[bytes]:
    """The bytes to hash of every full page."""
    packed = isinstance(tokens, bytes | bytearray | memoryview)
    if packed and not pairs:
        if len(tokens) % _TOKEN_BYTES:
            raise TokensError(f"{len(tokens)} bytes are not whole u32 token ids")
        stride = page_size * _TOKEN_BYTES
        return [bytes(tokens[at : at + stride]) for at in range(0, len(tokens) // stride * stride, stride)]
    ids = unpack_tokens(tokens) if packed else list(tokens)  # type: ignore[arg-type]
    if ids and not 0 <= min(ids) <= max(ids) < _U64:
        raise TokensError("token ids must be integers in 0..18446744073709551615")
    units = max(len(ids) - 1, 0) if pairs else len(ids)
    pages: list[bytes] = []
    for start in range(0, units // page_size * page_size, page_size):
        page = ids[start : start + page_size]
        if pairs:
            page = [token for pair in zip(page, ids[start + 1 : start + page_size + 1], strict=True) for token in pair]
        pages.append(_packed(page))
    return pages


def _packed(page: Sequence[int]) -> bytes:
    if max(page) < _U32:
        return struct.pack(f"<{len(page)}I", *page)
    return b"\xff" + struct.pack(f"<{len(page)}Q", *page)
