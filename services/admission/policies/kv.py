"""Policy ``kv``: the seat with the least cost of `services.admission.cost`, at once; it holds nothing back.

It books per seat what admission books: requests, prompt tokens until the first token, blocks until the end. As in
`services.admission.placement`, a session's previous seat (a sub-agent's first turn: its parent's) is taken while it
costs at most ``stickiness`` (``child_stickiness``) times the blocks that it holds more than the best. Which of equal
ones is chosen, whoever makes the policy decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from schemas.index import TierBlocks
from services.admission.cost import CostWeights, Load, Pricing, Prompt, predicted_cached_tokens
from services.admission.placement import EQUAL
from services.admission.scheduling.interface import (
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


@dataclass(slots=True)
class _Booked:
    """What a turn that runs takes of its seat: prompt tokens not computed yet, blocks."""

    program: str
    seat: int
    prefill: int
    blocks: int


def first(count: int) -> int:
    """The first of ``count`` equal ones."""
    del count
    return 0


class Kv(Base):
    """Bookings of turns that run; preferences of programs that did not end. ``choose`` draws below n, among equals."""

    def __init__(
        self,
        weights: CostWeights | None = None,
        *,
        stickiness: float = 3.0,
        child_stickiness: float = 0.25,
        choose: Callable[[int], int] = first,
    ) -> None:
        self._weights = weights or CostWeights()
        self._stickiness = stickiness
        self._child_stickiness = child_stickiness
        self._choose_equal = choose

    def begin(self, fleet: Fleet) -> None:
        super().begin(fleet)
        self._seats = dict(enumerate(fleet.workers))
        self._loads = {seat: Load() for seat in self._seats}
        self._booked: dict[int, _Booked] = {}
        self._preferred: dict[str, tuple[int, float]] = {}

    def worker_changed(self, now: float, seat: int, facts: WorkerFacts | None) -> Actions:
        if facts is not None:
            self._seats[seat] = facts
            self._loads.setdefault(seat, Load())
        elif self._seats.pop(seat, None) is not None:
            del self._loads[seat]
            self._booked = {turn: booked for turn, booked in self._booked.items() if booked.seat != seat}
            self._preferred = {name: where for name, where in self._preferred.items() if where[0] != seat}
        return ()

    def program_arrives(self, now: float, program: ProgramFacts) -> None:
        parent = self._preferred.get(program.parent) if program.parent is not None else None
        if parent is not None and program.name not in self._preferred:
            self._preferred[program.name] = (parent[0], self._child_stickiness)

    def turn_ready(self, now: float, turn: TurnFacts) -> Actions:
        if not self._seats:
            return (Refusal(turn.turn, "no_seat"),)
        blocks = self.fleet.residency(turn.turn) or ()
        reach = {seat: blocks[seat] if seat < len(blocks) else 0 for seat in self._seats}
        seat = self._choose(turn, reach)
        self._book(turn, seat, reach[seat])
        return (Admission(turn.turn, seat),)

    def turn_runs(self, now: float, turn: TurnFacts, seat: int) -> Actions:
        if seat in self._seats and turn.turn not in self._booked:
            self._book(turn, seat, 0)
        return ()

    def _book(self, turn: TurnFacts, seat: int, reach: int) -> None:
        size = self._seats[seat].block_size
        cached = predicted_cached_tokens(reach, turn.prompt_tokens, size)
        booked = _Booked(turn.program, seat, turn.prompt_tokens - cached, turn.prompt_tokens // size)
        self._booked[turn.turn] = booked
        self._add(seat, 1, booked.prefill, booked.blocks)
        self._preferred[turn.program] = (seat, self._stickiness)

    def _choose(self, turn: TurnFacts, reach: Mapping[int, int]) -> int:
        costs = placement_costs(self._weights, turn.prompt_tokens, self._seats, self._loads, reach)
        best = min(costs.values()) + EQUAL
        preferred = self._preferred.get(turn.program)
        if preferred is not None and costs[preferred[0]] <= best + preferred[1] * reach[preferred[0]]:
            return preferred[0]
        tied: Sequence[int] = [seat for seat, value in costs.items() if value <= best]
        return tied[0] if len(tied) == 1 else tied[self._choose_equal(len(tied))]

    def first_token(self, now: float, turn: int) -> Actions:
        booked = self._booked.get(turn)
        if booked is not None:
            self._add(booked.seat, 0, -booked.prefill, 0)
            booked.prefill = 0
        return ()

    def turn_finished(self, now: float, usage: TurnUsage) -> Actions:
        if usage.final:
            self._preferred.pop(usage.program, None)
        return self.turn_aborted(now, usage.turn)

    def turn_aborted(self, now: float, turn: int) -> Actions:
        booked = self._booked.pop(turn, None)
        if booked is not None:
            self._add(booked.seat, -1, -booked.prefill, -booked.blocks)
        return ()

    def program_closed(self, now: float, program: str) -> Actions:
        self._preferred.pop(program, None)
        return ()

    def _add(self, seat: int, requests: int, prefill: int, blocks: int) -> None:
        load = self._loads[seat]
        self._loads[seat] = Load(load.requests + requests, load.prefill_tokens + prefill, load.blocks + blocks)


def placement_costs(
    weights: CostWeights,
    prompt_tokens: int,
    seats: Mapping[int, WorkerFacts],
    loads: Mapping[int, Load],
    reach: Mapping[int, int],
) -> dict[int, float]:
    """The cost in blocks of a prompt on each seat, which holds ``reach`` blocks of it as a prefix."""
    least = min(loads[seat].prefill_tokens for seat in seats)
    pricing = {
        size: Pricing(weights, Prompt(prompt_tokens, size), least)
        for size in {facts.block_size for facts in seats.values()}
    }
    return {
        seat: pricing[facts.block_size].total(loads[seat], TierBlocks(device=reach[seat]), 0, 0)
        for seat, facts in seats.items()
    }
