"""What users' policies are asked, and what their answers, or the lack of them, come to: no ask and no bus is needed."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.decision import Candidate
from schemas.policy import (
    AdmitAnswer,
    AdmitQuestion,
    BuiltinLease,
    LeaseAnswer,
    LeaseQuestion,
    PolicyAnswer,
    PolicyQuestion,
    RouteAnswer,
    RouteQuestion,
)
from schemas.session import SessionIdentity, SessionKey
from services.admission.consulting import HOLD_MS, Consulting, summary
from services.admission.effects import AskPolicy
from services.admission.turn_counts import TurnCounts
from services.admission.user_policies import DECIDES_BLOCKS, UserPolicy, check_policies, slowest_ms

NOW = 1_000.0
IDENTITY = SessionIdentity(key=SessionKey(root="s"), session_id="s")
ROUTE = RouteQuestion(
    request_id="r", model="m", identity=IDENTITY, candidates=(Candidate(worker="a", rank=0),), choice=0, deadline_ms=0
)
ADMIT = AdmitQuestion(request_id="r", model="m", identity=IDENTITY, deadline_ms=0)
LEASE = LeaseQuestion(identity=IDENTITY, model="m", worker="a", rank=0, deadline_ms=0, builtin=BuiltinLease())


class House:
    """Policies, and the questions that are open to them."""

    def __init__(self, *policies: UserPolicy, limit: int = 100) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()
        self.consulting = Consulting(policies, limit, self.counts)
        self.asked: dict[tuple[str, str], AskPolicy] = {}

    def ask(self, subject: str = "r", *questions: PolicyQuestion, now: float = NOW):  # type: ignore[no-untyped-def]
        by_ask = {"RouteQuestion": "route", "AdmitQuestion": "admit", "LeaseQuestion": "lease"}
        wanted = {by_ask[type(each).__name__]: each for each in questions or (ADMIT, ROUTE)}
        consultation, effects = self.consulting.consult(subject, wanted, now)  # type: ignore[arg-type]
        self.asked |= {(effect.name, effect.ask): effect for effect in effects}
        return consultation

    def answer(self, name: str, answer: PolicyAnswer | str, now: float = NOW + 0.01) -> bool:
        """Whether the consultation is finished with it."""
        ask = "admit" if isinstance(answer, AdmitAnswer) else "lease" if isinstance(answer, LeaseAnswer) else "route"
        ticket = (self.asked.get((name, ask)) or self.asked[name, "admit"]).ticket
        if isinstance(answer, str):
            return self.consulting.failed(ticket, answer, now) is not None
        return self.consulting.answered(ticket, answer, now) is not None


def test_all_policies_of_one_ask_are_asked_at_once_each_with_its_own_deadline() -> None:
    house = House(
        UserPolicy(name="b", asks=("route", "admit"), order=2, deadline_ms=80),
        UserPolicy(name="a", asks=("admit",), order=1),
        UserPolicy(name="l", asks=("lease",)),
    )
    consultation = house.ask()
    assert [(each.policy.name, each.ask) for each in consultation.asked] == [
        ("a", "admit"), ("b", "admit"), ("b", "route"),
    ]  # fmt: skip
    assert {key: each.question.deadline_ms for key, each in house.asked.items()} == {
        ("a", "admit"): 1_000_050,
        ("b", "admit"): 1_000_080,
        ("b", "route"): 1_000_080,
    }
    assert not house.answer("b", AdmitAnswer())
    assert not house.answer("b", RouteAnswer(worker="a"))
    assert house.answer("a", AdmitAnswer())


def test_the_first_hold_or_refusal_in_order_counts_whoever_answers_first() -> None:
    house = House(*(UserPolicy(name=name, asks=("admit",), order=place) for place, name in enumerate("abc")))
    consultation = house.ask("r", ADMIT)
    house.answer("c", AdmitAnswer(action="refuse", reason="no"))
    house.answer("b", AdmitAnswer(action="hold", hold_ms=200, reason=" wait\na bit "))
    house.answer("a", AdmitAnswer(order_bias_s=5.0))
    verdict = house.consulting.weigh(consultation, 4)
    assert (verdict.policy, verdict.hold_s, verdict.refuse, verdict.reason) == ("b", 0.2, False, "wait a bit")
    assert house.counts == {("a", "admit", "admit"): 1, ("b", "admit", "hold"): 1, ("c", "admit", "overruled"): 1}
    told = {each.policy: (each.outcome, each.took_ms) for each in summary(consultation, {})}
    assert told == {"a": ("admit", 10.0), "b": ("hold", 10.0), "c": ("overruled", 10.0)}


def test_biases_add_by_weight_and_a_hold_has_bounds() -> None:
    house = House(
        UserPolicy(name="a", asks=("admit",), weight=2.0), UserPolicy(name="b", asks=("admit",)), UserPolicy(name="c")
    )
    consultation = house.ask("r", ADMIT)
    house.answer("a", AdmitAnswer(order_bias_s=-4.0))
    house.answer("b", AdmitAnswer(order_bias_s=3.0, action="admit"))
    assert house.consulting.weigh(consultation, 4).order_bias_s == -5.0
    for hold_ms, expected in ((None, HOLD_MS / 1000), (10**9, 30.0), (0, 0.05)):
        consultation = house.ask("r", ADMIT)
        house.answer("a", AdmitAnswer(action="hold", hold_ms=hold_ms))
        house.answer("b", AdmitAnswer(order_bias_s=1e9))
        assert house.consulting.weigh(consultation, 4).hold_s == expected


def test_route_answers_weigh_in_blocks_of_the_prompt_or_decide() -> None:
    house = House(UserPolicy(name="a", weight=0.5), UserPolicy(name="b", order=1))
    consultation = house.ask("r", ROUTE)
    house.answer("a", RouteAnswer(worker="w1", rank=1))
    house.answer("b", RouteAnswer(worker="w2"))
    first, second = house.consulting.weigh(consultation, 8).preferred
    assert (first.blocks, second.blocks) == (-4.0, -DECIDES_BLOCKS)
    assert [first.means("w1", 0), first.means("w1", 1), second.means("w2", 7)] == [False, True, True]
    house.consulting.became(first, "outvoted")
    house.consulting.became(second, "used")
    house.consulting.became(second, "unusable")
    assert house.counts == {("a", "route", "outvoted"): 1, ("b", "route", "used"): 1}


@pytest.mark.parametrize("cause", ["late", "absent", "malformed", "failed"])
def test_without_an_answer_the_turn_goes_on_and_the_cause_is_counted(cause: str) -> None:
    house = House(UserPolicy(name="a", asks=("admit",)))
    consultation = house.ask("r", ADMIT)
    assert house.answer("a", cause)
    verdict = house.consulting.weigh(consultation, 4)
    assert (verdict.hold_s, verdict.refuse, verdict.preferred, verdict.order_bias_s) == (None, False, (), 0.0)
    assert house.counts == {("a", "admit", cause): 1}


def test_an_answer_to_another_question_is_malformed() -> None:
    house = House(UserPolicy(name="a", asks=("admit",)))
    house.ask("r", ADMIT)
    assert house.consulting.answered(1, RouteAnswer(worker="a"), NOW) is not None
    assert house.counts == {("a", "admit", "malformed"): 1}


def test_a_deadline_passes_without_anybody_saying_so() -> None:
    """The shell's timer is lost: time alone ends the question, and the answer that comes later is nothing."""
    house = House(UserPolicy(name="a", asks=("admit",)), UserPolicy(name="b", asks=("admit",), deadline_ms=500))
    consultation = house.ask("r", ADMIT)
    assert house.consulting.overdue(NOW + 0.04) == []
    assert house.consulting.overdue(NOW + 0.06) == []
    assert house.counts == {("a", "admit", "late"): 1}
    assert house.consulting.overdue(NOW + 0.6) == [consultation]
    assert house.consulting.answered(1, AdmitAnswer(action="refuse"), NOW + 1) is None
    assert house.consulting.open_questions == 0


def test_a_policy_has_one_question_about_an_ask_and_a_bounded_number_in_all() -> None:
    """Whatever it is not asked is decided without it, and counted as busy."""
    house = House(UserPolicy(name="a", asks=("admit",)), limit=2)
    assert not house.ask("r1", ADMIT).finished
    assert house.ask("r1", ADMIT).finished
    assert not house.ask("r2", ADMIT).finished
    assert house.ask("r3", ADMIT).finished
    assert house.counts == {("a", "admit", "busy"): 2}
    house.consulting.failed(1, "late", NOW)
    assert not house.ask("r1", ADMIT).finished


def test_a_policy_that_is_always_late_is_left_alone_for_a_while() -> None:
    """Each late answer costs a turn its whole deadline: after five in a row it rests, longer each time."""
    house = House(UserPolicy(name="a", asks=("admit",)))
    now = NOW

    def late(number: int) -> bool:
        finished: bool = house.ask(f"r{number}", ADMIT, now=now).finished
        house.consulting.overdue(now + 0.06)
        return not finished

    assert [late(number) for number in range(7)] == [True] * 5 + [False] * 2
    for rest_s in (1.0, 2.0, 4.0):
        now += rest_s
        assert not late(10)
        now += 0.1
        assert late(11)
    assert house.counts == {("a", "admit", "late"): 8, ("a", "admit", "resting"): 5}
    now += 9.0
    many = [house.ask(f"m{number}", ADMIT, now=now) for number in range(20)]
    house.consulting.overdue(now + 0.06)
    assert all(each.finished for each in many)
    now += 16.1
    house.ask("r", ADMIT, now=now)
    assert house.answer("a", AdmitAnswer(), now)
    assert [late(number) for number in range(6)] == [True] * 5 + [False]


def test_a_consultation_that_nobody_waits_for_is_never_finished() -> None:
    house = House(UserPolicy(name="a", asks=("admit",)))
    house.consulting.forget(house.ask("r", ADMIT))
    assert not house.answer("a", AdmitAnswer(action="refuse"))
    assert house.counts == {("a", "admit", "unneeded"): 1}


def test_the_first_word_on_a_lease_counts() -> None:
    house = House(UserPolicy(name="b", asks=("lease",), order=1), UserPolicy(name="a", asks=("lease",)))
    consultation = house.ask("s", LEASE)
    house.answer("b", LeaseAnswer(keep=True, ttl_ms=5_000))
    house.answer("a", LeaseAnswer(keep=False))
    verdict = house.consulting.weigh_lease(consultation)
    assert verdict.keep is False
    assert house.counts == {("a", "lease", "release"): 1, ("b", "lease", "overruled"): 1}
    consultation = house.ask("s", LEASE)
    house.answer("b", LeaseAnswer(keep=True, ttl_ms=5_000))
    house.answer("a", LeaseAnswer())
    verdict = house.consulting.weigh_lease(consultation)
    assert (verdict.keep, verdict.ttl_s) == (True, 5.0)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3), st.sampled_from(["late", "ok", "time"]))))
def test_no_question_is_lost_or_ends_twice(steps: list[tuple[str, int, str]]) -> None:
    """Every question that was asked ends once: what is counted and what is open are all there ever were."""
    house = House(UserPolicy(name="a", asks=("admit",)), UserPolicy(name="b", asks=("admit",)), limit=2)
    asked, now = 0, NOW
    for name, subject, what in steps:
        asked += 2
        consultation = house.ask(str(subject), ADMIT, now=now)
        if what == "time":
            now += 0.03
            house.consulting.overdue(now)
        elif (name, "admit") in house.asked:
            house.answer(name, AdmitAnswer(action="hold") if what == "ok" else what, now)
        if consultation.finished:
            house.consulting.weigh(consultation, 1)
        else:
            house.consulting.forget(consultation)
    house.consulting.overdue(now + 1)
    assert house.consulting.open_questions == 0
    assert house.counts.total() == asked


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": "a" * 129}, "name"),
        ({"name": "a", "asks": ()}, "asks"),
        ({"name": "a", "asks": ("route", "route")}, "asks"),
        ({"name": "a", "weight": 0.0}, "weight"),
        ({"name": "a", "weight": float("inf")}, "weight"),
        ({"name": "a", "weight": float("nan")}, "weight"),
        ({"name": "a", "weight": 1e7}, "weight"),
        ({"name": "a", "deadline_ms": 0}, "deadline_ms"),
        ({"name": "a", "deadline_ms": 1001}, "deadline_ms"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_by_name(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        UserPolicy(**settings)  # type: ignore[arg-type]


def test_rules_between_policies() -> None:
    with pytest.raises(ValueError, match="twice"):
        check_policies([UserPolicy(name="a"), UserPolicy(name="a", asks=("admit",))], "commit")
    with pytest.raises(ValueError, match="leases nothing"):
        check_policies([UserPolicy(name="a", asks=("lease",))], "kv")
    policies = [UserPolicy(name="a", deadline_ms=70), UserPolicy(name="b", asks=("lease",), deadline_ms=900)]
    check_policies(policies, "commit")
    assert slowest_ms(policies) == 70


def test_turns_are_counted_in_and_out() -> None:
    counts = TurnCounts()
    counts.add("m", "acme", main=True)
    counts.add("m", "acme", main=False)
    counts.add("m", "zeta", main=True)
    assert (counts.turns("m"), counts.main("m"), counts.of_tenant("m", "acme")) == (3, 2, 2)
    assert (counts.turns("other"), counts.of_tenant("other", "acme"), set(counts.tenants("m"))) == (
        0,
        0,
        {"acme", "zeta"},
    )
    counts.remove("m", "zeta", main=True)
    assert set(counts.tenants("m")) == {"acme"}
    with pytest.raises(KeyError):
        counts.remove("m", "zeta", main=True)
    counts.remove("m", "acme", main=True)
    counts.remove("m", "acme", main=False)
    assert (counts.turns("m"), list(counts.tenants("m"))) == (0, [])
