"""A prompt's tokens and their hashes: the chain by which it is placed, pages of a shared pool, what its row says."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from xxhash import xxh3_64_intdigest

from kvcore import chain_hashes, pack_tokens, page_hashes
from kvcore.hashing import SEED, chain_of, chain_view

TOKEN_BYTES = 4
HASH_BYTES = 8
COARSE_BLOCK = 512
"""Tokens in a block of a long prompt's row, at most: the peer's default for traces."""


@dataclass(frozen=True, slots=True)
class PageRule:
    """How pages of a shared pool are cut and hashed: ``size`` in tokens; ``pairs``: over pairs of tokens (EAGLE). Spec:
    pool-events §6, page hash."""

    size: int
    pairs: bool = False


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """``tokens``: ids, u32 little-endian. ``chain``: chain hashes of the full blocks of ``block_size`` tokens, u64
    little-endian; both are empty where the block size is not known (0). ``salted``: the chain under the request's
    cache salt and adapter, where it has one; rows hash without them. ``pages``: the hashes of its full pages of
    ``page_size`` tokens in a shared pool, 16 bytes each; empty where no worker reads one."""

    tokens: bytes
    block_size: int = 0
    chain: bytes = b""
    salted: bytes | None = None
    pages: bytes = b""
    page_size: int = 0

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.tokens) // TOKEN_BYTES

    @property
    def cached_as(self) -> bytes:
        """The chain under which an engine keeps these blocks."""
        return self.chain if self.salted is None else self.salted

    def under(self, salt: str | None, adapter: str | None = None, start: bytes = b"") -> PromptTokens:
        """The same prompt in the namespace of ``salt`` and ``adapter``, where the beginning ``start`` of its chain is
        known. Spec: index-and-routing §1.1."""
        if not (salt or adapter) or not self.block_size:
            return self
        return replace(self, salted=_chain(self.tokens, self.block_size, start, salt, adapter))

    def paged(self, rule: PageRule | None, salt: str | None, adapter: str | None = None) -> PromptTokens:
        """The same prompt with its pages by ``rule``, in the namespace of ``salt`` and ``adapter``."""
        if rule is None:
            return self
        pages = page_hashes(self.tokens, rule.size, adapter=adapter, salt=salt, pairs=rule.pairs)
        return replace(self, pages=pages, page_size=rule.size)

    def trace_hashes(self, block_size: int) -> tuple[int, ...]:
        """The prompt's hashes for its row in blocks of ``block_size`` tokens, a multiple of our own: every so many-th
        one of the chain, and the partial tail block hashed like a full one: ceil(tokens / block size) hashes (spec:
        identity-and-traces §2.5, docs/adr/0018). Empty without a block size."""
        return trace_hashes(self.tokens, self.chain, self.block_size, block_size) if self.block_size else ()

    def answered(self, generated: Sequence[int], block_size: int) -> tuple[int, ...]:
        """Like `trace_hashes`, of the prompt and the token ids that were generated after it; only blocks that the
        prompt does not fill are hashed. Raises `TokensError` for what is no token id."""
        if not self.block_size:
            return ()
        done = len(self.chain) // HASH_BYTES * self.block_size * TOKEN_BYTES
        tokens = self.tokens + pack_tokens(generated)
        parent = int.from_bytes(self.chain[-HASH_BYTES:], "little") if self.chain else None
        chain = self.chain + chain_hashes(tokens[done:], self.block_size, parent=parent)
        return trace_hashes(tokens, chain, self.block_size, block_size)


def trace_block_size(tokens: int, block_size: int, fine_tokens: int) -> int:
    """Block size in which a prompt of ``tokens`` is written into its row: the pool's own up to ``fine_tokens``, else
    its largest multiple that is at most `COARSE_BLOCK` (docs/adr/0018)."""
    if tokens <= fine_tokens:
        return block_size
    return block_size * max(1, COARSE_BLOCK // block_size)


def trace_hashes(tokens: bytes, chain: bytes, block_size: int, trace_block: int) -> tuple[int, ...]:
    """Hashes of ``tokens`` in blocks of ``trace_block``, given their chain in blocks of ``block_size``, which divides
    it."""
    hashes = tuple(chain_view(chain)[trace_block // block_size - 1 :: trace_block // block_size])
    tail = tokens[len(hashes) * trace_block * TOKEN_BYTES :]
    if not tail:
        return hashes
    return (*hashes, *chain_of([xxh3_64_intdigest(tail, SEED)], hashes[-1] if hashes else None))


def chained(tokens: bytes, block_size: int | None, start: bytes = b"") -> PromptTokens:
    """``tokens`` with their chain, whose beginning ``start`` is known."""
    return PromptTokens(tokens, block_size, _chain(tokens, block_size, start)) if block_size else PromptTokens(tokens)


def _chain(tokens: bytes, block_size: int, start: bytes, salt: str | None = None, adapter: str | None = None) -> bytes:
    if not start:
        return chain_hashes(tokens, block_size, salt=salt, adapter=adapter)
    done = len(start) // HASH_BYTES * block_size * TOKEN_BYTES
    parent = int.from_bytes(start[-HASH_BYTES:], "little")
    return start + chain_hashes(tokens[done:], block_size, salt=salt, adapter=adapter, parent=parent)


def from_ids(ids: Iterable[int], block_size: int | None) -> PromptTokens:
    """Token ids that somebody else counted (the client, the engine)."""
    return chained(pack_tokens(ids), block_size)


def shared_blocks(one: bytes, other: bytes) -> int:
    """How many blocks two chains have in common from their start: where a prompt's cached prefix breaks (spec:
    user-cases C5)."""
    count = min(len(one), len(other)) // HASH_BYTES
    low, high = 0, count
    while low < high:  # a chain hash stands for everything before it, so equality is a prefix
        middle = (low + high + 1) // 2
        end = middle * HASH_BYTES
        if one[end - HASH_BYTES : end] == other[end - HASH_BYTES : end]:
            low = middle
        else:
            high = middle - 1
    return low
