"""What was sent where: the blocks that each (worker, rank) was given to compute, for engines that do not say what they
hold.

A block counts for ``ttl_s`` after it was sent last, and a rank keeps at most its ``capacity`` of them, the least
recently sent going first. Of one prompt the tail is always older than the head, and a block that two prompts share is
as young as the later one: so a block never outlives one that it hangs on, what a rank has of a chain is a prefix of it,
and a binary search finds its end exactly. (A chain hash stands for everything before it; whoever makes up chains in
which it does not gets wrong answers about those.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvcore.hashing import chain_view


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
        # Per rank: chain hash to the time it was sent last, oldest first; the same order as that of use.
        self._ranks: dict[tuple[str, int], OrderedDict[int, float]] = {}
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
            sent = self._ranks[worker, rank] = OrderedDict()
        before = len(sent)
        for position in range(count - 1, -1, -1):
            block = hashes[position]
            sent[block] = now
            sent.move_to_end(block)
        self._blocks += len(sent) - before
        self._drop_stale(sent)
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
        limit = max(now, self._now) - self._limits.ttl_s
        if sent.get(chain[0], limit) <= limit:
            return 0  # most of a pool
        low, high = 1, len(chain)
        while low < high:
            middle = (low + high + 1) // 2
            if sent.get(chain[middle - 1], limit) > limit:
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

    def _drop_stale(self, sent: OrderedDict[int, float]) -> None:
        limit = self._now - self._limits.ttl_s
        while sent and next(iter(sent.values())) <= limit:
            sent.popitem(last=False)
            self._blocks -= 1

    def _drop_oldest(self, sent: OrderedDict[int, float], count: int) -> None:
        for _ in range(min(count, len(sent))):
            sent.popitem(last=False)
            self._blocks -= 1
            self.evicted += 1
