"""What both forms of ThunderAgent share: programs that run or act, are active or paused, and the greedy choices of a
tick. Source: spec scheduling §2, thunderagent-and-hints §4.

A paused program holds no seat, and its KV is given up to the engine's own eviction. It is resumed on any seat.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from services.admission.scheduling.interface import Action, Actions, Admission, Base, Fleet, PauseChange, WorkerFacts

Status = Literal["reasoning", "acting"]


@dataclass(slots=True, eq=False)
class Program:
    """A program that did not end. ``seat``: ``None`` where it is paused, or was sent without a place.

    ``tokens``: of its context, as far as known. ``step``: turns that began. ``marked``: to be paused when its turn
    ends. ``acting_since``: seconds. ``epoch``: of its last admission. ``sort_tokens``: as known when it was paused;
    ``origin``: the seat that it had. ``counted``: the seat to whose use it adds, and what. ``told``: it is paused, and
    that was said.
    """

    name: str
    status: Status = "reasoning"
    paused: bool = False
    seat: int | None = None
    tokens: int = 0
    step: int = 0
    marked: bool = False
    soft_demoted_until: float = 0.0
    acting_since: float = 0.0
    epoch: int = 0
    sort_tokens: int = 0
    origin: int | None = None
    counted: tuple[int, int] | None = None
    told: bool = False


@dataclass(slots=True)
class PausingCounters:
    """Since the beginning."""

    pauses: int = 0
    resumes: int = 0
    marked: int = 0
    forced_resumes: int = 0
    cancelled: int = 0
    unpinned_turns: int = 0


def resume_group(program: Program) -> int:
    """0: a turn waits that continues a program; 1: a new program; 2: it acts, and nothing waits (§4.6, §2.4)."""
    if program.status == "acting":
        return 2
    return 0 if program.step > 1 else 1


def choose_resumes(rooms: Mapping[int, int], candidates: Sequence[Program], buffer: int) -> list[tuple[Program, int]]:
    """Which of ``candidates``, in their order of preference, are resumed, and where.

    ``rooms``: tokens left by seat. Chosen while all of them together have room; then placed largest first, each at the
    seat with most room (best-fit decreasing; §2.4, §4.6).
    """
    left = {seat: room for seat, room in rooms.items() if room > buffer}
    total = sum(left.values())
    chosen: list[Program] = []
    for program in candidates:
        need = program.tokens + buffer
        if need <= total:
            total -= need
            chosen.append(program)
    placed: list[tuple[Program, int]] = []
    if not chosen:
        return placed
    smallest = min(program.tokens for program in chosen) + buffer
    for program in sorted(chosen, key=lambda each: -each.tokens):
        seat = max(left, key=lambda each: left[each], default=None)
        if seat is None or left[seat] < smallest:
            break
        need = program.tokens + buffer
        if need > left[seat]:
            continue
        left[seat] -= need
        placed.append((program, seat))
        if left[seat] <= buffer:
            del left[seat]
    return placed


class Pausing(Base):
    """Seats, programs, who is paused, and what every seat's programs use together."""

    buffer = 100
    weight = 1.0

    def begin(self, fleet: Fleet) -> None:
        super().begin(fleet)
        self.programs: dict[str, Program] = {}
        self.paused: dict[str, Program] = {}
        """In the order in which they were paused."""
        self.counters = PausingCounters()
        self.used: dict[int, int] = {}
        self._members: dict[int, dict[str, Program]] = {}
        self.capacity: dict[int, int] = {}
        self.live: set[int] = set()
        self._changes: list[PauseChange] = []
        for seat, facts in enumerate(fleet.workers):
            self._seat_changed(seat, facts)

    def _seat_changed(self, seat: int, facts: WorkerFacts | None) -> None:
        """A seat whose size is not known is live without a capacity."""
        self.capacity.pop(seat, None)
        if facts is None:
            self.live.discard(seat)
            return
        self.live.add(seat)
        if facts.kv_tokens > 0:
            self.capacity[seat] = facts.kv_tokens + facts.host_tokens

    def members(self, seat: int) -> Iterable[Program]:
        """Active programs at ``seat``."""
        return self._members.get(seat, {}).values()

    def seat_used(self, seat: int) -> int:
        """Tokens that the active programs of ``seat`` are charged."""
        return self.used.get(seat, 0)

    def _charge(self, program: Program) -> int:
        tokens = program.tokens if program.status == "reasoning" else int(program.tokens * self.weight)
        return tokens + self.buffer

    def _recount(self, program: Program) -> None:
        """After any change of what a program is charged, or where."""
        if program.counted is not None:
            seat, tokens = program.counted
            self.used[seat] -= tokens
            del self._members[seat][program.name]
            program.counted = None
        if program.seat is not None and not program.paused and self.programs.get(program.name) is program:
            tokens = self._charge(program)
            program.counted = (program.seat, tokens)
            self.used[program.seat] = self.used.get(program.seat, 0) + tokens
            self._members.setdefault(program.seat, {})[program.name] = program

    def _add(self, name: str) -> Program:
        program = self.programs[name] = Program(name)
        return program

    def _drop(self, program: Program) -> None:
        if self.programs.get(program.name) is program:
            del self.programs[program.name]
        if self.paused.get(program.name) is program:
            del self.paused[program.name]
            self._tell_resumed(program, None)
        self._recount(program)

    def _pause(self, program: Program) -> None:
        program.marked = False
        program.paused = True
        if program.seat is not None:
            program.origin = program.seat
        program.seat = None
        program.sort_tokens = program.tokens
        self.paused[program.name] = program
        self.counters.pauses += 1
        if program.origin is not None:  # else it has never run: nothing of it is anywhere
            program.told = True
            self._changes.append(PauseChange(program.name, program.origin, "paused"))
        self._recount(program)

    def _resume(self, program: Program, seat: int | None) -> None:
        program.paused = False
        program.seat = seat
        self.paused.pop(program.name, None)
        self.counters.resumes += 1
        self._tell_resumed(program, seat)
        self._recount(program)

    def _tell_resumed(self, program: Program, seat: int | None) -> None:
        if program.told:
            program.told = False
            self._changes.append(PauseChange(program.name, seat, "resumed"))

    def _answer(self, actions: Iterable[Action]) -> Actions:
        """What a call answers: ``actions``, and before them who was paused and resumed in it."""
        acted = actions if isinstance(actions, tuple) else list(actions)
        changes, self._changes = self._changes, []
        return [*changes, *acted] if changes else acted

    def _pause_until(self, seat: int, target: float) -> None:
        """Acting programs pause, smallest first, until no more than ``target`` is used; if that is not enough, every
        reasoning one is marked: marking changes nothing of what is used, so nothing ends the loop (§2.4, §4.6)."""
        members = [program for program in self.members(seat) if not program.marked]
        for program in sorted((each for each in members if each.status == "acting"), key=lambda each: each.tokens):
            if self.seat_used(seat) <= target:
                return
            self._pause(program)
        if self.seat_used(seat) <= target:
            return
        for program in members:
            if program.status == "reasoning":
                program.marked = True
                self.counters.marked += 1

    def _any_seat(self, turn: int) -> int | None:
        """For a turn that is sent without a place, as a router behind would choose: most of its prompt resident, then
        least used."""
        blocks = self.fleet.residency(turn) or ()
        reach = {seat: blocks[seat] if seat < len(blocks) else 0 for seat in self.live}
        return min(self.live, key=lambda seat: (-reach[seat], self.seat_used(seat), seat), default=None)


def admit(turn: int, seat: int, now: float, priority_jump: float) -> Admission:
    """First come, first served with a head start. A penalty is no later than nothing: the router's queue takes no jump
    below 0 (§4.9.2)."""
    return Admission(turn, seat, round(1000 * (now - max(0.0, priority_jump))))
