"""Policy ``thunderagent`` with the thresholds of Dynamo's port, as it is in its Python service, defects included.

Source: spec thunderagent-and-hints §4.1-4.9 (form b) and its numbers §8.2. What a router cannot see is left out: tokens
are counted when a turn ends, not while it streams. What it must do differently: a turn is refused where no seat lives.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from services.admission.policies.pausing import Pausing, Program, Status, admit, choose_resumes, resume_group
from services.admission.scheduling.interface import (
    Action,
    Actions,
    Fleet,
    Refusal,
    TurnFacts,
    TurnUsage,
    WorkerFacts,
)


class DynamoParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shares of a seat's capacity: pausing begins above ``pause_threshold`` and drains to ``pause_target``; from
    ``soft_demote_threshold`` on programs are demoted; resuming fills up to ``pause_threshold - resume_hysteresis``.

    Priority jumps and times in seconds. Raises `ValueError`. Source: spec thunderagent-and-hints §4.2.
    """

    pause_threshold: float = 0.95
    pause_target: float = 0.80
    soft_demote_threshold: float = 0.80
    soft_demote_priority_jump: float = -2.0
    resume_hysteresis: float = 0.10
    resume_priority_boost: float = 1.0
    resume_timeout_seconds: float = 1800.0
    scheduler_interval_seconds: float = 5.0
    acting_token_weight: float = 1.0
    acting_decay_tau_seconds: float = 1.0
    buffer_per_program: int = 100

    def __post_init__(self) -> None:
        if not 0 <= self.pause_threshold <= 1:
            raise ValueError("pause_threshold must lie between 0 and 1")
        for name in ("pause_target", "soft_demote_threshold", "resume_hysteresis"):
            if not 0 <= getattr(self, name) <= self.pause_threshold:
                raise ValueError(f"{name} must lie between 0 and pause_threshold")
        for name in (
            "resume_timeout_seconds",
            "scheduler_interval_seconds",
            "acting_token_weight",
            "acting_decay_tau_seconds",
        ):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be greater than 0")
        for name in ("soft_demote_priority_jump", "resume_priority_boost"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} must be finite")
        if self.buffer_per_program < 0:
            raise ValueError("buffer_per_program must not be negative")


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What a program was before a turn that waits began; rolled back to when that turn is cancelled."""

    status: Status
    tokens: int
    step: int
    acting_since: float


@dataclass(slots=True, eq=False)
class _Waiting:
    """The turn of a program that is being admitted. ``before``: ``None`` where it made its program."""

    turn: TurnFacts
    program: Program
    before: _Snapshot | None
    since: float


class DynamoThunderAgent(Pausing):
    """Turns of one program are admitted one after the other; each runs on from there by itself."""

    def __init__(self, parameters: DynamoParameters | None = None) -> None:
        self.parameters = parameters or DynamoParameters()
        self.tick_s: float | None = self.parameters.scheduler_interval_seconds
        self.hold_limit_s: float | None = self.parameters.resume_timeout_seconds
        self.buffer = self.parameters.buffer_per_program
        self.weight = self.parameters.acting_token_weight

    def begin(self, fleet: Fleet) -> None:
        super().begin(fleet)
        self._gates: dict[str, deque[TurnFacts]] = {}
        """Turns of a program that wait for its gate, behind the one that is being admitted."""
        self._waiting: dict[str, _Waiting] = {}
        self._unsent: dict[int, str] = {}
        """Programs of the turns of both."""
        self._open: dict[int, tuple[Program, int, int, int]] = {}
        """Turns that run: program, epoch, seat, prompt tokens."""

    def worker_changed(self, now: float, seat: int, facts: WorkerFacts | None) -> Actions:
        self._seat_changed(seat, facts)
        return ()

    # One turn

    def turn_ready(self, now: float, turn: TurnFacts) -> Actions:
        if turn.turn in self._unsent or turn.turn in self._open:
            return ()
        if not self.live:
            return (Refusal(turn.turn, "no_seat"),)
        if turn.program in self._waiting:
            self._unsent[turn.turn] = turn.program
            self._gates.setdefault(turn.program, deque()).append(turn)
            return ()
        return self._answer(self._begin(now, turn))

    def _begin(self, now: float, turn: TurnFacts) -> Iterator[Action]:
        known = self.programs.get(turn.program)
        program = known if known is not None else self._add(turn.program)
        before = None
        if known is not None:
            before = _Snapshot(program.status, program.tokens, program.step, program.acting_since)
        program.step += 1
        program.epoch += 1
        program.status = "reasoning"
        program.acting_since = 0.0
        if turn.prompt_tokens > 0:
            program.tokens = turn.prompt_tokens
        self._recount(program)
        waiting = _Waiting(turn, program, before, now)
        if not program.paused:
            if self._place(program, is_new=before is None):
                yield from self._send(now, waiting, was_paused=False)
                return
            self._pause(program)
        self._waiting[turn.program] = waiting
        self._unsent[turn.turn] = turn.program

    def _place(self, program: Program, *, is_new: bool) -> bool:
        """Whether the turn goes now, at ``program.seat`` or without a place (§4.5, 3 to 7)."""
        moves = program.seat is not None and program.seat not in self.live
        if program.seat is not None and not moves:
            return True
        if moves:
            program.seat = None
            self._recount(program)
        if not self.capacity:
            return True
        if not (is_new and self.paused):
            need = program.tokens + self.buffer
            fits = [seat for seat, size in self.capacity.items() if size - self.seat_used(seat) >= need]
            if fits:
                program.seat = min(fits, key=self.seat_used)
                self._recount(program)
                return True
        if is_new:
            return False
        self.counters.unpinned_turns += 1
        return True

    def _send(self, now: float, waiting: _Waiting, *, was_paused: bool) -> Iterator[Action]:
        turn, program = waiting.turn, waiting.program
        self._unsent.pop(turn.turn, None)
        seat = program.seat if program.seat in self.live else self._any_seat(turn.turn)
        if seat is None:
            yield Refusal(turn.turn, "no_seat")
        else:
            self._open[turn.turn] = (program, program.epoch, seat, turn.prompt_tokens)
            yield admit(turn.turn, seat, now, self.priority_jump(now, program, was_paused=was_paused))
        yield from self._next(now, turn.program)

    def _next(self, now: float, name: str) -> Iterator[Action]:
        """The gate is free: the next turn of the program begins."""
        gate = self._gates.get(name)
        if gate is None:
            return
        turn = gate.popleft()
        if not gate:
            del self._gates[name]
        yield from self._begin(now, turn)

    def priority_jump(self, now: float, program: Program, *, was_paused: bool) -> float:
        """Seconds of head start; boost and penalty add up (§4.9.2)."""
        jump = self.parameters.resume_priority_boost if was_paused else 0.0
        return jump + (self.parameters.soft_demote_priority_jump if now < program.soft_demoted_until else 0.0)

    def first_token(self, now: float, turn: int) -> Actions:
        """The engine that answered becomes the place of a program that was sent without one."""
        program, epoch, seat, _ = self._open.get(turn, (None, 0, 0, 0))
        if program is not None and program.seat is None and not program.paused and program.epoch == epoch:
            program.seat = seat
            self._recount(program)
        return ()

    def turn_finished(self, now: float, usage: TurnUsage) -> Actions:
        program, _, _, _ = self._open.pop(usage.turn, (None, 0, 0, 0))
        if program is None:
            return ()
        self._end(now, program, usage.prompt_tokens + usage.output_tokens)
        return self._answer(self.program_closed(now, usage.program) if usage.final else ())

    def _end(self, now: float, program: Program, tokens: int) -> None:
        if self.programs.get(program.name) is not program:
            return
        program.tokens = tokens
        program.status = "acting"
        program.acting_since = now
        if program.marked:
            program.marked = False
            if not program.paused:
                self._pause(program)
                return
        self._recount(program)

    def turn_aborted(self, now: float, turn: int) -> Actions:
        program, _, _, prompt = self._open.pop(turn, (None, 0, 0, 0))
        if program is not None:
            self._end(now, program, prompt)
            return self._answer(())
        name = self._unsent.pop(turn, None)
        if name is None:
            return ()
        waiting = self._waiting[name]
        if waiting.turn.turn == turn:
            del self._waiting[name]
            self._roll_back(waiting)
            return self._answer(self._next(now, name))
        gate = deque(queued for queued in self._gates.pop(name) if queued.turn != turn)
        if gate:
            self._gates[name] = gate
        self.counters.cancelled += 1
        return ()

    def _roll_back(self, waiting: _Waiting) -> None:
        self.counters.cancelled += 1
        program, before = waiting.program, waiting.before
        if before is None:
            self._drop(program)
            return
        program.status, program.tokens = before.status, before.tokens
        program.step, program.acting_since = before.step, before.acting_since
        self._recount(program)

    def program_closed(self, now: float, program: str) -> Actions:
        """Its waiting turn is sent all the same, without a place and without a boost; a turn behind it begins anew."""
        known = self.programs.get(program)
        if known is None:
            return ()
        self._drop(known)
        known.paused, known.seat, known.soft_demoted_until = False, None, 0.0
        waiting = self._waiting.pop(program, None)
        return self._answer(() if waiting is None else self._send(now, waiting, was_paused=False))

    # The tick (§4.6)

    def tick(self, now: float) -> Actions:
        actions: list[Action] = []
        if self.capacity:
            self._soft_demote(now)
            actions.extend(self._greedy_resume(now))
            for seat, size in self.capacity.items():
                if self.seat_used(seat) > size * self.parameters.pause_threshold:
                    self._pause_until(seat, size * self.parameters.pause_target)
        actions.extend(self._force(now))
        return self._answer(actions)

    def _soft_demote(self, now: float) -> None:
        given = self.parameters
        for seat, size in self.capacity.items():
            used = self.seat_used(seat)
            if size * given.soft_demote_threshold <= used < size * given.pause_threshold:
                for program in self.members(seat):
                    if not program.marked:
                        program.soft_demoted_until = now + 1.5 * given.scheduler_interval_seconds

    def _greedy_resume(self, now: float) -> Iterator[Action]:
        if not self.paused:
            return
        ceiling = self.parameters.pause_threshold - self.parameters.resume_hysteresis
        rooms = {seat: int(size * ceiling) - self.seat_used(seat) for seat, size in self.capacity.items()}
        candidates = sorted(self.paused.values(), key=lambda program: (resume_group(program), program.tokens))
        for program, seat in choose_resumes(rooms, candidates, self.buffer):
            yield from self._release(now, program, seat)

    def _release(self, now: float, program: Program, seat: int | None) -> Iterator[Action]:
        self._resume(program, seat)
        waiting = self._waiting.pop(program.name, None)
        if waiting is not None:
            yield from self._send(now, waiting, was_paused=True)

    def _force(self, now: float) -> Iterator[Action]:
        """Whoever waited too long goes where most is left, idle programs counted by half-lives."""
        late = [each for each in self._waiting.values() if now - each.since >= self.parameters.resume_timeout_seconds]
        for waiting in late:
            left = {seat: size - self._decayed_used(now, seat) for seat, size in self.capacity.items()}
            self.counters.forced_resumes += 1
            yield from self._release(now, waiting.program, max(left, key=lambda seat: left[seat], default=None))

    def _decayed_used(self, now: float, seat: int) -> int:
        used = 0
        for program in self.members(seat):
            tokens = program.tokens
            if program.status == "acting":
                idle = now - program.acting_since
                tokens = int(tokens * 2.0 ** -(idle / max(1e-3, self.parameters.acting_decay_tau_seconds)))
            used += tokens + self.buffer
        return used
