"""Placement by cost is one thing, wherever it is done: the service's ``kv`` and the policy ``kv`` choose the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.request import RequestFirstToken, Usage
from services.admission.accounts import SeatAccounts
from services.admission.events import FirstToken, WorkerStated
from services.admission.policies.kv import Kv
from services.admission.scheduling.interface import Admission, Fleet, ProgramFacts, TurnFacts, TurnUsage, WorkerFacts
from services.admission.scoring import cheapest, first, held_blocks
from tests.unit.admission.build import MODEL, START, Driven, ask, driven, end, granted, identity, worker_state

SEATS = ("a", "b", "c")

Step = tuple[int, int, int]
"""What happens, to which session, and a number for it."""


class Both:
    """The same history in the service and in the policy."""

    def __init__(self) -> None:
        self.service: Driven = driven()
        self.service.core.state.choose = first
        for name in SEATS:
            self.service.reach[name] = 0
            self.service.do(WorkerStated(worker_state(name)))
        self.policy = Kv()
        self.policy.begin(Fleet(tuple(WorkerFacts(16_000, 16) for _ in SEATS), lambda turn: self.reach))
        self.reach: list[int] | None = [0, 0, 0]
        self.turns: dict[int, tuple[str, int, int]] = {}
        self.count = 0
        self.chosen: list[tuple[int, int]] = []
        self.ending: set[str] = set()

    def turn(self, session: int, number: int) -> None:
        self.count += 1
        turn, name, tokens = self.count, f"s{session}", 16 + number * 37 % 4_000
        parent = "s0" if session > 2 else None
        self.reach = [number % 5 * tokens // 100, number % 7 * tokens // 130, number % 3 * tokens // 60]
        self.service.reach = dict(zip(SEATS, self.reach, strict=True))
        if number % 9 == 0:
            self.ending.add(name)
        who = identity(name, parent=parent, final=name in self.ending or None)
        where = granted(self.service.ask(ask(f"r{turn}", who, tokens=tokens))).grant.worker
        now = self.service.now
        self.policy.program_arrives(now, ProgramFacts(name, "", parent))
        (action,) = self.policy.turn_ready(now, TurnFacts(turn, name, 0, tokens))
        assert isinstance(action, Admission)
        self.turns[turn] = name, tokens, action.seat
        self.chosen.append((SEATS.index(where), action.seat))

    def first_token(self, turn: int) -> None:
        fact = RequestFirstToken(
            source="ingress-1", epoch=1, seq=0, at_ms=0, request_id=f"r{turn}", model=MODEL, ttft_ms=1.0
        )
        self.service.do(FirstToken(fact))
        self.policy.first_token(self.service.now, turn)

    def finish(self, turn: int, number: int) -> None:
        name, tokens, seat = self.turns.pop(turn)
        usage = Usage(input_tokens=tokens, output_tokens=number % 50, cached_tokens=0)
        self.service.end(end(f"r{turn}", name, usage=usage))
        is_last = name in self.ending and all(other != name for other, _, _ in self.turns.values())
        if is_last:
            self.ending.remove(name)
        facts = TurnUsage(turn, name, seat, tokens, 0, number % 50, None, is_last)
        self.policy.turn_finished(self.service.now, facts)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 1_000)), max_size=40))
def test_the_service_and_the_policy_place_alike(steps: list[Step]) -> None:
    """Turns, first tokens and ends in any order, sub-agents, caches that say anything: every choice is the same."""
    both = Both()
    for kind, session, number in steps:
        both.service.now += number % 13 * 0.25
        if kind <= 1 or not both.turns:
            both.turn(session, number)
        else:
            turn = sorted(both.turns)[number % len(both.turns)]
            both.first_token(turn) if kind == 2 else both.finish(turn, number)
    assert all(one == other for one, other in both.chosen), both.chosen
    ours = {seat: account for seat, account in both.policy._accounts.by_seat.items() if account.requests}
    service = {SEATS.index(seat[0]): each for seat, each in both.service.core.state.ledger.accounts() if each.requests}
    assert {seat: (each.requests, each.prefill_tokens, each.blocks) for seat, each in ours.items()} == {
        seat: (each.requests, each.prefill_tokens, each.blocks) for seat, each in service.items()
    }
    assert both.service.now >= START


def test_a_preferred_seat_may_cost_more_by_what_it_holds() -> None:
    costs = [(10.0, 0), (12.0, 1), (10.0, 2)]
    assert cheapest(costs, [costs[1]], lambda _: 2.0, first) == 1
    assert cheapest(costs, [costs[1]], lambda _: 1.9, first) == 0
    assert cheapest(costs, (), lambda _: 0.0, lambda count: count - 1) == 2


@pytest.mark.parametrize(
    ("blind", "trusted", "affinity", "expected"),
    [(True, True, 7, 7), (True, True, 0, 20), (False, True, 7, 7), (False, False, 7, 3), (False, True, 1, 3)],
)
def test_what_a_preferred_seat_holds(blind: bool, trusted: bool, affinity: int, expected: int) -> None:
    assert held_blocks(3, affinity, blind=blind, trusted=trusted, request_blocks=20) == expected


def test_a_mistake_in_an_account_shows() -> None:
    accounts: SeatAccounts[int] = SeatAccounts()
    accounts.add(1, 0, 4)
    accounts.remove(1, 0, 5)
    assert accounts.of(1).blocks == -1
    with pytest.raises(KeyError):
        accounts.remove(2, 0, 1)
    assert accounts.of(2).requests == 0
