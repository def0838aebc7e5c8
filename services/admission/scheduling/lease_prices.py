"""What the lease of an idle program is worth, and until when that stays so.

Source: spec policy §4 (I, revocable).
"""

from __future__ import annotations

import heapq

from services.admission.estimators.learned_pool import LearnedPool
from services.admission.scheduling.programs import Program, ProgramState
from services.admission.scheduling.ranking import Ranking
from services.admission.scheduling.seat import Seat

KEPT_SHARE = 0.25
"""Of a seat's capacity, what leases may hold that are kept because somebody asked."""


class LeasePrices(Ranking):
    """``floor``: phi, so that a lease below phi/C per token is revocable."""

    def __init__(self, learned: LearnedPool, *, span: float, sunk: float, floor: float) -> None:
        super().__init__(learned, span=span, sunk=sunk)
        self.floor = floor
        self.seats: dict[int, Seat] = {}
        self._timers: list[tuple[float, int, int]] = []

    def index(self, program: Program, now: float) -> float:
        """I, per token: what its lease is worth, when its tool has run for so long."""
        elapsed = max(0.0, now - program.idle_since) if program.idle_since is not None else 0.0
        return self.learned.lease_index(program.waits_for, elapsed, program.context)

    def price(self, program: Program, now: float) -> None:
        """Whether an idle lease is below the floor now, and when that is to be asked again."""
        self._standing_over(program)
        if program.state is not ProgramState.LEASED or not program.is_idle or program.seat is None:
            return
        assert program.idle_since is not None
        seat = self.seats[program.seat]
        elapsed = max(0.0, now - program.idle_since)
        if program.keep_until > now and seat.advised + program.lease_charge <= KEPT_SHARE * seat.capacity:
            program.advised = True
            seat.advised += program.lease_charge
            heapq.heappush(self._timers, (program.keep_until, program.number, program.standing))
            return
        standing = self.learned.lease_standing(program.waits_for, elapsed, program.context, self.floor / seat.size)
        if not standing.worth_keeping:
            program.revocable = True
            seat.revocable += program.lease_charge
        until = program.idle_since + standing.until
        if until != float("inf"):
            heapq.heappush(self._timers, (max(until, now), program.number, program.standing))

    def _standing_over(self, program: Program) -> None:
        program.standing += 1
        if program.revocable and program.seat is not None:
            self.seats[program.seat].revocable -= program.lease_charge
        if program.advised and program.seat is not None:
            self.seats[program.seat].advised -= program.lease_charge
        program.revocable = program.advised = False

    def _count_kept(self, program: Program, counts: bool) -> None:
        """``counts``: its final context is promised."""
        at = program.seat if counts and program.state is ProgramState.LEASED and program.is_idle else None
        if at != program.kept_at:
            if program.kept_at is not None:
                self.seats[program.kept_at].kept -= 1
            if at is not None:
                self.seats[at].kept += 1
            program.kept_at = at
