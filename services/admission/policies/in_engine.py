"""What the policies share that act inside the engine: every turn goes to its program's seat at once, with a priority
and, while a tool runs, a pin. Queueing is the engine's.

A program stays at the seat of its first turn, which is the one with the fewest programs; when that seat is gone it
finds another.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.admission.policies.engine_rules import FCFS, EngineRules
from services.admission.scheduling.interface import (
    Action,
    Actions,
    Admission,
    Base,
    Fleet,
    Pin,
    ProgramFacts,
    Refusal,
    TurnFacts,
    TurnUsage,
    Unpin,
    WorkerFacts,
)


@dataclass(slots=True, eq=False)
class Program:
    """A program that did not end. ``order``: of its arrival among all; ``context``: tokens after its last turn.

    ``tool`` and ``since``: what it called, and when (``None``: nothing runs, or it is not known). ``pinned_until``: of
    its live pin. ``service_s``: work that it attained.
    """

    name: str
    order: int
    parent: str | None = None
    seat: int | None = None
    in_flight: int = 0
    turns: int = 0
    context: int = 0
    tool: str | None = None
    since: float | None = None
    pinned_until: float | None = None
    service_s: float = 0.0


@dataclass(slots=True)
class Running:
    """Turns that were admitted to a seat and are not over, and the tokens of their prompts."""

    turns: int = 0
    prompt_tokens: int = 0


@dataclass(slots=True, eq=False)
class OpenTurn:
    """A turn that was admitted. ``leased``: its program's pin was live when it came back."""

    program: Program
    seat: int
    prompt_tokens: int
    ready: float
    leased: bool
    context_before: int
    first_token: float | None = None


class InEngine(Base):
    """Programs, open turns, and where they are. Subclasses say the priority, the pin, and what they learn."""

    engine: EngineRules = FCFS

    def begin(self, fleet: Fleet) -> None:
        super().begin(fleet)
        self._seats = dict(enumerate(fleet.workers))
        self._placed = dict.fromkeys(self._seats, 0)
        self._running = {seat: Running() for seat in self._seats}
        self._programs: dict[str, Program] = {}
        self._turns: dict[int, OpenTurn] = {}
        self._arrivals = 0

    # What subclasses say.

    def priority(self, now: float, program: Program) -> int:
        """Lower runs earlier."""
        return 0

    def pin_until(self, now: float, program: Program, usage: TurnUsage) -> float | None:
        """Until when the program's blocks stay, now that it calls ``usage.tool``; ``None``: no pin."""
        return None

    def tool_returned(self, program: Program, tool: str, seconds: float) -> None:
        """The gap that the server saw after a turn which called ``tool``."""

    def turn_measured(self, now: float, turn: OpenTurn, usage: TurnUsage) -> None:
        """A turn finished; before its program takes its usage over."""

    def program_ended(self, program: Program) -> None:
        """Its last turn was finished."""

    # What happens.

    def worker_changed(self, now: float, seat: int, facts: WorkerFacts | None) -> Actions:
        if facts is not None:
            self._seats[seat] = facts
            self._placed.setdefault(seat, 0)
            self._running.setdefault(seat, Running())
        elif self._seats.pop(seat, None) is not None:
            del self._placed[seat]
            for number in [number for number, turn in self._turns.items() if turn.seat == seat]:
                self._over(number)
            del self._running[seat]
            for program in self._programs.values():
                if program.seat == seat:
                    program.seat = program.pinned_until = None
        return ()

    def program_arrives(self, now: float, program: ProgramFacts) -> None:
        if program.name not in self._programs:
            self._arrivals += 1
            parent = program.parent if program.parent in self._programs else None
            self._programs[program.name] = Program(program.name, self._arrivals, parent)

    def turn_ready(self, now: float, turn: TurnFacts) -> Actions:
        if not self._seats:
            return (Refusal(turn.turn, "no_seat"),)
        if turn.prompt_tokens > max(facts.kv_tokens for facts in self._seats.values()):
            return (Refusal(turn.turn, "oversize"),)
        self.program_arrives(now, ProgramFacts(turn.program, "", None))
        program = self._programs[turn.program]
        if program.tool is not None and program.since is not None and not program.in_flight:
            self.tool_returned(program, program.tool, max(0.0, now - program.since))
        seat = self._place(program)
        priority = self.priority(now, program)
        leased = program.pinned_until is not None and now < program.pinned_until
        self._turns[turn.turn] = OpenTurn(program, seat, turn.prompt_tokens, now, leased, program.context)
        program.in_flight += 1
        self._running[seat].turns += 1
        self._running[seat].prompt_tokens += turn.prompt_tokens
        program.tool = program.since = program.pinned_until = None
        return (Admission(turn.turn, seat, priority),)

    def _place(self, program: Program) -> int:
        if program.seat is None:
            program.seat = min(self._placed, key=lambda seat: (self._placed[seat], seat))
            self._placed[program.seat] += 1
        return program.seat

    def first_token(self, now: float, turn: int) -> Actions:
        known = self._turns.get(turn)
        if known is not None and known.first_token is None:
            known.first_token = now
        return ()

    def turn_finished(self, now: float, usage: TurnUsage) -> Actions:
        turn = self._over(usage.turn)
        if turn is None:
            return ()
        program = turn.program
        if self._programs.get(program.name) is not program:
            return ()
        self.turn_measured(now, turn, usage)
        program.turns += 1
        program.context = usage.prompt_tokens + usage.output_tokens
        if usage.final:
            self.program_ended(program)
            return self.program_closed(now, program.name)
        program.tool, program.since = usage.tool, now
        if usage.tool is None or program.in_flight or program.seat != usage.seat:
            return ()
        until = self.pin_until(now, program, usage)
        if until is None or until <= now:
            return ()
        program.pinned_until = until
        return (Pin(program.name, usage.seat, until),)

    def turn_aborted(self, now: float, turn: int) -> Actions:
        self._over(turn)
        return ()

    def _over(self, number: int) -> OpenTurn | None:
        turn = self._turns.pop(number, None)
        if turn is not None:
            turn.program.in_flight -= 1
            self._running[turn.seat].turns -= 1
            self._running[turn.seat].prompt_tokens -= turn.prompt_tokens
        return turn

    def program_closed(self, now: float, program: str) -> Actions:
        known = self._programs.pop(program, None)
        if known is None:
            return ()
        actions: list[Action] = []
        if known.seat is not None:
            self._placed[known.seat] -= 1
            if known.pinned_until is not None and now < known.pinned_until:
                actions.append(Unpin(known.name, known.seat))
        known.seat = known.pinned_until = None
        return actions
