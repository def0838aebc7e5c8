"""KV events, neutral: what the cache did, before anyone decides how it looks on the wire (`kv_wire`)."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Literal

from load.engine.block_hash import ExtraKeys

TierName = Literal["device", "host", "disk"]
"""Where a rank's own blocks lie. A shared pool tells of its objects itself (`load.pool`)."""


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive full blocks of one sequence can be hit from now on.

    ``first_index``: position of the first of them in its sequence. ``token_ids``: all their tokens, back to back.
    """

    digests: tuple[bytes, ...]
    parent: bytes | None
    token_ids: array[int]
    first_index: int
    extra: ExtraKeys
    session_id: str | None = None
    tier: TierName = "device"


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """One copy of a block was evicted. The block stays resident while other copies of it are."""

    digest: bytes
    tier: TierName = "device"


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The whole prefix cache was forgotten."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared
