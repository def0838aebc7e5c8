"""The one table of everything learned, by model pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.admission.estimators.errors import BadStateError
from services.admission.estimators.learned_pool import LearnedPool
from services.admission.estimators.learned_state import decode, encode, from_state, to_state
from services.admission.estimators.least_recent import LeastRecentlyUsed

MAX_POOLS = 64


class LearnedTable:
    """Pools by name, up to ``max_pools``: the least recently used makes room. ``make``: a pool that knows nothing yet;
    whoever knows the cost models of a pool sets them on it (``work_cost``, ``reload_cost``)."""

    def __init__(self, make: Callable[[], LearnedPool] = LearnedPool, *, max_pools: int = MAX_POOLS) -> None:
        self._make = make
        self._pools: LeastRecentlyUsed[str, LearnedPool] = LeastRecentlyUsed(max_pools, make)

    def __len__(self) -> int:
        return len(self._pools)

    @property
    def evictions(self) -> int:
        """Pools forgotten for want of room."""
        return self._pools.evictions

    def names(self) -> Iterator[str]:
        """Names of all pools, the least recently used first."""
        return (name for name, _ in self._pools.items())

    def pool(self, name: str) -> LearnedPool:
        """The pool of that name; one that knows nothing yet, where there is none."""
        return self._pools.use(name)

    def stored(self, name: str) -> bytes | None:
        """The bytes to store for a pool; None: there is no such pool."""
        pool = self._pools.peek(name)
        return None if pool is None else encode(to_state(pool))

    def restore(self, name: str, payload: bytes) -> list[BadStateError]:
        """Takes over what was stored for a pool. Returns the parts that were refused: nothing is known of those.

        Raises `BadStateError` where nothing could be used, or the pool is learning already; the table stays as it was.
        """
        if self._pools.peek(name) is not None:
            raise BadStateError("pool", "already_learning", f"{name!r} has learned since the start")
        state, unread = decode(payload)
        pool = self._make()
        refused = from_state(state, pool)
        self._pools.put(name, pool)
        return unread + refused
