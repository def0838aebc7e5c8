"""eta: how much a returning program's rank suffers when it has to queue anew (spec scheduling §1.2, §1.3, §5.4).

``eta = -Corr(k, N-k)`` over the turns k a program was served and the turns N-k it still had, pairs k = 1..N-1 of the
programs that completed last: 1 where all have equally many turns, 0 where the past tells nothing of the rest, below 0
where many turns done mean many to come.
"""

from __future__ import annotations

from collections import deque
from typing import Annotated

import msgspec

from services.admission.estimators.errors import BadStateError, sample, stored_version

WINDOW = 256
PRIOR_PROGRAMS = 20
"""The prior of 1 weighs as many programs."""

MAX_TURNS = 1 << 20
"""A program of more turns counts as one of so many."""

STATE_VERSION = 1
MAX_STORED = 1 << 16


class OrderCorrelationState(msgspec.Struct, frozen=True, kw_only=True):
    """What `OrderCorrelation` writes: turns of completed programs, oldest first."""

    version: int = STATE_VERSION
    turns: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_STORED)] = ()


class OrderCorrelation:
    """eta over the last ``window`` completed programs; sums of whole numbers, kept up in O(1)."""

    def __init__(self, *, window: int = WINDOW) -> None:
        self._window = window
        self._turns: deque[int] = deque()
        self._pairs = self._sum = self._squares = self._products = 0

    def __len__(self) -> int:
        return len(self._turns)

    def record(self, turns: int) -> None:
        """A program completed after so many turns. Raises `BadSampleError`."""
        turns = min(int(sample("turns", turns)), MAX_TURNS)
        if len(self._turns) == self._window:
            self._count(self._turns.popleft(), -1)
        self._turns.append(turns)
        self._count(turns, 1)

    def _count(self, turns: int, sign: int) -> None:
        # Over k = 1..N-1 both k and N-k run through the same numbers: equal sums, equal squares.
        pairs = max(0, turns - 1)
        total = turns * pairs // 2
        squares = pairs * turns * (2 * turns - 1) // 6
        self._pairs += sign * pairs
        self._sum += sign * total
        self._squares += sign * squares
        self._products += sign * (turns * total - squares)

    @property
    def raw(self) -> float | None:
        """eta as measured, in [-1, 1]; None where no pair varies."""
        variance = self._pairs * self._squares - self._sum**2
        if variance <= 0:
            return None
        return -(self._pairs * self._products - self._sum**2) / variance

    @property
    def value(self) -> float:
        """eta as used, in [0, 1]: shrunk to the prior of 1 by n/(n+20), undefined counted as 0, never negative.

        Source: spec scheduling §1.3 (b) and §5.4.
        """
        weight = len(self._turns) / (len(self._turns) + PRIOR_PROGRAMS)
        return max(0.0, weight * (self.raw or 0.0) + 1 - weight)

    def to_state(self) -> OrderCorrelationState:
        return OrderCorrelationState(turns=tuple(self._turns))

    @classmethod
    def from_state(cls, state: OrderCorrelationState, *, window: int = WINDOW) -> OrderCorrelation:
        """What was written; the latest, where the window is smaller. Raises `BadStateError`."""
        stored_version("order correlation", state.version, STATE_VERSION)
        if len(state.turns) > MAX_STORED:
            raise BadStateError("order correlation", "too_large", f"{len(state.turns)} programs")
        if not all(0 <= turns <= MAX_TURNS for turns in state.turns):
            raise BadStateError("order correlation", "bad_value", "turns that are no number of turns")
        made = cls(window=window)
        for turns in state.turns:
            made.record(turns)
        return made
