"""The random orders of `tests.unit.admission.test_books`, with users' policies that answer, hold, refuse, are late, or
never answer at all: whoever waits is answered, and nothing that was booked or counted is left."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from schemas.admit import AdmitRequest
from schemas.policy import AdmitAction, AdmitAnswer, LeaseAnswer, PolicyAnswer, RouteAnswer
from services.admission.effects import AskPolicy, Effect
from services.admission.events import PolicyAnswered, PolicyFailed
from services.admission.user_policies import UserPolicy
from tests.unit.admission.build import Driven, check_conserved, driven
from tests.unit.admission.test_books import HOLD_S, LIMIT, TTL_S, Books, Owed

POLICIES = (
    UserPolicy(name="first", asks=("admit",), deadline_ms=700),
    UserPolicy(name="second", asks=("admit", "route"), order=1, weight=0.5, deadline_ms=300),
)
ANSWERS: dict[str, Sequence[PolicyAnswer]] = {
    "admit": (
        AdmitAnswer(),
        AdmitAnswer(action="admit", order_bias_s=-30.0),
        AdmitAnswer(action="hold"),
        AdmitAnswer(action="hold", hold_ms=3_000),
        AdmitAnswer(action="refuse", reason="no"),
        RouteAnswer(worker="a"),
    ),
    "route": (RouteAnswer(), RouteAnswer(worker="a"), RouteAnswer(worker="b", rank=0), RouteAnswer(worker="gone")),
    "lease": (LeaseAnswer(), LeaseAnswer(keep=True, ttl_ms=4_000), LeaseAnswer(keep=False)),
}


class Advised(Books):
    """`Books` with policies of users."""

    def __init__(self) -> None:
        self.asked: list[AskPolicy] = []
        self.answered: list[AskPolicy] = []
        super().__init__()

    def fresh(self) -> Driven:
        return driven(
            policies=POLICIES,
            policy_questions=3,
            max_grants_per_rank=LIMIT,
            grant_ttl_s=TTL_S,
            hold_deadline_s=HOLD_S,
            hold_queue_limit=6,
        )

    def saw(self, effects: list[Effect]) -> None:
        super().saw(effects)
        self.asked += [each for each in effects if isinstance(each, AskPolicy)]

    @precondition(lambda self: bool(self.asked))
    @rule(data=st.data())
    def a_policy_answers(self, data: st.DataObject) -> None:
        asked = data.draw(st.sampled_from(self.asked[-6:]))
        self.asked.remove(asked)
        self.answered.append(asked)
        cause = data.draw(st.sampled_from((None, None, None, "late", "absent", "malformed", "failed")))
        if cause is not None:
            self.do(self.core.do(PolicyFailed(asked.ticket, cause)))
        else:
            self.do(self.core.do(PolicyAnswered(asked.ticket, data.draw(st.sampled_from(ANSWERS[asked.ask])))))

    @precondition(lambda self: bool(self.asked))
    @rule(action=st.sampled_from(("hold", "admit")))
    def all_are_answered(self, action: AdmitAction) -> None:
        """Every open question: the admitting ones alike, for long enough that others ask meanwhile."""
        asked, self.asked = self.asked, []
        for each in asked:
            answer = AdmitAnswer(action=action, hold_ms=3_000) if each.ask == "admit" else ANSWERS[each.ask][0]
            self.do(self.core.do(PolicyAnswered(each.ticket, answer)))

    @precondition(lambda self: bool(self.answered))
    @rule(data=st.data())
    def a_policy_answers_twice(self, data: st.DataObject) -> None:
        asked = data.draw(st.sampled_from(self.answered))
        before = dict(self.core.core.state.counters.policies)
        self.do(self.core.do(PolicyAnswered(asked.ticket, ANSWERS[asked.ask][-1])))
        assert dict(self.core.core.state.counters.policies) == before

    @invariant()
    def what_waits_and_runs_is_counted(self) -> None:
        deciding, ledger = self.core.core.deciding, self.core.core.state.ledger
        assert deciding.holds.counts.turns("m") == len(deciding.holds)
        assert ledger.counts.turns("m") == len(ledger)
        assert ledger.counts.of_tenant("m", "default") == len(ledger)

    @invariant()
    def no_policy_is_asked_more_than_it_may_be(self) -> None:
        assert self.core.core.deciding.users.consulting.open_questions <= 3 * len(POLICIES) + 3

    def teardown(self) -> None:
        """Nobody answers any more."""
        super().teardown()
        assert self.core.core.deciding.users.consulting.open_questions == 0


SIZES = (1_000, 6_000, 9_000, 12_000)
"""Prompts of 1 to 12 of the 16 thousand tokens that a worker holds."""


class ScheduledAdvised(Advised):
    """The same under ``commit``, which leases, with a word on that too."""

    def __init__(self) -> None:
        super().__init__()
        self.retried: set[int] = set()

    def message(self, owed: Owed, excluded: tuple[str, ...] = ()) -> AdmitRequest:
        if excluded:
            self.retried.add(owed.asked)
        sized = super().message(owed, excluded)
        return msgspec.structs.replace(sized, input_tokens=SIZES[int(owed.request_id[1:]) % len(SIZES)])

    @invariant()
    def what_is_booked_is_conserved(self) -> None:
        check_conserved(self.core)

    @invariant()
    def turns_of_a_session_are_granted_in_the_order_they_asked(self) -> None:
        """A retry has waited its turn once, and waits for no later turn."""
        for order in self.grant_order.values():
            first = [asked for asked in order if asked not in self.retried]
            assert first == sorted(first)

    def fresh(self) -> Driven:
        return driven(
            policy="commit",
            policy_parameters={"output_tokens": 100, "hold_limit_s": 5.0, "idle_expiry_s": 10.0},
            policies=(*POLICIES, UserPolicy(name="third", asks=("lease",), deadline_ms=900)),
            policy_questions=3,
            max_grants_per_rank=LIMIT,
            grant_ttl_s=TTL_S,
            hold_deadline_s=HOLD_S,
            hold_queue_limit=6,
            session_idle_s=15.0,
        )


SETTINGS = settings(stateful_step_count=40, suppress_health_check=list(HealthCheck))
Advised.TestCase.settings = SETTINGS
ScheduledAdvised.TestCase.settings = SETTINGS
TestAdvised = Advised.TestCase
TestScheduledAdvised = ScheduledAdvised.TestCase
