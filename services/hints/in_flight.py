"""Actions under way: one per session, place and direction; each is answered once, or given up at its deadline.

While one is under way the next one of the same kind waits: it would overtake the first, or do its work twice.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal, NamedTuple

from schemas.hint import ActionType
from schemas.session import SessionKey
from services.hints.wishes import Place, Wish

MAX_IN_FLIGHT = 16_384
"""Actions under way in all; beyond it nothing is sent."""

Direction = Literal["pin", "order", "up", "down", "drop"]

DIRECTION: dict[ActionType, Direction] = {
    "pin": "pin",
    "retain": "order",
    "prefetch": "up",
    "share": "up",
    "demote": "down",
    "dereference": "drop",
}
"""Actions of one direction would do the same to the same blocks twice."""


class Lane(NamedTuple):
    """Where only one action may be under way. ``session``: whose blocks they are."""

    session: SessionKey
    place: Place
    direction: Direction


@dataclass(frozen=True, slots=True)
class Flight:
    """An action under way. ``session``: for whom it was sent; ``generation``: of that session then. ``due``: Unix
    seconds. ``frees``: charges that are over when it succeeds; ``blocks``: that a share is of."""

    action_id: str
    action_type: ActionType
    lane: Lane
    session: SessionKey
    generation: int
    due: float
    frees: tuple[str, ...] = ()
    blocks: int = 0


class InFlight:
    """Flights by action, in the order in which they were sent (they all have the same time), and who waits."""

    def __init__(self) -> None:
        self._flights: OrderedDict[str, Flight] = OrderedDict()
        self._lanes: dict[Lane, str] = {}
        self._waiting: dict[Lane, Wish] = {}

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def waiting(self) -> int:
        """Wishes that wait for a flight to end; never more than there are flights."""
        return len(self._waiting)

    @property
    def full(self) -> bool:
        return len(self._flights) >= MAX_IN_FLIGHT

    def ids(self) -> list[str]:
        """Of the actions under way."""
        return list(self._flights)

    @property
    def oldest(self) -> str:
        """Of those under way; there must be one."""
        return next(iter(self._flights))

    def on(self, lane: Lane) -> str | None:
        """The action that is under way there."""
        return self._lanes.get(lane)

    def begin(self, flight: Flight) -> None:
        """It leaves. Its lane must be free."""
        if flight.lane in self._lanes:
            raise ValueError(f"{self._lanes[flight.lane]} is under way there")
        self._flights[flight.action_id] = flight
        self._lanes[flight.lane] = flight.action_id

    def get(self, action_id: str) -> Flight | None:
        """The flight of this action."""
        return self._flights.get(action_id)

    def wait(self, lane: Lane, wish: Wish) -> bool:
        """Send it when the lane is free; the last wish counts. Returns whether an earlier one was displaced."""
        displaced = lane in self._waiting
        self._waiting[lane] = wish
        return displaced

    def end(self, action_id: str) -> tuple[Flight, Wish | None] | None:
        """It is over: the flight, and who waited for it; ``None`` when it is not under way."""
        flight = self._flights.pop(action_id, None)
        if flight is None:
            return None
        del self._lanes[flight.lane]
        return flight, self._waiting.pop(flight.lane, None)

    def overdue(self, now: float) -> list[str]:
        """Actions whose time is up."""
        late = []
        for flight in self._flights.values():
            if flight.due > now:
                break
            late.append(flight.action_id)
        return late

    def forget_wishes(self, session: SessionKey, place: Place) -> int:
        """What waits for the session there is not wanted any more, but for letting go; how much that was."""
        lanes = [Lane(session, place, direction) for direction in ("pin", "order", "up", "down")]
        return sum(self._waiting.pop(lane, None) is not None for lane in lanes)
