"""What policies with a `Book` have in common: programs, turns and seats from the first fact to the last.

A subclass says which leases it gives, and whom it lets in; everything here is the same whatever it decides. All that
happens ends with `Booked._decide`, whose actions are the answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from math import ceil
from typing import Literal

from services.admission.cost import CostWeights, predicted_cached_tokens
from services.admission.estimators.learned_pool import LearnedPool
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
from services.admission.scheduling.places import programs_before
from services.admission.scheduling.programs import HeldTurn, Program, ProgramState
from services.admission.scheduling.seat import Seat

TRIED = 32
"""Turns that are looked at beyond those that an event lets in."""

EXPIRED_AT_ONCE = 256


class Booked(Base):
    """``hold_limit_s``: H, after which a turn of a program that ran before is forced in. ``idle_expiry_s``: so long a
    program may do nothing. ``output_tokens``: what a turn is charged for its answer (``None``: as learned, nine of ten
    are no longer). Feeds ``learned``. ``load_weight``: what a page that is loaded from a shared pool saves of its
    prefill (0..1)."""

    tick_s = 1.0
    load_weight = CostWeights().shared_cache_multiplier

    def __init__(
        self, book: Book, learned: LearnedPool, *, hold_limit_s: float, idle_expiry_s: float, output_tokens: int | None
    ) -> None:
        self.book = book
        self.learned = learned
        self.hold_limit_s: float | None = hold_limit_s
        self._hold_limit_s = hold_limit_s
        self.idle_expiry_s = idle_expiry_s
        self._output_tokens = output_tokens
        self._deadlines: list[tuple[float, int, int]] = []
        self._count = 0
        self._actions: list[Action] = []

    # What a subclass says

    def _decide(self, now: float) -> None:
        """Lets in whom it may."""
        raise NotImplementedError

    def _leased(self, program: Program, seat: Seat, now: float) -> Mapping[str, float]:
        """The program has just got a lease. Returns the numbers that go with it."""
        raise NotImplementedError

    def _crowded(self, seat: Seat, now: float) -> None:
        """Something was added to what the seat holds, or it became smaller."""
        raise NotImplementedError

    def _lease_over(self, program: Program) -> None:
        """The program has no lease any more."""

    def _cheapest(self, turn: HeldTurn, seats: list[Seat]) -> Seat:
        """Of ``seats``, where the turn is to go."""
        raise NotImplementedError

    def _priority(self, program: Program) -> int:
        """Of its turns in the engine; lower runs earlier."""
        return program.number

    def _expires(self, program: Program, now: float) -> float | None:
        """When the lease that the program is given now ends, if it does not return."""
        del program
        return now + self.idle_expiry_s

    def _shared(self, program: Program, turn: HeldTurn, seats: list[Seat]) -> Mapping[int, int]:
        """Tokens of the turn's prompt that others are charged for, by seat; none where a seat is not named."""
        del program, turn, seats
        return {}

    def _may_progress(self, seat: Seat, now: float) -> bool:
        """Whether a seat on which nothing runs takes who waits, whatever its size."""
        del seat, now
        return True

    # What happens

    def begin(self, fleet: Fleet) -> None:
        super().begin(fleet)
        for number, facts in enumerate(fleet.workers):
            self.book.open_seat(number, facts, 0.0)

    def worker_changed(self, now: float, seat: int, facts: WorkerFacts | None) -> Actions:
        self.book.advance(now)
        if facts is not None:
            self.book.open_seat(seat, facts, now)
            self._crowded(self.book.seats[seat], now)
        else:
            lost, ran = self.book.close_seat(seat)
            for program in lost:
                self._lease_over(program)
                self._actions.append(LeaseChange(program.facts.name, seat, "revoked"))
            for program in ran:
                if program.is_idle and (program.is_final or program.facts.single):
                    self._close(program, now)
        for number, program in list(self.book.turns.items()):
            turn = program.waiting.get(number)
            if turn is not None and self._refused(turn.facts):
                self.book.over(number)
                self._turn_over(program, False, None, now, kept=False)
            elif turn is not None and turn.charge > self.book.largest:  # no room for its answer any more
                turn.charge = self.book.largest
                self.book.requeued += 1
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
        self._returns(program, turn, now)
        size = self.book.largest
        held = self.book.wait(program, turn, now, self._charge(program, turn, size))
        if program.facts.single and program.first_waiting is held:
            seats = list(self.book.seats.values())
            at_home = [seat for seat in seats if program.running and seat.number == program.seat]
            self._admit(program, held, self._cheapest(held, at_home or seats))
        elif turn.index or program.turns or held.charge > self._hold_limit_from * size:
            self._count += 1
            heapq.heappush(self._deadlines, (now + self._hold_limit_s, self._count, turn.turn))
        return self._answer(now)

    _hold_limit_from = 0.85
    """A first turn of more than this share of the largest seat might wait for ever, but for the hard cap."""

    def _returns(self, program: Program, turn: TurnFacts, now: float) -> None:
        """A turn of the program is about to wait."""

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
        held = self.book.wait(program, turn, now, self._charge(program, turn, there.size))
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
            self._measured(program, turn, usage)
            self.book.used(program, turn, usage)
            self.book.programs.touch(program, now)
            program.children.update(usage.spawned)
        self._turn_over(program, ran, usage.tool, now, kept=ran)
        return self._answer(now)

    def _measured(self, program: Program, turn: HeldTurn, usage: TurnUsage) -> None:
        """A turn of the program ran and ended; before the book takes its usage over."""

    def turn_aborted(self, now: float, turn: int) -> Actions:
        self.book.advance(now)
        known = self.book.over(turn)
        if known is not None:
            program, _, ran = known
            self._turn_over(program, ran, None, now, kept=False)
        return self._answer(now)

    def tool_ended(self, now: float, program: str, tool: str, seconds: float) -> Actions:
        known = self.book.programs.get(program)
        if known is not None:
            self.book.tool_ended(known, tool, seconds)
        return ()

    def place(self, turn: int) -> int | None:
        return programs_before(self.book, turn)

    def figures(self, seat: int) -> Mapping[str, float]:
        """``kappa``; tokens that turns and leases are charged, and that are promised; ``recomputed``: rho of kappa."""
        known = self.book.seats.get(seat)
        if known is None:
            return {}
        return {
            "kappa": known.steering.value,
            "charged_tokens": known.load,
            "committed_tokens": known.committed.total,
            "recomputed": known.steering.recomputed,
        }

    def lease_advice(self, now: float, program: str, keep: bool | None, until: float | None) -> Actions:
        """A lease is given up at once; that one is to be kept is not heard."""
        del until
        known = self.book.programs.get(program)
        if keep is False and known is not None and known.is_idle and known.state is ProgramState.LEASED:
            self._lose(known, "revoked", {"advised": 1.0})
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
        return self._answer(now)

    def _answer(self, now: float) -> Actions:
        self.book.rekey()
        self._decide(now)
        return self._taken()

    def _taken(self) -> Actions:
        actions, self._actions = self._actions, []
        return actions

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
            if tool is None and program.is_idle and not program.children:
                self.learned.program_answered(program.facts.name)
            self.book.lease(program, tool, now)
            seat = self.book.seats[program.seat]
            numbers = self._leased(program, seat, now)
            self._actions.append(
                LeaseChange(program.facts.name, seat.number, "leased", numbers, self._expires(program, now))
            )
            self._crowded(seat, now)
        else:
            self.book.rest(program)

    def _close(self, program: Program, now: float, state: Literal["released", "expired"] = "released") -> None:
        """The program is over."""
        if program.state is ProgramState.LEASED and program.seat is not None:
            self._actions.append(LeaseChange(program.facts.name, program.seat, state))
        self._lease_over(program)
        self.book.close(program, now, finished=state == "released" and program.turns > 0)

    def _expire(self, now: float) -> None:
        for _ in range(EXPIRED_AT_ONCE):
            program = self.book.programs.longest_untouched()
            if program is None or now - program.touched < self.idle_expiry_s:
                return
            touched = self.book.programs.last_touched(program, now)
            if now - touched >= self.idle_expiry_s:
                self._close(program, now, "expired")
            else:
                self.book.programs.touch(program, touched)

    def _charge(self, program: Program, turn: TurnFacts, size: int) -> int:
        """Tokens that the turn takes of its seat: its prompt, and room for its answer."""
        output = turn.expected_output_tokens or self._output_tokens
        if output is None:
            output = round(self.learned.output_p90(program.key))
        if turn.max_output_tokens is not None:
            output = min(output, turn.max_output_tokens)
        return min(turn.prompt_tokens + output, size)

    def _refused(self, turn: TurnFacts) -> bool:
        """Whether no seat can ever hold it; says so."""
        if not self.book.seats:
            self._actions.append(Refusal(turn.turn, "no_seat"))
            return True
        if turn.prompt_tokens >= self.book.largest:
            self._actions.append(Refusal(turn.turn, "oversize"))
            return True
        return False

    # Leases

    def _lose(self, program: Program, state: Literal["revoked", "expired"], numbers: Mapping[str, float]) -> None:
        """The program's lease ends before it returned, or because its KV is gone."""
        seat = program.seat
        assert seat is not None
        self.book.lose_lease(program)
        self._lease_over(program)
        self._actions.append(LeaseChange(program.facts.name, seat, state, numbers))

    def _revoke(self, now: float, seat: Seat, programs: Iterable[Program], room: float) -> None:
        """Leases by ascending index until the seat's load is no more than ``room``."""
        for index, program in self._by_index(programs, now):
            if seat.load <= room:
                return
            self._lose(program, "revoked", {"tokens": float(program.lease_charge), "index": index})

    def _by_index(self, programs: Iterable[Program], now: float) -> list[tuple[float, Program]]:
        """(index, program), the least worth first; no more than fit into a seat."""
        ranked = sorted((self.book.index(program, now), program.number, program) for program in programs)
        return [(index, program) for index, _, program in ranked]

    @staticmethod
    def _takable(seat: Seat, keep: Program | None = None) -> list[Program]:
        """Programs whose lease may be taken: idle ones that nobody asked to keep."""
        return [each for each in seat.leases.values() if each is not keep and each.is_idle and not each.advised]

    # Who goes in

    @staticmethod
    def _needed(program: Program, turn: HeldTurn) -> int:
        """Tokens by which a seat's load grows with the turn of a program that has its KV there."""
        if program.running:
            return max(0, turn.charge - min(program.context, turn.facts.prompt_tokens))
        return turn.charge - program.shared - program.lease_charge

    def _progress(self, now: float) -> None:
        """Nothing runs on a seat, and somebody waits: the first goes there whatever its size."""
        book = self.book
        for seat in book.idle_seats():
            program = None
            if seat.warm:
                program = book.programs.numbered(seat.warm.at(0)[1])
            elif (len(book.cold) or book.new) and self._may_progress(seat, now):
                program = next((each for each in book.in_order() if each.first_waiting.charge <= seat.size), None)
            if program is not None:
                self._make_room(now, seat, program)
                self._admit(program, program.first_waiting, seat)

    def _force(self, now: float) -> None:
        """The hard cap: who returned and waited for H goes, one at a time on each seat."""
        blocked: list[tuple[float, int, int]] = []
        while self._deadlines and self._deadlines[0][0] <= now and len(blocked) < TRIED:
            deadline = heapq.heappop(self._deadlines)
            program = self.book.turns.get(deadline[2])
            turn = program.waiting.get(deadline[2]) if program is not None else None
            if program is None or turn is None:
                continue
            seats = [seat for seat in self.book.seats.values() if not seat.forced and turn.charge <= seat.size]
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
        others = self._takable(seat, program)
        needed = program.first_waiting.charge
        if program.seat == seat.number:
            needed = self._needed(program, program.first_waiting)
        self._revoke(now, seat, others, seat.capacity - needed)

    # Placement

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

    def _loadable(self, turn: HeldTurn, seats: list[Seat]) -> dict[int, float]:
        """Blocks of its prompt beyond its reach that each seat can load from its shared pool, as sure as they are."""
        blocks = self.fleet.loadable(turn.facts.turn)
        return {seat.number: blocks[seat.number] for seat in seats if seat.number < len(blocks)} if blocks else {}

    def _expected(self, turn: HeldTurn, reach: int, seat: Seat) -> int:
        """Tokens of its prompt that need not be computed on the seat: what it holds, and by its weight what it can load
        from its shared pool."""
        prompt, size = turn.facts.prompt_tokens, seat.facts.block_size
        loaded = self._loadable(turn, [seat]).get(seat.number, 0.0)
        all_of_it = predicted_cached_tokens(reach + ceil(loaded), prompt, size)
        return min(all_of_it, predicted_cached_tokens(reach, prompt, size) + round(self.load_weight * loaded * size))

    def _admit(self, program: Program, turn: HeldTurn, seat: Seat, *, forced: bool = False) -> None:
        self._run(program, turn, seat, forced=forced)
        self._actions.append(Admission(turn.facts.turn, seat.number, self._priority(program)))

    def _run(self, program: Program, turn: HeldTurn, seat: Seat, *, forced: bool = False) -> None:
        before = program.seat
        cached = self._reach(turn, [seat])[seat.number]
        cached = self._expected(turn, cached, seat)
        if program.state is ProgramState.LEASED and before is not None:
            self._actions.append(LeaseChange(program.facts.name, before, "released"))
        self._lease_over(program)
        shared = self._shared(program, turn, [seat]).get(seat.number, 0)
        self.book.admit(program, turn, seat, cached=cached, shared=shared, forced=forced)
