"""Native twin of `kvcore`: the same names, arguments and results, from Rust.

Hashing: `seed_of`, `multimodal_hash`, `local_hashes`, `chain_hashes`, `sequence_hashes_with_tail`.
Events: `decode_batch` with `Batch`, `Stored`, `Removed`, `Cleared`.
Index: `PrefixIndex` with `ApplyResult`, `RankMatch`, `IndexStats`, `PreparedRanks`.
Shared pool: `PoolIndex` (its results are those of `kvcore.pool_index`), `page_hashes`, `parse_key`.

Errors are those of `kvcore.errors`, bounds those of `kvcore.index.IndexLimits`: `kvcore` must be there, but is imported
when first needed only, so that either may be imported first.
"""

from collections.abc import Sequence

from tidegate_kvcore._native import (
    ApplyResult,
    Batch,
    Cleared,
    IndexStats,
    Matches,
    PoolIndex,
    PrefixIndex,
    PreparedRanks,
    RankMatch,
    Removed,
    Stored,
    chain_hashes,
    decode_batch,
    local_hashes,
    multimodal_hash,
    page_hashes,
    parse_key,
    seed_of,
    sequence_hashes_with_tail,
)

API = 2
"""Counts changes of what is offered here that its users must know of."""

Sequence.register(Matches)

__all__ = [
    "API",
    "ApplyResult",
    "Batch",
    "Cleared",
    "IndexStats",
    "Matches",
    "PoolIndex",
    "PrefixIndex",
    "PreparedRanks",
    "RankMatch",
    "Removed",
    "Stored",
    "chain_hashes",
    "decode_batch",
    "local_hashes",
    "multimodal_hash",
    "page_hashes",
    "parse_key",
    "seed_of",
    "sequence_hashes_with_tail",
]
