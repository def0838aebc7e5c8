"""The KV cache of `load.engine` by spans: ranges of a chain's blocks that share their fate.

The same behaviour as `load.engine.kv_cache` over `load.engine.blocks` (paged blocks, reference counts, one
least-recently-used free queue, tails first, blocks without a hash before all others, several copies of one block), at a
cost per range instead of per block. Property tests hold the two side by side.

Why it can be done: a block is never evicted before the blocks that continue it, so what is resident of a chain is
always its beginning. Copies are rare; all but the oldest copy of a block lie aside (``spare``) and move up as older
copies are evicted.

Beyond that core it knows preferences (`SpanCache.prefer`): a free queue for each, of which the least is emptied first.
A chain is preferred as a whole, and what it forks off with it, so that a beginning still outlives what continues it.
"""

from __future__ import annotations

from load.sim.content import Chain
from load.sim.preferences import Preferences
from load.sim.requests import SimRequest


class Span:
    """Blocks ``lo`` to ``hi`` of ``chain``, each referenced ``refs`` times; in the free queue when that is 0.

    ``upper``: what was cut off its end, so that whoever holds the whole finds all of it. ``freed``: when it came into
    the free queue, as a number that grows.
    """

    __slots__ = ("chain", "freed", "hi", "lo", "newer", "older", "refs", "upper")

    def __init__(self, chain: Chain, lo: int, hi: int, refs: int) -> None:
        self.chain = chain
        self.lo = lo
        self.hi = hi
        self.refs = refs
        self.upper: Span | None = None
        self.freed = 0
        self.older = self
        self.newer = self


class Hold:
    """What a request holds: the blocks from ``span.lo`` to ``hi``, in ``span`` and in what was cut off it."""

    __slots__ = ("hi", "span")

    def __init__(self, span: Span, hi: int) -> None:
        self.span = span
        self.hi = hi


class Resident:
    """What is resident of one chain: the oldest copies (back to back from its fork), and younger ones by age."""

    __slots__ = ("primary", "spare")

    def __init__(self) -> None:
        self.primary: list[Span] = []
        self.spare: list[Span] = []


class Hits:
    """Result of a lookup: ``len`` is blocks; ``free`` of them lie in the free queue."""

    __slots__ = ("blocks", "free", "parts")

    def __init__(self, parts: list[tuple[Resident, int]], blocks: int, free: int) -> None:
        self.parts = parts
        self.blocks = blocks
        self.free = free

    def __len__(self) -> int:
        return self.blocks


class SpanCache:
    """Prefix cache of one rank. ``num_blocks`` includes the null block, as in `load.engine`."""

    def __init__(
        self, num_blocks: int, block_size: int, prefix_caching: bool = True, *, whole_prompt: bool = False
    ) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks (one is the null block), not {num_blocks}")
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self.whole_prompt = whole_prompt
        self.usable = num_blocks - 1
        self.free_blocks = self.usable
        self.evicted_blocks = 0
        self._blank = self.usable
        self._residents: dict[Chain, Resident] = {}
        self._queues = {0: Span(Chain(), 0, 0, 1)}
        """Sentinels of the free queues by priority, the least first: ``newer`` is the least recently used span."""
        self._preferences = Preferences()
        self._freed = 0

    @property
    def used_blocks(self) -> int:
        return self.usable - self.free_blocks

    # What the scheduler asks for

    def lookup(self, request: SimRequest) -> Hits:
        """The longest cached prefix. Never the whole request: its last token is always recomputed."""
        limit = (request.length - 1) // self.block_size
        parts: list[tuple[Resident, int]] = []
        blocks = free = 0
        if self.prefix_caching:
            for chain, first, last in request.chain.path:
                resident = self._residents.get(chain)
                wanted = min(last, limit)
                if resident is None or wanted <= first:
                    break
                blocks = min(wanted, resident.primary[-1].hi)
                parts.append((resident, blocks))
                for span in resident.primary:
                    if span.lo >= blocks:
                        break
                    if span.refs == 0:
                        free += min(span.hi, blocks) - span.lo
                if blocks < wanted:
                    break
        return Hits(parts, blocks, free)

    def reach(self, chain: Chain, limit: int) -> int:
        """Blocks of the prefix of ``chain`` that are resident, at most ``limit``: what an exact index answers."""
        blocks = 0
        for own, first, last in chain.path:
            resident = self._residents.get(own)
            wanted = min(last, limit)
            if resident is None or wanted <= first:
                break
            blocks = min(wanted, resident.primary[-1].hi)
            if blocks < wanted:
                break
        return blocks

    def reaches(self) -> dict[Chain, int]:
        """The end, in blocks, of what is resident of each chain that has anything resident."""
        return {chain: resident.primary[-1].hi for chain, resident in self._residents.items()}

    def prefer(self, chain: Chain, priority: int) -> None:
        """What is free of ``chain`` is evicted after all of lower ``priority``, and with a positive one what it forks
        off too; 0 is the usual one. Goes on until the next call (`Preferences`)."""
        before = {own: self._preferences.of(own) for own, _, _ in chain.path}
        self._preferences.wish(chain, priority)
        for own in before:
            wanted = self._preferences.of(own)
            if wanted == before[own]:
                continue
            if wanted not in self._queues:
                self._queues = dict(sorted({**self._queues, wanted: Span(Chain(), 0, 0, 1)}.items()))
            resident = self._residents.get(own)
            spans = [] if resident is None else [*resident.primary, *resident.spare]
            for span in sorted((span for span in spans if span.refs == 0), key=lambda span: span.hi, reverse=True):
                self._unlink(span)
                self._link_by_age(self._queues[wanted], span)

    def drop(self, chain: Chain) -> int:
        """What is free of the chain's own part is evicted now, as far as nothing that is in use continues it; how many
        blocks."""
        resident = self._residents.get(chain)
        used = [] if resident is None else [span.hi for span in [*resident.primary, *resident.spare] if span.refs]
        keep = max(used, default=0)
        gone = 0
        while (resident := self._residents.get(chain)) is not None:
            free = [span for span in [*resident.primary, *resident.spare] if span.refs == 0 and span.lo >= keep]
            if not free:
                break
            span = max(free, key=lambda span: (span.hi, span in resident.spare))
            end, span.hi = span.hi, span.lo
            gone += end - span.lo
            self.evicted_blocks += end - span.lo
            self._forget(span, end)
        self._blank += gone
        return gone

    def take_away(self, count: int) -> int:
        """At most ``count`` free blocks are somebody else's from now on; how many that were."""
        taken = min(count, self.free_blocks)
        self._take(taken)
        return taken

    def give_back(self, count: int) -> None:
        """Of those that were taken away, ``count`` are free again."""
        self._blank += count
        self.free_blocks += count

    def hold(self, chain: Chain, tokens: int) -> SimRequest:
        """Reference what is resident of the first ``tokens`` of ``chain``, until the holder is freed."""
        holder = SimRequest(-1, chain, tokens + 1, 1)
        hits = self.lookup(holder)
        self._touch(holder, hits)
        holder.held = holder.registered = hits.blocks
        return holder

    def allocate(self, request: SimRequest, new_tokens: int, hits: Hits | None = None) -> bool:
        """Room for the next ``new_tokens`` of ``request`` (after ``hits``); ``False``, and no change, without room."""
        size = self.block_size
        found = hits.blocks if hits is not None else 0
        after = request.computed + found * size + new_tokens
        wanted = -(-after // size) - request.held - found
        if hits is None:
            if wanted > self.free_blocks:
                return False
        else:
            needed = -(-request.length // size) - found if self.whole_prompt else wanted
            if needed > self.free_blocks - hits.free:
                return False
        if hits is not None and found:
            self._touch(request, hits)
            request.held = request.registered = found
            request.computed += found * size
        if wanted > 0:
            self._take(wanted)
            request.held += wanted
        if self.prefix_caching:
            full = after // size
            if full > request.registered:
                self._register(request, full)
        return True

    def free(self, request: SimRequest) -> None:
        """Let go of everything that ``request`` holds; its full blocks can still be hit."""
        blank = request.held - request.registered
        self._blank += blank
        self.free_blocks += blank
        for hold in reversed(request.holds):
            self._release(hold)
        request.holds = []
        request.held = request.registered = 0
        request.computed = 0

    # The pool

    def _touch(self, request: SimRequest, hits: Hits) -> None:
        for resident, end in hits.parts:
            spans = resident.primary
            for index, span in enumerate(spans):
                if span.lo >= end:
                    break
                if span.hi > end:
                    spans.insert(index + 1, self._cut(span, end))
                if span.refs == 0:
                    self._unlink(span)
                    self.free_blocks -= span.hi - span.lo
                span.refs += 1
                request.holds.append(Hold(span, span.hi))

    def _take(self, count: int) -> None:
        """Hand out ``count`` free blocks, least recently used first; what they held is forgotten."""
        self.free_blocks -= count
        blank = min(self._blank, count)
        self._blank -= blank
        count -= blank
        while count:
            span = self._oldest()
            taken = min(count, span.hi - span.lo)
            span.hi -= taken
            count -= taken
            self.evicted_blocks += taken
            self._forget(span, span.hi + taken)

    def _oldest(self) -> Span:
        """The least recently used of the least preferred free spans."""
        return next(queue.newer for queue in self._queues.values() if queue.newer is not queue)

    def _forget(self, span: Span, end: int) -> None:
        """The blocks from ``span.hi`` to ``end`` are gone; younger copies of them, if any, move up."""
        resident = self._residents[span.chain]
        emptied = span.hi == span.lo
        if emptied:
            self._unlink(span)
        if span in resident.spare:
            if emptied:
                resident.spare.remove(span)
            return
        start = span.hi
        if emptied:
            resident.primary.remove(span)
        if resident.spare:
            self._move_up(resident, start, end)
        if not resident.primary:
            del self._residents[span.chain]

    def _move_up(self, resident: Resident, start: int, end: int) -> None:
        """Fill the hole from ``start`` to ``end`` with the oldest spare copies."""
        holes = [(start, end)]
        for spare in list(resident.spare):
            left: list[tuple[int, int]] = []
            for lo, hi in holes:
                span = spare
                first, last = max(lo, span.lo), min(hi, span.hi)
                if first >= last:
                    left.append((lo, hi))
                    continue
                if last < span.hi:
                    resident.spare.insert(resident.spare.index(span) + 1, self._cut(span, last))
                if first > span.lo:
                    upper = self._cut(span, first)
                    resident.spare.insert(resident.spare.index(span) + 1, upper)
                    span = upper
                resident.spare.remove(span)
                resident.primary.append(span)
                left.extend(hole for hole in ((lo, first), (last, hi)) if hole[0] < hole[1])
            holes = left
        resident.primary.sort(key=lambda span: span.lo)

    def _cut(self, span: Span, at: int) -> Span:
        """Cut ``span`` in two at block ``at``; the upper part, which is evicted first."""
        upper = Span(span.chain, at, span.hi, span.refs)
        upper.freed = span.freed
        upper.upper = span.upper
        span.upper = upper
        span.hi = at
        if span.refs == 0:
            self._link_before(span, upper)
        return upper

    def _register(self, request: SimRequest, full: int) -> None:
        """The blocks of ``request`` up to ``full`` hold what its chain says there, and can be hit."""
        first = request.registered
        request.registered = full
        if first >= request.chain.fork:
            self._register_part(request, request.chain, first, full)
            return
        for chain, start, end in request.chain.path:
            lo, hi = max(start, first), min(end, full)
            if lo < hi:
                self._register_part(request, chain, lo, hi)

    def _register_part(self, request: SimRequest, chain: Chain, lo: int, hi: int) -> None:
        resident = self._residents.get(chain)
        if resident is None:
            resident = self._residents[chain] = Resident()
        spans = resident.primary
        reach = spans[-1].hi if spans else chain.fork
        if lo < reach:
            copied = min(hi, reach)
            copy = Span(chain, lo, copied, 1)
            resident.spare.append(copy)
            request.holds.append(Hold(copy, copied))
            lo = copied
        elif spans and request.holds:
            last, own = spans[-1], request.holds[-1]
            if own.span is last and own.hi == last.hi and last.refs == 1:
                last.hi = own.hi = hi
                return
        if lo < hi:
            span = Span(chain, lo, hi, 1)
            spans.append(span)
            request.holds.append(Hold(span, hi))

    def _release(self, hold: Hold) -> None:
        span = hold.span
        if span.hi >= hold.hi:
            self._drop(span)
            return
        pieces = [span]
        while pieces[-1].hi < hold.hi:
            upper = pieces[-1].upper
            assert upper is not None
            pieces.append(upper)
        for piece in reversed(pieces):
            self._drop(piece)

    def _drop(self, span: Span) -> None:
        """One reference less; the last one puts it at the end of the free queue, joined with what continues it."""
        span.refs -= 1
        if span.refs:
            return
        self.free_blocks += span.hi - span.lo
        self._freed += 1
        span.freed = self._freed
        queue = self._queues[self._preferences.of(span.chain) if self._preferences else 0]
        upper = queue.older
        self._link_before(queue, span)
        if upper.chain is span.chain and upper.lo == span.hi and upper is not queue:
            resident = self._residents[span.chain]
            if not resident.spare:
                resident.primary.remove(upper)
                self._unlink(upper)
                span.hi = upper.hi

    def _link_by_age(self, queue: Span, span: Span) -> None:
        """Into a free queue, where it would be had it come there when it became free."""
        newer = queue
        while newer.older is not queue and newer.older.freed > span.freed:
            newer = newer.older
        self._link_before(newer, span)

    @staticmethod
    def _link_before(newer: Span, span: Span) -> None:
        span.newer = newer
        span.older = newer.older
        newer.older.newer = span
        newer.older = span

    @staticmethod
    def _unlink(span: Span) -> None:
        span.older.newer = span.newer
        span.newer.older = span.older
        span.older = span.newer = span
