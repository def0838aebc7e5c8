"""From what the index found to the answer: every source of the pool, its blocks of the chain and its health.

This is the hot path of every decision. Who is asked about is remembered per kind of question, and what was last said
of a source is said again until the source changes: most of a pool holds nothing of a chain, or the same shared prefix.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvcore import PrefixIndex, RankMatch
from kvcore.hashing import chain_view
from replica.approximate import Approximate
from replica.pool_layouts import PoolLayouts, PoolReaders
from replica.pools import blocks_per_page
from replica.source import Source, Worker
from schemas.index import MatchRequest, TierBlocks, WorkerMatch
from schemas.worker import WorkerState

_MAX_POOLS = 256
"""Kinds of question remembered; more are somebody's inventions."""
_MAX_ANSWERS = 64
"""Answers remembered per source."""

LOWER_IS_SHARED = frozenset({"vllm_mooncake"})
"""Schemes whose connectors tell of what they put into the pool as of the engine's own lower tier, and never that it
left there: the pool's own index knows better, and a page is not to count twice."""

_NONE = (0, 0, 0, 0)
_NOTHING = TierBlocks()


@dataclass(frozen=True, slots=True)
class _Pool:
    """Sources that serve a model, in order. ``fitting``: their places in it by (worker, rank); ``misfits``: why a place
    cannot be answered for. ``borrowed``: places whose lower tiers are those of a shared pool, not their own.
    ``readers``: who of them reads which shared pool."""

    sources: tuple[Source, ...]
    fitting: Mapping[tuple[str, int], int]
    misfits: Mapping[int, str]
    borrowed: frozenset[int]
    readers: tuple[PoolReaders, ...]


class Answers:
    """Answers from ``index`` about the sources of the workers that serve a model."""

    def __init__(
        self,
        index: PrefixIndex,
        workers: Mapping[str, Worker],
        sources: Mapping[str, Mapping[int, Source]],
        approximate: Approximate,
        layouts: PoolLayouts,
    ) -> None:
        self._index = index
        self._approximate = approximate
        self._layouts = layouts
        self._layouts_seen = layouts.changes
        self._workers = workers
        self._sources = sources
        self._pools: dict[tuple[str, int, str | None], _Pool] = {}

    def pools_changed(self) -> None:
        """A worker or a rank came or went, or a worker describes itself in another way."""
        self._pools.clear()

    def contents_changed(self) -> None:
        """Any source may hold something else than before."""
        for ranks in self._sources.values():
            for source in ranks.values():
                source.answers.clear()

    def of(self, request: MatchRequest, found: Iterable[RankMatch], now: float) -> tuple[WorkerMatch, ...]:
        """One answer per source of the pool, in the order of their names and ranks. ``now``: Unix seconds."""
        pool = self._pool(request)
        answers = [source.answers.get(_NONE) or self._say(source, _NONE) for source in pool.sources]
        fitting, sources = pool.fitting, pool.sources
        for match in found:
            place = fitting.get((match.worker, match.rank))
            if place is not None and sources[place].health != "blind":
                source = sources[place]
                blocks = (match.device, match.host, match.disk, match.external)
                if place in pool.borrowed:
                    blocks = (match.device, 0, 0, 0)
                answers[place] = source.answers.get(blocks) or self._say(source, blocks)
        if self._approximate.sources:
            chain = chain_view(request.chain)
            for key, source in self._approximate.sources.items():
                place = fitting.get(key)
                if place is not None:
                    answers[place] = self._approximate.of_tokens(source, answers[place], chain, now)
        for place, reason in pool.misfits.items():
            source = sources[place]
            answers[place] = WorkerMatch(
                worker=source.worker,
                rank=source.rank,
                health="blind",
                reason=reason,
                resident_blocks=self._index.resident(source.worker, source.rank),
            )
        return tuple(answers)

    def readers(self, request: MatchRequest) -> tuple[PoolReaders, ...]:
        """The readers of shared pools among the workers that fit the question."""
        return self._pool(request).readers

    def of_text(self, request: MatchRequest, now: float) -> tuple[WorkerMatch, ...]:
        """The same of a chain over text: every rank of the model, however its tokens are known."""
        chain = chain_view(request.chain)
        return tuple(self._approximate.of_text(source, chain, now) for source in self._pool(request).sources)

    def _say(self, source: Source, blocks: tuple[int, int, int, int]) -> WorkerMatch:
        device, host, disk, external = blocks
        answer = WorkerMatch(
            worker=source.worker,
            rank=source.rank,
            blocks=TierBlocks(device=device, host=host, disk=disk, external=external) if blocks != _NONE else _NOTHING,
            health=source.health,
            reason=source.reason,
            resident_blocks=self._index.resident(source.worker, source.rank),
            pool=self._credited(source.worker),
        )
        if len(source.answers) >= _MAX_ANSWERS:
            source.answers.clear()
        source.answers[blocks] = answer
        return answer

    def _credited(self, worker: str) -> str | None:
        """The shared pool of which pages count for this worker."""
        readers = self._layouts.of(worker)
        if readers is None or not readers.usable or readers.layout is None:
            return None
        size = self._workers[worker].state.profile.block_size or 0
        return readers.pool if blocks_per_page(readers.layout, size) else None

    def _pool(self, request: MatchRequest) -> _Pool:
        if self._layouts_seen != self._layouts.changes:
            self._layouts_seen = self._layouts.changes
            self.pools_changed()
            self.contents_changed()
        # Without a chain of tokens nothing can be misread, so that every rule fits.
        of_tokens = request.chain and request.unit == "tokens"
        kind = (request.model, request.block_size, request.salt_rule) if of_tokens else (request.model, -1, None)
        pool = self._pools.get(kind)
        if pool is None:
            pool = self._new_pool(request)
            if pool.sources:
                if len(self._pools) >= _MAX_POOLS:
                    self._pools.clear()
                self._pools[kind] = pool
        return pool

    def _new_pool(self, request: MatchRequest) -> _Pool:
        sources: list[Source] = []
        fitting: dict[tuple[str, int], int] = {}
        misfits: dict[int, str] = {}
        borrowed: set[int] = set()
        readers: dict[int, PoolReaders] = {}
        for name in sorted(name for name, worker in self._workers.items() if request.model in worker.models):
            misfit = _misfit(self._workers[name].state, request)
            of_worker = self._layouts.of(name) if misfit is None else None
            if of_worker is not None:
                readers.setdefault(id(of_worker), of_worker)
            shared = self._workers[name].state.profile.shared
            for rank, source in self._sources[name].items():
                if misfit is None:
                    fitting[name, rank] = len(sources)
                    if shared is not None and shared.scheme in LOWER_IS_SHARED:
                        borrowed.add(len(sources))
                else:
                    misfits[len(sources)] = misfit
                sources.append(source)
        return _Pool(tuple(sources), fitting, misfits, frozenset(borrowed), tuple(readers.values()))


def _misfit(state: WorkerState, request: MatchRequest) -> str | None:
    """Why a worker of this name is not of this question's pool."""
    if not request.chain or request.unit == "text":
        return None
    if state.profile.block_size not in (None, request.block_size):
        return "block_size"
    return "salt_rule" if state.profile.salt_rule != request.salt_rule else None
