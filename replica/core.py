"""A replica's one door: batches, facts and snapshots go in, questions and changes of health come out; it answers.

Each (worker, rank) has the same recovery machine as at the bridge, with snapshots instead of replays. A source that is
not continuous is still answered for, with its health beside it: what is known is said, and how far to trust it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from kvcore import BadBatchError, IndexLimits, PoolIndex, PrefixIndex, engine_pages
from kvcore.dump import Steps
from kvcore.index import PreparedRanks
from kvcore.stream import (
    Clear,
    Deliver,
    Fetch,
    FetchFailed,
    Heartbeat,
    Limits,
    LiveBatch,
    Restored,
    StateChanged,
    StreamEvent,
)
from kvcore.stream import Tick as StreamTick
from replica.answers import Answers
from replica.approximate import Approximate
from replica.asking import SnapshotQueue
from replica.config import ReplicaSettings
from replica.effects import ReplicaEffect, Say, SourceChanged
from replica.errors import BadQuestionError
from replica.events import (
    BatchReceived,
    PromptPlaced,
    ReplicaEvent,
    RequestEnded,
    SnapshotFailed,
    SnapshotReceived,
    Tick,
    Work,
    WorkerSeen,
)
from replica.parity import Expectations, Expected, ParityRules
from replica.parts import UNFINISHED_S, PartsAssembler
from replica.pools import PAGE_BYTES, Pools
from replica.source import Source, Worker, on_its_way
from schemas.index import MatchReply, MatchRequest
from schemas.kv import KvHeaders, RankMark
from schemas.placed import Placed
from schemas.request import RequestEnd
from schemas.worker import WorkerState

HASH_BYTES = 8
AT_ONCE = 16
"""Batches applied for one event or one `Work`; more (held ones, behind a hole that was filled) wait for their turn."""

MAX_WORKERS = 4096
MAX_SOURCES = 16_384
"""Workers, and ranks of all of them, beyond this are not taken in: somebody makes up names."""


@dataclass(slots=True)
class ReplicaCounters:
    """Since the start."""

    batches: int = 0
    blocks_stored: int = 0
    blocks_removed: int = 0
    matches: int = 0
    refused: int = 0
    parity_alarms: int = 0


class Replica:
    """A complete index. ``name`` says in answers who answers."""

    def __init__(self, settings: ReplicaSettings, name: str) -> None:
        self.name = name
        self.index = PrefixIndex(IndexLimits(max_blocks=settings.max_blocks))
        self.workers: dict[str, Worker] = {}
        self.sources: dict[str, dict[int, Source]] = {}
        self.parts = PartsAssembler()
        self.counters = ReplicaCounters()
        self.rejected: Counter[str] = Counter()
        self.gaps: Counter[tuple[str, str]] = Counter()
        self.predicted: Counter[str] = Counter()
        self.reported: Counter[str] = Counter()
        self.approximate = Approximate(settings)
        self.expectations = Expectations()
        self.pools = Pools(settings, self._engine_pages)
        self._answers = Answers(self.index, self.workers, self.sources, self.approximate, self.pools.layouts)
        self._settings = settings
        self._limits = Limits(hold_batches=settings.hold_limit, backoff_s=settings.snapshot_retry_s)
        self._rules = ParityRules(
            window=settings.parity_window,
            min_requests=settings.parity_min_requests,
            alarm_ratio=settings.parity_alarm_ratio,
            floor_tokens=settings.parity_floor_tokens,
            silent_requests=settings.silent_requests,
        )
        self._queue = SnapshotQueue(
            settings.snapshots_at_once, settings.snapshot_retry_s, settings.snapshot_retry_max_s
        )
        self._behind: dict[tuple[str, int], Source] = {}
        self._deaf = False
        self.applied: Callable[[str, int, bytes], None] | None = None
        """Hears every engine batch that was applied: worker, rank, payload."""

    def anew(self) -> Replica:
        """A replica like this one that knows nothing yet."""
        return Replica(self._settings, self.name)

    @property
    def behind(self) -> bool:
        """Whether batches wait to be applied: `Work` is to be done."""
        return bool(self._behind) or self.pools.behind

    def handle(self, event: ReplicaEvent, now: float) -> list[ReplicaEffect]:
        """What to do about ``event``, in this order. ``now``: Unix seconds."""
        effects: list[ReplicaEffect] = []
        match event:
            case BatchReceived():
                self._batch(event.headers, event.payload, now, effects)
            case WorkerSeen():
                self._seen(event.state, now, effects)
            case SnapshotReceived():
                self._restored(event, now, effects)
            case SnapshotFailed():
                if self._queue.close(event.worker, event.ticket):
                    self._snapshot_failed(event.worker, event.ticket, event.reason, now, effects)
            case RequestEnded():
                self._ended(event.end)
            case PromptPlaced():
                self._placed(event.placed, now)
            case Tick():
                self._tick(event.connected, now, effects)
            case Work():
                self._work(effects)
                self.pools.work(now, effects)
            case _:
                self.pools.handle(event, now, effects)
        effects += self._queue.ask(now)
        effects += self.pools.ask(now)
        return effects

    def catching_up(self) -> list[str]:
        """``worker/rank`` of the sources that are on their way."""
        return sorted(f"{s.worker}/{s.rank}" for s in self.all_sources() if s.health == "catching_up")

    def match(self, request: MatchRequest, now: float) -> MatchReply:
        """Who holds how much of this chain? Every source of the model, with its health. ``now``: Unix seconds.
        Raises `BadQuestionError`."""
        chain = request.chain
        if len(chain) % HASH_BYTES:
            raise BadQuestionError("bad_chain", f"a chain is whole u64 hashes, not {len(chain)} bytes")
        if len(request.pages) % PAGE_BYTES:
            raise BadQuestionError("bad_pages", f"pages are {PAGE_BYTES} bytes each, not {len(request.pages)} in all")
        self.counters.matches += 1
        if request.unit == "text":
            return MatchReply(indexer=self.name, matches=self._answers.of_text(request, now))
        matches = self._answers.of(request, self.index.match(chain), now)
        readers = self._answers.readers(request)
        if not readers:
            return MatchReply(indexer=self.name, matches=matches)
        pools = self.pools.matches(readers, request, matches, now)
        trusted = [pool.ranges for pool in pools if pool.health == "synced"]
        shared = trusted[0] if len(trusted) == 1 else ()
        return MatchReply(indexer=self.name, matches=matches, shared=shared, pools=pools)

    def _engine_pages(self, chain: bytes) -> bytes:
        return engine_pages(self.index.engine_hashes(chain))

    # Batches and streams

    def _batch(self, headers: KvHeaders, payload: bytes, now: float, effects: list[ReplicaEffect]) -> None:
        whole = self.parts.add(headers, payload, now)
        if whole is None:
            return
        source = self._source(headers.worker, headers.rank, now)
        if source is None:
            return
        live = LiveBatch(headers.seq, whole, headers.incarnation, headers.first)
        self._feed(source, live, now, effects)
        self._tell(source, effects)

    def _source(self, worker: str, rank: int, now: float) -> Source | None:
        """The source, new if need be; ``None`` beyond the bound on workers."""
        ranks = self.sources.get(worker)
        if ranks is None:
            if len(self.sources) >= MAX_WORKERS:
                self.counters.refused += 1
                return None
            ranks = self.sources[worker] = {}
        source = ranks.get(rank)
        if source is None:
            if sum(map(len, self.sources.values())) >= MAX_SOURCES:
                self.counters.refused += 1
                return None
            source = ranks[rank] = Source.new(worker, rank, self._limits, self._rules, now)
            self._answers.pools_changed()
        return source

    def _feed(self, source: Source, event: StreamEvent, now: float, effects: list[ReplicaEffect]) -> None:
        worker, rank = source.worker, source.rank
        room = AT_ONCE
        for effect in source.machine.handle(event, now):
            match effect:
                case Deliver():
                    if source.backlog or not room:
                        self._wait(source, effect)
                    else:
                        room -= 1
                        self._apply(source, effect.payload)
                case Clear():
                    self._forget_backlog(source)
                    self.index.clear_rank(worker, rank)
                    source.answers.clear()
                    source.parity.restarted()
                    self.gaps[worker, effect.reason] += 1
                    fields = {"worker": worker, "rank": rank, "reason": effect.reason}
                    effects.append(Say("source_cleared", fields, warning=True))
                case Fetch():
                    source.wants = effect.token
                    source.wants_after = self._queue.newest if effect.fresh else 0
                    self.gaps[worker, "asked"] += 1
                    self._queue.want(worker)
                case StateChanged():
                    pass  # `_tell` asks the machine

    def _wait(self, source: Source, batch: Deliver) -> None:
        """Into the line of its source; a line that is full moves on at once."""
        if len(source.backlog) >= self._settings.hold_limit:
            self._apply(source, source.backlog.popleft().payload)
        source.backlog.append(batch)
        self._behind[source.worker, source.rank] = source

    def _work(self, effects: list[ReplicaEffect]) -> None:
        for key, source in list(self._behind.items())[:1]:
            for _ in range(min(AT_ONCE, len(source.backlog))):
                self._apply(source, source.backlog.popleft().payload)
            if not source.backlog:
                del self._behind[key]
                self._tell(source, effects)

    def _forget_backlog(self, source: Source) -> None:
        source.backlog.clear()
        self._behind.pop((source.worker, source.rank), None)

    def _apply(self, source: Source, payload: bytes) -> None:
        """Apply one engine batch. What is malformed is counted and left out, the rest stands."""
        self.counters.batches += 1
        source.parity.event()
        try:
            result = self.index.apply_payload(source.worker, source.rank, payload)
        except BadBatchError as error:
            self.rejected[error.reason] += 1
            return
        source.answers.clear()
        if result.evicted:
            self._answers.contents_changed()
        if result.cleared:
            self.approximate.emptied(source.worker, source.rank)
        self.rejected += result.rejected
        self.counters.blocks_stored += result.stored
        self.counters.blocks_removed += result.removed
        if self.applied is not None:
            self.applied(source.worker, source.rank, payload)

    # Snapshots

    def prepare(self, worker: str, marks: Iterable[RankMark], dump: bytes) -> Steps[PreparedRanks]:
        """The ranks of a dump that ``marks`` speak of, for `SnapshotReceived`; in steps, between which events are
        handled as ever. Raises `BadDumpError`."""
        return self.index.prepare(dump, {(worker, mark.rank) for mark in marks})

    def prepare_pool(self, dump: bytes) -> Steps[PoolIndex]:
        """A shared pool's index as of ``dump``, for `PoolSnapshotReceived`; in steps. Raises `BadDumpError`."""
        return self.pools.prepare(dump)

    def _restored(self, event: SnapshotReceived, now: float, effects: list[ReplicaEffect]) -> None:
        if not self._queue.close(event.worker, event.ticket):
            return
        worker = event.worker
        marks = {mark.rank: mark for mark in event.marks}
        usable = {
            (worker, source.rank): source
            for source in self._wanting(worker, event.ticket)
            if (mark := marks.get(source.rank)) is not None
            and source.wants is not None
            and source.machine.accepts(source.wants, mark.incarnation, mark.seq)
        }
        loaded = self.index.adopt(event.prepared, usable.keys())
        self._answers.contents_changed()
        for key, source in usable.items():
            if key not in loaded:
                self.index.clear_rank(*key)  # a rank that holds nothing is not in the dump
            mark, token = marks[source.rank], source.wants
            assert token is not None
            source.wants = None
            self._forget_backlog(source)  # it is in the snapshot
            self._feed(source, Restored(token, mark.incarnation, mark.seq), now, effects)
            self.gaps[worker, "restored"] += 1
            source.parity.event()
            self._tell(source, effects)
        if self._wanting(worker, event.ticket):
            self._snapshot_failed(worker, event.ticket, "stale_snapshot", now, effects)
        elif all(source.machine.state == "synced" for source in usable.values()):
            self._queue.succeeded(worker)
        else:
            self._queue.failed(worker, now)  # it did not reach far enough; nor may the next one

    def _snapshot_failed(self, worker: str, ticket: int, reason: str, now: float, effects: list[ReplicaEffect]) -> None:
        self._queue.failed(worker, now)
        self.gaps[worker, reason] += 1
        effects.append(Say("snapshot_failed", {"worker": worker, "reason": reason}, warning=True))
        for source in self._wanting(worker, ticket):
            token, source.wants = source.wants, None
            assert token is not None
            self._feed(source, FetchFailed(token, reason), now, effects)
            self._tell(source, effects)

    def _wanting(self, worker: str, ticket: int) -> list[Source]:
        """Sources that the answer to this question may serve."""
        sources = self.sources.get(worker, {}).values()
        return [source for source in sources if source.wants is not None and source.wants_after < ticket]

    # Workers

    def _seen(self, state: WorkerState, now: float, effects: list[ReplicaEffect]) -> None:
        name = state.worker
        known = self.workers.get(name)
        if known is not None and (state.epoch, state.seq) < (known.state.epoch, known.state.seq):
            return
        if state.health == "left":
            self._remove(name, "left", now, effects)
            return
        if self._source(name, 0, now) is None:
            return
        worker = Worker.new(state, now, known)
        self.workers[name] = worker
        self._queue.seen(name)
        if known is not None and worker.restarted_since(known):
            self.approximate.restarted(name)
        if known is not None and known.state.epoch != state.epoch:
            self._queue.began_again(name)
            for known_source in self.sources[name].values():
                known_source.machine.publisher_restarted()
        elif known is not None and known.state.reconnects < state.reconnects:
            self._queue.asked_in_vain(name)
        if known is None or known.state.profile != state.profile:
            self._answers.pools_changed()
            self.pools.worker(name, state.profile, now, effects)
            shared = state.profile.shared
            if shared is not None and shared.page_hash == "engine":
                self.index.keep_links(self._settings.engine_links)
        for rank in range(state.profile.ranks):
            self._source(name, rank, now)
        streams = {stream.rank: stream for stream in state.streams}
        for rank, stream in streams.items():
            source = self._source(name, rank, now)
            if source is not None and stream.incarnation:
                beat = Heartbeat(stream.incarnation, stream.seq, not on_its_way(stream))
                self._feed(source, beat, now, effects)
                before = source.parity.problem
                source.parity.beat(stream.seq, now)
                self._alarm(source, before, effects)
        for rank, source in list(self.sources[name].items()):
            source.stream = streams.get(rank)
            if rank >= state.profile.ranks and rank not in streams and state.health != "starting":
                self._drop(source, "left", effects)
            else:
                self._tell(source, effects)

    def _remove(self, worker: str, reason: str, now: float, effects: list[ReplicaEffect]) -> None:
        if worker not in self.sources:
            return
        effects.append(Say("worker_gone", {"worker": worker, "reason": reason}, warning=reason != "left"))
        for source in list(self.sources[worker].values()):
            self._drop(source, reason, effects)
        self.pools.worker(worker, None, now, effects)
        self.sources.pop(worker, None)
        self.workers.pop(worker, None)
        self.index.remove_worker(worker)
        self.parts.forget(worker)
        self._queue.forget(worker)
        for counted in (self.predicted, self.reported):
            counted.pop(worker, None)
        for key in [key for key in self.gaps if key[0] == worker]:
            del self.gaps[key]

    def _drop(self, source: Source, reason: str, effects: list[ReplicaEffect]) -> None:
        del self.sources[source.worker][source.rank]
        self._answers.pools_changed()
        self._forget_backlog(source)
        self.index.clear_rank(source.worker, source.rank)
        self.approximate.dropped(source.worker, source.rank)
        source.health, source.reason = "blind", reason
        effects.append(self._change(source))

    # Requests

    def _over(self, request_id: str) -> tuple[Expected | None, bytes]:
        """The request is not on its way any more to where it was placed. Returns what was expected of it there, and its
        chain as far as that is known."""
        expected, chain = self.expectations.over(request_id), b""
        if expected is not None:
            source = self.sources.get(expected.worker, {}).get(expected.rank)
            if source is not None:
                chain = source.parity.over(request_id)
        return expected, chain

    def _placed(self, fact: Placed, now: float) -> None:
        self._over(fact.request_id)
        source = self.sources.get(fact.worker, {}).get(fact.rank)
        worker = self.workers.get(fact.worker)
        if source is None or worker is None:
            return
        self.approximate.placed(fact, source, worker.state.profile, now)
        if not source.measured:
            return
        blocks, common, judged = 0, 0, False
        if fact.unit == "tokens":
            common = source.parity.placed(fact.request_id, fact.chain)
            blocks, judged = fact.indexed or 0, fact.indexed is not None
        most = max(blocks, common)
        expected = Expected(fact.worker, fact.rank, blocks, most, fact.block_size, judged, source.spell)
        self.expectations.placed(fact.request_id, expected)

    def _ended(self, end: RequestEnd) -> None:
        expected, chain = self._over(end.request_id)
        if end.worker is None or end.rank is None:
            return
        source = self.sources.get(end.worker, {}).get(end.rank)
        worker = self.workers.get(end.worker)
        if source is None or worker is None:
            return
        if end.outcome != "completed":
            return
        reported, size = end.usage.cached_tokens, worker.state.profile.block_size or 0
        shared = end.predicted_shared_tokens or 0
        if end.predicted_cached_tokens is not None and reported is not None:
            self.predicted[end.worker] += end.predicted_cached_tokens + shared
            self.reported[end.worker] += reported
        if source.stream is None:
            return
        if expected is None or (expected.worker, expected.rank) != (end.worker, end.rank) or not source.measured:
            return
        if shared and expected.block_size:
            # What it found in its shared pool is no news of its own tiers, and no fault of their index if it did not.
            expected = replace(expected, most=max(expected.most, expected.blocks + -(-shared // expected.block_size)))
        input_tokens = end.usage.input_tokens or 0
        predicted = None
        if expected.judged and reported is not None and input_tokens:
            predicted = expected.cached_tokens(input_tokens, reported)
            if predicted < reported and chain:
                expected = replace(expected, most=max(expected.most, self._indexed(source, chain)))
                predicted = expected.cached_tokens(input_tokens, reported)
        if expected.spell == source.spell:
            source.parity.stores(input_tokens - max(predicted or 0, reported or 0), size)
        source.parity.ended(predicted, reported)

    def _indexed(self, source: Source, chain: bytes) -> int:
        """Blocks of the chain that the source's events have told of."""
        found = self.index.match(chain)
        return next((each.reach for each in found if (each.worker, each.rank) == (source.worker, source.rank)), 0)

    def _alarm(self, source: Source, before: str | None, effects: list[ReplicaEffect]) -> None:
        """Say so when the source has come to disagree with its engine; ``before``: what was wrong with it before."""
        after = source.parity.problem
        if after is not None and after != before:
            self.counters.parity_alarms += 1
            fields = {"worker": source.worker, "rank": source.rank, "reason": after}
            effects.append(Say("source_approximate", fields, warning=True))

    def _tick(self, connected: bool, now: float, effects: list[ReplicaEffect]) -> None:
        if not connected:
            self._deaf = True
            return
        self.pools.tick(now, deaf=self._deaf, effects=effects)
        if self._deaf:
            # Nobody could be heard; silence counts from now.
            self._deaf = False
            for worker in self.workers.values():
                worker.heard_at = now
        for source in self.all_sources():
            wake_at = source.machine.wake_at
            if wake_at is not None and now >= wake_at:
                self._feed(source, StreamTick(), now, effects)
                self._tell(source, effects)
        self.parts.expire(now - UNFINISHED_S)
        self.approximate.tick(now)
        limit = now - self._settings.worker_lost_s
        lost = [name for name, worker in self.workers.items() if worker.heard_at < limit]
        strays = [
            name
            for name, ranks in self.sources.items()
            if name not in self.workers and all(source.since < limit for source in ranks.values())
        ]
        for name in (*lost, *strays):
            self._remove(name, "lost", now, effects)

    # What it says

    def _tell(self, source: Source, effects: list[ReplicaEffect]) -> None:
        """Say so when the source's health, its reason or its incarnation has changed."""
        worker = self.workers.get(source.worker)
        health, reason = source.judge(worker.state if worker is not None else None)
        self.approximate.judged(source)
        told = (health, reason, source.machine.incarnation)
        if told == source.told:
            return
        source.told = told
        effects.append(self._change(source))
        fields = {"worker": source.worker, "rank": source.rank, "health": health, "reason": reason}
        effects.append(Say("source", fields))

    def _change(self, source: Source) -> SourceChanged:
        return SourceChanged(
            source.worker,
            source.rank,
            source.health,
            source.reason,
            source.machine.incarnation or "",
            source.applied,
            self.index.resident(source.worker, source.rank),
        )

    def all_sources(self) -> Iterator[Source]:
        """Every (worker, rank) that is known of."""
        for ranks in self.sources.values():
            yield from ranks.values()
