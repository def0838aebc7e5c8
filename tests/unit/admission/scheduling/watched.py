"""`Commit`, with what must hold at the moment of a decision checked at that moment (see `invariants` for the rest)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from services.admission.policies.commit import Commit
from services.admission.scheduling.interface import LeaseChange
from services.admission.scheduling.programs import HeldTurn, Program, ProgramState
from services.admission.scheduling.refusals import Candidate
from services.admission.scheduling.seat import Seat
from tests.unit.admission.scheduling import naive


class Watched(Commit):
    """``seen``: how often what is checked came up, so that a check that never is can be told."""

    now = 0.0
    seen: Counter[str]

    def _admit(self, program: Program, turn: HeldTurn, seat: Seat, *, forced: bool = False) -> None:
        is_cold = program.state in (ProgramState.NEW, ProgramState.COLD)
        is_free = forced or program.facts.single or naive.must_progress(self, seat, self.book.now)
        if is_cold and not is_free:
            self.is_within_the_commitment(program, turn, seat)
            self.overtakes_nobody_who_waits_for_long(program)
        if forced:
            self.is_forced_in_time(turn)
        super()._admit(program, turn, seat, forced=forced)
        if not is_free:
            self.is_within_the_band(seat, self.parameters.lo if is_cold else self.parameters.hi)
        assert seat.forced <= 1, "14: two forced turns on one seat"

    def is_within_the_commitment(self, program: Program, turn: HeldTurn, seat: Seat) -> None:
        """(i)"""
        self.seen["admitted by commitment"] += 1
        assert naive.accepts(self, seat, program, turn, self.book.now), "(i): promised beyond kappa*C"

    def is_within_the_band(self, seat: Seat, band: float) -> None:
        """1"""
        self.seen["admitted within a band"] += 1
        assert naive.load(self, seat) <= band * seat.capacity, "1: beyond the band"

    def is_forced_in_time(self, turn: HeldTurn) -> None:
        """3, 14"""
        self.seen["forced"] += 1
        assert self.now - turn.ready >= self.parameters.hold_limit_s, "3: forced too early"

    def overtakes_nobody_who_waits_for_long(self, program: Program) -> None:
        """4, (ii): the first new program in D, once it has waited for `bypass_s`, is overtaken by nobody behind it."""
        waiting = [each for each in self.book.programs if each.state is ProgramState.NEW and each.waiting]
        head = min(waiting, key=lambda each: (naive.rank(self, each), each.number), default=program)
        if naive.rank(self, head) >= naive.rank(self, program):
            return
        self.seen["overtaking"] += 1
        waited = self.now - head.first_waiting.ready
        assert waited <= self.parameters.bypass_s, "4, (ii): overtakes a new program that waits for too long"

    def _try(self, now: float, candidate: Candidate, revoked: set[int]) -> bool:
        """7, as amended: whoever has no lease takes only those below the floor."""
        start = len(self._actions)
        went = super()._try(now, candidate, revoked)
        for action in self._actions[start:]:
            if isinstance(action, LeaseChange) and action.state == "revoked":
                self.seen["revoked below the floor"] += 1
                floor = self.parameters.floor / self.book.seats[action.seat].size
                assert action.numbers["index"] < floor, "7: a lease above the floor was taken"
        return went

    def _revoke(self, now: float, seat: Seat, programs: Iterable[Program], room: float) -> None:
        """7, 9: those that are worth least, no more of them than needed, and only of the idle."""
        programs = list(programs)
        assert all(program.is_idle for program in programs), "9: only the idle lose leases"
        assert not any(program.advised for program in programs), "6: somebody asked to keep it"
        worth = {program.facts.name: naive.index(self, program, now) for program in programs}
        charges = {program.facts.name: program.lease_charge for program in programs}
        start = len(self._actions)
        super()._revoke(now, seat, programs, room)
        gone = [action.program for action in self._actions[start:] if isinstance(action, LeaseChange)]
        if not gone:
            return
        self.seen["revoked"] += len(gone)
        kept = [value for name, value in worth.items() if name not in gone]
        assert max(worth[name] for name in gone) <= min(kept, default=float("inf")), "7: not the least worth"
        assert seat.load + charges[gone[-1]] > room, "7: more than needed"

    def _crowded(self, seat: Seat, now: float) -> None:
        """1, 9: down to the lower band, but the oldest keeps its lease, and those that somebody asked to keep."""
        idle = self._takable(seat)
        super()._crowded(seat, now)
        if seat.load <= self.parameters.hi * seat.capacity or not idle:
            return
        self.seen["shed to the oldest"] += 1
        oldest = min(idle, key=lambda program: (program.arrival, program.number))
        assert self._takable(seat) == [oldest], "1: beyond the band, and leases are left that could go"
