"""What every room needs to know of KV blocks: their hashes, the engines' events, stream recovery, the prefix index, and
the index of a shared pool.

Imports nothing of ours and does no I/O. Hashing, decoding and both indexes exist twice, in Rust and in Python:
`kvcore.twin` chooses, and the names `PrefixIndex`, `PoolIndex`, `decode_batch`, `seed_of`, `local_hashes`,
`chain_hashes`, `page_hashes`, `multimodal_hash`, `sequence_hashes_with_tail` of this package are the chosen ones. The
modules are pure Python.

- `kvcore.twin`: `IMPLEMENTATION`, `WHY`.
- `kvcore.hashing`: `pack_tokens`, `seed_of`, `local_hashes`, `chain_hashes`, `sequence_hashes_with_tail`, `pack_chain`,
  `unpack_chain`, `multimodal_hash`.
- `kvcore.events`: `decode_batch`, `Batch`, `Stored`, `Removed`, `Cleared`, `Tier`.
- `kvcore.stream`: `StreamRecovery` with its events and effects; `kvcore.replay`: `request_frames`, `parse_reply`.
- `kvcore.index`: `PrefixIndex`, `IndexLimits`, `ApplyResult`, `RankMatch`, `IndexStats`.
- `kvcore.links`: `engine_pages`.
- `kvcore.page_hash`: `page_hashes`, `page_digests`; `kvcore.pool_keys`: `parse_key`.
- `kvcore.pool_layout`: `PoolLayout`, `LayoutSet`, and what computes them.
- `kvcore.pool_index`: `PoolIndex`, `PoolLimits`, `PoolApplied`, `PoolStats`, `PoolPrefix`.
- `kvcore.session_index`: `SessionIndex`, `SessionLimits`, `SessionPrefix` (its tree: `kvcore.session_forest`).
- `kvcore.errors`: `KvCoreError` and what derives from it.
"""

from kvcore.errors import (
    BadBatchError,
    BadDumpError,
    BadReplayError,
    BlockSizeError,
    HashesError,
    KvCoreError,
    TokensError,
    TwinError,
)
from kvcore.events import Batch, Cleared, Event, Removed, Stored, Tier
from kvcore.hashing import pack_chain, pack_tokens, unpack_chain, unpack_tokens
from kvcore.index import IndexLimits, IndexStats, PreparedRanks, RankMatch
from kvcore.links import engine_pages
from kvcore.page_hash import page_digests
from kvcore.pool_index import PoolApplied, PoolLimits, PoolPrefix, PoolStats
from kvcore.pool_keys import PoolKey, parse_key
from kvcore.pool_layout import LayoutSet, PoolLayout
from kvcore.residency import ApplyResult
from kvcore.stream import Limits, StreamRecovery
from kvcore.twin import (
    IMPLEMENTATION,
    WHY,
    PoolIndex,
    PrefixIndex,
    chain_hashes,
    decode_batch,
    local_hashes,
    multimodal_hash,
    page_hashes,
    seed_of,
    sequence_hashes_with_tail,
)

__all__ = [
    "IMPLEMENTATION",
    "WHY",
    "ApplyResult",
    "BadBatchError",
    "BadDumpError",
    "BadReplayError",
    "Batch",
    "BlockSizeError",
    "Cleared",
    "Event",
    "HashesError",
    "IndexLimits",
    "IndexStats",
    "KvCoreError",
    "LayoutSet",
    "Limits",
    "PoolApplied",
    "PoolIndex",
    "PoolKey",
    "PoolLayout",
    "PoolLimits",
    "PoolPrefix",
    "PoolStats",
    "PrefixIndex",
    "PreparedRanks",
    "RankMatch",
    "Removed",
    "Stored",
    "StreamRecovery",
    "Tier",
    "TokensError",
    "TwinError",
    "chain_hashes",
    "decode_batch",
    "engine_pages",
    "local_hashes",
    "multimodal_hash",
    "pack_chain",
    "pack_tokens",
    "page_digests",
    "page_hashes",
    "parse_key",
    "seed_of",
    "sequence_hashes_with_tail",
    "unpack_chain",
    "unpack_tokens",
]
