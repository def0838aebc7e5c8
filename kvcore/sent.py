"""What was sent where: the blocks that each (worker, rank) was given to compute, for engines that do not say what they
hold.

A block counts for ``ttl_s`` after it was sent last, and a rank keeps at most its ``capacity`` of them, the least
recently sent going first. Of one prompt the tail is always older than the head, and a block that two prompts share is
as young as the later one: so a block never outlives one that it hangs on, what a rank has of a chain is a prefix of it,
and a binary search finds its end exactly. (A chain hash stands for everything before it; whoever makes up chains in
which it does not finds them not taken in, or gets wrong answers about them.)

Agents send their prompts again and again, a little longer each time. So blocks are kept as runs that were sent together
last, each hanging on the run before it: to send a prompt once more costs what is new in it, and one step for each place
on its way where prompts part.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

from kvcore.hashing import chain_view


class _Run:
    """Blocks of one rank that follow each other, from position ``start`` of their prompts on, sent last at ``sent_at``
    (seconds). ``parent``: the run that it hangs on; ``children``: how many hang on this one."""

    __slots__ = ("children", "hashes", "parent", "sent_at", "start")

    def __init__(self, parent: _Run | None, start: int, hashes: list[int], sent_at: float) -> None:
        self.parent = parent
        self.start = start
        self.hashes = hashes
        self.sent_at = sent_at
        self.children = 0


class _Rank:
    """What was sent to one rank. ``_runs``: the one sent longest ago first; whatever hangs on a run is before it."""

    __slots__ = ("_runs", "_where")

    def __init__(self) -> None:
        self._where: dict[int, _Run] = {}
        self._runs: OrderedDict[_Run, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._where)

    def sent_at(self, block: int) -> float:
        """When ``block`` was sent last; minus infinity: it is not known."""
        run = self._where.get(block)
        return run.sent_at if run is not None else -inf

    def send(self, hashes: Sequence[int], now: float) -> None:
        """A prompt. One that contradicts what is known (no hash function of ours makes it) is not taken in."""
        where = self._where
        known = self._known(hashes)
        rest = list(hashes[known:])
        if len(set(rest)) < len(rest) or not where.keys().isdisjoint(rest):
            return
        run = where[hashes[known - 1]] if known else None
        if run is not None:
            if not run.start < known <= run.start + len(run.hashes):
                return
            if known < run.start + len(run.hashes):
                run = self._split(run, known - run.start)
        if rest:
            if run is not None and not run.children:
                run.hashes += rest
            else:
                if run is not None:
                    run.children += 1
                run = _Run(run, known, rest, now)
            where.update(dict.fromkeys(rest, run))
        while run is not None:
            run.sent_at = now
            self._runs.pop(run, None)
            self._runs[run] = None
            run = run.parent

    def _known(self, hashes: Sequence[int]) -> int:
        """How many blocks are known, from the start."""
        where = self._where
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in where:
                low = middle + 1
            else:
                high = middle
        return low

    def _split(self, run: _Run, at: int) -> _Run:
        """Cut ``run`` after its first ``at`` blocks: they are a new run, and it keeps the others and its age."""
        upper = _Run(run.parent, run.start, run.hashes[:at], run.sent_at)
        upper.children = 1
        self._where.update(dict.fromkeys(upper.hashes, upper))
        run.parent, run.start, run.hashes = upper, run.start + at, run.hashes[at:]
        return upper

    def drop(self, count: int) -> None:
        """The ``count`` blocks sent longest ago; of each prompt its tail first."""
        while count > 0:
            run = next(iter(self._runs))
            gone = run.hashes[-count:]
            del run.hashes[-count:]
            for block in gone:
                del self._where[block]
            count -= len(gone)
            if not run.hashes:
                del self._runs[run]
                if run.parent is not None:
                    run.parent.children -= 1

    def drop_until(self, limit: float) -> None:
        """What was sent at ``limit`` or before."""
        while self._runs:
            run = next(iter(self._runs))
            if run.sent_at > limit:
                return
            self.drop(len(run.hashes))


@dataclass(frozen=True, slots=True)
class SentLimits:
    """``ttl_s``: seconds for which a sent block counts. ``max_blocks``: of all ranks together; over it the rank with
    the most loses its oldest (a block costs about 130 bytes). ``max_ranks``: further ranks are not taken in."""

    ttl_s: float = 300.0
    max_blocks: int = 1_000_000
    max_ranks: int = 16_384


class SentBlocks:
    """Chain hashes by the rank that they were sent to. Times are seconds of any clock; one that steps back counts as
    standing still.

    ``evicted``: blocks that went because of a bound before their time; ``refused``: records of ranks beyond the bound.
    """

    def __init__(self, limits: SentLimits | None = None) -> None:
        self._limits = limits or SentLimits()
        self._ranks: dict[tuple[str, int], _Rank] = {}
        self._blocks = 0
        self._now = float("-inf")
        self.evicted = 0
        self.refused = 0

    def __len__(self) -> int:
        """Blocks kept, over all ranks."""
        return self._blocks

    def ranks(self) -> Iterator[tuple[str, int]]:
        """Every (worker, rank) that something is known of."""
        return iter(self._ranks)

    def resident(self, worker: str, rank: int) -> int:
        """Blocks kept for one rank."""
        return len(self._ranks.get((worker, rank), ()))

    def record(self, worker: str, rank: int, chain: bytes, now: float, *, capacity: int) -> None:
        """``chain`` (as `kvcore.hashing.pack_chain` writes it) was sent to this rank at ``now``.

        ``capacity``: blocks that the rank can hold; of a longer chain its beginning is kept.
        """
        now = self._advance(now)
        hashes = chain_view(chain)
        count = min(len(hashes), capacity, self._limits.max_blocks)
        if count <= 0:
            return
        sent = self._ranks.get((worker, rank))
        if sent is None:
            if len(self._ranks) >= self._limits.max_ranks:
                self.refused += 1
                return
            sent = self._ranks[worker, rank] = _Rank()
        self._drop_stale(sent)
        before = len(sent)
        sent.send(hashes[:count], now)
        self._blocks += len(sent) - before
        self._drop_oldest(sent, len(sent) - capacity)
        while self._blocks > self._limits.max_blocks:
            self._drop_oldest(max(self._ranks.values(), key=len), self._blocks - self._limits.max_blocks)

    def reach(self, worker: str, rank: int, chain: Sequence[int], now: float) -> int:
        """How many blocks of ``chain`` (chain hashes, as of `kvcore.hashing.chain_view`) count as held, from its start.

        O(log n) looks, so that asking for every rank of a pool is cheap.
        """
        sent = self._ranks.get((worker, rank))
        if not sent or not chain:
            return 0
        limit, sent_at = max(now, self._now) - self._limits.ttl_s, sent.sent_at
        if sent_at(chain[0]) <= limit:
            return 0  # most of a pool
        low, high = 1, len(chain)
        while low < high:
            middle = (low + high + 1) // 2
            if sent_at(chain[middle - 1]) > limit:
                low = middle
            else:
                high = middle - 1
        return low

    def clear_rank(self, worker: str, rank: int) -> None:
        """The rank holds nothing any more (its engine is another one), or need not be guessed at."""
        self._blocks -= len(self._ranks.pop((worker, rank), ()))

    def remove_worker(self, worker: str) -> None:
        """The worker is gone."""
        for key in [key for key in self._ranks if key[0] == worker]:
            self.clear_rank(*key)

    def expire(self, now: float) -> None:
        """Give back what does not count any more. Otherwise that happens only where something is recorded."""
        self._advance(now)
        for key, sent in list(self._ranks.items()):
            self._drop_stale(sent)
            if not sent:
                del self._ranks[key]

    def _advance(self, now: float) -> float:
        self._now = max(now, self._now)
        return self._now

    def _drop_stale(self, sent: _Rank) -> None:
        before = len(sent)
        sent.drop_until(self._now - self._limits.ttl_s)
        self._blocks += len(sent) - before

    def _drop_oldest(self, sent: _Rank, count: int) -> None:
        count = min(count, len(sent))
        if count > 0:
            sent.drop(count)
            self._blocks -= count
            self.evicted += count
