"""A pool's bridge as a replica sees it: it publishes, resets, beats, restarts, and answers for its index."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from kvcore import PoolIndex, page_digests, page_hashes
from kvcore.dump import at_once
from kvcore.hashing import pack_tokens
from kvcore.pool_layout import mha_components
from replica.config import ReplicaSettings
from replica.core import Replica
from replica.effects import AskPoolSnapshot, ReplicaEffect, Say
from replica.events import (
    PoolBatchReceived,
    PoolResetReceived,
    PoolSnapshotFailed,
    PoolSnapshotReceived,
    PoolStated,
    ReplicaEvent,
    Tick,
    Work,
    WorkerSeen,
)
from schemas.index import MatchReply, MatchRequest, PoolMatch, SourceHealth
from schemas.pool import ComponentSet, PoolHeaders, PoolReset, PoolState, SharedLayout
from schemas.worker import WorkerProfile
from tests.unit.replica.bridge import BLOCK, Bridge

MODEL = "m"
POOL = "p"
PREFIX = "Qwen-Qwen3-8B_"
SETTINGS = ReplicaSettings(pool_alarm_keys=8)


def layout(tp: int = 2, prefix: str = PREFIX, page_size: int = BLOCK, pool: str = POOL) -> SharedLayout:
    """HiCache, multi-head attention."""
    sets = (ComponentSet(components=mha_components(tp)),)
    return SharedLayout(pool=pool, scheme="sglang_hicache", page_size=page_size, key_prefix=prefix, sets=sets)


def prompt(pages: int, start: int = 0, page_size: int = BLOCK) -> bytes:
    """Tokens of a prompt of whole pages."""
    return pack_tokens(range(start, start + pages * page_size))


def keys(tokens: bytes, shared: SharedLayout, which: Iterable[int] | None = None) -> list[str]:
    """Every object of the prompt's pages (or of those named), as an engine of this layout calls them."""
    digests = page_digests(tokens, shared.page_size)
    hashes = [digests[place : place + 32].hex() for place in range(0, len(digests), 32)]
    chosen = range(len(hashes)) if which is None else which
    components = [name for each in shared.sets for name in each.components]
    return [f"{shared.key_prefix}{hashes[page]}{component}" for page in chosen for component in components]


def told(kind: str, objects: Iterable[str]) -> bytes:
    """A batch as a master publishes it."""
    events = [{"event_type": kind, "object_key": key, "medium": "cpu"} for key in objects]
    return msgspec.msgpack.encode([1, events, 0])


@dataclass
class PoolBridge:
    """What a pool's bridge keeps: its index and its numbers. ``workers``: bridges of engines that read the pool."""

    core: Replica = field(default_factory=lambda: Replica(SETTINGS, "index"))
    pool: str = POOL
    epoch: int = 1000
    seq: int = -1
    facts: int = 0
    now: float = 1000.0
    health: SourceHealth = "synced"
    reason: str | None = None
    reconciled_s: float | None = 1000.0
    index: PoolIndex = field(default_factory=PoolIndex)
    asked: list[AskPoolSnapshot] = field(default_factory=list)
    said: list[Say] = field(default_factory=list)
    reconnects: int = 0
    workers: dict[str, Bridge] = field(default_factory=dict)
    profiles: dict[str, WorkerProfile] = field(default_factory=dict)

    def give(self, event: ReplicaEvent) -> None:
        self.now += 0.01
        effects: list[ReplicaEffect] = self.core.handle(event, self.now)
        while self.core.behind:
            effects += self.core.handle(Work(), self.now)
        self.asked += [effect for effect in effects if isinstance(effect, AskPoolSnapshot)]
        self.said += [effect for effect in effects if isinstance(effect, Say)]

    # What its bridge says

    def batch(self, payload: bytes, *, heard: bool = True) -> None:
        """The master's own batch."""
        self.index.apply_payload(payload)
        self._number(payload, "master", heard)

    def store(self, objects: Iterable[str], *, heard: bool = True) -> None:
        self.batch(told("stored", objects), heard=heard)

    def remove(self, objects: Iterable[str], *, heard: bool = True) -> None:
        self.batch(told("removed", objects), heard=heard)

    def reconcile(self, objects: Iterable[str], *, heard: bool = True) -> None:
        """The master's list says that these are there, and no others."""
        target = PoolIndex()
        target.add_keys("\n".join(objects).encode())
        for delta in self.index.difference(target):
            self.index.apply_delta(delta)
            self._number(delta, "reconcile", heard)
        self.reconciled_s = self.now

    def reset(self, *, heard: bool = True) -> None:
        self.seq += 1
        self.index.clear()
        if heard:
            fact = PoolReset(
                source="b", epoch=self.epoch, seq=0, at_ms=0, pool=self.pool, pool_seq=self.seq, reason="restarted"
            )
            self.give(PoolResetReceived(fact))

    def restart(self) -> None:
        """Another process: it begins with a reset, and knows nothing."""
        self.epoch += 1
        self.seq = -1
        self.reset()

    def beat(self) -> None:
        self.facts += 1
        state = PoolState(
            source="b",
            epoch=self.epoch,
            seq=self.facts,
            at_ms=round(self.now * 1000),
            pool=self.pool,
            health=self.health,
            reason=self.reason,
            pool_seq=self.seq,
            reconciled_ms=None if self.reconciled_s is None else round(self.reconciled_s * 1000),
            reconnects=self.reconnects,
        )
        self.give(PoolStated(state))

    def _number(self, payload: bytes, origin: str, heard: bool) -> None:
        self.seq += 1
        if heard:
            headers = PoolHeaders(pool=self.pool, epoch=self.epoch, seq=self.seq, origin=origin)  # type: ignore[arg-type]
            self.give(PoolBatchReceived(headers, payload))

    def answer(self) -> None:
        """Answer the last question with the whole picture."""
        question = self.asked.pop()
        index = at_once(self.core.prepare_pool(at_once(self.index.dump())))
        self.give(PoolSnapshotReceived(self.pool, question.ticket, self.epoch, self.seq, index))

    def fail(self, reason: str = "bus_timeout") -> None:
        question = self.asked.pop()
        self.give(PoolSnapshotFailed(self.pool, question.ticket, reason))

    # Time and workers

    def live(self, seconds: int, *, beats: bool = True) -> None:
        """Time passes; the workers go on saying what they are."""
        for _ in range(seconds):
            self.now += 1
            for name in self.workers:
                self.worker(name)
            if beats:
                self.beat()
            self.give(Tick())

    def worker(
        self,
        name: str,
        shared: SharedLayout | str | None = "as before",
        block_size: int = BLOCK,
        model: str = MODEL,
    ) -> Bridge:
        """A worker introduces itself, or describes itself in another way."""
        at = self.workers.get(name)
        if at is None:
            at = self.workers[name] = Bridge(self.core, name)
            self.profiles[name] = WorkerProfile(url="http://e", model=model, block_size=block_size)
        at.now = self.now
        if not isinstance(shared, str):
            self.profiles[name] = msgspec.structs.replace(self.profiles[name], shared=shared)
        self.give(WorkerSeen(at.state(profile=self.profiles[name])))
        return at

    def leave(self, name: str) -> None:
        """A worker says goodbye."""
        self.give(WorkerSeen(self.workers.pop(name).state("left")))

    # Questions

    def match(self, tokens: bytes, page_size: int = BLOCK, chain: bytes = b"\1" * 8, model: str = MODEL) -> MatchReply:
        pages = page_hashes(tokens, page_size)
        request = MatchRequest(model=model, block_size=BLOCK, chain=chain, pages=pages, page_size=page_size)
        return self.core.match(request, self.now)

    def found(self, tokens: bytes, page_size: int = BLOCK) -> PoolMatch:
        """What the only pool holds of it."""
        (pool,) = self.match(tokens, page_size).pools
        return pool

    def events(self, name: str) -> list[Say]:
        return [each for each in self.said if each.event == name]


def followed(*workers: str, shared: SharedLayout | None = None) -> PoolBridge:
    """A bridge that has begun, and workers that read its pool."""
    at = PoolBridge()
    for name in workers or ("a",):
        at.worker(name, shared or layout())
    at.reset()
    at.beat()
    return at
