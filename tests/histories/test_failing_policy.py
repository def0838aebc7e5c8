"""Random histories of the admission core under a policy that raises at random, before and after it has done what it was
told, and answers with what is no answer: every ask gets its final answer, lines keep their bound, nothing is left."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis.stateful import invariant

from schemas.admit import AdmitRequest
from services.admission.deciding_scheduled import ScheduledDeciding
from services.admission.policies.commit import Commit, CommitParameters
from services.admission.policies.registry import POLICIES, Entry
from services.admission.scheduling.interface import Admission
from tests.histories.conftest import record
from tests.histories.test_policies import SEED
from tests.unit.admission.build import Driven, ask, driven
from tests.unit.admission.scheduling.machine import Tally
from tests.unit.admission.test_books import Books, Owed
from tests.unit.admission.test_books_scheduled import SETTINGS, SIZES, run

HISTORIES = 40
CALLS = (
    "begin", "worker_changed", "program_arrives", "turn_ready", "turn_runs", "first_token", "turn_finished",
    "turn_aborted", "program_closed", "tick", "place", "lease_advice", "tool_ended",
)  # fmt: skip


def failing(share: float, chance: random.Random) -> type[Commit]:
    """`Commit` of which so many calls raise at once, as many when all is done, and some answer with nonsense."""

    def wrapped(name: str) -> Any:
        original = getattr(Commit, name)

        def call(self: Commit, *arguments: Any) -> Any:
            drawn = chance.random()
            if drawn < share:
                raise ZeroDivisionError(name)
            answer = original(self, *arguments)
            if drawn < 2 * share:
                raise KeyError(name)
            return [*answer, Admission(1, 99), name] if drawn < 2.3 * share and isinstance(answer, list) else answer

        return call

    return type("Failing", (Commit,), {name: wrapped(name) for name in CALLS})


class FailingBooks(Books):
    """`Books` under the policy ``failing``."""

    chance: random.Random
    histories, events, failures = 0, 0, 0

    def fresh(self) -> Driven:
        self.chance.seed(SEED)
        return driven(**{**SETTINGS, "policy": "failing"})

    def message(self, owed: Owed, excluded: tuple[str, ...] = ()) -> AdmitRequest:
        return ask(
            owed.request_id,
            owed.session,
            tokens=SIZES[int(owed.request_id[1:]) % len(SIZES)],
            attempt=owed.attempt,
            ingress=owed.ingress,
            ingress_epoch=owed.epoch,
            excluded=excluded,
        )

    @invariant()
    def turns_of_a_session_are_granted_in_the_order_they_asked(self) -> None:
        """Not here: a retry waits for no later turn."""

    @invariant()
    def lines_have_their_bound(self) -> None:
        assert self.core.core.deciding.held <= SETTINGS["hold_queue_limit"]

    def teardown(self) -> None:
        """All is over: nothing is left in any table."""
        super().teardown()
        self.do(self.core.wait(SETTINGS["session_idle_s"] + 2, ingresses=sorted(self.epochs)))
        scheduled, deciding = self.core.core.state.scheduled, self.core.core.deciding
        assert scheduled is not None
        assert isinstance(deciding, ScheduledDeciding)
        assert not scheduled.turns
        assert (deciding.held, deciding.open_questions, len(deciding)) == (0, 0, 0)
        assert [line.turns("m") for line in (deciding.holds.counts, deciding.with_policy.counts)] == [0, 0]
        type(self).histories += 1
        type(self).events += len(self.core.said)
        type(self).failures += sum(scheduled.failed.values())


@pytest.fixture
def chance(share: float, monkeypatch: pytest.MonkeyPatch) -> random.Random:
    chance = random.Random(SEED)
    policy = failing(share, chance)
    made = Entry(CommitParameters, lambda parameters, given: policy(parameters, given.learned, given.choose))
    monkeypatch.setitem(POLICIES, "failing", made)
    return chance


@pytest.mark.timeout(300)
@pytest.mark.parametrize("share", [0.01, 0.08])
def test_a_policy_that_fails_again_and_again(
    share: float, chance: random.Random, request: pytest.FixtureRequest
) -> None:
    print(f"HISTORIES_SEED={SEED}")

    class Machine(FailingBooks):
        """Counts for itself."""

        histories, events, failures = 0, 0, 0

    Machine.chance = chance
    run(Machine, HISTORIES, 30, 2_000_000 * SEED + round(100 * share))  # type: ignore[arg-type]
    record(request, "the admission core, a policy that fails", Tally(Machine.histories, Machine.events))
    assert Machine.histories >= HISTORIES
    assert Machine.failures >= HISTORIES
