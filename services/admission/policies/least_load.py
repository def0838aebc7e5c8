"""Policy ``least_load``: the seat with the fewest open requests, at once."""

from __future__ import annotations

from services.admission.scheduling.interface import (
    Actions,
    Admission,
    Base,
    Fleet,
    Refusal,
    TurnFacts,
    TurnUsage,
    WorkerFacts,
)


class LeastLoad(Base):
    """Of equal ones the next in turn."""

    def begin(self, fleet: Fleet) -> None:
        super().begin(fleet)
        self._open = dict.fromkeys(range(len(fleet.workers)), 0)
        self._runs: dict[int, int] = {}
        self._last = -1

    def worker_changed(self, now: float, seat: int, facts: WorkerFacts | None) -> Actions:
        if facts is not None:
            self._open.setdefault(seat, 0)
        elif self._open.pop(seat, None) is not None:
            self._runs = {turn: where for turn, where in self._runs.items() if where != seat}
        return ()

    def turn_ready(self, now: float, turn: TurnFacts) -> Actions:
        if not self._open:
            return (Refusal(turn.turn, "no_seat"),)
        seat = min(self._open, key=lambda each: (self._open[each], each <= self._last, each))
        self._last = seat
        self._open[seat] += 1
        self._runs[turn.turn] = seat
        return (Admission(turn.turn, seat),)

    def turn_finished(self, now: float, usage: TurnUsage) -> Actions:
        return self.turn_aborted(now, usage.turn)

    def turn_aborted(self, now: float, turn: int) -> Actions:
        seat = self._runs.pop(turn, None)
        if seat is not None:
            self._open[seat] -= 1
        return ()
