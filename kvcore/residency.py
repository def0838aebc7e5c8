"""What one KV-cache group of one rank holds: engine hashes, the chain hashes they stand for, copies per tier.

Two facts are kept apart, so that the order of events does not matter:

- *copies*: how often the engine said stored less removed, per engine hash and tier. Never below 0; a block is
  resident while it has a copy in any tier.
- *identity*: the chain hash behind an engine hash, recomputed from tokens. It is learned from an event with tokens
  whose parent is known; until then the event waits (bounded), and the copies count already.

A resident block with an identity is *present*: its bit is set in the shared `Masks`. Presence is a set: what happens to
one block changes no other. A present block whose parent is not resident is a *hole*; without holes, presence along any
chain is a prefix, which makes matching cheap. Blocks that are no longer resident are remembered for a while (bounded),
as parents of blocks to come and for lower tiers that name them without tokens.

Parents are known by engine hash. When an engine gives a hash a second meaning (or may have, while we had forgotten the
first), that proves nothing any more: the group is *ambiguous*, and matched as if it had holes, until it is cleared.

Two engine hashes of one identity (namespaces that the engine does not publish) share their copies.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import msgspec

from kvcore.events import Stored, Tier
from kvcore.hashing import SEED, chain_of, local_hashes, seed_of
from kvcore.links import EngineLinks

_FIELD = 0xFFFF
_BITS = 16
_CLEARED_AT_ONCE = 8192
TIERS = tuple(Tier)


class Block(msgspec.Struct, gc=False, eq=False):
    """One block. ``own``: chain hash, ``None`` until known. ``parent``: engine hash before it. ``copies``: 16 bits a
    tier, device lowest. ``children``: resident blocks that name it as parent."""

    own: int | None
    seed: int
    parent: int | None
    copies: int = 0
    children: int = 0


def best_tier(copies: int) -> int:
    """Best tier with a copy; ``copies`` is not 0."""
    return ((copies & -copies).bit_length() - 1) // _BITS


def copies_in(copies: int, tier: int) -> int:
    """Copies in one tier."""
    return (copies >> (tier * _BITS)) & _FIELD


class Masks:
    """Presence of all groups of all ranks, one bit each: any tier, and per tier below the device those best there.
    ``links``: engine hash of each block, where that is asked for."""

    __slots__ = ("below", "links", "presence")

    def __init__(self) -> None:
        self.links: EngineLinks | None = None
        self.presence: dict[int, int] = {}
        self.below: tuple[dict[int, int], ...] = ({}, {}, {}, {})

    def add(self, table: dict[int, int], own: int, bit: int) -> None:
        table[own] = table.get(own, 0) | bit

    def discard(self, table: dict[int, int], own: int, bit: int) -> None:
        left = table[own] & ~bit
        if left:
            table[own] = left
        else:
            del table[own]


@dataclass(slots=True)
class ApplyResult:
    """What one batch did. Blocks: ``stored``, ``removed``, ``held`` (waiting for their parent or their tokens),
    ``unknown_removed`` (no copy to remove: no-op), ``other_groups`` (groups that do not form the prefix), ``dropped``
    (held too long), ``evicted`` (by the bound on the whole index). Events: ``cleared``, and ``rejected`` by reason
    (those of `kvcore.events.Batch`, ``misaligned``, ``block_size``, ``hash_conflict``,
    ``too_many_groups``). ``block_size``: in tokens, as learned so far."""

    stored: int = 0
    removed: int = 0
    cleared: int = 0
    held: int = 0
    unknown_removed: int = 0
    other_groups: int = 0
    dropped: int = 0
    evicted: int = 0
    block_size: int | None = None
    rejected: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Waiting:
    """A stored event whose blocks have no identity yet."""

    event: Stored
    done: bool = False


class Residency:
    """One group of one rank. ``bit``: its place in ``masks``."""

    def __init__(self, masks: Masks, bit: int, *, max_held: int, max_remembered: int) -> None:
        self.bit = bit
        self.block_size: int | None = None
        self.blocks: dict[int, Block] = {}
        self.present = 0
        self.holes = 0
        self.ambiguous = False
        self.lowered = 0
        self.held = 0
        self.connector_copies = 0
        self.waiting: deque[Waiting] = deque()
        self._masks = masks
        self._max_held = max_held
        self._max_remembered = max_remembered
        self._by_parent: dict[int, list[Waiting]] = {}
        self._remembered: deque[int] = deque()
        self._by_own: dict[int, Block] | None = None

    # Events

    def store(self, event: Stored, result: ApplyResult) -> None:
        """Count one copy of each block, and learn identities where the tokens allow it."""
        size = event.tokens_per_block
        if event.misaligned:
            result.rejected["misaligned"] += 1
            return
        if size and self.block_size not in (None, size):
            result.rejected["block_size"] += 1
            return
        if event.connector:
            self.connector_copies |= _FIELD << (event.tier * _BITS)
        if not size:
            self._store_without_identity(event, result)
            return
        self.block_size = size
        if event.parent is None:
            self._bind(event, None, result, count=True)
        else:
            parent = self.blocks.get(event.parent)
            if parent is None or parent.own is None:
                self._store_without_identity(event, result)
                return
            self._bind(event, parent, result, count=True)
        if self._by_parent:
            self._release(event.hashes, result)

    def store_given(
        self, hashes: Sequence[int], chain: Sequence[int], before: int | None, tier: Tier, result: ApplyResult
    ) -> None:
        """Count one copy of each block, whose chain hashes are given. ``before``: engine hash of their parent; a parent
        that is not known is a hole."""
        parent = None if before is None else self.blocks.get(before)
        if parent is not None and parent.own is None:
            parent = None
        seed = SEED if parent is None else parent.seed
        self._bind_each(hashes, chain, tier, seed, before, parent, result, count=True)
        if self._by_parent:
            self._release(hashes, result)

    def remove(self, hashes: tuple[int, ...], tier: int, result: ApplyResult) -> None:
        """Remove one copy of each block from ``tier``; without a copy there it is a no-op, counted."""
        unit = 1 << (tier * _BITS)
        block_of = self.blocks.get
        unknown = 0
        for engine in hashes:
            block = block_of(engine)
            if block is None or not copies_in(block.copies, tier):
                unknown += 1
                continue
            if block.copies != unit:
                self._set(engine, block, block.copies - unit)
                continue
            block.copies = 0
            if block.own is not None:
                self._vanish(block, block.own, tier)
            self._remembered.append(engine)
        result.unknown_removed += unknown
        result.removed += len(hashes) - unknown
        self._forget()

    def clear_pool(self) -> None:
        """The engine emptied its own pool: what connectors hold stays, all else goes."""
        if not self.connector_copies:
            self.clear()
            return
        for waiting in self.waiting:
            waiting.done = True
        self.waiting.clear()
        self._by_parent.clear()
        self.held = 0
        for engine, block in list(self.blocks.items()):
            self._set(engine, block, block.copies & self.connector_copies)
        for engine, block in list(self.blocks.items()):
            if block.own is None and not block.children:
                del self.blocks[engine]
            elif not block.copies:
                self._remembered.append(engine)
        self._forget()

    def clear(self) -> None:
        """Forget everything, the block size included, and give the memory back."""
        for _ in self.clear_in_steps():
            pass

    def clear_in_steps(self) -> Iterator[None]:
        """As `clear`, a few milliseconds a step; the group is empty at once, its bit is gone from the masks at the
        end."""
        masks, bit = self._masks, self.bit
        blocks, self.blocks = self.blocks, {}
        self.present = self.holes = self.lowered = self.held = self.connector_copies = 0
        self.ambiguous = False
        self.block_size = None
        self.waiting.clear()
        self._by_parent.clear()
        self._remembered.clear()
        self._by_own = None
        while blocks:
            for _ in range(min(_CLEARED_AT_ONCE, len(blocks))):
                _, block = blocks.popitem()
                if block.copies and block.own is not None:
                    masks.discard(masks.presence, block.own, bit)
                    if tier := best_tier(block.copies):
                        masks.discard(masks.below[tier], block.own, bit)
                block.copies = 0
            yield

    def evict(self, count: int) -> int:
        """Drop up to ``count`` blocks, those stored first, but none that a resident block hangs on; how many went."""
        evicted = 0
        start = 0
        while evicted < count and start < len(self.blocks):
            oldest = list(islice(self.blocks.items(), start, start + 2 * count))
            start += len(oldest)
            for engine, block in reversed(oldest):
                if block.children or evicted == count:
                    continue
                self._set(engine, block, 0)
                del self.blocks[engine]
                evicted += 1
                start -= 1
        return evicted

    def restore(self, engine: int, copies: int) -> None:
        """Set the copies of a block as a dump has them."""
        block = self.blocks[engine]
        if self._masks.links is not None and block.own is not None:
            self._masks.links.store(block.own, engine)
        if block.copies:
            return  # named by another engine hash before
        if copies:
            self._set(engine, block, copies)
        else:
            self._remembered.append(engine)

    # Identity

    def _store_without_identity(self, event: Stored, result: ApplyResult) -> None:
        unknown = 0
        for engine in event.hashes:
            block = self.blocks.get(engine)
            if block is None:
                block = self.blocks[engine] = Block(None, 0, None)
            elif not block.copies and block.own is not None and block.parent is not None:
                # It comes back without tokens. Its parent may have been forgotten meanwhile, and the parent's engine
                # hash given to another block: then it would look reachable where it is not.
                self.ambiguous = True
            unknown += block.own is None
            self._add(engine, block, event.tier)
        result.stored += len(event.hashes)
        if not unknown:
            return
        result.held += unknown
        self.hold(Waiting(event))
        while self.held > self._max_held:
            result.dropped += self._drop_oldest()

    def hold(self, waiting: Waiting) -> None:
        """Let an event wait for its parent (or, without tokens, for any event that names its blocks)."""
        self.waiting.append(waiting)
        self.held += len(waiting.event.hashes)
        if waiting.event.tokens and waiting.event.parent is not None:
            self._by_parent.setdefault(waiting.event.parent, []).append(waiting)

    def _drop_oldest(self) -> int:
        waiting = self.waiting.popleft()
        if waiting.done:
            return 0
        event = waiting.event
        self.held -= len(event.hashes)
        if event.tokens and event.parent is not None and (others := self._by_parent.get(event.parent)):
            others.remove(waiting)
            if not others:
                del self._by_parent[event.parent]
        dropped = 0
        for engine in event.hashes:
            block = self.blocks.get(engine)
            if block is not None and block.own is None and not block.children:
                del self.blocks[engine]
                dropped += 1
        return dropped

    def _release(self, hashes: Sequence[int], result: ApplyResult) -> None:
        """These blocks have an identity now: so have the ones that waited for them."""
        ready = list(hashes)
        while ready and self._by_parent:
            engine = ready.pop()
            runs = self._by_parent.get(engine)
            parent = self.blocks.get(engine)
            if not runs or parent is None or parent.own is None:
                continue
            del self._by_parent[engine]
            for waiting in runs:
                waiting.done = True
                self.held -= len(waiting.event.hashes)
                self._bind(waiting.event, parent, result, count=False)
                ready.extend(waiting.event.hashes)
        while self.waiting and self.waiting[0].done:
            self.waiting.popleft()

    def _bind(self, event: Stored, parent: Block | None, result: ApplyResult, *, count: bool) -> None:
        """Give the blocks of ``event`` their chain hashes, and count a copy of each unless that was done before."""
        seed = seed_of(event.adapter, event.salt) if parent is None else parent.seed
        local = local_hashes(event.tokens, event.tokens_per_block, seed=seed, mm=event.mm, eagle=event.eagle)
        chain = chain_of(local, None if parent is None else parent.own)
        self._bind_each(event.hashes, chain, event.tier, seed, event.parent, parent, result, count=count)

    def _bind_each(
        self,
        hashes: Sequence[int],
        chain: Iterable[int],
        tier: Tier,
        seed: int,
        before: int | None,
        parent: Block | None,
        result: ApplyResult,
        *,
        count: bool,
    ) -> None:
        bit, blocks, presence = self.bit, self.blocks, self._masks.presence
        link = None if self._masks.links is None else self._masks.links.store
        unit = 1 << (tier * _BITS)
        for engine, own in zip(hashes, chain, strict=True):
            block = blocks.get(engine)
            holders = presence.get(own, 0)
            if block is None and count and not holders & bit and (parent is not None or before is None):
                # A block that is new to the rank, by far the most common case: `_add` and `_appear` written out,
                # which halves the cost of a batch.
                block = blocks[engine] = Block(own, seed, before, unit)
                presence[own] = holders | bit
                self.present += 1
                result.stored += 1
                if parent is not None:
                    parent.children += 1
                    if not parent.copies:
                        self.holes += 1
                if tier:
                    self._lower(own, tier, 1)
                if self._by_own is not None:
                    self._by_own[own] = block
                if link is not None:
                    link(own, engine)
                before, parent = engine, block
                continue
            if block is None or (block.own not in (None, own) and not block.copies and not block.children):
                self.ambiguous = self.ambiguous or block is not None
                block = blocks[engine] = Block(own, seed, before)
                if not count:
                    self._remembered.append(engine)
            elif block.own is None:
                self._identify(engine, block, own, seed, before)
            elif block.own != own:
                # The engine cannot mean two things by one hash while it holds the block.
                result.rejected["hash_conflict"] += 1
                return
            if count:
                self._add(engine, block, tier)
                result.stored += 1
            if link is not None:
                link(own, engine)
            before, parent = engine, blocks[engine]
        self._forget()

    def _identify(self, engine: int, block: Block, own: int, seed: int, parent: int | None) -> None:
        copies, block.copies = block.copies, 0
        self.ambiguous = self.ambiguous or block.children > 0
        block.own, block.seed, block.parent = own, seed, parent
        if copies:
            self._set(engine, block, copies)

    # Copies and presence

    def _add(self, engine: int, block: Block, tier: int) -> None:
        copies = block.copies
        if copies_in(copies, tier) < _FIELD:
            self._set(engine, block, copies + (1 << (tier * _BITS)))

    def _set(self, engine: int, block: Block, copies: int) -> None:
        old = block.copies
        if block.own is None:
            block.copies = copies
        elif not old:
            if not copies:
                return
            if self._masks.presence.get(block.own, 0) & self.bit:
                self._merge(engine, block, copies)
                return
            block.copies = copies
            self._appear(block, block.own, best_tier(copies))
        elif not copies:
            block.copies = copies
            self._vanish(block, block.own, best_tier(old))
        else:
            block.copies = copies
            before, after = best_tier(old), best_tier(copies)
            if before != after:
                self._lower(block.own, before, -1)
                self._lower(block.own, after, 1)

    def _appear(self, block: Block, own: int, tier: int) -> None:
        self._masks.add(self._masks.presence, own, self.bit)
        self._lower(own, tier, 1)
        self.present += 1
        self.holes -= block.children
        if block.parent is not None:
            parent = self.blocks.get(block.parent)
            if parent is None:  # forgotten; its place is kept, so that its children are counted
                parent = self.blocks[block.parent] = Block(None, block.seed, None)
                self._remembered.append(block.parent)
            parent.children += 1
            if not parent.copies or parent.own is None:
                self.holes += 1
        if self._by_own is not None:
            self._by_own[own] = block

    def _vanish(self, block: Block, own: int, tier: int) -> None:
        self._masks.discard(self._masks.presence, own, self.bit)
        self._lower(own, tier, -1)
        self.present -= 1
        self.holes += block.children
        if block.parent is not None:
            parent = self.blocks[block.parent]
            parent.children -= 1
            if not parent.copies or parent.own is None:
                self.holes -= 1
        if self._by_own is not None:
            del self._by_own[own]

    def _lower(self, own: int, tier: int, change: int) -> None:
        """One block more (or less) whose best tier is ``tier``; the device needs no record."""
        if not tier:
            return
        masks = self._masks
        (masks.add if change > 0 else masks.discard)(masks.below[tier], own, self.bit)
        self.lowered += change

    def _merge(self, engine: int, block: Block, copies: int) -> None:
        """A second engine hash of a block that is present under another one: both name the same block from here on."""
        if self._by_own is None:
            self._by_own = {
                other.own: other for other in self.blocks.values() if other.copies and other.own is not None
            }
        assert block.own is not None
        twin = self._by_own[block.own]
        self.blocks[engine] = twin
        # Its children may name it by another engine hash, which goes on naming the old block.
        self.ambiguous = self.ambiguous or block.children != 0
        self.holes -= block.children
        twin.children += block.children
        block.children = 0
        total = twin.copies
        for tier in TIERS:
            room = _FIELD - copies_in(total, tier)
            total += min(copies_in(copies, tier), room) << (tier * _BITS)
        self._set(engine, twin, total)

    def _forget(self) -> None:
        """Keep the remembered blocks within their bound, the oldest go first."""
        for _ in range(len(self._remembered) - self._max_remembered):
            engine = self._remembered.popleft()
            block = self.blocks.get(engine)
            if block is None or block.copies:
                continue
            if block.children:
                self._remembered.append(engine)
            else:
                del self.blocks[engine]
