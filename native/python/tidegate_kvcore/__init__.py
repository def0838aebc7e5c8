"""Native twin of `kvcore`: the same names, arguments and results, from Rust.

Hashing: `seed_of`, `multimodal_hash`, `local_hashes`, `chain_hashes`, `sequence_hashes_with_tail`.
Events: `decode_batch` with `Batch`, `Stored`, `Removed`, `Cleared`. Errors: `tidegate_kvcore.errors`.
Index: `PrefixIndex` with `IndexLimits`, `ApplyResult`, `RankMatch`, `IndexStats`, `PreparedRanks`.
"""

from collections.abc import Sequence

from tidegate_kvcore._native import (
    ApplyResult,
    Batch,
    Cleared,
    IndexStats,
    Matches,
    PrefixIndex,
    PreparedRanks,
    RankMatch,
    Removed,
    Stored,
    chain_hashes,
    decode_batch,
    local_hashes,
    multimodal_hash,
    seed_of,
    sequence_hashes_with_tail,
)
from tidegate_kvcore.errors import BadBatchError, BadDumpError, BlockSizeError, KvCoreError, TokensError
from tidegate_kvcore.limits import IndexLimits

API = 1
"""Counts changes of what is offered here that its users must know of."""

Sequence.register(Matches)

__all__ = [
    "API",
    "ApplyResult",
    "BadBatchError",
    "BadDumpError",
    "Batch",
    "BlockSizeError",
    "Cleared",
    "IndexLimits",
    "IndexStats",
    "KvCoreError",
    "Matches",
    "PrefixIndex",
    "PreparedRanks",
    "RankMatch",
    "Removed",
    "Stored",
    "TokensError",
    "chain_hashes",
    "decode_batch",
    "local_hashes",
    "multimodal_hash",
    "seed_of",
    "sequence_hashes_with_tail",
]
