"""The book of a policy that commits memory: programs, seats, what is charged, leased, committed, and who waits where.

Whatever changes a program ends with `Book.settle`, which puts it where it belongs: in the commitments of its seat, and
in the queue of its kind. So that every sum stands for exactly the programs that it says, whatever happened.

Source: spec policy §4 (state, D, Pk, blocked, revocable), scheduling §5.2 (charges).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from math import isfinite
from operator import attrgetter

from services.admission.estimators.class_key import ClassKey
from services.admission.estimators.learned_pool import LearnedPool
from services.admission.scheduling.interface import ProgramFacts, TurnFacts, TurnUsage, WorkerFacts
from services.admission.scheduling.lease_prices import LeasePrices
from services.admission.scheduling.ordered import Key, OrderedKeys
from services.admission.scheduling.programs import (
    SUB_AGENTS,
    HeldTurn,
    Program,
    ProgramEvent,
    ProgramState,
    ProgramTable,
)
from services.admission.scheduling.seat import Seat
from services.admission.scheduling.steering import STEERING, Steering, SteeringParameters

RENEWED_AT_ONCE = 32
"""Programs that are looked at per event after the estimates changed, and leases per event whose time has come; of so
many, ranks are never older than the estimates."""

RENEWED_OF_MANY = 4
"""Of more programs, whose rank is made anew per event: their own turns do that about as often."""


class Book(LeasePrices):
    """``floor``: phi, so that a lease below phi/C per token is revocable. ``span``, ``sunk``: see `Ranking`.
    ``steering``: of every seat's kappa."""

    def __init__(
        self,
        learned: LearnedPool,
        *,
        span: float,
        floor: float,
        max_programs: int,
        sunk: float = 0.0,
        steering: SteeringParameters = STEERING,
    ) -> None:
        super().__init__(learned, span=span, sunk=sunk, floor=floor)
        self.steering = steering
        self.now = 0.0
        self.programs = ProgramTable(max_programs)
        self.turns: dict[int, Program] = {}
        self.cold = OrderedKeys()
        """Programs that ran before and wait without a lease, by D."""
        self.new: dict[ClassKey, OrderedKeys] = {}
        """Programs of which nothing ran to its end and that wait, by class and arrival: D differs by as much."""
        self.changes = 0
        """Counts what may have made room; see `Seat.changed`."""
        self.requeued = 0  # counts what may have changed the lines of programs without a lease
        self.largest = self.smallest = 0
        """Sizes of the largest and of the smallest seat, in tokens."""
        self.largest_block = 0  # of all seats, in tokens
        self.queued = 0  # programs that wait
        self._recent: OrderedDict[int, Seat] = OrderedDict()  # those last that may have gained room last
        self._idle: dict[int, Seat] = {}
        self._warm: set[int] = set()  # numbers of seats where somebody may wait who has its KV there
        self._opened = 0
        self._placed: OrderedDict[int, Program] = OrderedDict()

    # Who waits

    def in_order(self) -> Iterator[Program]:
        """Programs without a lease that wait, by D; predictions of new ones are renewed where they are looked at. Do
        not change the queues meanwhile."""
        lines = [iter(self.cold)] if len(self.cold) else []
        lines += [self._ranked(line, self.span * self.outlooks.of(key).first_work) for key, line in self.new.items()]
        revision = self.learned.revision
        for _, number in lines[0] if len(lines) == 1 else heapq.merge(*lines):
            program = self.programs.numbered(number)
            if program is None:
                continue
            if program.state is ProgramState.NEW and program.revision != revision:
                self.predict(program)
                program.first_waiting.tested = -1
            yield program

    @staticmethod
    def _ranked(line: OrderedKeys, offset: float) -> Iterator[Key]:
        return ((arrival + offset, number) for arrival, number in line)

    # Where a program belongs

    def settle(self, program: Program) -> None:
        """Predicts anew, and puts the program where it belongs."""
        before = program.rank, program.left_tokens, program.queued
        self.predict(program)
        self._commit(program)
        self._queue(program)
        if before != (program.rank, program.left_tokens, program.queued):
            self.requeued += self._is_in_line(before[2]) or self._is_in_line(program.queued)
            for turn in program.waiting.values():
                turn.tested = -1
        self._place(program)

    def _is_in_line(self, queued: tuple[OrderedKeys, Key] | None) -> bool:
        """Whether that is a place in a line of programs without a lease."""
        return queued is not None and not queued[0].is_of_seat

    def _priced(self, program: Program, was_revocable: bool) -> None:
        """`settle` of an idle lease that was priced."""
        if program.revision != self.learned.revision:
            self.settle(program)
        elif was_revocable != program.revocable:
            self._commit(program)
            self._place(program)
        elif program.number in self._placed:
            self._placed.move_to_end(program.number)

    def _place(self, program: Program) -> None:
        if program.committed is not None or (program.queued is not None and program.state is not ProgramState.NEW):
            self._placed[program.number] = program
            self._placed.move_to_end(program.number)
        else:
            self._placed.pop(program.number, None)

    def _commit(self, program: Program) -> None:
        wanted = None
        if program.seat is not None and self._counts(program):
            seat = self.seats[program.seat]
            wanted = (seat.number, (self.claim(program), program.number), self.final_context(program, seat))
        self._count_kept(program, wanted is not None)
        if wanted == program.committed:
            return
        if program.committed is not None:
            number, key, _ = program.committed
            self.seats[number].committed.remove(key)
            self.made_room(self.seats[number])
        if wanted is not None:
            self.seats[wanted[0]].committed.add(wanted[1], wanted[2])
        program.committed = wanted

    def _counts(self, program: Program) -> bool:
        """Whether its final context is promised: it runs, waits in mid-session, or is leased and to return soon."""
        if program.state is ProgramState.RUNNING:
            return True
        if program.state is ProgramState.LEASED:
            return bool(program.waiting) or not (program.children or program.revocable)
        return program.state is ProgramState.COLD and bool(program.waiting)

    def _queue(self, program: Program) -> None:
        wanted: tuple[OrderedKeys, Key] | None = None
        if program.waiting:
            if program.state in (ProgramState.RUNNING, ProgramState.LEASED) and program.seat is not None:
                wanted = (self.seats[program.seat].warm, (program.rank, program.number))
                self._warm.add(program.seat)
            elif program.state is ProgramState.NEW:
                wanted = (self.new.setdefault(program.key, OrderedKeys()), (program.due, program.number))
            else:
                wanted = (self.cold, (program.rank, program.number))
        before = program.queued
        if before != wanted:
            if before is not None:
                before[0].remove(before[1])
                self.queued -= 1
            if wanted is not None:
                wanted[0].add(wanted[1])
                self.queued += 1
            program.queued = wanted
        line = self.new.get(program.key)
        if line is not None and not line:
            del self.new[program.key]

    def rekey(self) -> None:
        """After the estimates changed: makes ranks anew, the stalest first, a bounded number per event."""
        revision = self.learned.revision
        left = RENEWED_OF_MANY if len(self._placed) > RENEWED_AT_ONCE else RENEWED_AT_ONCE
        for number, program in list(islice(self._placed.items(), RENEWED_AT_ONCE)):
            if program.revision == revision or not left:
                return
            if program.outlook is self.outlooks.of(program.key):  # of its class nothing is known anew
                program.revision = revision
                self._placed.move_to_end(number)
            else:
                self.settle(program)
                left -= 1

    def made_room(self, seat: Seat) -> None:
        """Something that was refused here may fit now."""
        self.changes += 1
        seat.changed = self.changes
        self._recent.move_to_end(seat.number)

    # Seats

    def changed_since(self, changes: int) -> list[Seat]:
        """Seats that may have gained room since then, on the count of `changes`."""
        found = []
        for seat in reversed(self._recent.values()):
            if seat.changed <= changes:
                break
            found.append(seat)
        return found

    def warm_seats(self) -> list[Seat]:
        """Seats where somebody waits who has its KV there."""
        seats = [self.seats[number] for number in self._warm if number in self.seats]
        found = [seat for seat in seats if seat.warm]
        self._warm = {seat.number for seat in found}
        return sorted(found, key=attrgetter("opened"))

    def idle_seats(self) -> list[Seat]:
        """Seats where nothing runs."""
        return sorted(self._idle.values(), key=attrgetter("opened")) if self._idle else []

    def _resized(self) -> None:
        sizes = [seat.size for seat in self.seats.values()]
        self.largest, self.smallest = max(sizes, default=0), min(sizes, default=0)
        self.largest_block = max((seat.facts.block_size for seat in self.seats.values()), default=0)

    def open_seat(self, number: int, facts: WorkerFacts, now: float) -> None:
        """A seat appeared, or has other sizes."""
        seat = self.seats.get(number)
        if seat is None:
            self._opened += 1
            seat = Seat(number, facts, Steering(facts.host_tokens > 0, self.steering), self._opened)
            self.seats[number] = self._recent[number] = self._idle[number] = seat
        elif seat.facts == facts:
            return
        else:
            before = seat.facts
            seat.resize(facts)
            seat.steering.host_tier = facts.host_tokens > 0
            if before == replace(facts, foreign_tokens=before.foreign_tokens):  # no price depends on it
                self.made_room(seat)
                return
        self._resized()
        for program in list(seat.programs.values()):
            self.price(program, now)
            self.settle(program)
        self.made_room(seat)

    def close_seat(self, number: int) -> tuple[list[Program], list[Program]]:
        """The seat is gone, and all that ran or was kept there. Returns the programs that lost a lease, and those that
        lost turns."""
        seat = self.seats.get(number)
        if seat is None:
            return [], []
        lost = list(seat.leases.values())
        ran = [program for program in seat.programs.values() if program.running]
        for program in list(seat.programs.values()):
            for turn in program.running:
                del self.turns[turn]
            program.running.clear()
            if program.state is ProgramState.RUNNING:
                program.move(ProgramEvent.ABORTED if program.turns else ProgramEvent.ABORTED_FIRST)
            elif program.state is ProgramState.LEASED:
                program.move(ProgramEvent.LEASE_LOST)
            self._standing_over(program)
            program.seat, program.lease_charge, program.shared = None, 0, 0
            self.settle(program)
        del self.seats[number], self._recent[number]
        self._idle.pop(number, None)
        self._resized()
        return lost, ran

    # Programs and turns

    def program(self, facts: ProgramFacts, now: float) -> Program:
        """The program of that name, opened where it is not known."""
        known = self.programs.get(facts.name)
        if known is not None:
            return known
        program = self.programs.open(facts, now)
        program.growth = self.learned.growth(program.key)
        parent = self.programs.get(facts.parent) if facts.parent is not None else None
        if parent is not None and parent.is_idle and parent.state is ProgramState.LEASED:
            parent.tool = SUB_AGENTS
            self.price(parent, now)
            self.settle(parent)
        return program

    def wait(self, program: Program, facts: TurnFacts, now: float, charge: int) -> HeldTurn:
        """A turn of the program waits from now on."""
        if program.is_idle and program.idle_since is not None and not program.returned:
            self.learned.tool_returned(program.waits_for, max(0.0, now - facts.held_s - program.idle_since))
            program.returned = True
        if isfinite(facts.order_bias_s):
            program.order_bias = facts.order_bias_s
        turn = program.waiting[facts.turn] = HeldTurn(facts, now, charge)
        self.turns[facts.turn] = program
        self._standing_over(program)
        self.programs.touch(program, now)
        self.settle(program)
        return turn

    def tool_ended(self, program: Program, tool: str, seconds: float) -> None:
        """A call took so long. Of the call that the program waits for, its return tells nothing new then."""
        self.learned.tool_returned(tool, seconds)
        program.returned = program.returned or (program.is_idle and program.tool == tool)

    def cancelled(self, program: Program, now: float) -> None:
        """A turn that waited does not any more: the program is where it was before."""
        self.price(program, now)
        self.settle(program)

    def rewritten(self, program: Program, prompt_tokens: int, now: float) -> None:
        """What an idle program comes back with is not what it left: its harness made its context anew, and smaller.
        What it held of the old one is worth nothing."""
        program.context = prompt_tokens
        program.shared = min(program.shared, prompt_tokens)
        if program.state is ProgramState.LEASED and program.seat is not None:
            seat = self.seats[program.seat]
            self._standing_over(program)
            seat.load -= program.lease_charge
            program.lease_charge = max(0, prompt_tokens + round(program.growth) - program.shared)
            seat.load += program.lease_charge
            self.price(program, now)
            self.made_room(seat)
        self.settle(program)

    def admit(
        self, program: Program, turn: HeldTurn, seat: Seat, *, cached: int, shared: int = 0, forced: bool = False
    ) -> bool:
        """The turn runs there from now on. ``shared``: tokens of its prompt that others are charged for there. Returns
        whether the program gave a lease back for it."""
        leased = program.state is ProgramState.LEASED
        turn.warm = leased or bool(program.running)
        if leased:
            self._end_lease(program)
        if program.running:  # what they have in common is charged once
            turn.charge = max(0, turn.charge - min(program.context, turn.facts.prompt_tokens))
        else:
            program.shared = min(shared, turn.charge)
            turn.charge -= program.shared
        turn.prefill = max(0, turn.facts.prompt_tokens - cached)
        turn.forced = forced
        del program.waiting[turn.facts.turn]
        program.running[turn.facts.turn] = turn
        self._move_to(program, seat)
        program.move(ProgramEvent.ADMITTED)
        program.idle_since = None
        self._idle.pop(seat.number, None)
        seat.load += turn.charge
        seat.running += 1
        seat.forced += forced
        seat.prefill += turn.prefill
        seat.running_tokens += turn.facts.prompt_tokens
        if program.turns == 0:
            self.learned.program_started(program.facts.name, program.key, from_start=turn.facts.index == 0)
        self.learned.program_returned(program.facts.name)
        self.settle(program)
        return leased

    def first_token(self, number: int) -> None:
        """What the turn had to compute is computed."""
        program = self.turns.get(number)
        turn = program.running.get(number) if program is not None else None
        if program is not None and program.seat is not None and turn is not None:
            self.seats[program.seat].prefill -= turn.prefill
            turn.prefill = 0

    def over(self, number: int) -> tuple[Program, HeldTurn, bool] | None:
        """A turn is over, and all that it had booked is given back; whether it ran. ``None``: it is not known. The
        owner moves the program on, and settles it."""
        program = self.turns.pop(number, None)
        if program is None:
            return None
        turn = program.waiting.pop(number, None)
        if turn is not None:
            self.requeued += 1
            return program, turn, False
        turn = program.running.pop(number)
        if program.seat is not None:
            seat = self.seats[program.seat]
            seat.load -= turn.charge
            seat.running -= 1
            if not seat.running:
                self._idle[seat.number] = seat
                seat.idle_since = self.now
            seat.forced -= turn.forced
            seat.prefill -= turn.prefill
            seat.running_tokens -= turn.facts.prompt_tokens
            self.made_room(seat)
        return program, turn, True

    def used(self, program: Program, turn: HeldTurn, usage: TurnUsage) -> None:
        """What the engine reported of a turn that ran: attained work, context, and what had to be computed twice."""
        seat = self.seats.get(program.seat) if program.seat is not None else None
        attained = self.learned.turn_finished(
            program.facts.name, program.key, prompt_tokens=usage.prompt_tokens, output_tokens=usage.output_tokens
        )
        before = program.context
        program.turns += 1
        if attained is None:
            return
        program.work, program.context = attained.work_s, attained.context_tokens
        program.growth = self.learned.growth(program.key)
        if seat is None:
            return
        cached = usage.cached_tokens
        rewritten = usage.prompt_tokens < before or (
            turn.warm and cached is not None and 2 * cached < before and seat.still_holds(program, before)
        )
        new = usage.prompt_tokens if rewritten else usage.prompt_tokens - before
        seat.steering.turn_finished(usage.prompt_tokens, cached, max(0, new), warm=turn.warm and not rewritten)
        seat.written += max(0, usage.prompt_tokens - (cached or 0)) + usage.output_tokens
        program.written_mark = seat.written

    def rest(self, program: Program) -> None:
        """Nothing of it runs any more, and nobody has said what becomes of its KV: it is given up."""
        program.move(ProgramEvent.ABORTED if program.turns else ProgramEvent.ABORTED_FIRST)
        program.tool, program.idle_since = None, None
        self.settle(program)

    def close(self, program: Program, now: float, *, finished: bool) -> None:
        """The program is over; its parent waits no longer for it, and is to return soon when it was the last."""
        for number in (*program.waiting, *program.running):
            self.over(number)
        if program.state is ProgramState.LEASED:
            self._end_lease(program)
        parent = self.programs.drop(program)
        self.settle(program)
        self._leave_seat(program)
        if finished:
            self.learned.program_finished(program.facts.name)
        else:
            self.learned.program_abandoned(program.facts.name)
        if parent is not None:
            if not parent.children and parent.state is ProgramState.LEASED and parent.is_idle:
                parent.idle_since = now
                self.price(parent, now)
            self.settle(parent)

    # Leases

    def lease(self, program: Program, tool: str | None, now: float) -> None:
        """Nothing of it runs any more, and its KV is kept for its return."""
        assert program.seat is not None
        seat = self.seats[program.seat]
        program.move(ProgramEvent.LEASED)
        program.tool = SUB_AGENTS if program.children else tool
        program.idle_since, program.returned = now, bool(program.waiting)
        program.lease_charge = max(0, program.context + round(program.growth) - program.shared)
        program.keep_until = 0.0
        seat.load += program.lease_charge
        seat.leases[program.number] = program
        self.price(program, now)
        self.settle(program)

    def lose_lease(self, program: Program) -> None:
        """Its KV is not kept any longer."""
        self._end_lease(program)
        program.move(ProgramEvent.LEASE_LOST)
        self.settle(program)

    def _end_lease(self, program: Program) -> None:
        assert program.seat is not None
        seat = self.seats[program.seat]
        self._standing_over(program)
        seat.load -= program.lease_charge
        program.lease_charge = 0
        del seat.leases[program.number]
        self.made_room(seat)

    def keep(self, program: Program, until: float, now: float) -> None:
        """Somebody asks to keep the lease of an idle program until then; heard while all such leases of the seat are no
        more than `lease_prices.KEPT_SHARE` of it. A time that is over: as if nobody had asked."""
        program.keep_until = until
        self.price(program, now)
        self.settle(program)

    def advance(self, now: float) -> None:
        """Tells the time. Leases whose standing changes with it are priced anew, each at its time; a bounded number per
        event."""
        self.now = now
        for _ in range(RENEWED_AT_ONCE):
            if not self._timers or self._timers[0][0] > now:
                break
            _, number, standing = heapq.heappop(self._timers)
            program = self.programs.numbered(number)
            if program is not None and program.standing == standing:
                before = program.revocable
                self.price(program, now)
                self._priced(program, before)

    # Where a program has its KV

    def _move_to(self, program: Program, seat: Seat) -> None:
        if program.seat != seat.number:
            self._leave_seat(program)
            program.seat = seat.number
        seat.programs[program.number] = program

    def _leave_seat(self, program: Program) -> None:
        if program.seat is not None:
            self.seats[program.seat].programs.pop(program.number, None)
            program.seat = None
            self._commit(program)
