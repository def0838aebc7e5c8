"""Everything that can go wrong here: the same names and reasons as in the pure-Python twin (`kvcore.errors`).

KvCoreError
├── BlockSizeError   a block size below 1 (the caller's fault)
├── TokensError      token ids that are not whole u32 values (the caller's fault)
├── BadBatchError    an engine's payload is not a batch of KV events (the engine's fault)
└── BadDumpError     bytes that `PrefixIndex.dump` did not write (the snapshot's fault; the index is unchanged)
"""


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


class BadBatchError(KvCoreError):
    """The payload as a whole is not a batch; nothing of it can be applied."""

    reason = "bad_batch"


class BadDumpError(KvCoreError):
    """Not a dump of this version, or a damaged one."""

    reason = "bad_dump"
