"""Every policy of the registry under random histories: what it may answer, and that nothing is left in the end.

A few histories each; the many are in `tests/histories`. Arrivals, parallel turns, finishes with and without counts,
aborts, closing, repeated and foreign facts, seats that go, come back and change their size; see `any_policy`.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import seed, settings
from hypothesis.stateful import run_state_machine_as_test

from services.admission.policies.registry import POLICIES, make_policy
from services.admission.scheduling.interface import (
    Action,
    Admission,
    Fleet,
    ProgramFacts,
    TurnFacts,
    TurnUsage,
    WorkerFacts,
)
from tests.unit.admission.policies.any_policy import VARIANTS, machine
from tests.unit.admission.scheduling.machine import Tally


@pytest.mark.long
@pytest.mark.parametrize(("name", "parameters"), VARIANTS, ids=lambda value: str(value))
def test_a_policy_survives_any_history(name: str, parameters: Mapping[str, object]) -> None:
    """It admits only turns that are ready, once, to seats that are there; and answers the same when told the same."""
    tally = Tally()
    few = settings(max_examples=4, stateful_step_count=6, deadline=None, database=None)
    run_state_machine_as_test(seed(1)(machine(name, parameters, tally)), settings=few)
    assert tally.histories >= 4


def usage(turn: int, program: str) -> TurnUsage:
    return TurnUsage(turn, program, 0, 100, 50, 10, "bash", final=True)


@pytest.mark.parametrize(("name", "parameters"), VARIANTS, ids=lambda value: str(value))
def test_the_last_turn_told_twice_closes_nobody_anew(name: str, parameters: Mapping[str, object]) -> None:
    """A name comes back after its program has ended; then the end of the first one is told again."""
    with_noise, without = make_policy(name, parameters), make_policy(name, parameters)
    for policy in (with_noise, without):
        policy.begin(Fleet((WorkerFacts(1000, 16),), lambda turn: None))
        policy.program_arrives(0.0, ProgramFacts("a", "", None))
        policy.turn_ready(0.0, TurnFacts(1, "a", 0, 100))
        policy.turn_finished(1.0, usage(1, "a"))
        policy.program_arrives(2.0, ProgramFacts("a", "", None))
        policy.turn_ready(2.0, TurnFacts(2, "a", 0, 900))
    assert list(with_noise.turn_finished(3.0, usage(1, "a"))) == []
    for policy in (with_noise, without):
        policy.program_arrives(4.0, ProgramFacts("b", "", None))
    turn = TurnFacts(3, "b", 0, 900)
    assert list(with_noise.turn_ready(4.0, turn)) == list(without.turn_ready(4.0, turn))


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_turn_that_is_announced_again_while_it_waits_is_let_once(name: str) -> None:
    policy = make_policy(name, {"initial": 1.0} if name == "concur" else {})
    policy.begin(Fleet((WorkerFacts(1000, 16),), lambda turn: None))
    said: list[Action] = []
    for turn in (TurnFacts(1, "a", 0, 600), TurnFacts(2, "b", 0, 600)):
        policy.program_arrives(0.0, ProgramFacts(turn.program, "", None))
        said += policy.turn_ready(0.0, turn)
        if not any(isinstance(action, Admission) and action.turn == turn.turn for action in said):
            said += policy.turn_ready(0.0, turn)
    said += policy.turn_finished(1.0, usage(1, "a"))
    for now in range(2, 20):
        said += policy.tick(float(now))
    assert sorted(action.turn for action in said if isinstance(action, Admission)) == [1, 2]
