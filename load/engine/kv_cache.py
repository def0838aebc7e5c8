"""The KV cache of one rank: which blocks a request holds, hits, evictions, and the events that tell of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from load.engine.block_hash import ChainHasher, ExtraKeys
from load.engine.blocks import BlockPool
from load.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent
from load.engine.requests import EngineRequest


@dataclass(frozen=True, slots=True)
class BlockContent:
    """What a cached block holds: its digest, that of the block before it, its tokens (u32 bytes), its extra keys."""

    digest: bytes
    parent: bytes | None
    tokens: bytes
    extra: ExtraKeys


class KvCache:
    """Prefix cache over a `BlockPool`. Full blocks are registered when they are scheduled, as in vLLM."""

    def __init__(self, num_blocks: int, hasher: ChainHasher, prefix_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = hasher.block_size
        self.prefix_caching = prefix_caching
        self._hasher = hasher
        self._events: list[KvEvent] = []
        self._contents: dict[bytes, BlockContent] = {}

    def lookup(self, request: EngineRequest) -> list[int]:
        """The blocks of the longest cached prefix. Never the whole request: its last token is always recomputed."""
        if not self.prefix_caching:
            return []
        self._hasher.extend(request.digests, request.tokens, request.extra)
        hits: list[int] = []
        for digest in request.digests[: (len(request.tokens) - 1) // self.block_size]:
            block = self.pool.find(digest)
            if block is None:
                break
            hits.append(block)
        return hits

    def allocate(self, request: EngineRequest, new_tokens: int, hits: list[int] | None = None) -> bool:
        """Room for the next ``new_tokens`` of ``request`` (after ``hits``); ``False``, and no change, without room."""
        hits = hits or []
        size = self.block_size
        computed = request.computed + len(hits) * size
        wanted = -(-(computed + new_tokens) // size) - len(request.blocks) - len(hits)
        if wanted > self.pool.free_blocks - self.pool.unreferenced(hits):
            return False
        if hits:
            self.pool.touch(hits)
            request.blocks.extend(hits)
            request.computed = computed
            request.registered = len(hits)
        if wanted > 0:
            blocks, evicted = self.pool.allocate(wanted)
            request.blocks.extend(blocks)
            for digest in evicted:
                self._events.append(BlockRemoved(digest))
                if self.pool.find(digest) is None:
                    self._contents.pop(digest, None)
        if self.prefix_caching:
            self._register(request, (computed + new_tokens) // size)
        return True

    def _register(self, request: EngineRequest, full: int) -> None:
        first = request.registered
        if full <= first:
            return
        if len(request.digests) < full:
            self._hasher.extend(request.digests, request.tokens, request.extra)
        size = self.block_size
        for index in range(first, full):
            digest = request.digests[index]
            self.pool.register(request.blocks[index], digest)
            if digest not in self._contents:
                parent = request.digests[index - 1] if index else None
                tokens = request.tokens[index * size : (index + 1) * size].tobytes()
                self._contents[digest] = BlockContent(digest, parent, tokens, request.extra)
        request.registered = full
        self._events.append(
            BlockStored(
                digests=tuple(request.digests[first:full]),
                parent=request.digests[first - 1] if first else None,
                token_ids=request.tokens[first * size : full * size],
                first_index=first,
                extra=request.extra,
                session_id=request.session_id,
            )
        )

    def free(self, request: EngineRequest) -> None:
        """Let go of everything that ``request`` holds; its full blocks can still be hit."""
        self.pool.release(request.blocks)
        request.blocks = []
        request.registered = 0
        request.computed = 0

    def reset(self) -> bool:
        """Forget the prefix cache; refused while a request holds blocks. Published with the next step, as vLLM does."""
        if not self.pool.reset():
            return False
        self._contents.clear()
        self._events.append(AllBlocksCleared())
        return True

    def resident(self) -> Iterator[BlockContent]:
        """Every block that can be hit, once however many copies there are."""
        yield from self._contents.values()

    def take_events(self) -> list[KvEvent]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events
