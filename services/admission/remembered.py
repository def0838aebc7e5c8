"""What pools have learned, beyond the life of a process: taken over when a pool begins, stored when it has changed.

The bucket has one value a pool. A value that is damaged, foreign or too large is refused, whole or in the part that is,
and costs nothing else: the pool begins with less.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from bus.subjects import encode_id
from services.admission.estimators.errors import BadStateError
from services.admission.estimators.learned_pool import LearnedPool
from services.admission.estimators.learned_state import decode, encode_within, from_state
from services.admission.pools import Pool

MAX_BYTES = 1 << 22
MAX_STORED = 64


@dataclass(frozen=True, slots=True)
class Stored:
    """A value for the bucket: what the pool of ``key`` has learned."""

    key: str
    payload: bytes


class Remembered:
    """``refused``: values and parts of them that could not be used or written, by reason. ``is_read``: whether it is
    known what the bucket holds; before that nothing is written, or more would be lost than is learned.

    ``most_bytes``: that one message may carry.
    """

    def __init__(self) -> None:
        self.is_read = False
        self.most_bytes = MAX_BYTES
        self.refused: Counter[str] = Counter()
        self._values: dict[str, bytes] = {}
        self._written: dict[str, tuple[float, int]] = {}

    def read(self, values: Mapping[str, bytes]) -> None:
        """All that the bucket holds."""
        self.is_read = True
        self._values = dict(list(values.items())[:MAX_STORED])

    def has(self, pool: str) -> bool:
        """Whether something is stored of the pool."""
        return encode_id(pool) in self._values

    def begun(self, pool: str) -> tuple[LearnedPool, list[BadStateError]]:
        """The pool as it was stored, or one that knows nothing; and what of it was refused. It is asked once: from now
        on the pool learns by itself."""
        payload = self._values.pop(encode_id(pool), None)
        learned = LearnedPool()
        if payload is None:
            return learned, []
        try:
            if len(payload) > MAX_BYTES:
                raise BadStateError("pool", "too_large", f"{len(payload)} bytes, at most {MAX_BYTES}")
            state, unread = decode(payload)
            if state.pool != pool:
                raise BadStateError("pool", "foreign_pool", f"it is of pool {state.pool[:100]!r}")
            refused = unread + from_state(state, learned)
        except BadStateError as error:
            learned, refused = LearnedPool(), [error]
        for each in refused:
            self.refused[each.reason] += 1
        return learned, refused

    def due(self, pools: Iterable[Pool], now: float, *, every_s: float) -> list[Stored]:
        """Pools that learned something since they were stored at least ``every_s`` ago: one at a time, so that no
        decision waits long (at the bounds, one takes about 10 ms)."""
        if not self.is_read:
            return []
        for pool in pools:
            at, samples = self._written.get(pool.name, (now, 0))
            if pool.name not in self._written:
                self._written[pool.name] = at, samples
            if pool.learned.samples == samples or now - at < every_s:
                continue
            self._written[pool.name] = now, pool.learned.samples
            payload = encode_within(pool.learned, pool.name, min(self.most_bytes, MAX_BYTES))
            if payload is None:
                self.refused["too_large"] += 1
                continue
            return [Stored(encode_id(pool.name), payload)]
        return []

    def unwritten(self, key: str) -> None:
        """The bucket did not take the pool's value: it is due again after the same time."""
        for name, (at, _) in self._written.items():
            if encode_id(name) == key:
                self._written[name] = at, -1

    def forget(self, pool: str) -> None:
        """The pool is over."""
        self._written.pop(pool, None)
