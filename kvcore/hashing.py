"""A block's identity: XXH3-64 over its tokens, chained to the block before it.

Wire compatible with NVIDIA Dynamo's router (spec: index-and-routing §1, vectors in §1.3):

- local hash: XXH3-64 of the block's token ids as u32 little-endian, then its multimodal hashes (u64 little-endian,
  ascending); the seed carries adapter and salt, so that two namespaces never share a block;
- chain hash: that of the first block is its local hash; after it XXH3-64 with seed 1337 over LE64(chain hash of the
  block before) and LE64(local hash).

Only full blocks have an identity, except in trace rows, which hash the partial tail as well. Hashes are unsigned.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from struct import Struct

from xxhash import xxh3_64_intdigest

from kvcore.errors import BlockSizeError, TokensError

Tokens = bytes | bytearray | memoryview
"""Token ids, u32 little-endian, four bytes each."""

Multimodal = Mapping[int, Sequence[int]]
"""Block position (from 0, within the tokens at hand) to the u64 hashes of the objects in that block, in any order."""

SEED = 1337
_MASK64 = (1 << 64) - 1
_PAIR = Struct("<QQ")
_TOKEN_BYTES = 4
_HASH_BYTES = 8


def seed_of(adapter: str | None = None, salt: str | None = None) -> int:
    """Seed of the local hashes in one namespace: 1337 + XXH3(adapter, seed 0) + XXH3(salt, seed 1), modulo 2^64.

    A missing or empty string adds nothing. Spec: index-and-routing §1.1.
    """
    seed = SEED
    if adapter:
        seed += xxh3_64_intdigest(adapter.encode("utf-8", "surrogatepass"), 0)
    if salt:
        seed += xxh3_64_intdigest(salt.encode("utf-8", "surrogatepass"), 1)
    return seed & _MASK64


def multimodal_hash(identifier: str) -> int:
    """u64 of a multimodal identifier: the first 16 digits of a 64-digit hex digest, else XXH3 (seed 0) of the text."""
    if len(identifier) == 64:
        try:
            return int.from_bytes(bytes.fromhex(identifier)[:8], "big")
        except ValueError:
            pass  # 64 characters, but not a digest: hashed as text like any other
    return xxh3_64_intdigest(identifier.encode("utf-8", "surrogatepass"), 0)


def pack_tokens(tokens: Iterable[int]) -> bytes:
    """Token ids as u32 little-endian bytes. Raises `TokensError` for what does not fit u32."""
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError) as error:
        raise TokensError(f"token ids must be integers in 0..4294967295: {error}") from error
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def unpack_tokens(tokens: Tokens) -> list[int]:
    """Inverse of `pack_tokens`. Raises `TokensError` when the length is not a multiple of four bytes."""
    _count(tokens)
    unpacked = array("I")
    unpacked.frombytes(tokens)
    if sys.byteorder != "little":
        unpacked.byteswap()
    return unpacked.tolist()


def pack_chain(hashes: Sequence[int]) -> bytes:
    """u64 hashes as little-endian bytes back to back, eight a block."""
    return Struct(f"<{len(hashes)}Q").pack(*hashes)


def unpack_chain(chain: bytes) -> tuple[int, ...]:
    """Inverse of `pack_chain`; an incomplete last hash is ignored."""
    return Struct(f"<{len(chain) // _HASH_BYTES}Q").unpack_from(chain)


def chain_view(chain: bytes) -> Sequence[int]:
    """Like `unpack_chain`, but each hash is read when it is looked at, where the machine's byte order allows."""
    if sys.byteorder != "little":
        return unpack_chain(chain)
    return memoryview(chain)[: len(chain) // _HASH_BYTES * _HASH_BYTES].cast("Q")


def local_hashes(
    tokens: Tokens, block_size: int, *, seed: int = SEED, mm: Multimodal | None = None, eagle: bool = False
) -> list[int]:
    """Local hash of every full block of ``tokens``.

    ``eagle``: a block's window is one token longer than its stride (spec: index-and-routing §1.1, Eagle/MTP).
    Raises `BlockSizeError`, `TokensError`.
    """
    if block_size < 1:
        raise BlockSizeError(block_size)
    stride = block_size * _TOKEN_BYTES
    window = stride + _TOKEN_BYTES if eagle else stride
    count = _count(tokens)
    if eagle:
        count = max(count - 1, 0)
    starts = range(0, count // block_size * stride, stride)
    if not mm:
        return [xxh3_64_intdigest(tokens[start : start + window], seed) for start in starts]
    return [
        xxh3_64_intdigest(bytes(tokens[start : start + window]) + pack_chain(sorted(mm.get(position, ()))), seed)
        for position, start in enumerate(starts)
    ]


def chain_of(local: Iterable[int], parent: int | None = None) -> list[int]:
    """Chain hashes of blocks with these local hashes; ``parent``: chain hash of the block before the first one."""
    chain: list[int] = []
    pack = _PAIR.pack
    for value in local:
        parent = value if parent is None else xxh3_64_intdigest(pack(parent, value), SEED)
        chain.append(parent)
    return chain


def chain_hashes(
    tokens: Tokens,
    block_size: int,
    *,
    adapter: str | None = None,
    salt: str | None = None,
    mm: Multimodal | None = None,
    parent: int | None = None,
    eagle: bool = False,
) -> bytes:
    """Chain hashes of every full block of ``tokens``, packed as `pack_chain`: what `PrefixIndex.match` takes.

    To continue a chain, give the tokens after its last full block and that block's chain hash as ``parent``; ``mm``
    positions count from the first block given. Raises `BlockSizeError`, `TokensError`.
    """
    local = local_hashes(tokens, block_size, seed=seed_of(adapter, salt), mm=mm, eagle=eagle)
    return pack_chain(chain_of(local, parent))


def sequence_hashes_with_tail(tokens: Tokens, block_size: int) -> tuple[int, ...]:
    """Chain hashes for a trace row: ceil(tokens / block_size) of them, the partial tail hashed like a block.

    Neither adapter nor salt enters. Spec: identity-and-traces §2.5. Raises `BlockSizeError`, `TokensError`.
    """
    local = local_hashes(tokens, block_size)
    tail = bytes(tokens[len(local) * block_size * _TOKEN_BYTES :])
    if tail:
        local.append(xxh3_64_intdigest(tail, SEED))
    return tuple(chain_of(local))


def _count(tokens: Tokens) -> int:
    size = len(tokens)
    if size % _TOKEN_BYTES:
        raise TokensError(f"{size} bytes are not whole u32 token ids")
    return size // _TOKEN_BYTES
