"""Policy ``thunderagent`` as its authors' code has it, defects included: capacity without thresholds, ticks of 5 s.

Source: spec scheduling §2.2-2.4, §2.8. A returning turn is not checked; a program whose turn ends without usage counts
as reasoning for ever; paused programs are sorted by what they had when they were paused. Left out: the estimate of
tokens from characters (here they are known), and the unfinished term of shared tokens, which that code never sets.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from services.admission.policies.pausing import Pausing, Program, choose_resumes, resume_group
from services.admission.scheduling.interface import (
    Action,
    Actions,
    Admission,
    Fleet,
    Refusal,
    TurnFacts,
    TurnUsage,
    WorkerFacts,
)


class PaperParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``use_acting_token_decay``: on resuming, idle programs count by half-lives of 1 s. Raises `ValueError`."""

    scheduler_interval: float = 5.0
    acting_token_weight: float = 1.0
    use_acting_token_decay: bool = False
    buffer_per_program: int = 100
    resume_timeout: float = 1800.0

    def __post_init__(self) -> None:
        for name in ("scheduler_interval", "acting_token_weight", "resume_timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be greater than 0")
        if self.buffer_per_program < 0:
            raise ValueError("buffer_per_program must not be negative")


class PaperThunderAgent(Pausing):
    """Turns of a paused program wait for its event; all of them go when it comes."""

    def __init__(self, parameters: PaperParameters | None = None) -> None:
        self.parameters = parameters or PaperParameters()
        self.tick_s: float | None = self.parameters.scheduler_interval
        self.hold_limit_s: float | None = self.parameters.resume_timeout
        self.buffer = self.parameters.buffer_per_program
        self.weight = self.parameters.acting_token_weight

    def begin(self, fleet: Fleet) -> None:
        super().begin(fleet)
        self._waiting: dict[int, tuple[TurnFacts, Program, float]] = {}
        self._open: dict[int, Program] = {}

    def worker_changed(self, now: float, seat: int, facts: WorkerFacts | None) -> Actions:
        self._seat_changed(seat, facts)
        if facts is None:
            for program in list(self.members(seat)):
                program.seat = None
                self._recount(program)
        return ()

    def turn_ready(self, now: float, turn: TurnFacts) -> Actions:
        if turn.turn in self._waiting or turn.turn in self._open:
            return ()
        if not self.live:
            return (Refusal(turn.turn, "no_seat"),)
        program = self.programs.get(turn.program)
        is_new = program is None
        if program is None:
            program = self._add(turn.program)
        program.step += 1
        program.status = "reasoning"
        program.tokens = turn.prompt_tokens
        self._recount(program)
        if is_new:
            self._place_new(program)
        if program.paused:
            self._waiting[turn.turn] = (turn, program, now)
            return self._answer(())
        return self._answer([self._send(turn, program)])

    def _place_new(self, program: Program) -> None:
        need = program.tokens + self.buffer
        fits = [seat for seat, size in self.capacity.items() if size - self.seat_used(seat) >= need]
        if self.paused or not fits:
            self._pause(program)
            return
        program.seat = min(fits, key=self.seat_used)
        self._recount(program)

    def _send(self, turn: TurnFacts, program: Program) -> Action:
        if program.seat is None:
            program.seat = self._any_seat(turn.turn)
            self._recount(program)
        if program.seat is None:
            return Refusal(turn.turn, "no_seat")
        self._open[turn.turn] = program
        return Admission(turn.turn, program.seat)

    def turn_finished(self, now: float, usage: TurnUsage) -> Actions:
        program = self._open.pop(usage.turn, None)
        if program is None:
            return ()
        if self.programs.get(program.name) is program:
            program.tokens = usage.prompt_tokens + usage.output_tokens
            program.status = "acting"
            program.acting_since = now
            if program.marked:
                self._pause(program)
            else:
                self._recount(program)
        return self._answer(self.program_closed(now, usage.program) if usage.final else ())

    def turn_aborted(self, now: float, turn: int) -> Actions:
        """Its program goes on counting as one that reasons (§2.8, 9)."""
        self._open.pop(turn, None)
        self._waiting.pop(turn, None)
        return ()

    def program_closed(self, now: float, program: str) -> Actions:
        """Turns that wait are sent without an account (§2.8, 10)."""
        known = self.programs.get(program)
        if known is None:
            return ()
        self._drop(known)
        known.paused = False
        return self._answer(self._release_turns(known))

    def _release_turns(self, program: Program) -> Iterator[Action]:
        for turn in [turn for turn, owner, _ in self._waiting.values() if owner is program]:
            del self._waiting[turn.turn]
            yield self._send(turn, program)

    def tick(self, now: float) -> Actions:
        actions: list[Action] = []
        if self.capacity:
            actions.extend(self._greedy_resume(now))
            for seat, size in self.capacity.items():
                self._pause_until(seat, size)
        actions.extend(self._force(now))
        return self._answer(actions)

    def _greedy_resume(self, now: float) -> Iterator[Action]:
        if not self.paused:
            return
        rooms = {seat: size - self._used_on_resume(now, seat) for seat, size in self.capacity.items()}
        candidates = sorted(self.paused.values(), key=lambda program: (resume_group(program), program.sort_tokens))
        for program, seat in choose_resumes(rooms, candidates, self.buffer):
            self._resume(program, seat)
            yield from self._release_turns(program)

    def _used_on_resume(self, now: float, seat: int) -> int:
        if not self.parameters.use_acting_token_decay:
            return self.seat_used(seat)
        used = 0
        for program in self.members(seat):
            acts = program.status == "acting"
            used += self.buffer
            used += int(program.tokens * 2.0 ** -(now - program.acting_since)) if acts else program.tokens
        return used

    def _force(self, now: float) -> Iterator[Action]:
        """A turn that waited too long goes to its program's last seat, or to the one with the fewest programs."""
        late = [each for each in self._waiting.values() if now - each[2] >= self.parameters.resume_timeout]
        for turn, program, _ in late:
            if turn.turn not in self._waiting:
                continue
            seat = program.origin if program.origin in self.live else None
            if seat is None:
                seat = min(self.live, key=lambda each: (len(list(self.members(each))), each), default=None)
            self.counters.forced_resumes += 1
            self._resume(program, seat)
            yield from self._release_turns(program)
