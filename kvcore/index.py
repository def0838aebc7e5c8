"""The exact prefix index: which rank of which worker holds how much of a chain, and in which tier.

One class for the bridge (one worker) and the indexer (all of them). Blocks are identified by their own chain hashes,
so that workers with different engine hashes share one index; see `kvcore.residency` for what is kept per rank. Answers
are exact: per rank the contiguous prefix that can be reached, each position counted once, at its best tier.

Only groups of full attention form the prefix (`kvcore.events.MAIN_KINDS`; without a kind: no group or group 0). A rank
with several of them holds a block where all of them do, at the worst of their tiers. Other groups are counted.

Memory is bounded: at most `IndexLimits.max_blocks` blocks. Beyond it the rank with the most blocks loses those stored
first, but never one that a resident block hangs on; answers are then too low, never too high, and `stats` says how
many went. What is cleared or removed is given back.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import msgspec

from kvcore.dump import (
    GroupDump,
    IndexDump,
    RankDump,
    Steps,
    at_once,
    decode_dump,
    dump_group,
    encode_dump,
    load_group,
)
from kvcore.errors import HashesError
from kvcore.events import MAIN_KINDS, Batch, Cleared, Removed, Stored, Tier, decode_batch
from kvcore.hashing import chain_view, pack_chain, unpack_chain
from kvcore.links import EngineLinks
from kvcore.match import Reach, bits, blocks_per_bit, reach_exact, reach_without_holes, select
from kvcore.residency import TIERS, ApplyResult, Masks, Residency, copies_in

_SHRINK_FROM = 4_096
MAX_GROUPS = 64
"""Groups of one rank, those that form the prefix and others each; real engines have below ten."""


@dataclass(frozen=True, slots=True)
class IndexLimits:
    """Bounds in blocks: in all; per group of a rank, waiting for their parent; per group of a rank, remembered after
    they left; and in all, whose engine hashes are kept for `PrefixIndex.engine_hashes` (0: none)."""

    max_blocks: int = 8_000_000
    max_held: int = 8_192
    max_remembered: int = 4_096
    links: int = 0


class RankMatch(msgspec.Struct, frozen=True, gc=False):
    """What one rank holds of a chain, in blocks: the reachable prefix, each position once, at its best tier."""

    worker: str
    rank: int
    device: int = 0
    host: int = 0
    disk: int = 0
    external: int = 0

    @property
    def reach(self) -> int:
        """Length of the reachable prefix in blocks."""
        return self.device + self.host + self.disk + self.external


@dataclass(frozen=True, slots=True)
class IndexStats:
    """Blocks: ``resident`` pairs of (rank, block) that can match, ``unique`` chain hashes, ``known`` in all (with those
    remembered or waiting: what `IndexLimits.max_blocks` bounds), ``held`` waiting, and since the start ``evicted`` and
    ``dropped`` from waiting. ``holed``: groups whose prefixes have holes, or may have, as their engine gave a hash a
    second meaning (matched exactly, but slower). ``links``: engine hashes kept; one told again may count twice."""

    ranks: int
    resident: int
    unique: int
    known: int
    held: int
    evicted: int
    dropped: int
    holed: int
    links: int = 0


@dataclass(slots=True)
class _Rank:
    worker: str
    rank: int
    groups: dict[int, Residency] = field(default_factory=dict)
    other_kinds: dict[int, str] = field(default_factory=dict)
    known: int = 0

    @property
    def mask(self) -> int:
        """The bits of its groups."""
        return sum(group.bit for group in self.groups.values())


@dataclass(slots=True)
class PreparedRanks:
    """Ranks of an index that it does not answer for (yet, or any more): see `PrefixIndex.prepare`."""

    ranks: dict[tuple[str, int], _Rank] = field(default_factory=dict)


Content = dict[tuple[str, int], dict[int, tuple[tuple[int, int, int], ...]]]


class PrefixIndex:
    """Presence of every block of every rank that it was told of."""

    def __init__(self, limits: IndexLimits | None = None) -> None:
        self.limits = limits or IndexLimits()
        self._masks = Masks()
        self.keep_links(self.limits.links)
        self._ranks: dict[tuple[str, int], _Rank] = {}
        # By bit. A free place keeps its last owner, but its bit is set nowhere.
        self._owners: list[_Rank] = []
        self._free: list[int] = []
        self._holed = 0
        self._lowered = 0
        self._grouped = 0
        self._aside = 0  # bits of `PreparedRanks`
        self._known = 0
        self._peak = 0
        self._evicted = 0
        self._dropped = 0

    # Writing

    def apply(self, worker: str, rank: int, batch: Batch) -> ApplyResult:
        """Apply one batch, its events in order. ``rank`` counts, whatever the batch says of itself."""
        owner = self._rank(worker, rank)
        result = ApplyResult()
        if batch.rejected:
            result.rejected.update(batch.rejected)
        for event in batch.events:
            if isinstance(event, Stored):
                for group in self._stored_groups(owner, event, result):
                    group.store(event, result)
            elif isinstance(event, Removed):
                self._remove(owner, event, result)
            elif isinstance(event, Cleared):
                result.cleared += 1
                for group in owner.groups.values():
                    group.clear_pool()
        return self._applied(owner, result)

    def _applied(self, owner: _Rank, result: ApplyResult) -> ApplyResult:
        self._refresh(owner)
        if self._known > self.limits.max_blocks:
            result.evicted = self._evict()
        if result.cleared:
            self._give_back()
        self._dropped += result.dropped
        result.block_size = self.block_size(owner.worker, owner.rank)
        return result

    def apply_payload(self, worker: str, rank: int, payload: bytes) -> ApplyResult:
        """Decode one engine payload and apply it. Raises `BadBatchError`, with nothing changed."""
        return self.apply(worker, rank, decode_batch(payload))

    def apply_hashes(
        self, worker: str, rank: int, hashes: bytes, chain: bytes, parent: int | None = None, tier: int = 0
    ) -> ApplyResult:
        """Apply a run of blocks by their hashes alone, as shared pools and other routers tell them: engine hashes and
        their chain hashes, u64 little-endian back to back; ``parent``: engine hash of the block before the first.

        As a stored event of no group whose tokens give these chain hashes, but nothing waits: a parent that is not
        known makes a hole until the group is cleared. They are believed: chain hashes that do not follow from the
        parent's make the answers for this rank wrong. Blocks after them that come with tokens are hashed in the
        namespace of the parent; without one in that of the base model without a salt. Raises `HashesError`, and
        `ValueError` for a tier that is none, with nothing changed."""
        where = Tier(tier)
        engines, owns = _hashes(hashes), _hashes(chain)
        if len(engines) != len(owns):
            raise HashesError(f"{len(engines)} engine hashes, but {len(owns)} chain hashes")
        owner = self._rank(worker, rank)
        result = ApplyResult()
        for group in self._stored_groups(owner, Stored(hashes=engines, tier=where), result):
            group.store_given(engines, owns, parent, where, result)
        return self._applied(owner, result)

    def clear_rank(self, worker: str, rank: int) -> None:
        """Forget every block of the rank, in all tiers and groups: a restart, or lost history. The rank stays."""
        owner = self._rank(worker, rank)
        for number in list(owner.groups):
            self._drop_group(owner, number)
        owner.other_kinds.clear()
        self._give_back()

    def remove_worker(self, worker: str) -> None:
        """Forget the worker and its ranks. Unknown: no-op."""
        for key in [key for key in self._ranks if key[0] == worker]:
            self.clear_rank(*key)
            del self._ranks[key]

    # Reading

    def match(self, chain: bytes) -> list[RankMatch]:
        """Every rank that holds a prefix of ``chain`` (u64 little-endian, as `kvcore.hashing.chain_hashes`), in no
        particular order. Ranks that hold nothing of it are left out: `ranks` has them all."""
        hashes = chain_view(chain)
        presence = self._masks.presence
        first = presence.get(hashes[0], 0) & ~self._aside if len(hashes) else 0
        if not first:
            return []
        reach: Reach = []
        closed = first & ~(self._holed | self._grouped)
        if closed:
            reach += reach_without_holes(presence, hashes, closed)
        if holed := first & self._holed & ~self._grouped:
            reach += reach_exact(presence, hashes, holed)
        lowered = first & self._lowered
        lower = self._lower_tiers(hashes, reach) if lowered else {}
        owners = self._owners
        matches: list[RankMatch] = []
        for mask, blocks in reach:
            matches += [RankMatch(owner.worker, owner.rank, blocks) for owner in select(owners, mask & ~lowered)]
            for place in bits(mask & lowered):
                host, disk, external = lower[place]
                owner = owners[place]
                device = blocks - host - disk - external
                matches.append(RankMatch(owner.worker, owner.rank, device, host, disk, external))
        if first & self._grouped:
            matches += self._match_grouped(hashes, first & self._grouped)
        return matches

    def keep_links(self, limit: int) -> None:
        """From now on keep the engine hashes of so many blocks (0: of none); those kept under another limit go."""
        links = self._masks.links
        if limit != (links.limit if links is not None else 0):
            self._masks.links = EngineLinks(limit) if limit > 0 else None

    def engine_hashes(self, chain: bytes) -> bytes:
        """Engine hash of every block of ``chain``, as last told by anybody; 0 where it is not known, or is not kept
        (`IndexLimits.links`). Both u64 little-endian back to back. See `kvcore.links`. Raises `HashesError`."""
        links = self._masks.links
        hashes = _hashes(chain)
        return bytes(len(chain)) if links is None else links.engine_hashes(hashes)

    def own_hashes(self, worker: str, rank: int, hashes: Sequence[int]) -> bytes:
        """Chain hash of every block that the rank knows by these engine hashes, u64 little-endian back to back; 0 where
        it knows none. Of several groups the first that knows the block."""
        owner = self._ranks.get((worker, rank))
        groups = [group.blocks for group in owner.groups.values()] if owner is not None else []
        owns: list[int] = []
        for engine in hashes:
            blocks = (blocks[engine] for blocks in groups if engine in blocks)
            owns.append(next((block.own for block in blocks if block.own is not None), 0))
        return pack_chain(owns)

    def ranks(self) -> list[tuple[str, int]]:
        """Every (worker, rank) that was applied to, loaded or cleared, and not removed."""
        return list(self._ranks)

    def resident(self, worker: str, rank: int) -> int:
        """Blocks that the rank holds, any tier (of several groups, the fullest)."""
        owner = self._ranks.get((worker, rank))
        return max((group.present for group in owner.groups.values()), default=0) if owner else 0

    def block_size(self, worker: str, rank: int) -> int | None:
        """Tokens per block as learned from the rank's events; ``None`` before the first one with tokens."""
        owner = self._ranks.get((worker, rank))
        for group in owner.groups.values() if owner else ():
            if group.block_size:
                return group.block_size
        return None

    def stats(self) -> IndexStats:
        """Counts for metrics."""
        groups = [group for owner in self._ranks.values() for group in owner.groups.values()]
        return IndexStats(
            ranks=len(self._ranks),
            resident=sum(group.present for group in groups),
            unique=len(self._masks.presence),
            known=self._known,
            held=sum(group.held for group in groups),
            evicted=self._evicted,
            dropped=self._dropped,
            holed=self._holed.bit_count(),
            links=len(self._masks.links or ()),
        )

    def content(self) -> Content:
        """Everything that can match, comparable: per (worker, rank) and chain hash its (group, tier, copies)."""
        content: Content = {}
        for key, owner in self._ranks.items():
            blocks: dict[int, set[tuple[int, int, int]]] = {}
            for number, group in owner.groups.items():
                for block in group.blocks.values():
                    places = [(number, int(tier), copies_in(block.copies, tier)) for tier in TIERS]
                    if block.own is not None and block.copies:
                        blocks.setdefault(block.own, set()).update(place for place in places if place[2])
            content[key] = {own: tuple(sorted(copies)) for own, copies in blocks.items()}
        return content

    # Snapshots

    def dump(self, worker: str | None = None) -> bytes:
        """The whole index, or one worker's part: `load` gives an index that answers and goes on alike."""
        return at_once(self.dump_steps(worker))

    def dump_steps(self, worker: str | None = None) -> Steps[bytes]:
        """As `dump`, a few milliseconds a step. What is dumped must not change before the last one."""
        ranks: list[RankDump] = []
        for owner in [owner for owner in self._ranks.values() if worker is None or owner.worker == worker]:
            groups: dict[int, GroupDump] = {}
            for number, group in owner.groups.items():
                groups[number] = yield from dump_group(group)
            ranks.append(RankDump(owner.worker, owner.rank, groups, owner.other_kinds))
        return encode_dump(IndexDump(ranks))

    def load(self, data: bytes, ranks: Collection[tuple[str, int]] | None = None) -> list[tuple[str, int]]:
        """Replace the ranks that ``data`` holds (of those in ``ranks``, if given) by what it says of them; which were
        replaced. Raises `BadDumpError`, with nothing changed."""
        prepared = at_once(self.prepare(data, ranks))
        loaded = self.adopt(prepared, list(prepared.ranks))
        at_once(self.discard(prepared))
        return loaded

    def prepare(self, data: bytes, ranks: Collection[tuple[str, int]] | None = None) -> Steps[PreparedRanks]:
        """`load` in three parts, of which the long ones go in steps: this builds the ranks aside, where they answer
        nothing while the index lives on; then `adopt`; and always `discard`. Raises `BadDumpError`."""
        prepared = PreparedRanks()
        built = False
        try:
            for dump in decode_dump(data).ranks:
                key = (dump.worker, dump.rank)
                if ranks is not None and key not in ranks:
                    continue
                owner = prepared.ranks[key] = _Rank(*key, other_kinds=dict(dump.other_kinds))
                for number, group in dump.groups.items():
                    residency = self._add_group(owner, number)
                    self._aside |= residency.bit
                    yield from load_group(residency, group)
            built = True
        finally:
            if not built:
                at_once(self.discard(prepared))
        return prepared

    def adopt(self, prepared: PreparedRanks, ranks: Collection[tuple[str, int]]) -> list[tuple[str, int]]:
        """Replace those of ``ranks`` that were prepared, at once; which were replaced. What they replace takes their
        place in ``prepared``."""
        adopted = [key for key in prepared.ranks if key in ranks]
        for key in adopted:
            new, old = prepared.ranks.pop(key), self._ranks.get(key)
            self._ranks[key] = new
            self._aside &= ~new.mask
            self._refresh(new)
            if old is not None:
                prepared.ranks[key] = old
                self._aside |= old.mask
                self._known -= old.known
                old.known = 0
        if self._known > self.limits.max_blocks:
            self._evict()
        return adopted

    def discard(self, prepared: PreparedRanks) -> Steps[None]:
        """Give back what was not adopted, and what was replaced."""
        self._peak = max(self._peak, len(self._masks.presence))
        for key, owner in list(prepared.ranks.items()):
            for group in owner.groups.values():
                yield from group.clear_in_steps()
            for number in list(owner.groups):
                self._drop_group(owner, number)
            del prepared.ranks[key]
        self._give_back()

    # Ranks, groups and their bits

    def _rank(self, worker: str, rank: int) -> _Rank:
        key = (worker, rank)
        owner = self._ranks.get(key)
        if owner is None:
            owner = self._ranks[key] = _Rank(worker, rank)
        return owner

    def _stored_groups(self, owner: _Rank, event: Stored, result: ApplyResult) -> list[Residency]:
        number, kind = event.group, event.group_kind
        if kind is not None and kind not in MAIN_KINDS:
            if number is not None:
                if len(owner.other_kinds) < MAX_GROUPS:
                    owner.other_kinds[number] = kind
                if number in owner.groups:  # taken for a main group before its kind was said
                    self._drop_group(owner, number)
        elif number is None and owner.groups:
            return list(owner.groups.values())
        elif (number or 0) in owner.groups:
            return [owner.groups[number or 0]]
        elif kind is not None or ((number or 0) == 0 and 0 not in owner.other_kinds):
            if len(owner.groups) < MAX_GROUPS:
                return [self._add_group(owner, number or 0)]
            result.rejected["too_many_groups"] += 1
            return []
        result.other_groups += len(event.hashes)
        return []

    def _remove(self, owner: _Rank, event: Removed, result: ApplyResult) -> None:
        if event.group is None or event.group in owner.groups:
            groups = owner.groups.values() if event.group is None else (owner.groups[event.group],)
            for group in groups:
                group.remove(event.hashes, event.tier, result)
            if not groups:
                result.unknown_removed += len(event.hashes)
        elif event.group in owner.other_kinds or event.group:
            result.other_groups += len(event.hashes)
        else:
            result.unknown_removed += len(event.hashes)

    def _add_group(self, owner: _Rank, number: int) -> Residency:
        if self._free:
            place = heappop(self._free)
            self._owners[place] = owner
        else:
            place = len(self._owners)
            self._owners.append(owner)
        limits = self.limits
        group = Residency(self._masks, 1 << place, max_held=limits.max_held, max_remembered=limits.max_remembered)
        owner.groups[number] = group
        return group

    def _drop_group(self, owner: _Rank, number: int) -> None:
        group = owner.groups.pop(number)
        group.clear()
        heappush(self._free, group.bit.bit_length() - 1)
        self._holed &= ~group.bit
        self._lowered &= ~group.bit
        self._grouped &= ~group.bit
        self._aside &= ~group.bit
        self._refresh(owner)

    def _refresh(self, owner: _Rank) -> None:
        """After a change: the rank's bits in the masks that say how it must be matched, and its size."""
        several = len(owner.groups) > 1
        known = 0
        for group in owner.groups.values():
            bit = group.bit
            self._holed = self._holed | bit if group.holes or group.ambiguous else self._holed & ~bit
            self._lowered = self._lowered | bit if group.lowered else self._lowered & ~bit
            self._grouped = self._grouped | bit if several else self._grouped & ~bit
            known += len(group.blocks)
        self._known += known - owner.known
        owner.known = known
        self._peak = max(self._peak, len(self._masks.presence))

    # Matching

    def _lower_tiers(self, hashes: Sequence[int], reach: Reach) -> dict[int, tuple[int, int, int]]:
        """Blocks below the device, per place: host, disk, external."""
        reaches = {place: blocks for mask, blocks in reach for place in bits(mask & self._lowered)}
        tables = self._masks.below[1:]
        host, disk, external = (blocks_per_bit(table, hashes, reaches) if table else {} for table in tables)
        return {place: (host.get(place, 0), disk.get(place, 0), external.get(place, 0)) for place in reaches}

    def _match_grouped(self, hashes: Sequence[int], mask: int) -> list[RankMatch]:
        """Ranks with several main groups: a position counts where all groups hold it, at the worst of their tiers."""
        presence, below = self._masks.presence, self._masks.below
        matches: list[RankMatch] = []
        for owner in {id(owner): owner for owner in select(self._owners, mask)}.values():
            wanted = owner.mask
            counts = [0, 0, 0, 0]
            for own in hashes:
                if presence.get(own, 0) & wanted != wanted:
                    break
                counts[next((tier for tier in (3, 2, 1) if below[tier].get(own, 0) & wanted), 0)] += 1
            if any(counts):
                matches.append(RankMatch(owner.worker, owner.rank, *counts))
        return matches

    # Memory

    def _evict(self) -> int:
        """Get below the bound with some room, so that this is not done for every batch."""
        evicted = 0
        surplus = self._known - self.limits.max_blocks + self.limits.max_blocks // 32
        while surplus > 0:
            taken = [(owner, group) for owner in self._ranks.values() for group in owner.groups.values()]
            owner, group = max(taken, key=lambda pair: len(pair[1].blocks))
            gone = group.evict(min(surplus, max(len(group.blocks) // 8, 1)))
            if not gone:
                break
            surplus -= gone
            evicted += gone
            self._refresh(owner)
        self._evicted += evicted
        self._give_back()
        return evicted

    def _give_back(self) -> None:
        """A dict never shrinks by itself: copy the shared one when most of it is empty."""
        masks = self._masks
        size = len(masks.presence)
        if self._peak > _SHRINK_FROM and size < self._peak // 4:
            masks.presence = dict(masks.presence)
            masks.below = tuple(dict(table) for table in masks.below)
            self._peak = size


def _hashes(packed: bytes) -> tuple[int, ...]:
    if len(packed) % 8:
        raise HashesError(f"{len(packed)} bytes are not whole u64 hashes")
    return unpack_chain(packed)
