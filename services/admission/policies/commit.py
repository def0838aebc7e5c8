"""Policy ``commit``, the default: lease, hold, commit.

A program is charged the context that it is predicted to end with from its first admission on, so that those that were
let in can run to their end with their KV kept. Who is let in first goes by arrival and predicted remaining work. KV of
idle programs is leased, and given up where it is needed and least worth.

Several seats, which the study left open: commitments are per seat; a program without a lease may go anywhere, and goes
where it costs least of those seats that accept it; one that waits without a lease counts where it was last. A turn
without a session is forwarded at once, and its load counts.

Source: spec policy §4; scheduling §5.2 for what it does not change (bands, order, progress, hard cap).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Literal

import msgspec

from services.admission.cost import CostWeights, predicted_cached_tokens
from services.admission.estimators.learned_pool import LearnedPool
from services.admission.placement import EQUAL
from services.admission.policies.kv import placement_costs
from services.admission.scheduling.book import Book
from services.admission.scheduling.interface import (
    Action,
    Actions,
    Admission,
    Base,
    Fleet,
    LeaseChange,
    ProgramFacts,
    Refusal,
    TurnFacts,
    TurnUsage,
    WorkerFacts,
)
from services.admission.scheduling.programs import HeldTurn, Program, ProgramState
from services.admission.scheduling.seat import Seat

TRIED = 32
"""Waiting programs that are looked at beyond those that an event lets in."""

EXPIRED_AT_ONCE = 256


class CommitParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``span_s``: S; 0 is the conservative profile, first come, first served. ``lo``, ``hi``: bands, shares of the
    capacity. ``floor``: phi. ``bypass_s``: so long a blocked new program may be overtaken. ``hold_limit_s``: H.
    ``output_tokens``: what a turn is charged for its answer (``None``: as learned, nine of ten are no longer).

    Raises `ValueError`.
    """

    span_s: float = 80.0
    lo: float = 0.85
    hi: float = 0.95
    floor: float = 1.0
    bypass_s: float = 10.0
    hold_limit_s: float = 300.0
    idle_expiry_s: float = 600.0
    output_tokens: int | None = None
    max_programs: int = 100_000
    weights: CostWeights = CostWeights()

    def __post_init__(self) -> None:
        if not 0 < self.lo <= self.hi <= 1:
            raise ValueError("commit: 0 < lo <= hi <= 1")
        for name in ("span_s", "floor", "bypass_s", "hold_limit_s", "idle_expiry_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"commit: {name} must not be negative")


class Commit(Base):
    """Feeds ``learned``, and decides by it."""

    tick_s = 1.0

    def __init__(self, parameters: CommitParameters, learned: LearnedPool) -> None:
        self.parameters = parameters
        self.learned = learned
        self.book = Book(learned, span=parameters.span_s, floor=parameters.floor, max_programs=parameters.max_programs)
        self._deadlines: list[tuple[float, int, int]] = []
        self._count = 0
        self._actions: list[Action] = []

    # What happens

    def begin(self, fleet: Fleet) -> None:
        super().begin(fleet)
        for number, facts in enumerate(fleet.workers):
            self.book.open_seat(number, facts, 0.0)

    def worker_changed(self, now: float, seat: int, facts: WorkerFacts | None) -> Actions:
        self.book.advance(now)
        if facts is not None:
            self.book.open_seat(seat, facts, now)
            self._shed(now, self.book.seats[seat])
        else:
            lost, ran = self.book.close_seat(seat)
            for program in lost:
                self._actions.append(LeaseChange(program.facts.name, seat, "revoked"))
            for program in ran:
                if program.is_idle and (program.is_final or program.facts.single):
                    self._close(program, now)
        for number, program in list(self.book.turns.items()):
            turn = program.waiting.get(number)
            if turn is not None and self._refused(turn.facts):
                self.book.over(number)
                self._turn_over(program, False, None, now, kept=False)
        return self._answer(now)

    def program_arrives(self, now: float, program: ProgramFacts) -> None:
        self._known(now, program)

    def turn_ready(self, now: float, turn: TurnFacts) -> Actions:
        if turn.turn in self.book.turns:
            return ()
        if self._refused(turn):
            known = self.book.programs.get(turn.program)
            if known is not None and known.facts.single and known.is_idle:
                self._close(known, now)
            return self._taken()
        self.book.advance(now)
        program = self._known(now, ProgramFacts(turn.program, "", None))
        capacity = max(seat.capacity for seat in self.book.seats.values())
        held = self.book.wait(program, turn, now, self._charge(program, turn, capacity))
        if program.facts.single and program.first_waiting is held:
            seats = list(self.book.seats.values())
            at_home = [seat for seat in seats if program.running and seat.number == program.seat]
            self._admit(program, held, self._cheapest(held, at_home or seats))
        elif turn.index or program.turns or held.charge > self.parameters.lo * capacity:
            self._count += 1
            heapq.heappush(self._deadlines, (now + self.parameters.hold_limit_s, self._count, turn.turn))
        return self._answer(now)

    def turn_runs(self, now: float, turn: TurnFacts, seat: int) -> Actions:
        """A program runs on one seat at a time: a turn that runs elsewhere meanwhile is taken for one without a
        session."""
        there = self.book.seats.get(seat)
        if there is None or turn.turn in self.book.turns:
            return ()
        self.book.advance(now)
        program = self._known(now, ProgramFacts(turn.program, "", None))
        if program.running and program.seat != seat:
            program = self._known(now, ProgramFacts(f"{turn.program}#{turn.turn}", "", None, single=True))
        held = self.book.wait(program, turn, now, self._charge(program, turn, there.capacity))
        self._run(program, held, there)
        return self._answer(now)

    def first_token(self, now: float, turn: int) -> Actions:
        self.book.first_token(turn)
        return ()

    def turn_finished(self, now: float, usage: TurnUsage) -> Actions:
        self.book.advance(now)
        known = self.book.over(usage.turn)
        if known is None:
            return self._answer(now)
        program, turn, ran = known
        program.is_final = program.is_final or usage.final
        if ran:
            self.book.used(program, turn, usage)
            self.book.programs.touch(program, now)
            program.children.update(usage.spawned)
        self._turn_over(program, ran, usage.tool, now, kept=ran)
        return self._answer(now)

    def turn_aborted(self, now: float, turn: int) -> Actions:
        self.book.advance(now)
        known = self.book.over(turn)
        if known is not None:
            program, _, ran = known
            self._turn_over(program, ran, None, now, kept=False)
        return self._answer(now)

    def program_closed(self, now: float, program: str) -> Actions:
        self.book.advance(now)
        known = self.book.programs.get(program)
        if known is not None:
            known.is_final = True
            if known.is_idle:
                self._close(known, now)
        return self._answer(now)

    def tick(self, now: float) -> Actions:
        self.book.advance(now)
        self._expire(now)
        for seat in self.book.seats.values():
            if seat.steering.step(now, bool(self.book.new)):
                self.book.made_room(seat)
        return self._answer(now)

    # Programs

    def _known(self, now: float, facts: ProgramFacts) -> Program:
        programs = self.book.programs
        if programs.get(facts.name) is None and programs.is_full:
            oldest = programs.longest_untouched()
            if oldest is not None and oldest.is_idle:
                self._close(oldest, now, "expired")
        return self.book.program(facts, now)

    def _turn_over(self, program: Program, ran: bool, tool: str | None, now: float, *, kept: bool) -> None:
        """A turn of the program is over. ``kept``: its KV may be kept for the next one."""
        if program.is_idle and (program.is_final or program.facts.single):
            self._close(program, now)
        elif not ran:
            self.book.cancelled(program, now)
        elif program.running:
            self.book.settle(program)
        elif kept and program.seat is not None:
            self._lease(program, tool, now)
        else:
            self.book.rest(program)

    def _close(self, program: Program, now: float, state: Literal["released", "expired"] = "released") -> None:
        if program.state is ProgramState.LEASED and program.seat is not None:
            self._actions.append(LeaseChange(program.facts.name, program.seat, state))
        self.book.close(program, now, finished=state == "released" and program.turns > 0)

    def _expire(self, now: float) -> None:
        for _ in range(EXPIRED_AT_ONCE):
            program = self.book.programs.longest_untouched()
            if program is None or now - program.touched < self.parameters.idle_expiry_s:
                return
            if program.is_idle and not program.children:
                self._close(program, now, "expired")
            else:
                self.book.programs.touch(program, now)

    def _charge(self, program: Program, turn: TurnFacts, capacity: int) -> int:
        """Tokens that the turn takes of its seat: its prompt, and room for its answer."""
        output = self.parameters.output_tokens
        if output is None:
            output = round(self.learned.output_p90(program.key))
        if turn.max_output_tokens is not None:
            output = min(output, turn.max_output_tokens)
        return min(turn.prompt_tokens + output, capacity)

    def _refused(self, turn: TurnFacts) -> bool:
        """Whether no seat can ever hold it; says so."""
        if not self.book.seats:
            self._actions.append(Refusal(turn.turn, "no_seat"))
            return True
        if all(turn.prompt_tokens >= seat.capacity for seat in self.book.seats.values()):
            self._actions.append(Refusal(turn.turn, "oversize"))
            return True
        return False

    # Leases

    def _lease(self, program: Program, tool: str | None, now: float) -> None:
        self.book.lease(program, tool, now)
        assert program.seat is not None
        seat = self.book.seats[program.seat]
        final = self.book.final_context(program, seat.capacity)
        numbers = {"tokens": float(program.lease_charge), "final_tokens": float(final)}
        self._actions.append(LeaseChange(program.facts.name, seat.number, "leased", numbers))
        self._shed(now, seat)

    def _shed(self, now: float, seat: Seat) -> None:
        """Gives leases up, the least worth first, where there is more than the band allows; never the oldest's."""
        if seat.load <= self.parameters.hi * seat.capacity:
            return
        idle = [program for program in seat.leases.values() if program.is_idle]
        oldest = min((program.arrival, program.number) for program in idle)[1] if idle else -1
        chosen = [program for program in idle if program.number != oldest]
        self._revoke(now, seat, chosen, self.parameters.lo * seat.capacity)

    def _revoke(self, now: float, seat: Seat, programs: Iterable[Program], room: float) -> None:
        """Leases by ascending index until the seat's load is no more than ``room``."""
        by_index = sorted((self.book.index(program, now), program.number, program) for program in programs)
        for index, _, program in by_index:
            if seat.load <= room:
                return
            numbers = {"tokens": float(program.lease_charge), "index": index}
            self.book.lose_lease(program)
            self._actions.append(LeaseChange(program.facts.name, seat.number, "revoked", numbers))

    # Decisions

    def _answer(self, now: float) -> Actions:
        """Lets in whom it may, in order, and says all that happened."""
        self.book.rekey()
        revoked: set[int] = set()
        before = -1
        while self.book.seats and len(self._actions) != before:  # who went in may have left room to others
            before = len(self._actions)
            for seat in self.book.seats.values():
                if seat.warm:
                    self._warm(now, seat, revoked)
            if self.book.cold or self.book.new:
                self._commit_tested(now, revoked)
            self._progress(now)
            self._force(now)
        return self._taken()

    def _taken(self) -> Actions:
        actions, self._actions = self._actions, []
        return actions

    def _warm(self, now: float, seat: Seat, revoked: set[int]) -> None:
        """Turns of programs that have their KV here: they only have to fit. The first that does not may take leases."""
        limit = self.parameters.hi * seat.capacity
        for _, number in list(islice(seat.warm, TRIED)):
            program = self.book.programs.numbered(number)
            while program is not None and program.waiting:
                turn = program.first_waiting
                if turn.tested >= seat.changed and seat.number in revoked:
                    break
                needed = self._needed(program, turn)
                if seat.load + needed > limit and seat.number not in revoked:
                    revoked.add(seat.number)
                    self._revoke_others(now, seat, program, limit - needed)
                if seat.load + needed > limit:
                    turn.tested = self.book.changes
                    break
                self._admit(program, turn, seat)

    @staticmethod
    def _needed(program: Program, turn: HeldTurn) -> int:
        """Tokens by which a seat's load grows with the turn of a program that has its KV there."""
        if program.running:
            return max(0, turn.charge - min(program.context, turn.facts.prompt_tokens))
        return turn.charge - program.lease_charge

    def _revoke_others(self, now: float, seat: Seat, program: Program, room: float) -> None:
        """Idle leases, where giving up all of them but the program's own would do."""
        others = [other for other in seat.leases.values() if other is not program and other.is_idle]
        if seat.load - sum(other.lease_charge for other in others) <= room:
            self._revoke(now, seat, others, room)

    def _held(self) -> Iterator[Program]:
        """Programs without a lease that wait, by D."""
        cold = ((rank, number) for rank, number in self.book.cold)
        programs = (self.book.programs.numbered(number) for _, number in cold)
        known = (program for program in programs if program is not None)
        return heapq.merge(known, self.book.new_in_order(), key=lambda program: (program.rank, program.number))

    def _commit_tested(self, now: float, revoked: set[int]) -> None:
        """Programs without a lease, by D: whom a seat accepts, goes. A new one that is blocked for too long stops those
        behind it."""
        again = True
        while again:  # from the beginning, for who went in changed the queue
            again, is_first_new = False, True
            for program in islice(self._held(), TRIED):
                if self._try(now, program, revoked):
                    again = True
                    break
                if program.state is ProgramState.NEW and is_first_new:
                    is_first_new = False
                    if now - program.first_waiting.ready > self.parameters.bypass_s:
                        return

    def _try(self, now: float, program: Program, revoked: set[int]) -> bool:
        """``revoked``: seats where somebody before was accepted, but did not fit: leases go to the first only."""
        turn = program.first_waiting
        if turn.tested == self.book.changes:
            return False
        fitting, others = [], []
        for seat in self.book.seats.values():
            if seat.changed <= turn.tested or not self._accepts(seat, program, turn):
                continue
            missing = seat.load + turn.charge - self.parameters.lo * seat.capacity
            if missing <= 0:
                fitting.append(seat)
            elif seat.number not in revoked:
                revoked.add(seat.number)
                if missing <= seat.revocable:
                    others.append(seat)
        if not fitting and not others:
            turn.tested = self.book.changes
            return False
        seat = self._cheapest(turn, fitting or others)
        if not fitting:
            below = [other for other in seat.leases.values() if other.revocable]
            self._revoke(now, seat, below, self.parameters.lo * seat.capacity - turn.charge)
        self._admit(program, turn, seat)
        return True

    def _accepts(self, seat: Seat, program: Program, turn: HeldTurn) -> bool:
        """COMMIT: what is promised to those that outrank the program leaves room for its final context."""
        if not seat.running:
            return True
        if self.parameters.span_s:
            promised = seat.committed.through(program.rank)
        elif program.state is ProgramState.COLD:
            return True
        else:
            promised = seat.committed.total
        if program.committed is not None and program.committed[0] == seat.number:
            promised -= program.committed[2]
        final = self.book.final_context(program, seat.capacity, turn.charge)
        return promised + final <= seat.steering.value * seat.capacity

    def _progress(self, now: float) -> None:
        """Nothing runs on a seat, and somebody waits: the first goes there whatever its size."""
        for seat in self.book.seats.values():
            if seat.running:
                continue
            program = None
            if seat.warm:
                program = self.book.programs.numbered(seat.warm.at(0)[1])
            elif self.book.cold or self.book.new:
                program = next((each for each in self._held() if each.first_waiting.charge <= seat.capacity), None)
            if program is not None:
                self._make_room(now, seat, program)
                self._admit(program, program.first_waiting, seat)

    def _force(self, now: float) -> None:
        """The safety net: who returned and waited for H goes, one at a time on each seat."""
        blocked: list[tuple[float, int, int]] = []
        while self._deadlines and self._deadlines[0][0] <= now and len(blocked) < TRIED:
            deadline = heapq.heappop(self._deadlines)
            program = self.book.turns.get(deadline[2])
            turn = program.waiting.get(deadline[2]) if program is not None else None
            if program is None or turn is None:
                continue
            seats = [seat for seat in self.book.seats.values() if not seat.forced and turn.charge <= seat.capacity]
            if program.state in (ProgramState.RUNNING, ProgramState.LEASED):
                seats = [seat for seat in seats if seat.number == program.seat]
            if not seats:
                blocked.append(deadline)
                continue
            seat = min(seats, key=lambda each: (each.number != program.seat, each.load / each.capacity))
            self._make_room(now, seat, program)
            self._admit(program, turn, seat, forced=True)
        for deadline in blocked:
            heapq.heappush(self._deadlines, deadline)

    def _make_room(self, now: float, seat: Seat, program: Program) -> None:
        """The engine will evict somebody's KV: the leases that are worth least."""
        others = [other for other in seat.leases.values() if other is not program and other.is_idle]
        needed = program.first_waiting.charge
        if program.seat == seat.number:
            needed = self._needed(program, program.first_waiting)
        self._revoke(now, seat, others, seat.capacity - needed)

    # Placement

    def _cheapest(self, turn: HeldTurn, seats: list[Seat]) -> Seat:
        """Of ``seats``, where the turn costs least; of equal ones, where least is promised."""
        if len(seats) == 1:
            return seats[0]
        reach = self._reach(turn, seats)
        costs = placement_costs(
            self.parameters.weights,
            turn.facts.prompt_tokens,
            {seat.number: seat.facts for seat in seats},
            {seat.number: seat.placement_load for seat in seats},
            reach,
        )
        best = min(costs.values()) + EQUAL
        tied = [seat for seat in seats if costs[seat.number] <= best]
        return min(tied, key=lambda seat: (seat.committed.total / seat.capacity, seat.number))

    def _reach(self, turn: HeldTurn, seats: list[Seat]) -> dict[int, int]:
        """Blocks of its prompt on each seat: as the index says, else by stack distance."""
        blocks = self.fleet.residency(turn.facts.turn)
        if blocks is not None:
            return {seat.number: blocks[seat.number] if seat.number < len(blocks) else 0 for seat in seats}
        program = self.book.turns[turn.facts.turn]
        tokens = min(program.context, turn.facts.prompt_tokens)
        return {
            seat.number: tokens // seat.facts.block_size if seat.still_holds(program, tokens) else 0 for seat in seats
        }

    def _admit(self, program: Program, turn: HeldTurn, seat: Seat, *, forced: bool = False) -> None:
        self._run(program, turn, seat, forced=forced)
        self._actions.append(Admission(turn.facts.turn, seat.number, round(program.rank)))

    def _run(self, program: Program, turn: HeldTurn, seat: Seat, *, forced: bool = False) -> None:
        before = program.seat
        cached = self._reach(turn, [seat])[seat.number]
        cached = predicted_cached_tokens(cached, turn.facts.prompt_tokens, seat.facts.block_size)
        if program.state is ProgramState.LEASED and before is not None:
            self._actions.append(LeaseChange(program.facts.name, before, "released"))
        self.book.admit(program, turn, seat, cached=cached, forced=forced)
