"""Native twin of `kvcore`: the same names, arguments and results, from Rust.

Hashing: `seed_of`, `multimodal_hash`, `local_hashes`, `chain_hashes`, `sequence_hashes_with_tail`.
Events: `decode_batch` with `Batch`, `Stored`, `Removed`, `Cleared`. Errors: `tidegate_kvcore.errors`.
"""

from tidegate_kvcore._native import (
    Batch,
    Cleared,
    Removed,
    Stored,
    chain_hashes,
    decode_batch,
    local_hashes,
    multimodal_hash,
    seed_of,
    sequence_hashes_with_tail,
)
from tidegate_kvcore.errors import BadBatchError, BlockSizeError, KvCoreError, TokensError

__all__ = [
    "BadBatchError",
    "Batch",
    "BlockSizeError",
    "Cleared",
    "KvCoreError",
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
