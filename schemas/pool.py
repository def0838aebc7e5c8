"""The shared pool on the bus: batches of its key events, what its bridge says of it, and how workers lay out pages.

A pool is a store that several workers share (a Mooncake master). Its bridge numbers everything that it says of the pool
without a gap (``epoch``, ``seq``): the master's own batches untouched, what a reconcile found to be otherwise, and
resets. A receiver that misses a number asks for a snapshot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from msgspec import Meta

from schemas.base import BadMessageError, Count, Fact, Message, Number, Sequence
from schemas.index import SourceHealth

PoolOrigin = Literal["master", "reconcile"]
"""Whose bytes a batch is: the master's own message, or the bridge's difference (`kvcore.pool_index`)."""

PoolScheme = Literal["sglang_hicache", "vllm_mooncake", "lmcache"]
"""How an object key is built of prefix, page hash and component (spec: pool-events §6)."""

PageHash = Literal["sha256_chain", "engine"]
"""``sha256_chain``: SGLang's rule over token ids, which anybody can follow. ``engine``: the engine's own block hash,
which has to be learned from its events."""

HitPolicy = Literal["all_pages", "trailing_pages"]

MAX_COMPONENTS = 1024
MAX_COMPONENT_SETS = 16

_POOL = "Tg-Pool"
_EPOCH = "Tg-Epoch"
_SEQ = "Tg-Seq"
_ORIGIN = "Tg-Origin"
_PART = "Tg-Part"
_PARTS = "Tg-Parts"


class ComponentSet(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Objects that one page consists of, or one side pool's share of them.

    ``components``: what a key has beside prefix and hash (HiCache: the suffix ``_0_k``; vLLM: ``@tp_rank:0@pcp0...``).
    ``hit_policy``: needed of every page, or only of the last ``trailing_pages`` pages of a match.
    """

    pool: str = "kv"
    components: Annotated[tuple[str, ...], Meta(max_length=MAX_COMPONENTS)] = ()
    hit_policy: HitPolicy = "all_pages"
    trailing_pages: Count = 0


class SharedLayout(Message, frozen=True, kw_only=True, omit_defaults=True):
    """How one worker's pages lie in the pool: with it, and only with it, a page's objects can be looked for.

    ``pool``: its name on the bus. ``page_size`` in tokens. ``key_prefix``: what every key has in front, separators
    included (HiCache: ``Qwen-Qwen3-8B_``; vLLM: ``[cache_prefix@]model[namespace]``). ``pairs``: pages are hashed over
    pairs of tokens (EAGLE).
    """

    pool: str
    scheme: PoolScheme
    page_size: Annotated[int, Meta(ge=1, le=1 << 20)]
    key_prefix: str = ""
    sets: Annotated[tuple[ComponentSet, ...], Meta(max_length=MAX_COMPONENT_SETS)] = ()
    page_hash: PageHash = "sha256_chain"
    pairs: bool = False


class PoolHeaders(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Headers of ``tg.v1.pool.<pool>``. ``epoch``: of the bridge (Unix ms of its start); ``seq``: without a gap within
    it, from 0; a batch larger than a message goes as ``part`` 0..``parts``-1, all with the same seq."""

    pool: str
    epoch: Count
    seq: Sequence
    origin: PoolOrigin = "master"
    part: Count = 0
    parts: Count = 1

    def to_headers(self) -> dict[str, str]:
        """As NATS headers."""
        headers = {_POOL: self.pool, _EPOCH: str(self.epoch), _SEQ: str(self.seq), _ORIGIN: self.origin}
        if self.parts != 1:
            headers[_PART] = str(self.part)
            headers[_PARTS] = str(self.parts)
        return headers

    @classmethod
    def from_headers(cls, headers: Mapping[str, str]) -> PoolHeaders:
        """Inverse of `to_headers`. Raises `BadMessageError` for a missing header and for numbers that cannot be."""
        try:
            origin = headers.get(_ORIGIN, "master")
            if origin not in ("master", "reconcile"):
                raise BadMessageError(f"unknown origin of a pool batch {origin!r}")
            parsed = cls(
                pool=headers[_POOL],
                epoch=int(headers[_EPOCH]),
                seq=int(headers[_SEQ]),
                origin=origin,  # type: ignore[arg-type]
                part=int(headers.get(_PART, "0")),
                parts=int(headers.get(_PARTS, "1")),
            )
        except (KeyError, ValueError) as error:
            raise BadMessageError(f"pool batch headers: {error!r}") from error
        possible = 0 <= parsed.seq < 1 << 63 and 0 <= parsed.epoch < 1 << 63 and 0 <= parsed.part < parsed.parts
        if not possible:
            raise BadMessageError(f"pool batch headers: numbers that cannot be in {dict(headers)!r}")
        return parsed


class PoolReset(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """``tg.v1.pool.reset.<pool>``: forget everything of this pool, it is told again from here on.

    ``pool_seq``: this reset's own number among the batches (`PoolHeaders.seq`, same ``epoch``).
    """

    pool: str
    pool_seq: Sequence
    reason: str


class PoolState(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """``tg.v1.pool.state.<pool>``: once a second, how far the bridge's picture of the pool can be trusted.

    ``pool_seq``: last number that was published (-1: none), so that a lost tail is noticed. ``reconciled_ms``: Unix ms
    of the key list that it agreed with last; ``reconcile_added`` and ``reconcile_removed``: objects that it had wrong
    then. ``objects``, ``pages``: in the bridge's own index. ``gaps``, ``restarts``: noticed since its start.
    ``reconnects``: how often its bridge has found the bus again. What it was asked before that may be lost.
    """

    pool: str
    health: SourceHealth
    reason: str | None = None
    backend_id: str | None = None
    pool_seq: Sequence = -1
    objects: Count = 0
    pages: Count = 0
    unparsed: Count = 0
    reconciled_ms: Count | None = None
    reconcile_added: Count = 0
    reconcile_removed: Count = 0
    gaps: Count = 0
    restarts: Count = 0
    reconnects: Count = 0


class PoolSnapshotRequest(Message, frozen=True, kw_only=True, omit_defaults=True):
    """``tg.v1.pool.snapshot.<pool>``: an index asks the pool's bridge for its whole picture (JSON)."""

    indexer: str


class PoolSnapshotReply(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Object-store ``bucket`` and ``key`` of the dump, its size and digest (XXH3-64, hex), and the last ``pool_seq`` of
    ``epoch`` that it stands for; or ``error``."""

    pool: str
    epoch: Count = 0
    pool_seq: Sequence = -1
    bucket: str = ""
    key: str = ""
    size_bytes: Number = 0
    digest: Annotated[str, Meta(pattern="^([0-9a-f]{16})?$")] = ""
    error: str | None = None
