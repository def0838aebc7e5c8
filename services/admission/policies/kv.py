"""Policy ``kv``: the seat with the least cost of `services.admission.cost`, at once; it holds nothing back.

For the laboratory, and for whoever wants it behind the scheduling interface. The service's own ``kv`` is
`services.admission.placement`, which knows more of a worker; both use the same rule (`services.admission.scoring`) and
the same accounting (`services.admission.accounts`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from schemas.index import TierBlocks
from services.admission.accounts import SeatAccounts
from services.admission.cost import CostWeights, Load, booked_prefill_tokens
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
from services.admission.scoring import EVENT_LAG_S, Choose, cheapest, first, held_blocks, placement_costs


@dataclass(slots=True)
class _Booked:
    """What a turn that runs takes of its seat: prompt tokens not computed yet, blocks."""

    program: str
    seat: int
    prefill: int
    blocks: int


@dataclass(slots=True)
class _Previous:
    """Where a program ran last, by how much that is preferred, what it left there (tokens), and when."""

    seat: int
    margin: float
    context: int = 0
    touched: float = float("-inf")


class Kv(Base):
    """Bookings of turns that run; preferences of programs that did not end. ``choose`` draws below n, among equals."""

    def __init__(
        self,
        weights: CostWeights | None = None,
        *,
        stickiness: float = 3.0,
        child_stickiness: float = 0.25,
        choose: Choose = first,
    ) -> None:
        self._weights = weights or CostWeights()
        self._stickiness = stickiness
        self._child_stickiness = child_stickiness
        self._draw = choose

    def begin(self, fleet: Fleet) -> None:
        super().begin(fleet)
        self._seats = dict(enumerate(fleet.workers))
        self._accounts: SeatAccounts[int] = SeatAccounts()
        self._booked: dict[int, _Booked] = {}
        self._previous: dict[str, _Previous] = {}

    def worker_changed(self, now: float, seat: int, facts: WorkerFacts | None) -> Actions:
        if facts is not None:
            self._seats[seat] = facts
        elif self._seats.pop(seat, None) is not None:
            self._booked = {turn: booked for turn, booked in self._booked.items() if booked.seat != seat}
            self._previous = {name: known for name, known in self._previous.items() if known.seat != seat}
            self._accounts.by_seat.pop(seat, None)
        return ()

    def program_arrives(self, now: float, program: ProgramFacts) -> None:
        parent = self._previous.get(program.parent) if program.parent is not None else None
        if parent is not None and program.name not in self._previous:
            self._previous[program.name] = _Previous(parent.seat, self._child_stickiness)

    def turn_ready(self, now: float, turn: TurnFacts) -> Actions:
        if not self._seats:
            return (Refusal(turn.turn, "no_seat"),)
        resident, loadable = self.fleet.residency(turn.turn), self.fleet.loadable(turn.turn)
        seat = self._choose(now, turn, resident, loadable)
        self._book(now, turn, seat, _reach(resident, seat), _of(loadable, seat))
        return (Admission(turn.turn, seat),)

    def turn_runs(self, now: float, turn: TurnFacts, seat: int) -> Actions:
        if seat in self._seats and turn.turn not in self._booked:
            self._book(now, turn, seat, 0)
        return ()

    def _book(self, now: float, turn: TurnFacts, seat: int, reach: int, loadable: float = 0.0) -> None:
        size, weights = self._seats[seat].block_size, self._weights
        credit = weights.shared_cache_multiplier * loadable
        blocks = TierBlocks(device=reach)
        prefill = booked_prefill_tokens(weights, blocks, turn.prompt_tokens, size, ceil(loadable), credit)
        booked = self._booked[turn.turn] = _Booked(turn.program, seat, prefill, turn.prompt_tokens // size)
        self._accounts.add(seat, booked.prefill, booked.blocks)
        previous = self._previous.get(turn.program)
        context = previous.context if previous is not None else 0
        self._previous[turn.program] = _Previous(seat, self._stickiness, context, now)

    def _choose(
        self, now: float, turn: TurnFacts, resident: Sequence[int] | None, loadable: Sequence[float] | None
    ) -> int:
        previous = self._previous.get(turn.program)
        reach = {seat: _reach(resident, seat) for seat in self._seats}
        kept = 0
        if previous is not None:
            kept = min(previous.context, turn.prompt_tokens) // self._seats[previous.seat].block_size
        stands_in = {previous.seat: kept} if previous is not None and resident is None else {}
        costs = placement_costs(
            self._weights,
            turn.prompt_tokens,
            {seat: facts.block_size for seat, facts in self._seats.items()},
            {seat: self._load(seat) for seat in self._seats},
            reach,
            stands_in,
            {seat: _of(loadable, seat) for seat in self._seats} if loadable is not None else {},
        )
        scored = [(cost + turn.seat_bias.get(seat, 0.0), seat) for seat, cost in costs.items()]
        if previous is None:
            return cheapest(scored, (), lambda _: 0.0, self._draw)
        held = held_blocks(
            reach[previous.seat],
            kept,
            blind=resident is None,
            trusted=now - previous.touched <= EVENT_LAG_S,
            request_blocks=-(-turn.prompt_tokens // self._seats[previous.seat].block_size),
        )
        own = [each for each in scored if each[1] == previous.seat]
        return cheapest(scored, own, lambda _: previous.margin * held, self._draw)

    def _load(self, seat: int) -> Load:
        ours, facts = self._accounts.of(seat), self._seats[seat]
        foreign = facts.foreign_tokens // facts.block_size
        return Load(ours.requests, ours.prefill_tokens, ours.blocks + foreign)

    def first_token(self, now: float, turn: int) -> Actions:
        booked = self._booked.get(turn)
        if booked is not None and booked.prefill:
            self._accounts.prefilled(booked.seat, booked.prefill)
            booked.prefill = 0
        return ()

    def turn_finished(self, now: float, usage: TurnUsage) -> Actions:
        if usage.turn not in self._booked:
            return ()
        previous = self._previous.get(usage.program)
        if usage.final:
            self._previous.pop(usage.program, None)
        elif previous is not None:
            previous.context, previous.touched = usage.prompt_tokens + usage.output_tokens, now
        return self.turn_aborted(now, usage.turn)

    def turn_aborted(self, now: float, turn: int) -> Actions:
        booked = self._booked.pop(turn, None)
        if booked is not None:
            self._accounts.remove(booked.seat, booked.prefill, booked.blocks)
        return ()

    def program_closed(self, now: float, program: str) -> Actions:
        self._previous.pop(program, None)
        return ()


def _of(loadable: Sequence[float] | None, seat: int) -> float:
    return loadable[seat] if loadable is not None and seat < len(loadable) else 0.0


def _reach(resident: Sequence[int] | None, seat: int) -> int:
    return resident[seat] if resident is not None and seat < len(resident) else 0
