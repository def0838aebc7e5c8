"""Policy ``round_robin``: every request goes to the next seat, at once."""

from __future__ import annotations

from bisect import bisect_right

from services.admission.scheduling.interface import Actions, Admission, Base, Fleet, Refusal, TurnFacts, WorkerFacts


class RoundRobin(Base):
    """Seats by number, in turn. It books nothing."""

    def begin(self, fleet: Fleet) -> None:
        super().begin(fleet)
        self._seats = list(range(len(fleet.workers)))
        self._last = -1

    def worker_changed(self, now: float, seat: int, facts: WorkerFacts | None) -> Actions:
        known = set(self._seats)
        self._seats = sorted(known - {seat} if facts is None else known | {seat})
        return ()

    def turn_ready(self, now: float, turn: TurnFacts) -> Actions:
        if not self._seats:
            return (Refusal(turn.turn, "no_seat"),)
        self._last = self._seats[bisect_right(self._seats, self._last) % len(self._seats)]
        return (Admission(turn.turn, self._last),)
