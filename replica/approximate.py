"""What was sent where: stands in for the index where events cannot be had or trusted, and for chains over text.

Which answers come from it (docs/adr/0008):

- a source is `approximate` because its engine publishes no events, because they have stopped, because ranks share a
  port, or because they disagree with what the engine reports: only what was sent counts;
- because its history is gone for good: the longer of what the index has and what was sent;
- a chain over text: only what was sent counts, for every rank of the model.

Token chains are noted only for sources that are not `synced`, so that an exact index pays nothing; what was noted is
forgotten when its source is synced again, and (text too) when the engine began anew or its worker is gone.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.sent import SentBlocks, SentLimits
from replica.config import ReplicaSettings
from replica.source import Source
from schemas.index import TierBlocks, WorkerMatch
from schemas.placed import Placed
from schemas.worker import WorkerProfile

EXPIRE_S = 1.0
"""How often what no longer counts is given back."""


class Approximate:
    """The blocks sent to every source, and the answers made of them. Times are Unix seconds."""

    def __init__(self, settings: ReplicaSettings) -> None:
        limits = SentLimits(settings.approximate_ttl_s, settings.approximate_max_blocks)
        self._blocks = settings.approximate_blocks
        self.tokens = SentBlocks(limits)
        self.text = SentBlocks(limits)
        self.sources: dict[tuple[str, int], Source] = {}
        """Those that are `approximate` now."""
        self._expire_at = float("-inf")

    def judged(self, source: Source) -> None:
        """The source's health may have changed."""
        key = source.worker, source.rank
        if source.health == "approximate":
            self.sources[key] = source
            return
        self.sources.pop(key, None)
        if source.health == "synced":
            self.tokens.clear_rank(*key)

    def placed(self, fact: Placed, source: Source, profile: WorkerProfile, now: float) -> None:
        """A prompt goes to this source."""
        if fact.unit == "tokens" and source.health == "synced":
            return
        capacity = self._blocks
        if profile.kv_tokens and fact.block_size:
            capacity = max(1, profile.kv_tokens // fact.block_size)
        sent = self.text if fact.unit == "text" else self.tokens
        sent.record(fact.worker, fact.rank, fact.chain, now, capacity=capacity)

    def restarted(self, worker: str) -> None:
        """The worker's engine began anew: its cache is empty."""
        self.tokens.remove_worker(worker)
        self.text.remove_worker(worker)

    def emptied(self, worker: str, rank: int) -> None:
        """The engine says that it has dropped its cache."""
        self.tokens.clear_rank(worker, rank)
        self.text.clear_rank(worker, rank)

    def dropped(self, worker: str, rank: int) -> None:
        """The source is gone."""
        self.sources.pop((worker, rank), None)
        self.emptied(worker, rank)

    def tick(self, now: float) -> None:
        """Give memory back."""
        if now >= self._expire_at:
            self._expire_at = now + EXPIRE_S
            self.tokens.expire(now)
            self.text.expire(now)

    def of_tokens(self, source: Source, indexed: WorkerMatch, chain: Sequence[int], now: float) -> WorkerMatch:
        """What an approximate source has of a chain of tokens; ``indexed``: what the index says."""
        worker, rank = source.worker, source.rank
        sent = self.tokens.reach(worker, rank, chain, now)
        blocks, resident = TierBlocks(device=sent), self.tokens.resident(worker, rank)
        if not source.only_sent:
            known = indexed.blocks
            resident = max(resident, indexed.resident_blocks)
            blocks = TierBlocks(
                device=known.device + max(0, sent - known.reach),
                host=known.host,
                disk=known.disk,
                external=known.external,
            )
        return WorkerMatch(
            worker=worker,
            rank=rank,
            blocks=blocks,
            health="approximate",
            reason=source.reason,
            resident_blocks=resident,
            indexed=indexed.blocks.reach if source.measured else None,
            pool=indexed.pool,
        )

    def of_text(self, source: Source, chain: Sequence[int], now: float) -> WorkerMatch:
        """What any source has of a chain over text."""
        worker, rank = source.worker, source.rank
        return WorkerMatch(
            worker=worker,
            rank=rank,
            blocks=TierBlocks(device=self.text.reach(worker, rank, chain, now)),
            health="approximate",
            reason="text_blocks",
            resident_blocks=self.text.resident(worker, rank),
        )
