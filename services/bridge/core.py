"""The bridge's one door: what happens to its engine goes in, what to publish and to ask comes out.

It forwards each rank's batches untouched and in order, keeps an index of its own engine from the same batches (so that
it can answer snapshots), and says once a second, and at every change, how its engine is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from bus import subjects
from bus.facts import FactNumbers
from kvcore import ApplyResult, BadBatchError, IndexLimits, PreparedRanks, decode_batch
from kvcore.dump import Steps
from schemas.base import to_json
from schemas.hint import HintResult
from schemas.kv import Dialect, KvHeaders
from schemas.worker import WorkerHealth, WorkerState
from services.bridge.checkpoint import Checkpoint, RankCheckpoint, Restorable
from services.bridge.config import BridgeSettings
from services.bridge.effects import (
    BridgeEffect,
    Discard,
    Discover,
    FetchReplay,
    Publish,
    PutWorker,
    Say,
    ScrapeNow,
    Subscribe,
)
from services.bridge.endpoints import RankSource
from services.bridge.engine import EngineView
from services.bridge.events import (
    Beat,
    BridgeEvent,
    CheckpointRead,
    EngineBatch,
    EngineConnected,
    EngineDisconnected,
    HintCallAnswered,
    HintReceived,
    ReplayAnswered,
    Scraped,
    ScrapeFailed,
    SessionHeard,
    SocketsOpened,
    SourcesFound,
    Stopping,
)
from services.bridge.hinting import HintAnswer, HintDesk
from services.bridge.own_index import OwnIndex
from services.bridge.rank import Ask, FeedRules, Forget, Forward, RankEffect, RankFeed, Resume

HEADERS_ROOM = 1024
"""Bytes of a message kept free for headers and subject."""


@dataclass(slots=True)
class BridgeCounters:
    """Since the start: batches and bytes forwarded, and messages they took."""

    batches: int = 0
    messages: int = 0
    payload_bytes: int = 0


class BridgeCore:
    """One engine. ``epoch``: Unix ms of the bridge's start; ``max_payload``: bytes of one bus message; ``previous``:
    incarnations that an earlier bridge named last; ``restores``: `CheckpointRead` will come, and is waited for."""

    def __init__(
        self,
        settings: BridgeSettings,
        epoch: int,
        max_payload: int,
        previous: dict[int, str] | None = None,
        *,
        restores: bool = False,
    ) -> None:
        self.worker = settings.worker_id
        self.counters = BridgeCounters()
        self.rejected: Counter[str] = Counter()
        self.gaps: Counter[str] = Counter()
        self.engine = EngineView(
            url=settings.engine_url.rstrip("/"),
            engine=None if settings.engine == "auto" else settings.engine,
            block_size=settings.block_size,
            unhealthy_after=settings.unhealthy_after,
            ready_after=settings.ready_after,
            rank_count=max(1, settings.ranks),
            shared=settings.shared_rules(),
            request_hints=frozenset(settings.request_hints),
        )
        self.own = OwnIndex(
            self.worker, IndexLimits(max_blocks=settings.max_blocks), settings.hold_limit, self._applied
        )
        self.hints = HintDesk(
            self.worker,
            max_calls=settings.hint_calls,
            lanes=settings.hint_lanes,
            max_sessions=settings.hint_sessions,
        )
        self.feeds: dict[int, RankFeed] = {}
        self._settings = settings
        self._room = max_payload - HEADERS_ROOM
        self._previous = previous or {}
        self._restoring = restores
        self._restorable: Restorable | None = None
        self._rejected_by_rank: Counter[int] = Counter()
        self._numbers = FactNumbers(settings.instance or "bridge-1", epoch)
        self._discovering = False
        self._started_ms: int | None = None
        self._sources: tuple[RankSource, ...] | None = None
        self._said: tuple[object, ...] = ()
        self._left: str | None = None
        self._reconnects = 0

    def handle(self, event: BridgeEvent, now: float) -> list[BridgeEffect]:
        """What to do about ``event``, in this order. ``now``: Unix seconds."""
        effects: list[BridgeEffect] = []
        match event:
            case EngineBatch():
                feed = self.feeds.get(event.rank)
                if feed is not None:
                    self._carry_out(feed, feed.batch(event.seq, event.payload, now), now, effects)
            case EngineConnected() | EngineDisconnected():
                self._socket(event, now, effects)
            case ReplayAnswered():
                self._replayed(event, now, effects)
            case Scraped():
                self._scraped(event, now, effects)
            case ScrapeFailed():
                self.engine.scrape_failed(event.reason)
            case SourcesFound():
                self._found(event, effects)
            case CheckpointRead():
                self._restoring = False
                self._restorable = event.restorable
                for rank, feed in self.feeds.items():
                    feed.checkpoint = self._checkpoint_of(rank)
                effects.append(ScrapeNow())
            case SocketsOpened():
                self.engine.source_problem = event.problem
                if event.problem is not None:
                    fields = {"worker": self.worker, "reason": event.problem}
                    effects.append(Say("kv_events_unusable", fields, warning=True))
            case HintReceived():
                self._hint(event, now, effects)
            case HintCallAnswered():
                answer = self.hints.answered(event.ticket, event.answer)
                if answer is not None:
                    effects.append(self._hint_result(answer, now))
            case SessionHeard():
                self.hints.closed.heard(event.payload)
                return effects
            case Beat():
                self._reconnects = event.reconnects
                for feed in self.feeds.values():
                    self._carry_out(feed, feed.tick(now), now, effects)
                self._said = self._summary()
                effects.append(Publish(subjects.worker_state(self.worker), to_json(self._state(now))))
                return effects
            case Stopping():
                self._left = event.reason
        self._say_changes(now, effects)
        return effects

    def snapshot(self) -> Steps[tuple[bytes, tuple[RankCheckpoint, ...]] | None]:
        """The index of this engine, and the batch of each rank that it stands for; in steps, between which events are
        handled as ever. ``None``: given up, too many came."""
        return self.own.dump(self.marks)

    def marks(self) -> tuple[RankCheckpoint, ...]:
        """How far each rank's stream has come, of those whose process is known."""
        return tuple(feed.left_behind() for feed in self.feeds.values() if feed.incarnation)

    def prepare(self, checkpoint: Checkpoint, dump: bytes) -> Steps[PreparedRanks]:
        """The dump of a checkpoint, built aside for `Restorable`; in steps. Raises `BadDumpError`."""
        return self.own.index.prepare(dump, {(self.worker, rank.rank) for rank in checkpoint.ranks})

    @property
    def blocks(self) -> int:
        """Blocks in the bridge's own index, over all ranks."""
        return sum(self.own.index.resident(self.worker, rank) for rank in self.feeds)

    def health(self) -> tuple[WorkerHealth, str | None]:
        """As the next fact will say it."""
        return ("left", self._left) if self._left is not None else self.engine.health()

    # The engine

    def _scraped(self, event: Scraped, now: float, effects: list[BridgeEffect]) -> None:
        engine = self.engine
        engine.scrape_worked(event.metrics, event.sight)
        started_at = event.metrics.started_at if event.metrics is not None else None
        started_ms = None if started_at is None else round(started_at * 1000)
        if started_ms is not None and started_ms != self._started_ms:
            if self._started_ms is not None:
                effects.append(Say("engine_restarted", {"worker": self.worker, "started_ms": started_ms}, warning=True))
                engine.restarted()
                self._discovering = False
                if not self._settings.kv_events:
                    self._sources = None
            self._started_ms = started_ms
        if self._sources is None and not self._discovering:
            self._discovering = True
            effects.append(Discover())
        if self._restoring:
            return  # whose index it is can only be told once it is there
        for feed in self.feeds.values():
            self._carry_out(feed, feed.identified(started_ms, event.asked_at, now), now, effects)
        known = self._sources is not None and all(feed.base for feed in self.feeds.values())
        if self._restorable is not None and known:
            effects.append(Discard(self._restorable.prepared))
            self._restorable = None

    def _checkpoint_of(self, rank: int) -> RankCheckpoint | None:
        """What was left of this rank, for the first feed that it has."""
        return self._restorable.ranks.pop(rank, None) if self._restorable is not None else None

    def _found(self, event: SourcesFound, effects: list[BridgeEffect]) -> None:
        self._discovering = self.engine.looking = False
        self._sources = event.sources
        if event.sources == tuple(feed.source for feed in self.feeds.values()):
            return
        self.own.forget()
        self.feeds = {source.rank: self._feed(source) for source in event.sources}
        self.engine.has_events = bool(event.sources)
        self.engine.has_replay = any(source.replay for source in event.sources)
        self.engine.rank_count = max(1, self._settings.ranks, *(source.rank + 1 for source in event.sources), 1)
        effects.append(Subscribe(event.sources))

    def _feed(self, source: RankSource) -> RankFeed:
        settings = self._settings
        rules = FeedRules(
            hold_limit=settings.hold_limit,
            replay_attempts=settings.replay_attempts,
            replay_retry_s=settings.replay_retry_s,
            identify_timeout_s=settings.identify_timeout_s,
            probe_after_s=settings.probe_after_s,
        )
        rank = source.rank
        return RankFeed(source, rules, previous=self._previous.get(rank, ""), checkpoint=self._checkpoint_of(rank))

    def _socket(self, event: EngineConnected | EngineDisconnected, now: float, effects: list[BridgeEffect]) -> None:
        feed = self.feeds.get(event.rank)
        if feed is None:
            return
        if isinstance(event, EngineConnected):
            feed.connected_now(now)
        else:
            feed.disconnected(now)
            effects.append(Say("kv_events_disconnected", {"worker": self.worker, "rank": event.rank}, warning=True))
        effects.append(ScrapeNow())

    def _replayed(self, event: ReplayAnswered, now: float, effects: list[BridgeEffect]) -> None:
        feed = self.feeds.get(event.rank)
        if feed is None:
            return
        if event.problem is not None:
            self.gaps[event.problem] += 1
            fields = {"worker": self.worker, "rank": event.rank, "reason": event.problem}
            effects.append(Say("replay_failed", fields, warning=True))
        self._carry_out(
            feed, feed.replayed(event.ticket, event.batches, event.problem, now, more=event.more), now, effects
        )

    # The stream

    def _carry_out(self, feed: RankFeed, wanted: list[RankEffect], now: float, effects: list[BridgeEffect]) -> None:
        rank = feed.source.rank
        for effect in wanted:
            match effect:
                case Forward():
                    self._forward(rank, effect, effects)
                    self._apply(feed, effect.payload, now)
                case Forget():
                    self.own.clear(rank)
                    self.gaps[effect.reason] += 1
                    fields = {
                        "worker": self.worker,
                        "rank": rank,
                        "reason": effect.reason,
                        "incarnation": feed.incarnation,
                    }
                    effects.append(Say("kv_stream_cleared", fields, warning=True))
                case Resume():
                    self._resume(feed, effects)
                case Ask():
                    effects.append(FetchReplay(rank, feed.source.replay, effect.start, effect.ticket))

    def _resume(self, feed: RankFeed, effects: list[BridgeEffect]) -> None:
        rank = feed.source.rank
        if self._restorable is not None:
            self.own.restore(rank, self._restorable.prepared)
        fields = {"worker": self.worker, "rank": rank, "incarnation": feed.incarnation, "seq": feed.last}
        blocks = self.own.index.resident(self.worker, rank)
        effects.append(Say("kv_stream_resumed", {**fields, "blocks": blocks}))

    def _forward(self, rank: int, batch: Forward, effects: list[BridgeEffect]) -> None:
        subject = subjects.kv(self.worker, rank)
        payload = batch.payload
        parts = max(1, -(-len(payload) // self._room))
        for part in range(parts):
            headers = KvHeaders(
                worker=self.worker,
                rank=rank,
                incarnation=batch.incarnation,
                seq=batch.seq,
                dialect=self._dialect,
                part=part,
                parts=parts,
                first=batch.first,
            )
            piece = payload if parts == 1 else payload[part * self._room : (part + 1) * self._room]
            effects.append(Publish(subject, piece, headers.to_headers()))
        self.counters.batches += 1
        self.counters.messages += parts
        self.counters.payload_bytes += len(payload)

    @property
    def _dialect(self) -> Dialect:
        return "sglang" if self.engine.kind == "sglang" else "vllm"

    def _apply(self, feed: RankFeed, payload: bytes, now: float) -> None:
        """Keep our own index, and learn what the events betray. A bad event is counted and left out."""
        rank = feed.source.rank
        try:
            batch = decode_batch(payload)
        except BadBatchError as error:
            self.rejected[error.reason] += 1
            self._rejected_by_rank[rank] += 1
            return
        if batch.rank is not None:
            feed.stated_rank(batch.rank)
        if batch.cleared:
            feed.rebuilt(now)
        self.own.apply(rank, batch)

    def _applied(self, rank: int, result: ApplyResult) -> None:
        self.rejected += result.rejected
        self._rejected_by_rank[rank] += sum(result.rejected.values())
        if result.block_size is not None:
            self.engine.saw_block_size(result.block_size)

    # What it says

    def _hint(self, event: HintReceived, now: float, effects: list[BridgeEffect]) -> None:
        engine = self.engine
        told = self.hints.received(event.payload, engine.hint_facts(), engine.rank_count, now)
        effects += [self._hint_result(told, now)] if isinstance(told, HintAnswer) else told

    def _hint_result(self, answer: HintAnswer, now: float) -> Publish:
        result = HintResult(
            **self._numbers.stamp("hint.result", now),
            worker=self.worker,
            rank=answer.rank,
            session=answer.session,
            message_id=answer.message_id,
            results=answer.results,
            error=answer.error,
        )
        return Publish(subjects.hint_result(self.worker), to_json(result))

    def _say_changes(self, now: float, effects: list[BridgeEffect]) -> None:
        summary = self._summary()
        if summary == self._said:
            return
        self._said = summary
        health, reason = self.health()
        effects.append(Say("worker_state", {"worker": self.worker, "health": health, "reason": reason}))
        state = to_json(self._state(now))
        effects += (Publish(subjects.worker_state(self.worker), state), PutWorker(state))

    def _summary(self) -> tuple[object, ...]:
        """What is worth a fact of its own when it changes: everything but load and sequence numbers."""
        engine = self.engine
        return (
            self._left,
            engine.sight,
            engine.metrics.block_size,
            engine.metrics.kv_tokens,
            engine.healthy,
            engine.healthy or engine.problem,
            engine.seen_block_size,
            engine.rank_count,
            engine.source_problem,
            engine.looking,
            tuple((rank, feed.incarnation, *feed.state()) for rank, feed in self.feeds.items()),
        )

    def _state(self, now: float) -> WorkerState:
        health, reason = self.health()
        return WorkerState(
            **self._numbers.stamp("worker.state", now),
            worker=self.worker,
            incarnation="" if self._started_ms is None else str(self._started_ms),
            health=health,
            profile=self.engine.profile(),
            reason=reason,
            loads=self.engine.loads(),
            streams=tuple(feed.stream(self._rejected_by_rank[rank]) for rank, feed in self.feeds.items()),
            reconnects=self._reconnects,
        )
