"""A master that is a set of keys, the core of its bridge, and a receiver that believes what the bridge publishes."""

from __future__ import annotations

from collections import deque
from typing import Any

import msgspec

from kvcore import PoolIndex
from schemas.pool import PoolState
from services.bridge.config import BridgeSettings
from services.bridge.effects import Publish, Say
from services.bridge.events import Beat, EngineBatch, EngineConnected, EngineDisconnected
from services.bridge.pool.core import PoolCore
from services.bridge.pool.effects import Compare, ListKeys, PoolEffect
from services.bridge.pool.events import Compared, GoOn, KeysListed, ListEnded, Polled, PoolEvent
from services.bridge.pool.report import EventStatus, MasterMetrics, PoolReport
from tests.support.pool_follower import PoolFollower

MAX_PAYLOAD = 1 << 20


def key_of(page: int, component: str = "_0_k") -> str:
    """An object of a HiCache page."""
    return f"m_{page:032x}{0:032x}{component}"


def event(kind: str, key: str | None = None, medium: str | None = "cpu", **more: Any) -> dict[str, Any]:
    """One event of a master 0.3.14, with what is read of it."""
    return {"event_type": kind, "object_key": key, "medium": medium, "backend_id": "pool-a", **more}


def payload_of(*events: dict[str, Any]) -> bytes:
    """One message."""
    return msgspec.msgpack.encode([1, list(events), 0])


def settings_of(**changes: Any) -> BridgeSettings:
    """Of a pool's bridge."""
    values = {"pool": "pool-a", "pool_url": "http://127.0.0.1:9003", "pool_events": "tcp://127.0.0.1:5557", **changes}
    return BridgeSettings(**values)


class Room:
    """Master, bridge and receiver in one time. What the master publishes waits in ``wire`` until it is `deliver`ed."""

    def __init__(self, max_payload: int = MAX_PAYLOAD, **changes: Any) -> None:
        self.now = 1000.0
        self.core = PoolCore(settings_of(**changes), 1_000_000, max_payload)
        self.receiver = PoolFollower()
        self.said: list[Say] = []
        self.keys: dict[str, set[str]] = {}
        self.seq = 0
        self.evicted = 0
        self.enabled = True
        self.segments: frozenset[tuple[str, str, str]] = frozenset({("s1", "c1", "OK")})
        self.liveness: tuple[tuple[str, int], ...] = ()
        self.tenants: tuple[str, ...] = ()
        self.wire: deque[EngineBatch] = deque()
        self.lists = 0
        self._list: tuple[int, list[str]] | None = None
        self._comparison: Compare | None = None

    # The master

    def put(self, key: str, medium: str = "cpu") -> None:
        self.keys.setdefault(key, set()).add(medium)
        self.publish(event("stored", key, medium))

    def remove(self, key: str) -> None:
        for medium in sorted(self.keys.pop(key, set())):
            self.publish(event("removed", key, medium))

    def evict(self, key: str) -> None:
        """Silently, as it does (spec: pool-events §3)."""
        if self.keys.pop(key, None) is not None:
            self.evicted += 1

    def publish(self, *events: dict[str, Any]) -> None:
        self.seq += 1
        self.wire.append(EngineBatch(0, self.seq, payload_of(*events)))

    def restart(self) -> None:
        """Another process: nothing in it, no event."""
        self.keys.clear()
        self.seq = self.evicted = 0
        self.wire.clear()
        self.handle(EngineDisconnected(0))
        self.handle(EngineConnected(0))

    # The bridge

    def handle(self, happened: PoolEvent) -> list[PoolEffect]:
        effects = self.core.handle(happened, self.now)
        for effect in effects:
            match effect:
                case Publish():
                    self.receiver.hear(effect)
                case ListKeys():
                    self.lists += 1
                    self._list = (effect.ticket, [])
                case Compare():
                    self._comparison = effect
                case Say():
                    self.said.append(effect)
        return effects

    def poll(self) -> None:
        status = EventStatus(self.enabled, self.seq, 0)
        metrics = MasterMetrics(self.evicted, self.liveness, self.tenants)
        self.handle(Polled(PoolReport(status, metrics, self.segments)))

    def deliver(self, count: int = 1_000_000) -> None:
        while self.wire and count:
            count -= 1
            self.handle(self.wire.popleft())

    def work(self) -> bool:
        """One step of the reconcile under way; whether there was one."""
        running = self.core.reconciling
        if running is None:
            return False
        if running.phase == "listing":
            assert self._list is not None
            ticket, _ = self._list
            lines = "".join(f"{key}\n" for key in self.keys).encode()
            if lines:
                self.handle(KeysListed(ticket, lines))
            self.handle(ListEnded(ticket))
        elif self._comparison is not None:
            comparison, self._comparison = self._comparison, None
            deltas = comparison.here.difference(comparison.there, part_bytes=200)
            self.handle(Compared(comparison.ticket, tuple(deltas)))
        else:
            self.handle(GoOn(running.ticket))
        return True

    def settle(self, seconds: float = 10.0) -> None:
        """Everything arrives, time goes by, and whatever is due is done."""
        for _ in range(3):
            self.deliver()
            self.now += seconds
            self.poll()
            self.handle(Beat())
            while self.work():
                pass

    def begin(self) -> None:
        """Connected, seen and agreed."""
        self.handle(EngineConnected(0))
        self.settle()

    def known(self, index: PoolIndex | None = None) -> dict[str, set[str]]:
        """What an index (the bridge's own) says of the keys that were ever used here."""
        of = index or self.core.index
        found = {key: set(of.present(key)) for key in (key_of(page) for page in range(12))}
        return {key: media for key, media in found.items() if media}

    @property
    def state(self) -> PoolState:
        """The newest one published."""
        return self.receiver.states[-1]
