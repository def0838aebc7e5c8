"""Workers and pools as the planner needs them: capacity, lower tiers, who shares, and what one cannot do."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from schemas.hint import ActionType
from schemas.index import SourceHealth
from schemas.pool import PoolState
from schemas.worker import RankLoad, WorkerState
from services.hints.wishes import Place, Tier

LOWER_TIERS: tuple[tuple[str, Tier], ...] = (("tier:host", "host"), ("tier:disk", "disk"))
"""Features of a `schemas.worker.WorkerProfile` that say where its KV can go below the device."""

USABLE: frozenset[SourceHealth] = frozenset({"synced", "approximate"})
"""Health of a pool that is worth fetching from."""

MAX_POOLS = 256


@dataclass(slots=True)
class Known:
    """One worker. ``lower``: tiers below the device that it has itself; ``pool``: the shared pool that it reads;
    ``usable``: it is there, and its engine too; ``loads``: of its ranks, where its engine says so."""

    incarnation: str
    engine: str
    kv_tokens: int
    block_size: int
    ranks: int
    lower: tuple[Tier, ...]
    pool: str | None
    usable: bool
    loads: tuple[RankLoad, ...] = ()


class Workers:
    """Bounded: of too many, the one heard longest ago is forgotten."""

    def __init__(self, max_workers: int, unsupported_s: float) -> None:
        self._max_workers = max_workers
        self._unsupported_s = unsupported_s
        self._known: OrderedDict[str, Known] = OrderedDict()
        self._pools: OrderedDict[str, SourceHealth] = OrderedDict()
        self._unsupported: dict[str, dict[ActionType, float]] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, worker: str) -> Known | None:
        return self._known.get(worker)

    def engine(self, worker: str) -> str:
        """For metrics."""
        known = self._known.get(worker)
        return known.engine if known is not None else "unknown"

    def seen(self, state: WorkerState) -> bool:
        """A heartbeat. Returns whether all that its cache was asked to keep is gone: it has left, or begun anew."""
        before = self._known.get(state.worker)
        if state.health == "left":
            self.forget(state.worker)
            return True
        profile = state.profile
        features = frozenset(profile.features)
        lower = tuple(tier for feature, tier in LOWER_TIERS if feature in features)
        self._known[state.worker] = Known(
            incarnation=state.incarnation,
            engine=profile.engine,
            kv_tokens=profile.kv_tokens or 0,
            block_size=profile.block_size or 0,
            ranks=profile.ranks,
            lower=lower,
            pool=profile.shared.pool if profile.shared is not None else None,
            usable=state.health in ("ready", "mismatch"),
            loads=state.loads,
        )
        self._known.move_to_end(state.worker)
        while len(self._known) > self._max_workers:
            self.forget(next(iter(self._known)))
        anew = before is not None and before.incarnation != state.incarnation
        if anew:
            self._unsupported.pop(state.worker, None)
        return anew

    def forget(self, worker: str) -> None:
        """It is gone."""
        self._known.pop(worker, None)
        self._unsupported.pop(worker, None)

    def pool_seen(self, state: PoolState) -> None:
        """A pool's heartbeat."""
        self._pools[state.pool] = state.health
        self._pools.move_to_end(state.pool)
        while len(self._pools) > MAX_POOLS:
            self._pools.popitem(last=False)

    def pool_is_usable(self, pool: str | None) -> bool:
        return pool is not None and self._pools.get(pool) in USABLE

    def lowest(self, place: Place) -> Tier | None:
        """Where what must leave the device of this place can go: its own memory before its disk, both before the pool,
        by the time that it takes to come back. ``None``: nowhere."""
        known = self._known.get(place.worker)
        if known is None:
            return None
        if known.lower:
            return known.lower[0]
        return "pool" if self.pool_is_usable(known.pool) else None

    def is_crowded(self, place: Place, usage: float) -> bool:
        """Whether others want the device's room: so much of it is in use, or requests wait; true where nobody says."""
        known = self._known.get(place.worker)
        load = next((each for each in known.loads if each.rank == place.rank), None) if known is not None else None
        return load is None or load.waiting > 0 or load.kv_usage >= usage

    def share_a_pool(self, one: str, other: str) -> bool:
        """Whether what one of them has put into a usable pool can be read by the other."""
        first, second = self._known.get(one), self._known.get(other)
        return (
            first is not None and second is not None and first.pool == second.pool and self.pool_is_usable(first.pool)
        )

    # What a worker cannot do

    def cannot(self, worker: str, action: ActionType, now: float) -> None:
        """It said so; it is not asked again for a while (an engine may be configured otherwise without a restart)."""
        if worker not in self._known and len(self._unsupported) >= self._max_workers:
            return
        self._unsupported.setdefault(worker, {})[action] = now + self._unsupported_s

    def can(self, worker: str, action: ActionType, now: float) -> bool:
        """Unless it said otherwise lately."""
        return now >= self._unsupported.get(worker, {}).get(action, float("-inf"))
