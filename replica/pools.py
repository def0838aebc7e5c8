"""Shared pools: one index per pool that some worker reads, how far its picture can be trusted, and its answers.

A pool's bridge numbers everything that it says of the pool in one stream (`schemas.pool`), so that the machine of the
ranks' streams recovers it too: an epoch of the bridge is an incarnation, whose first number is 0; a reset is a batch
like any other; a snapshot fills a hole. What is known of a pool that nobody reads any more, and whose bridge is silent,
is forgotten; a pool that nobody reads is not taken in at all, as nobody could ask for it.

Health, best first: `synced`; `catching_up` (a hole is being filled, or the bridge has not agreed with the pool's own
list yet); `approximate` (as the bridge says; not reconciled for long; `no_matching_keys`); `blind` (bridge silent).

The alarm `no_matching_keys`: keys arrive, and the workers of a model find no page. Either no key has a prefix that
anybody asks for, or `MISSES` of their prompts in a row were not found of which one of them holds the beginning, and so
must have written it. It ends with the first page that is found (user case: peers' routers looked for a wrong prefix for
months without an error, spec: pool-events §8.8).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvcore import BadBatchError, PoolIndex, PoolLimits
from kvcore.dump import Steps
from kvcore.links import UNKNOWN_PAGE
from kvcore.stream import (
    Clear,
    Deliver,
    Fetch,
    FetchFailed,
    Heartbeat,
    Limits,
    LiveBatch,
    Restored,
    StreamEvent,
    StreamRecovery,
)
from kvcore.stream import Tick as StreamTick
from replica.asking import SnapshotQueue
from replica.config import ReplicaSettings
from replica.effects import AskPoolSnapshot, ReplicaEffect, Say
from replica.events import (
    PoolBatchReceived,
    PoolEvent,
    PoolResetReceived,
    PoolSnapshotFailed,
    PoolSnapshotReceived,
    PoolStated,
)
from replica.parts import UNFINISHED_S, PartsAssembler
from replica.pool_layouts import DISAGREE, PoolLayouts, PoolReaders
from schemas.index import MatchRequest, PoolMatch, SourceHealth, WorkerMatch
from schemas.kv import KvHeaders
from schemas.pool import PoolHeaders, PoolState, SharedLayout
from schemas.worker import WorkerProfile

NO_MATCHING_KEYS = "no_matching_keys"
MISSES = 32
"""Prompts in a row that were not found in a pool, although a reader holds their beginning, before it is an alarm."""

LOOK_S = 1.0
"""How often the keys that arrived are compared with the layouts in use."""

AT_ONCE = 16
TURN_BYTES = 256 * 1024
"""Batches applied for one event or `Pools.work`, and their bytes (one difference of a reconcile has as many, and takes
10 ms); more wait for their turn."""

BACKLOG_BYTES = 64 * 1024 * 1024
"""Of batches of one pool that wait; beyond it the first of them is applied at once."""

PAGE_BYTES = 16
_REASON_CHARACTERS = 64
_PREFIXES_SAID = 4
_MASTER, _DELTA, _RESET = b"m", b"d", b"r"


@dataclass(slots=True)
class PoolSource:
    """One pool. ``state``: what its bridge said last, at ``heard_at``. ``wants``: token of the fetch that a snapshot
    answers, if it was asked for after the question ``wants_after``. ``told``: health and reason as said last."""

    name: str
    machine: StreamRecovery
    index: PoolIndex
    heard_at: float
    state: PoolState | None = None
    wants: int | None = None
    wants_after: int = 0
    backlog: deque[bytes] = field(default_factory=deque)
    backlog_bytes: int = 0
    health: SourceHealth = "blind"
    reason: str | None = "no_bridge"
    told: tuple[object, ...] = ()

    def judge(self, now: float, silent_s: float, stale_s: float) -> None:
        """How far to trust it now. ``now``: Unix seconds."""
        self.health, self.reason = self._judge(now, silent_s, stale_s)

    def _judge(self, now: float, silent_s: float, stale_s: float) -> tuple[SourceHealth, str | None]:
        state = self.state
        if state is None:
            return "blind", "no_bridge"
        if now - self.heard_at > silent_s:
            return "blind", "silent"
        if self.machine.state != "synced":
            return self.machine.state, self.machine.reason
        if self.backlog:
            return "catching_up", "backlog"
        if state.health != "synced":
            return state.health, (state.reason or state.health)[:_REASON_CHARACTERS]
        age = self.age_s(now)
        return ("approximate", "not_reconciled") if age is None or age > stale_s else ("synced", None)

    def age_s(self, now: float) -> float | None:
        """Seconds since its bridge agreed with the pool's own list of keys; ``None``: it never did."""
        if self.state is None or self.state.reconciled_ms is None:
            return None
        return max(0.0, now - self.state.reconciled_ms / 1000)


@dataclass(slots=True)
class PoolCounters:
    """Since the start. ``unread``: messages of pools that no worker reads; ``refused``: of pools beyond the bound."""

    batches: int = 0
    objects_stored: int = 0
    objects_removed: int = 0
    unparsed: int = 0
    evicted: int = 0
    matches: int = 0
    matched_pages: int = 0
    unread: int = 0
    refused: int = 0
    alarms: int = 0
    disagreements: int = 0


class Pools:
    """Every pool that workers read. Times are Unix seconds. ``engine_pages``: of a chain's blocks, as engines that hash
    by themselves name them in a pool (16 bytes each; `kvcore.engine_pages`)."""

    def __init__(self, settings: ReplicaSettings, engine_pages: Callable[[bytes], bytes]) -> None:
        self._engine_pages = engine_pages
        self.sources: dict[str, PoolSource] = {}
        self.layouts = PoolLayouts()
        self.parts = PartsAssembler()
        self.counters = PoolCounters()
        self.rejected: Counter[str] = Counter()
        self.gaps: Counter[tuple[str, str]] = Counter()
        self._settings = settings
        self._limits = Limits(hold_batches=settings.hold_limit, backoff_s=settings.snapshot_retry_s)
        self._queue = SnapshotQueue(1, settings.snapshot_retry_s, settings.snapshot_retry_max_s)
        self._behind: dict[str, PoolSource] = {}
        self._look_at = float("-inf")

    @property
    def behind(self) -> bool:
        """Whether batches wait to be applied: `work` is to be done."""
        return bool(self._behind)

    def new_index(self) -> PoolIndex:
        """An empty index within the bounds."""
        return PoolIndex(PoolLimits(max_pages=self._settings.pool_pages))

    def prepare(self, dump: bytes) -> Steps[PoolIndex]:
        """A pool's index as of ``dump``, for `PoolSnapshotReceived`; in steps. Raises `BadDumpError`."""
        index = self.new_index()
        yield from index.load(dump)
        return index

    # What happens

    def handle(self, event: PoolEvent, now: float, effects: list[ReplicaEffect]) -> None:
        """Take in what is heard of a pool."""
        match event:
            case PoolBatchReceived():
                self._batch(event.headers, event.payload, now, effects)
            case PoolResetReceived():
                fact = event.reset
                source = self._source(fact.pool, now)
                if source is not None:
                    payload = _RESET + fact.reason.encode()
                    self._live(source, str(fact.epoch), fact.pool_seq, payload, now, effects)
            case PoolStated():
                self._stated(event.state, now, effects)
            case PoolSnapshotReceived():
                self._restored(event, now, effects)
            case PoolSnapshotFailed():
                if self._queue.close(event.pool, event.ticket):
                    self._snapshot_failed(event.pool, event.ticket, event.reason, now, effects)

    def ask(self, now: float) -> list[AskPoolSnapshot]:
        """Questions to be sent now."""
        return [AskPoolSnapshot(asked.worker, asked.ticket) for asked in self._queue.ask(now)]

    def worker(self, name: str, profile: WorkerProfile | None, now: float, effects: list[ReplicaEffect]) -> None:
        """A worker describes itself in another way than before, or is gone (``None``)."""
        self._switched(self.layouts.worker(name, profile, now), effects)
        shared = profile.shared if profile is not None else None
        if shared is not None:
            self._source(shared.pool, now)

    def tick(self, now: float, *, deaf: bool, effects: list[ReplicaEffect]) -> None:
        """Time passes. ``deaf``: nobody could be heard until now, so that silence counts from now."""
        if deaf:
            for source in self.sources.values():
                source.heard_at = now
        self.parts.expire(now - UNFINISHED_S)
        self._switched(self.layouts.settle(now), effects)
        looks = now >= self._look_at
        if looks:
            self._look_at = now + LOOK_S
        for source in list(self.sources.values()):
            if source.machine.wake_at is not None and now >= source.machine.wake_at:
                self._feed(source, StreamTick(), now, effects)
            if looks:
                self._look(source, effects)
            self._tell(source, now, effects)
            if source.health == "blind" and not self.layouts.reads(source.name):
                self._forget(source, effects)

    def work(self, now: float, effects: list[ReplicaEffect]) -> None:
        """There is time: apply a few of the batches that wait, of one pool after the other."""
        for name in list(self._behind)[:1]:
            source, spent = self._behind.pop(name), 0
            for _ in range(min(AT_ONCE, len(source.backlog))):
                spent += self._apply_first(source, effects)
                if spent >= TURN_BYTES:
                    break
            if source.backlog:
                self._behind[name] = source
            else:
                self._tell(source, now, effects)

    # Questions

    def matches(
        self, readers: Iterable[PoolReaders], request: MatchRequest, held: Sequence[WorkerMatch], now: float
    ) -> tuple[PoolMatch, ...]:
        """What each of these readers' pools holds of a prompt, in its blocks. ``held``: what its workers hold of it."""
        return tuple(self._match(each, request, held, now) for each in readers)

    def _match(self, readers: PoolReaders, request: MatchRequest, held: Sequence[WorkerMatch], now: float) -> PoolMatch:
        name, source, layout = readers.pool, self.sources.get(readers.pool), readers.layout
        if not readers.usable or layout is None or readers.asked is None:
            return PoolMatch(pool=name, health="blind", reason=DISAGREE)
        if source is None:
            return PoolMatch(pool=name, health="blind", reason="no_bridge")
        if source.health == "blind":
            return PoolMatch(pool=name, health="blind", reason=source.reason)
        age_s = source.age_s(now)
        age_ms = round(age_s * 1000) if age_s is not None else None
        health, reason = source.health, source.reason
        if readers.alarmed and health == "synced":
            health, reason = "approximate", NO_MATCHING_KEYS
        if not request.chain:
            return PoolMatch(pool=name, health=health, reason=reason, age_ms=age_ms)
        blocks = blocks_per_page(layout, request.block_size)
        own_rule = layout.page_hash == "sha256_chain"
        if not blocks or (own_rule and request.pages and request.page_size != layout.page_size):
            return PoolMatch(pool=name, health=health, reason="page_size", age_ms=age_ms)
        pages = request.pages if own_rule else self._pages_of(request.chain, blocks)
        ranges: tuple[tuple[int, int], ...] = ()
        if pages:
            self.counters.matches += 1
            ranges = source.index.match(readers.asked, pages)
            if ranges:
                readers.missed, readers.found = 0, True
                self.counters.matched_pages += sum(end - start for start, end in ranges)
            elif (
                readers.missed < MISSES and not readers.is_adapter(request.model) and pages[:PAGE_BYTES] != UNKNOWN_PAGE
            ):
                # An engine names an adapter in its pool as nobody else does: its pages are never found, and no fault.
                # Nor is it one that nobody knows (any more) how the engine hashes the beginning.
                readers.missed += any(each.pool == name and each.blocks.reach >= blocks for each in held)
            if blocks > 1:
                ranges = tuple((start * blocks, end * blocks) for start, end in ranges)
        return PoolMatch(pool=name, ranges=ranges, health=health, reason=reason, age_ms=age_ms)

    def _pages_of(self, chain: bytes, blocks: int) -> bytes:
        """Pages of ``blocks`` blocks by the engines' own hashes: a page is named by its last block (spec: pool-events
        §6)."""
        pages = self._engine_pages(chain)
        if blocks == 1:
            return pages
        last = range(PAGE_BYTES * (blocks - 1), len(pages) - PAGE_BYTES + 1, PAGE_BYTES * blocks)
        return b"".join([pages[start : start + PAGE_BYTES] for start in last])

    # Batches and streams

    def _source(self, name: str, now: float) -> PoolSource | None:
        source = self.sources.get(name)
        if source is None:
            if not self.layouts.reads(name):
                self.counters.unread += 1
                return None
            if len(self.sources) >= self._settings.pools:
                self.counters.refused += 1
                return None
            machine = StreamRecovery("snapshot", self._limits)
            source = self.sources[name] = PoolSource(name, machine, self.new_index(), now)
        return source

    def _batch(self, headers: PoolHeaders, payload: bytes, now: float, effects: list[ReplicaEffect]) -> None:
        source = self._source(headers.pool, now)
        if source is None:
            return
        epoch = str(headers.epoch)
        as_ranks_are = KvHeaders(
            worker=headers.pool, rank=0, incarnation=epoch, seq=headers.seq, part=headers.part, parts=headers.parts
        )
        whole = self.parts.add(as_ranks_are, payload, now)
        if whole is None:
            return
        origin = _MASTER if headers.origin == "master" else _DELTA
        self._live(source, epoch, headers.seq, origin + whole, now, effects)

    def _live(
        self, source: PoolSource, epoch: str, seq: int, payload: bytes, now: float, effects: list[ReplicaEffect]
    ) -> None:
        self._feed(source, LiveBatch(seq, payload, epoch, first=seq == 0), now, effects)
        self._tell(source, now, effects)

    def _feed(self, source: PoolSource, event: StreamEvent, now: float, effects: list[ReplicaEffect]) -> None:
        room, bytes_left = AT_ONCE, TURN_BYTES
        for effect in source.machine.handle(event, now):
            match effect:
                case Deliver():
                    if source.backlog or not room or bytes_left <= 0:
                        self._wait(source, effect.payload, effects)
                    else:
                        room -= 1
                        bytes_left -= len(effect.payload)
                        self._apply(source, effect.payload, effects)
                case Clear():
                    self._forget_backlog(source)
                    self._clear(source, effect.reason, effects)
                case Fetch():
                    source.wants = effect.token
                    source.wants_after = self._queue.newest if effect.fresh else 0
                    self.gaps[source.name, "asked"] += 1
                    self._queue.want(source.name)
                case _:
                    pass  # `_tell` asks the machine for its state

    def _wait(self, source: PoolSource, tagged: bytes, effects: list[ReplicaEffect]) -> None:
        """Into the line; a line that is full moves on at once."""
        line = source.backlog
        while line and (len(line) >= self._settings.hold_limit or source.backlog_bytes + len(tagged) > BACKLOG_BYTES):
            self._apply_first(source, effects)
        line.append(tagged)
        source.backlog_bytes += len(tagged)
        self._behind[source.name] = source

    def _apply_first(self, source: PoolSource, effects: list[ReplicaEffect]) -> int:
        """Apply the first batch of the line. Returns its bytes."""
        tagged = source.backlog.popleft()
        source.backlog_bytes -= len(tagged)
        self._apply(source, tagged, effects)
        return len(tagged)

    def _forget_backlog(self, source: PoolSource) -> None:
        source.backlog.clear()
        source.backlog_bytes = 0
        self._behind.pop(source.name, None)

    def _clear(self, source: PoolSource, reason: str, effects: list[ReplicaEffect]) -> None:
        source.index = self.new_index()
        for readers in self.layouts.readers(source.name):
            readers.missed, readers.found = 0, False
        self.gaps[source.name, reason] += 1
        effects.append(Say("pool_cleared", {"pool": source.name, "reason": reason}, warning=True))

    def _apply(self, source: PoolSource, tagged: bytes, effects: list[ReplicaEffect]) -> None:
        """Apply one batch. What is malformed is counted and left out, the rest stands."""
        kind, payload = tagged[:1], tagged[1:]
        if kind == _RESET:
            if source.index.stats().pages:
                self._clear(source, "reset", effects)
            return
        self.counters.batches += 1
        index = source.index
        try:
            done = index.apply_payload(payload) if kind == _MASTER else index.apply_delta(payload)
        except BadBatchError as error:
            self.rejected[error.reason] += 1
            return
        self.rejected += done.rejected
        self.counters.objects_stored += done.stored
        self.counters.objects_removed += done.removed
        self.counters.unparsed += done.unparsed
        self.counters.evicted += done.evicted

    def _stated(self, state: PoolState, now: float, effects: list[ReplicaEffect]) -> None:
        source = self._source(state.pool, now)
        if source is None:
            return
        known, is_silent = source.state, now - source.heard_at > self._settings.worker_lost_s
        if known is not None and not is_silent and (state.epoch, state.seq) < (known.epoch, known.seq):
            return
        if known is not None and known.epoch != state.epoch:
            self._queue.began_again(source.name)
        elif known is not None and known.reconnects < state.reconnects:
            self._queue.asked_in_vain(source.name)
        source.state, source.heard_at = state, now
        self._queue.seen(source.name)
        self._feed(source, Heartbeat(str(state.epoch), state.pool_seq), now, effects)
        self._tell(source, now, effects)

    # Snapshots

    def _restored(self, event: PoolSnapshotReceived, now: float, effects: list[ReplicaEffect]) -> None:
        if not self._queue.close(event.pool, event.ticket):
            return
        source, epoch = self._wanting(event.pool, event.ticket), str(event.epoch)
        if source is None or source.wants is None:
            return
        if not source.machine.accepts(source.wants, epoch, event.seq):
            self._snapshot_failed(event.pool, event.ticket, "stale_snapshot", now, effects)
            return
        token, source.wants = source.wants, None
        source.index = event.index
        self._forget_backlog(source)  # it is in the snapshot
        self._feed(source, Restored(token, epoch, event.seq), now, effects)
        self.gaps[source.name, "restored"] += 1
        if source.machine.state == "synced":
            self._queue.succeeded(source.name)
        else:
            self._queue.failed(source.name, now)
        self._tell(source, now, effects)

    def _snapshot_failed(self, pool: str, ticket: int, reason: str, now: float, effects: list[ReplicaEffect]) -> None:
        self._queue.failed(pool, now)
        self.gaps[pool, reason] += 1
        effects.append(Say("pool_snapshot_failed", {"pool": pool, "reason": reason}, warning=True))
        source = self._wanting(pool, ticket)
        if source is not None and source.wants is not None:
            token, source.wants = source.wants, None
            self._feed(source, FetchFailed(token, reason), now, effects)
            self._tell(source, now, effects)

    def _wanting(self, pool: str, ticket: int) -> PoolSource | None:
        """The pool, if the answer to this question may serve it."""
        source = self.sources.get(pool)
        return source if source is not None and source.wants is not None and source.wants_after < ticket else None

    def _forget(self, source: PoolSource, effects: list[ReplicaEffect]) -> None:
        del self.sources[source.name]
        self._forget_backlog(source)
        self.parts.forget(source.name)
        self._queue.forget(source.name)
        for key in [key for key in self.gaps if key[0] == source.name]:
            del self.gaps[key]
        effects.append(Say("pool_gone", {"pool": source.name, "reason": source.reason}))

    # What it says

    def _switched(self, changed: Sequence[PoolReaders], effects: list[ReplicaEffect]) -> None:
        """One line for each change of what readers agree about, with who says what."""
        for readers in changed:
            if readers.usable:
                fields = {"pool": readers.pool, "model": readers.model, "workers": sorted(readers.layouts)}
                effects.append(Say("pool_layout", fields))
            elif readers.differ:
                self.counters.disagreements += 1
                effects.append(Say("pool_layouts_disagree", _differences(readers), warning=True))

    def _look(self, source: PoolSource, effects: list[ReplicaEffect]) -> None:
        """Do keys arrive that nobody can find?"""
        readers = [each for each in self.layouts.readers(source.name) if each.usable]
        is_found = any(each.found for each in readers)
        if not any(each.alarmed or each.missed >= MISSES for each in readers) and is_found:
            return
        arriving = source.index.prefixes()
        enough = sum(each.arrived for each in arriving) >= self._settings.pool_alarm_keys
        asked = {(each.asked.scheme, each.asked.key_prefix) for each in readers if each.asked is not None}
        nobodys = not is_found and not any((each.scheme, each.prefix) in asked for each in arriving)
        for each in readers:
            lost = enough and (nobodys or each.missed >= MISSES)
            if lost and not each.alarmed:
                self.counters.alarms += 1
                fields = {
                    "pool": source.name,
                    "model": each.model,
                    "asked": each.asked.key_prefix if each.asked is not None else "",
                    "arriving": sorted({known.prefix for known in arriving})[:_PREFIXES_SAID],
                    "misses": each.missed,
                }
                effects.append(Say(f"pool_{NO_MATCHING_KEYS}", fields, warning=True))
            elif each.alarmed and not lost:
                effects.append(Say("pool_matching_keys", {"pool": source.name, "model": each.model}))
            each.alarmed = lost

    def _tell(self, source: PoolSource, now: float, effects: list[ReplicaEffect]) -> None:
        """Say so when the pool's health or its reason has changed."""
        source.judge(now, self._settings.worker_lost_s, self._settings.pool_stale_s)
        told = source.health, source.reason
        if told != source.told:
            source.told = told
            fields = {"pool": source.name, "health": source.health, "reason": source.reason}
            effects.append(Say("pool_source", fields))


def blocks_per_page(layout: SharedLayout, block_size: int) -> int:
    """Blocks of ``block_size`` tokens in one page; 0 where pages do not consist of whole blocks."""
    return layout.page_size // block_size if block_size > 0 and layout.page_size % block_size == 0 else 0


def _differences(readers: PoolReaders) -> dict[str, object]:
    """Who says what, in one line: the first of each description."""
    said: dict[tuple[object, ...], str] = {}
    for worker, layout in sorted(readers.layouts.items()):
        components = [sorted(each.components) for each in layout.sets]
        shape = (layout.scheme, layout.page_size, layout.key_prefix, str(components)[:200], layout.page_hash)
        said.setdefault(shape, worker)
    return {
        "pool": readers.pool,
        "model": readers.model,
        "layouts": [f"{worker}: {shape}" for shape, worker in list(said.items())[:_PREFIXES_SAID]],
    }
