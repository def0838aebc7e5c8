"""One door of a pool's bridge: what its master sends and says goes in, what to publish and to ask comes out.

Every batch of the master is numbered and published untouched at once, and applied to the bridge's own index, from which
snapshots are dumped. Nothing that the master leaves unsaid (silent eviction, a client's death, its own restart; spec:
pool-events §3) is missed for long: `services.bridge.pool.triggers` has the reasons to fetch the key list, and what it
differs in is published as deltas under the same numbering. It stands under number 0 that a bridge has started.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from bus import subjects
from bus.facts import FactNumbers
from kvcore import BadBatchError, PoolApplied, PoolIndex, PoolLimits, PoolStats
from kvcore.dump import Steps
from schemas.base import to_json
from schemas.index import SourceHealth
from schemas.pool import PoolHeaders, PoolOrigin, PoolReset, PoolState
from services.bridge.config import BridgeSettings
from services.bridge.effects import Publish, Say
from services.bridge.events import Beat, EngineBatch, EngineConnected, EngineDisconnected, Stopping
from services.bridge.pool.effects import Compare, ListKeys, PoolEffect
from services.bridge.pool.events import Compared, GoOn, KeysListed, ListEnded, Polled, PollFailed, PoolEvent
from services.bridge.pool.health import Standing, judge
from services.bridge.pool.master import MasterView
from services.bridge.pool.reconcile import KEPT_BYTES, STEP_BATCHES, Outcomes, Reconcile
from services.bridge.pool.report import LISTED_TENANT
from services.bridge.pool.triggers import Triggers

BATCH_BYTES = 1024 * 1024
"""A larger message is no master's: 64 events at most (spec: pool-events §1), each with a key and a dozen short fields.
Whoever applies one stands still meanwhile."""

HEADERS_ROOM = 1024
"""Bytes of a message kept free for headers and subject."""


@dataclass(slots=True)
class PoolCounters:
    """Since the start: batches of the master, deltas and bytes published; what of the batches could not be used."""

    batches: int = 0
    deltas: int = 0
    payload_bytes: int = 0
    bad_batches: int = 0
    held_dropped: int = 0
    stored: int = 0
    removed: int = 0
    cleared: int = 0
    evicted: int = 0


class PoolCore:
    """One pool. ``epoch``: Unix ms of the bridge's start; ``max_payload``: bytes of one bus message."""

    def __init__(self, settings: BridgeSettings, epoch: int, max_payload: int) -> None:
        self.pool = settings.pool
        self.epoch = epoch
        self.seq = -1
        """The last number that was given."""
        self.counters = PoolCounters()
        self.unusable: Counter[str] = Counter()
        """Events that could not be taken in, by reason; ``unknown_medium`` are taken in all the same."""
        self.master = MasterView()
        self.outcomes = Outcomes()
        self.reconciling: Reconcile | None = None
        self._settings = settings
        self._limits = PoolLimits(max_pages=settings.pool_max_pages)
        self.index = PoolIndex(self._limits)
        self.triggers = Triggers(settings.pool_reconcile_s, settings.pool_reconcile_min_s)
        self._held: deque[bytes] = deque()
        self._held_bytes = 0
        self._room = max_payload - HEADERS_ROOM
        self._numbers = FactNumbers(settings.instance or "bridge-1", epoch)
        self._tickets = 0
        self._reconciled = False
        self._list_problem: str | None = None
        self._tenants = False
        self._full = False
        self._stopped: str | None = None
        self._said: tuple[SourceHealth, str | None] | None = None
        self._started = False
        self._reconnects = 0

    def handle(self, event: PoolEvent, now: float) -> list[PoolEffect]:
        """What to do about ``event``, in this order. ``now``: Unix seconds."""
        effects: list[PoolEffect] = []
        if not self._started:
            self._started = True
            self._reset("bridge_started", now, effects)
        match event:
            case EngineBatch():
                self._batch(event, now, effects)
            case EngineConnected():
                if self.master.connected_now():
                    self.triggers.want("reconnect", now)
            case EngineDisconnected():
                self.master.connected = False
                effects.append(Say("pool_events_disconnected", {"pool": self.pool}, warning=True))
            case Polled():
                self._polled(event, now, effects)
            case PollFailed():
                if self.reconciling is not None and self.reconciling.phase == "listing":
                    self.master.kept_waiting()
                else:
                    self.master.poll_failed(event.reason)
            case KeysListed() | ListEnded() | Compared() | GoOn():
                self._go_on_with(event, now, effects)
            case Beat():
                self._reconnects = event.reconnects
                self._tenants = any(tenant != LISTED_TENANT for tenant in self.index.stats().tenants)
            case Stopping():
                self._stopped = event.reason
        self._begin(now, effects)
        self._say(isinstance(event, Beat), now, effects)
        return effects

    @property
    def stats(self) -> PoolStats:
        """Of the bridge's own index."""
        return self.index.stats()

    @property
    def held(self) -> int:
        """Batches that wait for a comparison to be told."""
        return len(self._held)

    def health(self) -> tuple[SourceHealth, str | None]:
        """As the next fact will say it."""
        return judge(
            Standing(
                stopped=self._stopped,
                master=self.master,
                reconciled=self._reconciled,
                doubt=self.triggers.doubt,
                list_problem=self._list_problem,
                tenants=self._tenants or self.master.other_tenants,
                full=self._full,
            )
        )

    def snapshot(self) -> Steps[tuple[bytes, int]]:
        """The picture as it is at the first step, and the last number in it; in steps, between which events are handled
        as ever."""
        seq = self.seq
        dump = yield from self.index.dump()
        return dump, seq

    # The master's stream

    def _batch(self, event: EngineBatch, now: float, effects: list[PoolEffect]) -> None:
        found = self.master.numbered(event.seq)
        if found == "restart":
            self._restarted(now, effects)
        elif found is not None:
            self.triggers.want(found, now)
            fields = {"pool": self.pool, "seq": event.seq, "reason": found}
            effects.append(Say("pool_batches_missing", fields, warning=True))
        running = self.reconciling
        if running is None or running.phase in ("listing", "replaying"):
            self._forward(event.payload, now, effects)
            if running is not None:
                running.heard(event.seq, event.payload)
            return
        size = len(event.payload) + KEPT_BYTES
        if self._held_bytes + size > self._settings.pool_buffer_bytes:
            self.counters.held_dropped += 1
            self.triggers.want("held_full", now)
        else:
            self._held_bytes += size
            self._held.append(event.payload)

    def _forward(self, payload: bytes, now: float, effects: list[PoolEffect]) -> None:
        """One batch of the master: applied, and told untouched; one that nobody can read is not told."""
        self.counters.batches += 1
        try:
            if len(payload) > BATCH_BYTES:
                raise BadBatchError(f"{len(payload)} bytes: {BATCH_BYTES} are the most that is read")
            self._count(self.index.apply_payload(payload))
            self._publish("master", payload, effects)
        except BadBatchError as error:
            self.counters.bad_batches += 1
            self.triggers.want("bad_batch", now)
            fields = {"pool": self.pool, "reason": error.reason, "detail": str(error)}
            effects.append(Say("pool_batch_unreadable", fields, warning=True))

    def _restarted(self, now: float, effects: list[PoolEffect]) -> None:
        effects.append(Say("pool_master_restarted", {"pool": self.pool}, warning=True))
        if self.reconciling is not None:
            self.reconciling.give_up("restart")
        self._held.clear()  # of the process before
        self._held_bytes = 0
        self._reset("master_restarted", now, effects)
        self.triggers.want("restart", now)

    def _reset(self, reason: str, now: float, effects: list[PoolEffect]) -> None:
        self.index = PoolIndex(self._limits)
        self._reconciled = False
        self.seq += 1
        reset = PoolReset(**self._numbers.stamp("pool", now), pool=self.pool, pool_seq=self.seq, reason=reason)
        effects.append(Publish(subjects.pool_reset(self.pool), to_json(reset)))

    def _count(self, applied: PoolApplied) -> None:
        counters = self.counters
        counters.stored += applied.stored
        counters.removed += applied.removed
        counters.cleared += applied.cleared
        counters.evicted += applied.evicted
        self.unusable.update(applied.rejected)
        if applied.unparsed:
            self.unusable["unparsed"] += applied.unparsed
        if applied.unknown_media:
            self.unusable["unknown_medium"] += applied.unknown_media

    def _publish(self, origin: PoolOrigin, payload: bytes, effects: list[PoolEffect]) -> None:
        self.seq += 1
        self.counters.payload_bytes += len(payload)
        parts = max(1, -(-len(payload) // self._room))
        for part in range(parts):
            headers = PoolHeaders(pool=self.pool, epoch=self.epoch, seq=self.seq, origin=origin, part=part, parts=parts)
            piece = payload if parts == 1 else payload[part * self._room : (part + 1) * self._room]
            effects.append(Publish(subjects.pool(self.pool), piece, headers.to_headers()))

    # What the master says over HTTP

    def _polled(self, event: Polled, now: float, effects: list[PoolEffect]) -> None:
        was_enabled = self.master.enabled
        if self.master.polled(event.report):
            self._restarted(now, effects)
        for reason in self.master.noticed(event.report, now):
            self.triggers.want(reason, now)
        enabled = self.master.enabled
        if enabled is not was_enabled and enabled is False:
            text = (
                "events are off at the master (enable_kv_events, bind endpoint, backend id): key lists alone are used"
            )
            effects.append(Say("pool_events_disabled", {"pool": self.pool, "detail": text}, warning=True))

    # Reconciling

    def _begin(self, now: float, effects: list[PoolEffect]) -> None:
        if self.reconciling is not None or self._stopped is not None or not self.master.may_list(now):
            return
        reasons = self.triggers.due(now)
        if not reasons:
            return
        self.triggers.began()
        covers = self.master.list_begins()
        self._tickets += 1
        self.reconciling = Reconcile(
            self._tickets,
            reasons,
            now,
            self._limits,
            covers=covers,
            buffer_bytes=self._settings.pool_buffer_bytes,
        )
        effects.append(ListKeys(self._tickets))

    def _go_on_with(
        self, event: KeysListed | ListEnded | Compared | GoOn, now: float, effects: list[PoolEffect]
    ) -> None:
        running = self.reconciling
        if running is None or event.ticket != running.ticket:
            return
        match event:
            case KeysListed():
                self.master.listed()
                if running.void is None:
                    running.keys(event.keys, self.index)
            case ListEnded():
                if event.problem is None:
                    self.master.listed()
                else:
                    running.give_up(event.problem)
                running.phase = "replaying"
            case Compared():
                running.compared(event.deltas)
            case GoOn():
                self._step(running, now, effects)

    def _step(self, running: Reconcile, now: float, effects: list[PoolEffect]) -> None:
        match running.phase:
            case "replaying":
                if running.void is not None:
                    self._end(running, now, effects)
                elif running.replay():
                    running.phase = "comparing"
                    self._full = running.target.stats().evicted > 0
                    effects.append(Compare(running.ticket, self.index, running.target))
            case "telling":
                delta = running.next_delta() if running.void is None else None
                if delta is None:
                    running.phase = "releasing"
                else:
                    self._tell(running, delta, effects)
            case "releasing":
                for _ in range(min(STEP_BATCHES, len(self._held))):
                    payload = self._held.popleft()
                    self._held_bytes -= len(payload) + KEPT_BYTES
                    self._forward(payload, now, effects)
                if not self._held:
                    self._end(running, now, effects)
            case "listing" | "comparing":
                pass

    def _tell(self, running: Reconcile, delta: bytes, effects: list[PoolEffect]) -> None:
        self._publish("reconcile", delta, effects)
        applied = self.index.apply_delta(delta)
        self.counters.deltas += 1
        self.counters.evicted += applied.evicted
        running.added += applied.stored
        running.removed += applied.removed

    def _end(self, running: Reconcile, now: float, effects: list[PoolEffect]) -> None:
        self.reconciling = None
        self._list_problem = None if running.void == "restart" else running.void
        fields = {"pool": self.pool, "reasons": ",".join(running.reasons)}
        if running.void is not None:
            self.outcomes.given_up[running.void] += 1
            self.triggers.given_up(now, failed=running.void != "restart")
            effects.append(Say("pool_reconcile_given_up", {**fields, "reason": running.void}, warning=True))
            return
        self.triggers.ended(now, now - running.began_at)
        self.outcomes.ended(running, now)
        self._reconciled = True
        found = {"listed": running.listed, "added": running.added, "removed": running.removed}
        effects.append(Say("pool_reconciled", {**fields, **found}))

    # What it says

    def _say(self, beat: bool, now: float, effects: list[PoolEffect]) -> None:
        """The state at every beat, and at once when health changes."""
        health = self.health()
        if health != self._said:
            self._said = health
            fields = {"pool": self.pool, "health": health[0], "reason": health[1]}
            effects.append(Say("pool_health", fields, warning=health[0] != "synced"))
        elif not beat:
            return
        effects.append(Publish(subjects.pool_state(self.pool), to_json(self._state(health, now))))

    def _state(self, health: tuple[SourceHealth, str | None], now: float) -> PoolState:
        stats, outcomes = self.stats, self.outcomes
        return PoolState(
            **self._numbers.stamp("pool.state", now),
            pool=self.pool,
            health=health[0],
            reason=health[1],
            backend_id=stats.backend_id,
            pool_seq=self.seq,
            objects=stats.objects,
            pages=stats.pages,
            unparsed=stats.unparsed,
            reconciled_ms=outcomes.last_ms,
            reconcile_added=outcomes.last_added,
            reconcile_removed=outcomes.last_removed,
            gaps=self.master.gaps,
            restarts=self.master.restarts,
            reconnects=self._reconnects,
        )
