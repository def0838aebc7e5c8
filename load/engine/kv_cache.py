"""The KV cache of one rank: which blocks a request holds, hits, evictions, and the events that tell of them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from load.engine.block_hash import ChainHasher, ExtraKeys
from load.engine.blocks import BlockPool
from load.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, TierName
from load.engine.requests import EngineRequest


@dataclass(frozen=True, slots=True, eq=False)
class BlockContent:
    """What a cached block holds: its digest, its tokens (u32 bytes), its extra keys, its place in its sequence.

    ``before``: the content of the block before it, whether that is still cached or not.
    """

    digest: bytes
    before: BlockContent | None = field(repr=False)
    tokens: bytes
    extra: ExtraKeys
    index: int


def stored_events(
    contents: Sequence[BlockContent], tier: TierName, session_id: str | None = None
) -> Iterator[BlockStored]:
    """One event for each run of ``contents`` in which every block follows the one before it."""
    start = 0
    for place, content in enumerate(contents):
        following = contents[place + 1].before if place + 1 < len(contents) else None
        if following is not None and following.digest == content.digest:
            continue
        run = contents[start : place + 1]
        start = place + 1
        before = run[0].before
        tokens = array("I", b"".join(part.tokens for part in run))
        yield BlockStored(
            digests=tuple(part.digest for part in run),
            parent=None if before is None else before.digest,
            token_ids=tokens,
            first_index=run[0].index,
            extra=run[0].extra,
            session_id=session_id,
            tier=tier,
        )


class KvCache:
    """Prefix cache over a `BlockPool`. Full blocks are registered when they are scheduled, as in vLLM."""

    def __init__(self, num_blocks: int, hasher: ChainHasher, prefix_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = hasher.block_size
        self.prefix_caching = prefix_caching
        self._hasher = hasher
        self.arriving: dict[bytes, float] = {}
        """Of blocks whose load has not ended: when it will have."""
        self.on_evict: Callable[[BlockContent], None] | None = None
        self._events: list[KvEvent] = []
        self._contents: dict[bytes, BlockContent] = {}

    def find_prefix(self, request: EngineRequest) -> int:
        """Blocks of the longest cached prefix, and the digests of all its full blocks; nothing is touched."""
        self._hasher.extend(request.digests, request.tokens, request.extra)
        return len(self.lookup(request))

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
                self._evicted(digest)
        if self.prefix_caching:
            self._register(request, (computed + new_tokens) // size)
        return True

    def _evicted(self, digest: bytes) -> None:
        if self.pool.find(digest) is None:
            content = self._contents.pop(digest, None)
            self.arriving.pop(digest, None)
            if content is not None and self.on_evict is not None:
                self.on_evict(content)
        self._events.append(BlockRemoved(digest))

    def insert(self, contents: Sequence[BlockContent], session_id: str | None) -> list[int]:
        """Blocks that hold ``contents`` without a request that needs them, referenced once. There must be room."""
        blocks, evicted = self.pool.allocate(len(contents))
        for digest in evicted:
            self._evicted(digest)
        for block, content in zip(blocks, contents, strict=True):
            self.pool.register(block, content.digest)
            self._contents.setdefault(content.digest, content)
        self._events.extend(stored_events(contents, "device", session_id))
        return blocks

    def drop(self, content: BlockContent) -> bool:
        """Forget the copies that nobody references; whether there were any."""
        dropped = self.pool.drop(content.digest)
        if dropped and self.pool.find(content.digest) is None:
            self._contents.pop(content.digest, None)
            self.arriving.pop(content.digest, None)
        self._events.extend([BlockRemoved(content.digest)] * dropped)
        return dropped > 0

    def contents_of(self, request: EngineRequest, blocks: int) -> list[BlockContent]:
        """What the first ``blocks`` blocks of a request that holds them contain."""
        return [self._contents[digest] for digest in request.digests[: min(blocks, request.registered)]]

    def emit(self, event: KvEvent) -> None:
        """Something happened below the device."""
        self._events.append(event)

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
                before = self._contents[request.digests[index - 1]] if index else None
                tokens = request.tokens[index * size : (index + 1) * size].tobytes()
                self._contents[digest] = BlockContent(digest, before, tokens, request.extra, index)
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
        self.arriving.clear()
        self._events.append(AllBlocksCleared())
        return True

    def resident(self) -> Iterator[BlockContent]:
        """Every block that can be hit, once however many copies there are."""
        yield from self._contents.values()

    def take_events(self) -> list[KvEvent]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events
