"""How much may be asked of a cache: a ledger of what is kept until when, and rates.

Hints are soft, and a message about one may be lost: what was asked to be kept weighs until it ends by itself, or until
its worker says that it is gone.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from schemas.session import SessionKey

S = TypeVar("S", bound=Hashable)
"""What has a budget: a rank, or a worker."""


@dataclass(frozen=True, slots=True)
class Charge:
    """One action that keeps something. ``until``: Unix seconds. ``owner``: the user's policy that wants it, if any."""

    action_id: str
    weight: int
    until: float
    owner: str = ""


class Ledger(Generic[S]):
    """What sessions keep at seats. A later charge of a session at a seat replaces its earlier one at the cache, if the
    cache heard it; until that is known the session weighs as its heaviest.

    Invariants: `of` is the sum over sessions; nothing weighs after its end.
    """

    def __init__(self) -> None:
        self._charges: dict[tuple[SessionKey, S], OrderedDict[str, Charge]] = {}
        self._seat_of: dict[str, tuple[SessionKey, S]] = {}
        self._weights: Counter[S] = Counter()
        self._owned: Counter[tuple[S, str]] = Counter()
        self._ends: list[tuple[float, str]] = []

    def __len__(self) -> int:
        return len(self._charges)

    def of(self, seat: S) -> int:
        """What weighs on the seat."""
        return self._weights[seat]

    def owned(self, seat: S, owner: str) -> int:
        """What a user's policy has there."""
        return self._owned[seat, owner]

    def seats(self) -> dict[S, int]:
        """Weight by seat, those with any."""
        return dict(self._weights)

    def weight(self, session: SessionKey, seat: S) -> int:
        """What the session weighs there."""
        charges = self._charges.get((session, seat))
        if not charges:
            return 0
        weights = [charge.weight for charge in charges.values()]
        return weights[0] if len(weights) == 1 else max(weights)

    def owner(self, session: SessionKey, seat: S) -> str:
        """Whose the session's last charge there is."""
        charges = self._charges.get((session, seat))
        return next(reversed(charges.values())).owner if charges else ""

    def fits(self, session: SessionKey, seat: S, charge: Charge, limit: float, owner_limit: float) -> bool:
        """Whether the seat stays within ``limit``, and what the charge's owner has there within ``owner_limit``."""
        before, owner = self.weight(session, seat), self.owner(session, seat)
        after = max(before, charge.weight)
        if self._weights[seat] - before + after > limit:
            return False
        own = self._owned[seat, charge.owner] - (before if owner == charge.owner else 0)
        return not charge.owner or own + after <= owner_limit

    def charge(self, session: SessionKey, seat: S, charge: Charge) -> None:
        """Take it in, whatever the limit."""
        key = (session, seat)
        with_it = self._charges.setdefault(key, OrderedDict())
        self._unweigh(key)
        with_it[charge.action_id] = charge
        self._seat_of[charge.action_id] = key
        self._weigh(key)
        heapq.heappush(self._ends, (charge.until, charge.action_id))

    def confirmed(self, action_id: str) -> None:
        """The cache has taken it: what it replaces is gone."""
        key = self._seat_of.get(action_id)
        if key is None:
            return
        for earlier in list(self._charges[key]):
            if earlier == action_id:
                return
            self.free(earlier)

    def held(self, session: SessionKey, seat: S) -> tuple[str, ...]:
        """Actions of the session that weigh there."""
        return tuple(self._charges.get((session, seat), ()))

    def free(self, action_id: str) -> None:
        """It weighs no more."""
        key = self._seat_of.pop(action_id, None)
        if key is None:
            return
        self._unweigh(key)
        charges = self._charges[key]
        del charges[action_id]
        if charges:
            self._weigh(key)
        else:
            del self._charges[key]

    def forget(self, seats: set[S]) -> None:
        """Nothing is kept there any more."""
        for key in [key for key in self._charges if key[1] in seats]:
            for action_id in list(self._charges[key]):
                self.free(action_id)

    def expire(self, now: float) -> None:
        """What ends at ``now`` or before weighs no more."""
        while self._ends and self._ends[0][0] <= now:
            self.free(heapq.heappop(self._ends)[1])

    def _weigh(self, key: tuple[SessionKey, S]) -> None:
        session, seat = key
        weight = self.weight(session, seat)
        self._weights[seat] += weight
        self._owned[seat, self.owner(session, seat)] += weight

    def _unweigh(self, key: tuple[SessionKey, S]) -> None:
        session, seat = key
        weight, owner = self.weight(session, seat), self.owner(session, seat)
        self._weights[seat] -= weight
        self._owned[seat, owner] -= weight
        if not self._weights[seat]:
            del self._weights[seat]
        if not self._owned[seat, owner]:
            del self._owned[seat, owner]


class RateLimit:
    """A token bucket: ``per_s`` on average, ``burst`` at once."""

    __slots__ = ("_burst", "_left", "_per_s", "_since")

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s = per_s
        self._burst = float(burst)
        self._left = float(burst)
        self._since = float("-inf")

    def take(self, now: float) -> bool:
        """One more, if that is within the rate. A clock that went back gives nothing, and goes on from there."""
        if now > self._since:
            self._left = min(self._burst, self._left + (now - self._since) * self._per_s)
        self._since = now
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
