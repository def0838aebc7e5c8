"""The book of a policy that commits memory: programs, seats, what is charged, leased, committed, and who waits where.

Whatever changes a program ends with `Book.settle`, which puts it where it belongs: in the commitments of its seat, and
in the queue of its kind. So that every sum stands for exactly the programs that it says, whatever happened.

Source: spec policy §4 (state, D, Pk, blocked, revocable), scheduling §5.2 (charges).
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterator

from services.admission.estimators.class_key import ClassKey
from services.admission.estimators.learned_pool import LearnedPool
from services.admission.estimators.residual import predicted_final_context
from services.admission.estimators.tool_times import USER_TURN
from services.admission.scheduling.interface import ProgramFacts, TurnFacts, TurnUsage, WorkerFacts
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
from services.admission.scheduling.steering import Steering

REKEYED_AT_ONCE = 32
"""Programs whose rank is made anew per event after the estimates changed; of so many, ranks are never older."""


class Book:
    """``span``: S, seconds of arrival that one GPU second of work to come outweighs; 0: first come, first served.
    ``floor``: phi, so that a lease below phi/C per token is revocable."""

    def __init__(self, learned: LearnedPool, *, span: float, floor: float, max_programs: int) -> None:
        self.learned = learned
        self.span = span
        self.floor = floor
        self.seats: dict[int, Seat] = {}
        self.programs = ProgramTable(max_programs)
        self.turns: dict[int, Program] = {}
        self.cold = OrderedKeys()
        """Programs that ran before and wait without a lease, by D."""
        self.new: dict[ClassKey, OrderedKeys] = {}
        """Programs of which nothing ran to its end and that wait, by class and arrival: D differs by as much."""
        self.changes = 0
        """Counts what may have made room; see `Seat.changed`."""
        self._timers: list[tuple[float, int, int]] = []
        self._placed: OrderedDict[int, Program] = OrderedDict()
        self._first: dict[ClassKey, tuple[int, float, float | None]] = {}

    # Predictions

    def first_prediction(self, key: ClassKey) -> tuple[float, float | None]:
        """V and the mean residual of the context of a program of the class that has had nothing."""
        revision = self.learned.revision
        known = self._first.get(key)
        if known is None or known[0] != revision:
            work = self.learned.residual_work(key) if self.span else None
            context = self.learned.residual_context(key)
            if len(self._first) > 4 * len(self.new) + 64:
                self._first.clear()
            known = (revision, work.value if work else 0.0, context.value if context else None)
            self._first[key] = known
        return known[1], known[2]

    def predict(self, program: Program) -> None:
        """Makes D and what its context will still grow anew."""
        if program.state is ProgramState.NEW:
            work, program.left_tokens = self.first_prediction(program.key)
        else:
            left = self.learned.residual_work(program.key, program.work) if self.span else None
            grows = self.learned.residual_context(program.key, program.context)
            work, program.left_tokens = left.value if left else 0.0, grows.value if grows else None
        program.rank = program.arrival + self.span * work
        program.revision = self.learned.revision

    def final_context(self, program: Program, capacity: int, charge: int = 0) -> int:
        """Pk in tokens; no less than ``charge``, what its next turn takes."""
        if program.left_tokens is not None:
            return round(min(capacity, max(program.context + max(0.0, program.left_tokens), charge)))
        predicted = predicted_final_context(program.context, None, growth=program.growth, capacity=capacity)
        return round(min(capacity, max(predicted, charge)))

    def new_in_order(self) -> Iterator[Program]:
        """Programs of which nothing ran and that wait, by D, their predictions renewed where they are looked at. Do not
        change the queues meanwhile."""
        lines = [self._ranked(line, self.span * self.first_prediction(key)[0]) for key, line in self.new.items()]
        merged = lines[0] if len(lines) == 1 else heapq.merge(*lines)
        for _, number in merged:
            program = self.programs.numbered(number)
            if program is None:
                continue
            if program.revision != self.learned.revision:
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
            for turn in program.waiting.values():
                turn.tested = -1
        if program.committed is not None or (program.queued is not None and program.state is not ProgramState.NEW):
            self._placed[program.number] = program
            self._placed.move_to_end(program.number)
        else:
            self._placed.pop(program.number, None)

    def _commit(self, program: Program) -> None:
        wanted = None
        if program.seat is not None and self._counts(program):
            seat = self.seats[program.seat]
            wanted = (seat.number, (program.rank, program.number), self.final_context(program, seat.capacity))
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
            elif program.state is ProgramState.NEW:
                wanted = (self.new.setdefault(program.key, OrderedKeys()), (program.arrival, program.number))
            else:
                wanted = (self.cold, (program.rank, program.number))
        before = program.queued
        if before != wanted:
            if before is not None:
                before[0].remove(before[1])
            if wanted is not None:
                wanted[0].add(wanted[1])
            program.queued = wanted
        line = self.new.get(program.key)
        if line is not None and not line:
            del self.new[program.key]

    def rekey(self) -> None:
        """After the estimates changed: makes ranks anew, of `REKEYED_AT_ONCE` programs at a time, the stalest first."""
        revision = self.learned.revision
        for _ in range(min(REKEYED_AT_ONCE, len(self._placed))):
            program = next(iter(self._placed.values()))
            if program.revision == revision:
                return
            self.settle(program)

    def made_room(self, seat: Seat) -> None:
        """Something that was refused here may fit now."""
        self.changes += 1
        seat.changed = self.changes

    # Seats

    def open_seat(self, number: int, facts: WorkerFacts, now: float) -> None:
        """A seat appeared, or has other sizes."""
        seat = self.seats.get(number)
        if seat is None:
            seat = self.seats[number] = Seat(number, facts, Steering(host_tier=facts.host_tokens > 0))
        elif seat.facts == facts:
            return
        else:
            seat.facts = facts
            seat.steering.host_tier = facts.host_tokens > 0
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
            program.seat, program.lease_charge = None, 0
            self.settle(program)
        del self.seats[number]
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
            tool = program.tool if program.tool is not None else USER_TURN
            self.learned.tool_returned(tool, max(0.0, now - program.idle_since))
            program.returned = True
        turn = program.waiting[facts.turn] = HeldTurn(facts, now, charge)
        self.turns[facts.turn] = program
        self._standing_over(program)
        self.programs.touch(program, now)
        self.settle(program)
        return turn

    def cancelled(self, program: Program, now: float) -> None:
        """A turn that waited does not any more: the program is where it was before."""
        self.price(program, now)
        self.settle(program)

    def admit(self, program: Program, turn: HeldTurn, seat: Seat, *, cached: int, forced: bool = False) -> bool:
        """The turn runs there from now on. Returns whether the program gave a lease back for it."""
        leased = program.state is ProgramState.LEASED
        turn.warm = leased or bool(program.running)
        if leased:
            self._end_lease(program)
        if program.running:  # what they have in common is charged once
            turn.charge = max(0, turn.charge - min(program.context, turn.facts.prompt_tokens))
        turn.prefill = max(0, turn.facts.prompt_tokens - cached)
        turn.forced = forced
        del program.waiting[turn.facts.turn]
        program.running[turn.facts.turn] = turn
        self._move_to(program, seat)
        program.move(ProgramEvent.ADMITTED)
        program.idle_since = None
        seat.load += turn.charge
        seat.running += 1
        seat.forced += forced
        seat.prefill += turn.prefill
        seat.running_tokens += turn.facts.prompt_tokens
        if program.turns == 0:
            self.learned.program_started(program.facts.name, program.key, from_start=turn.facts.index == 0)
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
            return program, turn, False
        turn = program.running.pop(number)
        if program.seat is not None:
            seat = self.seats[program.seat]
            seat.load -= turn.charge
            seat.running -= 1
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
        program.lease_charge = program.context + round(program.growth)
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

    def index(self, program: Program, now: float) -> float:
        """I, per token: what its lease is worth, when its tool has run for so long."""
        elapsed = max(0.0, now - program.idle_since) if program.idle_since is not None else 0.0
        tool = program.tool if program.tool is not None else USER_TURN
        return self.learned.lease_standing(tool, elapsed, program.context, 0.0).index

    def price(self, program: Program, now: float) -> None:
        """Whether an idle lease is below the floor now, and when that is to be asked again."""
        self._standing_over(program)
        if program.state is not ProgramState.LEASED or not program.is_idle or program.seat is None:
            return
        assert program.idle_since is not None
        seat = self.seats[program.seat]
        tool = program.tool if program.tool is not None else USER_TURN
        elapsed = max(0.0, now - program.idle_since)
        standing = self.learned.lease_standing(tool, elapsed, program.context, self.floor / seat.capacity)
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
        program.revocable = False

    def advance(self, now: float) -> None:
        """Leases whose standing changes with time are priced anew, each at its time; a bounded number per event."""
        for _ in range(REKEYED_AT_ONCE):
            if not self._timers or self._timers[0][0] > now:
                break
            _, number, standing = heapq.heappop(self._timers)
            program = self.programs.numbered(number)
            if program is not None and program.standing == standing:
                self.price(program, now)
                self.settle(program)

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
