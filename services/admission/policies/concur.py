"""Policy ``concur``: a window of programs per seat, grown by one and cut by a share (CONCUR's congestion control).

Every interval the window of a seat grows by ``increase`` where KV use is low and somebody waits, and is multiplied by
``decrease`` where KV use is high while the hit rate falls. Whole programs wait: one enters when there is room, in the
order of arrival, and leaves when it ends; when the window was cut, those that entered last leave at their next turn.
A sub-agent whose parent is inside goes in with it, without a place of its own.
Source: spec scheduling §3 (CONCUR; known at second hand only, its constants are not public: these are ours).

The two signals are what a router knows of them: KV use is the context of turns that run over the seat's capacity, the
hit rate that of the turns that finished in the interval, of what a cache of any size could have held.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from services.admission.scheduling.interface import (
    Action,
    Actions,
    Admission,
    Base,
    Fleet,
    ProgramFacts,
    Refusal,
    TurnFacts,
    TurnUsage,
    WorkerFacts,
)


class ConcurParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``initial``, ``least`` and ``most`` programs of a window. ``low`` and ``high``: shares of KV capacity in use.
    ``falling``: by how much the hit rate must be below the last interval's. Raises `ValueError`."""

    initial: float = 6.0
    least: float = 1.0
    most: float = 1024.0
    increase: float = 1.0
    decrease: float = 0.5
    low: float = 0.8
    high: float = 0.95
    falling: float = 0.02
    interval_s: float = 5.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.initial <= self.most < math.inf:
            raise ValueError("1 <= least <= initial <= most is required")
        if not 0 < self.decrease < 1 or not 0 <= self.increase < math.inf:
            raise ValueError("decrease must lie between 0 and 1, increase must not be negative")
        if not 0 < self.low <= self.high <= 1 or not 0 <= self.falling <= 1:
            raise ValueError("0 < low <= high <= 1 and 0 <= falling <= 1 are required")
        if not 0 < self.interval_s < math.inf:
            raise ValueError("interval_s must be greater than 0")


@dataclass(slots=True, eq=False)
class _Seat:
    facts: WorkerFacts
    window: float
    inside: dict[str, None] = field(default_factory=dict)
    """Programs in the order in which they entered."""
    running_tokens: int = 0
    peak_tokens: int = 0
    reusable: int = 0
    cached: int = 0
    hit_rate: float | None = None


@dataclass(slots=True, eq=False)
class _Program:
    order: int
    parent: str | None = None
    seat: int | None = None
    in_flight: int = 0
    context: int = 0


class Concur(Base):
    """Windows per seat; one queue of turns whose programs are outside."""

    def __init__(self, parameters: ConcurParameters | None = None) -> None:
        self._parameters = parameters or ConcurParameters()
        self.tick_s: float | None = self._parameters.interval_s

    def begin(self, fleet: Fleet) -> None:
        super().begin(fleet)
        self._seats = {seat: _Seat(facts, self._parameters.initial) for seat, facts in enumerate(fleet.workers)}
        self._programs: dict[str, _Program] = {}
        self._waiting: dict[int, TurnFacts] = {}
        self._outside: list[tuple[int, int]] = []
        """(order of the program, turn) of what waits, and of turns that did."""
        self._running: dict[int, tuple[TurnFacts, int]] = {}
        self._arrivals = 0

    def windows(self) -> dict[int, float]:
        """Programs that may be inside, by seat."""
        return {number: seat.window for number, seat in self._seats.items()}

    def worker_changed(self, now: float, seat: int, facts: WorkerFacts | None) -> Actions:
        known = self._seats.get(seat)
        if facts is None:
            for turn in [turn for turn, (_, where) in self._running.items() if where == seat]:
                self._over(turn)
            self._seats.pop(seat, None)
            for program in self._programs.values():
                if program.seat == seat:
                    program.seat = None
        elif known is None:
            self._seats[seat] = _Seat(facts, self._parameters.initial)
        else:
            known.facts = facts
        return list(self._enter())

    def program_arrives(self, now: float, program: ProgramFacts) -> None:
        if program.name not in self._programs:
            self._arrivals += 1
            parent = program.parent if program.parent in self._programs else None
            self._programs[program.name] = _Program(self._arrivals, parent)

    def turn_ready(self, now: float, turn: TurnFacts) -> Actions:
        if turn.turn in self._waiting or turn.turn in self._running:
            return ()
        if not self._seats:
            return (Refusal(turn.turn, "no_seat"),)
        if turn.prompt_tokens > max(seat.facts.kv_tokens for seat in self._seats.values()):
            return (Refusal(turn.turn, "oversize"),)
        self.program_arrives(now, ProgramFacts(turn.program, "", None))
        program = self._programs[turn.program]
        if program.seat is not None and not program.in_flight:
            self._leave_if_cut(turn.program, program)
        parent = self._programs.get(program.parent) if program.parent is not None else None
        if program.seat is None and parent is not None:
            program.seat = parent.seat
        self._waiting[turn.turn] = turn
        if program.seat is not None:
            return [self._start(turn, program)]
        heapq.heappush(self._outside, (program.order, turn.turn))
        return list(self._enter())

    def _leave_if_cut(self, name: str, program: _Program) -> None:
        """One of those that entered last leaves where the window is smaller than what is inside."""
        assert program.seat is not None
        seat = self._seats[program.seat]
        allowed = int(seat.window)
        if name in list(seat.inside)[allowed:]:
            self._leave(name, program)

    def _leave(self, name: str, program: _Program) -> None:
        if program.seat is not None:
            self._seats[program.seat].inside.pop(name, None)
            program.seat = None

    def _enter(self) -> Iterator[Action]:
        """Turns of programs that find room, or have found it, first come first."""
        while self._outside:
            turn = self._waiting.get(self._outside[0][1])
            program = self._programs.get(turn.program) if turn is not None else None
            if turn is None or program is None:
                heapq.heappop(self._outside)
                continue
            if program.seat is None:
                program.seat = self._room()
                if program.seat is None:
                    return
                self._seats[program.seat].inside[turn.program] = None
            heapq.heappop(self._outside)
            yield self._start(turn, program)

    def _start(self, turn: TurnFacts, program: _Program) -> Admission:
        assert program.seat is not None
        program.in_flight += 1
        return self._send(turn, program.seat)

    def _send(self, turn: TurnFacts, number: int) -> Admission:
        del self._waiting[turn.turn]
        self._running[turn.turn] = (turn, number)
        seat = self._seats[number]
        seat.running_tokens += turn.prompt_tokens
        seat.peak_tokens = max(seat.peak_tokens, seat.running_tokens)
        return Admission(turn.turn, number)

    def _room(self) -> int | None:
        """The seat whose window has most room left."""
        number = max(self._seats, key=lambda each: (self._left(each), -each), default=None)
        return number if number is not None and self._left(number) >= 1 else None

    def _left(self, number: int) -> float:
        return self._seats[number].window - len(self._seats[number].inside)

    def turn_finished(self, now: float, usage: TurnUsage) -> Actions:
        if usage.turn not in self._running:
            return ()
        program = self._programs.get(usage.program)
        seat = self._seats.get(usage.seat)
        if program is not None:
            if seat is not None and usage.cached_tokens is not None and program.context:
                seat.reusable += min(program.context, usage.prompt_tokens)
                seat.cached += min(usage.cached_tokens, program.context, usage.prompt_tokens)
            program.context = usage.prompt_tokens + usage.output_tokens
        self._over(usage.turn)
        return self.program_closed(now, usage.program) if usage.final else ()

    def turn_aborted(self, now: float, turn: int) -> Actions:
        self._waiting.pop(turn, None)
        self._over(turn)
        return ()

    def _over(self, number: int) -> None:
        turn, seat = self._running.pop(number, (None, -1))
        if turn is None:
            return
        if seat in self._seats:
            self._seats[seat].running_tokens -= turn.prompt_tokens
        program = self._programs.get(turn.program)
        if program is not None:
            program.in_flight -= 1

    def program_closed(self, now: float, program: str) -> Actions:
        known = self._programs.get(program)
        if known is None:
            return ()
        self._leave(program, known)
        del self._programs[program]
        # A turn that still waits is no program's any more: it holds nobody's place, so it need not wait for one.
        left = [turn for turn in self._waiting.values() if turn.program == program]
        seat = max(self._seats, key=self._left, default=None)
        if seat is None:
            for turn in left:
                del self._waiting[turn.turn]
            return [Refusal(turn.turn, "no_seat") for turn in left]
        return [*(self._send(turn, seat) for turn in left), *self._enter()]

    def tick(self, now: float) -> Actions:
        for number, seat in self._seats.items():
            self._steer(number, seat)
        return list(self._enter())

    def _steer(self, number: int, seat: _Seat) -> None:
        given = self._parameters
        used = seat.peak_tokens / seat.facts.kv_tokens
        rate = seat.cached / seat.reusable if seat.reusable else seat.hit_rate
        falls = rate is not None and seat.hit_rate is not None and rate < seat.hit_rate - given.falling
        if used > given.high and falls:
            seat.window = max(given.least, seat.window * given.decrease)
        elif used < given.low and self._waiting and self._left(number) < 1:
            seat.window = min(given.most, seat.window + given.increase)
        seat.hit_rate = rate
        seat.peak_tokens = seat.running_tokens
        seat.reusable = seat.cached = 0
