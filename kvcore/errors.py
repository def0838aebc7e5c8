"""Everything that can go wrong in kvcore.

KvCoreError
├── BlockSizeError   a block size below 1 (the caller's fault)
├── TokensError      token ids that are not whole u32 values (the caller's fault)
├── HashesError      packed hashes that are not whole u64 values, or of which there are not as many (the caller's fault)
├── BadBatchError    a payload is not a batch of KV events, or of a pool's (the sender's fault; its seq still counts)
├── BadReplayError   a reply on the replay socket has an unknown shape (the engine's fault)
├── BadDumpError     bytes that the index's own `dump` did not write (the snapshot's fault; the index is unchanged)
└── TwinError        the twin that was asked for cannot be had (the installation's fault)
"""

from __future__ import annotations


class KvCoreError(Exception):
    """Root of this package's errors. ``reason`` is stable: metric label, trace field, reply."""

    reason = "kvcore_error"


class BlockSizeError(KvCoreError, ValueError):
    """A block holds at least one token."""

    reason = "bad_block_size"

    def __init__(self, block_size: int) -> None:
        super().__init__(f"block size must be at least 1 token, not {block_size}")
        self.block_size = block_size


class TokensError(KvCoreError, ValueError):
    """Token ids travel as u32 little-endian, four bytes each."""

    reason = "bad_tokens"


class HashesError(KvCoreError, ValueError):
    """Hashes travel as u64 little-endian, eight bytes each, and one chain hash goes with each engine hash."""

    reason = "bad_hashes"


class BadBatchError(KvCoreError):
    """The payload as a whole is not a batch; nothing of it can be applied."""

    reason = "bad_batch"


class BadReplayError(KvCoreError):
    """A message on the replay socket that is neither a batch nor the end mark."""

    reason = "bad_replay"


class BadDumpError(KvCoreError):
    """Not a dump of this version, or a damaged one."""

    reason = "bad_dump"


class TwinError(KvCoreError, ImportError):
    """``TIDEGATE_KVCORE`` names no twin, or the native one where there is none that fits: `kvcore` cannot be
    imported."""

    reason = "no_such_twin"
