"""Every policy of the registry under random histories: what it may answer, and that nothing is left in the end.

Arrivals, parallel turns, sub-agents, finishes with and without usage, aborts, closing, lost and repeated messages,
seats that go, come back and change their size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.admission.policies.registry import POLICIES, make_policy
from services.admission.scheduling.interface import (
    Actions,
    Admission,
    Fleet,
    Pin,
    Policy,
    ProgramFacts,
    Refusal,
    TurnFacts,
    TurnUsage,
    WorkerFacts,
)

SIZES = (4_000, 10_000, 0)
NAMES = 6

Event = tuple[int, int, int]
"""What happens, to whom, and a number for it."""

VARIANTS: list[tuple[str, dict[str, object]]] = [
    *((name, {}) for name in sorted(POLICIES)),
    ("thunderagent", {"form": "paper"}),
    ("infercept", {"remaining": "elapsed", "order": "request"}),
    ("concur", {"initial": 1.0}),
]


@dataclass
class World:
    """What a router would know, beside the policy."""

    policy: Policy
    now: float = 0.0
    turns: int = 0
    seats: dict[int, WorkerFacts] = field(default_factory=dict)
    ready: dict[int, str] = field(default_factory=dict)
    running: dict[int, tuple[str, int]] = field(default_factory=dict)
    pinned: dict[str, float] = field(default_factory=dict)

    def obey(self, actions: Actions) -> None:
        for action in actions:
            if isinstance(action, Admission):
                assert action.seat in self.seats
                self.running[action.turn] = (self.ready.pop(action.turn), action.seat)
            elif isinstance(action, Refusal):
                del self.ready[action.turn]
            elif isinstance(action, Pin):
                assert action.seat in self.seats
                assert action.until > self.now

    def usage(self, turn: int, program: str, seat: int, number: int) -> TurnUsage:
        tool = None if number % 7 == 0 else f"tool {number % 3}"
        cached = None if number % 5 == 0 else number * 13 % 900
        return TurnUsage(turn, program, seat, 1 + number * 37 % 3000, cached, number % 50, tool, number % 4 == 0)

    def happen(self, event: Event) -> None:
        kind, whom, number = event
        self.now += number % 11
        policy, name = self.policy, f"program {whom % NAMES}"
        if kind <= 3:
            self.turns += 1
            parent = f"program {number % NAMES}" if number % 3 == 0 else None
            policy.program_arrives(self.now, ProgramFacts(name, "", parent))
            self.ready[self.turns] = name
            self.obey(policy.turn_ready(self.now, TurnFacts(self.turns, name, 0, 1 + number * 61 % 5000)))
        elif kind == 4 and self.running:
            turn = sorted(self.running)[whom % len(self.running)]
            self.obey(policy.first_token(self.now, turn))
        elif kind in (5, 6, 7) and self.running:
            turn = sorted(self.running)[whom % len(self.running)]
            program, seat = self.running.pop(turn)
            usage = self.usage(turn, program, seat, number)
            self.obey(policy.turn_finished(self.now, usage))
            if number % 6 == 0:
                self.obey(policy.turn_finished(self.now, usage))
        elif kind == 8:
            every = sorted([*self.ready, *self.running, self.turns + 1])
            turn = every[whom % len(every)]
            self.ready.pop(turn, None)
            self.running.pop(turn, None)
            self.obey(policy.turn_aborted(self.now, turn))
        elif kind == 9:
            self.obey(policy.program_closed(self.now, name))
        elif kind == 10:
            self.obey(policy.tick(self.now))
        elif kind == 11:
            self.seat_changes(whom % 3, number)

    def seat_changes(self, seat: int, number: int) -> None:
        if seat in self.seats and number % 2:
            del self.seats[seat]
            lost = [turn for turn, (_, where) in self.running.items() if where == seat]
            self.obey(self.policy.worker_changed(self.now, seat, None))
            for turn in lost:
                del self.running[turn]
                self.obey(self.policy.turn_aborted(self.now, turn))
        else:
            self.seats[seat] = WorkerFacts(SIZES[number % 2], 16)
            self.obey(self.policy.worker_changed(self.now, seat, self.seats[seat]))

    def end(self) -> None:
        """Everybody goes; ticks go on for longer than any deadline."""
        for _ in range(3):
            for turn, (program, seat) in list(self.running.items()):
                self.running.pop(turn, None)
                self.obey(self.policy.turn_finished(self.now, TurnUsage(turn, program, seat, 100, 0, 1, None, True)))
            self.now += 2000.0
            self.obey(self.policy.tick(self.now))
        for number in range(NAMES):
            self.obey(self.policy.program_closed(self.now, f"program {number}"))
        for turn in list(self.ready):
            del self.ready[turn]
            self.obey(self.policy.turn_aborted(self.now, turn))


EVENTS = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 30), st.integers(0, 200)), min_size=10, max_size=60)


@pytest.mark.parametrize(("name", "parameters"), VARIANTS, ids=lambda value: str(value))
@settings(max_examples=15, deadline=None)
@given(EVENTS)
def test_a_policy_survives_any_history(name: str, parameters: dict[str, object], events: list[Event]) -> None:
    """It admits only turns that are ready, once, to seats that are there; and answers the same when told the same."""
    worlds = []
    for _ in range(2):
        world = World(make_policy(name, parameters))
        world.seats = {0: WorkerFacts(SIZES[0], 16), 1: WorkerFacts(SIZES[1], 16)}
        world.policy.begin(Fleet(tuple(world.seats.values()), lambda turn: None))
        for event in events:
            world.happen(event)
        worlds.append((dict(world.ready), dict(world.running)))
        world.end()
        for attribute in ("_programs", "programs", "paused", "_waiting", "_gates", "_unsent", "_turns", "_open"):
            table = getattr(world.policy, attribute, None)
            assert not table or set(table) <= {0, 1, 2}, attribute
    assert worlds[0] == worlds[1]
