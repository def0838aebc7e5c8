"""Users' hint policies: asked within their deadline, bounded by a budget and a rate of their own."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.hint import HintIntent
from schemas.policy import HintAnswer, PlannedAction
from services.hints.config import HintsSettings
from services.hints.consulting import REST_S, RESTS_AFTER
from services.hints.effects import AskPolicy, PlannedHint
from services.hints.events import IntentGiven, PolicyAnswered, PolicyFailed
from services.hints.user_policies import HintPolicy
from tests.unit.hints.support import START, Driven, decided, key, reasons, session, told


def driven_by(*policies: HintPolicy, **settings: Any) -> Driven:
    return Driven(policies=policies or (HintPolicy(name="x"),), **settings)


def ask(driven: Driven) -> AskPolicy:
    """The last question."""
    asked = driven.asked[-1]
    assert isinstance(asked, AskPolicy)
    return asked


def retain(worker: str = "a", **bounds: Any) -> PlannedAction:
    return PlannedAction(action_type="retain", worker=worker, **bounds)


def answer(driven: Driven, *actions: PlannedAction) -> list[PlannedHint]:
    return driven.do(PolicyAnswered(ask(driven).ticket, HintAnswer(actions=actions)))


def intent(policy: str = "x", name: str = "s", publisher: str | None = None, **fields: Any) -> IntentGiven:
    fields.setdefault("action_type", "retain")
    given = HintIntent(source=policy, epoch=1, seq=0, at_ms=0, policy=policy, session=key(name), **fields)
    return IntentGiven(policy if publisher is None else publisher, given)


def test_a_policy_is_told_what_the_planner_would_send_and_its_answer_stands_instead() -> None:
    driven = driven_by(HintPolicy(name="x", deadline_ms=70))
    assert driven.do(session("s", "acting", tokens=640)) == []
    question = ask(driven).question
    assert (question.session, question.trigger, question.worker, question.rank) == (key("s"), "acting", "a", 0)
    assert (question.context_tokens, question.deadline_ms) == (640, int(START * 1000) + 70)
    assert question.builtin == (PlannedAction(action_type="retain", worker="a", ttl_ms=120_000, priority=4),)
    (hint,) = answer(driven, retain(priority=90, ttl_ms=5_000))
    assert (hint.payload.priority, hint.payload.ttl_ms) == (90, 5_000)
    assert driven.planner.proposals.consulting.counts == {("x", "used"): 1}


def test_an_empty_answer_sends_nothing_and_no_answer_sends_the_planners_own() -> None:
    driven = driven_by()
    driven.do(session("s", "acting"))
    assert answer(driven) == []
    driven.do(decided("s"), session("s", "acting", turns=2))
    assert told(driven.do(PolicyAnswered(ask(driven).ticket, HintAnswer()))) == [("a", "s", "retain")]
    assert driven.planner.proposals.consulting.counts["x", "no_opinion"] == 1


@pytest.mark.parametrize("cause", ["late", "absent", "malformed", "failed", "unsent"])
def test_without_an_answer_the_planners_own_actions_stand(cause: str) -> None:
    """Counted by cause; the question ends once, whatever comes after."""
    driven = driven_by()
    driven.do(session("s", "acting"))
    ticket = ask(driven).ticket
    assert told(driven.do(PolicyFailed(ticket, cause))) == [("a", "s", "retain")]
    assert driven.do(PolicyAnswered(ticket, HintAnswer(actions=(retain(),)))) == []
    assert driven.do(PolicyFailed(ticket, "late")) == []
    assert driven.planner.proposals.consulting.counts == {("x", cause): 1}


def test_a_lost_timer_stalls_nothing() -> None:
    """The planner's own clock ends the question at the next tick."""
    driven = driven_by()
    driven.do(session("s", "acting"))
    assert told(driven.wait(1.0)) == [("a", "s", "retain")]
    assert driven.planner.proposals.consulting.counts == {("x", "late"): 1}


def test_what_the_session_has_left_behind_is_not_sent() -> None:
    """Neither the policy's actions nor the planner's own; nor after a close."""
    driven = driven_by()
    driven.do(session("s", "acting"))
    first = ask(driven).ticket
    driven.do(decided("s"))
    second = ask(driven).ticket
    assert driven.do(PolicyAnswered(first, HintAnswer(actions=(retain(),)))) == []
    driven.do(session("s", "closed"))
    assert driven.do(PolicyAnswered(second, HintAnswer(actions=(retain(),)))) == []
    assert driven.planner.gate.policy_refused == {("x", "overtaken"): 1, ("x", "closed"): 1}


def test_the_first_policy_in_order_with_an_opinion_counts() -> None:
    driven = driven_by(HintPolicy(name="second", order=2), HintPolicy(name="first", order=1))
    driven.do(session("s", "acting"))
    first, second = driven.asked
    assert isinstance(first, AskPolicy)
    assert isinstance(second, AskPolicy)
    assert (first.name, second.name) == ("first", "second")
    assert driven.do(PolicyAnswered(second.ticket, HintAnswer(actions=(retain(priority=2),)))) == []
    (hint,) = driven.do(PolicyAnswered(first.ticket, HintAnswer(actions=(retain(priority=1),))))
    assert hint.payload.priority == 1
    assert driven.planner.proposals.consulting.counts == {("first", "used"): 1, ("second", "overruled"): 1}


def test_letting_go_waits_for_nobody() -> None:
    driven = driven_by()
    driven.do(session("s", "acting"))
    answer(driven, retain())
    assert reasons(driven.do(session("s", "closed"))) == [("dereference", "closed")]


def test_one_that_is_always_late_rests_and_too_many_questions_are_not_put() -> None:
    driven = driven_by(policy_questions=2)
    for number in range(3):
        driven.do(session(f"s{number}", "acting"))
    assert len(driven.asked) == 2
    assert driven.planner.proposals.consulting.counts == {("x", "busy"): 1}
    driven = driven_by()
    for number in range(RESTS_AFTER):
        driven.do(session(f"s{number}", "acting"))
        driven.do(PolicyFailed(ask(driven).ticket, "late"))
    assert told(driven.do(session("t", "acting"))) == [("a", "t", "retain")]
    driven.now += REST_S
    assert driven.do(session("u", "acting")) == []


def test_a_policy_has_a_budget_of_its_own() -> None:
    """Of what may be pinned, beside the budget of all; and so many actions a second."""
    driven = driven_by(pin_share=0.8, policy_pin_share=0.25, policy_actions_burst=3, policy_actions_per_s=1.0)
    pin = PlannedAction(action_type="pin", worker="a", ttl_ms=30_000)
    for name, tokens in (("s1", 1500), ("s2", 600), ("s3", 500)):
        driven.do(session(name, "acting", tokens=tokens))
        hints = answer(driven, pin)
        assert len(hints) == (name != "s2"), name
    assert driven.planner.gate.policy_refused == {("x", "over_budget"): 1}
    assert driven.planner.gate.pins.seats() == {("a", 0): 2000}
    driven.do(session("s4", "acting"))
    assert len(answer(driven, retain(), PlannedAction(action_type="demote", worker="a"))) == 1
    assert driven.planner.gate.policy_refused["x", "policy_rate"] == 1
    driven.do(decided("s4"))
    answer(driven)
    driven.do(session("s5", "acting"))
    assert told(driven.do(PolicyFailed(ask(driven).ticket, "late"))) == [("a", "s5", "retain")]  # not its actions


def test_a_policy_lets_go_at_its_rate() -> None:
    """One that says so of everybody's sessions all the time takes no more from them than its rate; the planner's own
    letting go waits for nobody."""
    driven = driven_by(HintPolicy(name="x", asked=False), policy_actions_burst=2, policy_actions_per_s=1.0)
    for number in range(5):
        driven.settle(driven.do(session(f"s{number}", "acting")))
    drops = [hint for number in range(5) for hint in driven.do(intent(name=f"s{number}", action_type="dereference"))]
    assert told(drops) == [("a", "s0", "dereference"), ("a", "s1", "dereference")]
    assert driven.planner.gate.policy_refused == {("x", "policy_rate"): 3}
    assert reasons(driven.do(session("s4", "closed"))) == [("dereference", "closed")]


def test_a_policy_may_not_pin_for_ever_nor_where_the_session_has_nothing() -> None:
    driven = driven_by()
    driven.do(session("s", "acting"))
    hints = answer(
        driven,
        PlannedAction(action_type="pin", worker="a", ttl_ms=10_000_000),
        retain("b"),
        retain("nobody"),
        PlannedAction(action_type="retain", worker="a", rank=7),
        PlannedAction(action_type="share", worker="a"),
        PlannedAction(action_type="prefetch", worker="b", reason="a\nlong " + "x" * 1000),
    )
    assert told(hints) == [("a", "s", "pin"), ("b", "s", "prefetch")]
    assert hints[0].payload.ttl_ms == 600_000
    assert hints[1].payload.reason is not None
    assert len(hints[1].payload.reason) == 200
    assert "\n" not in hints[1].payload.reason
    assert driven.planner.gate.policy_refused == {
        ("x", "elsewhere"): 2,
        ("x", "unknown_worker"): 1,
        ("x", "no_pool"): 1,
    }


def test_an_intent_is_an_action_of_its_policy() -> None:
    """Of a policy that is configured, on its own subject, for a session that is open."""
    driven = driven_by(HintPolicy(name="x", asked=False))
    driven.settle(driven.do(session("s", "acting")))
    (hint,) = driven.do(intent(priority=99))
    assert (hint.worker, hint.rank, hint.payload.priority) == ("a", 0, 99)
    assert told(driven.do(intent(action_type="prefetch", worker="b"))) == [("b", "s", "prefetch")]
    assert told(driven.do(intent(action_type="dereference", reason="done"))) == [("a", "s", "dereference")]
    assert driven.do(intent("stranger"), intent(publisher="")) == []
    assert driven.do(intent(name="nobody")) == []
    driven.do(session("s", "closed"))
    assert driven.do(intent()) == []
    assert driven.planner.proposals.intents == {
        ("x", "taken"): 3,
        ("", "unknown_policy"): 2,
        ("x", "unknown_session"): 1,
        ("x", "closed"): 1,
    }


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: HintPolicy(name=""), "name"),
        (lambda: HintPolicy(name="x", deadline_ms=0), "deadline_ms"),
        (lambda: HintsSettings(policies=(HintPolicy(name="x"), HintPolicy(name="x"))), "twice"),
        (lambda: HintsSettings(pin_share=1.5), "pin_share"),
        (lambda: HintsSettings(pin_ttl_s=601.0), "pin_ttl_s"),
        (lambda: HintsSettings(actions_burst=0), "actions_burst"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_one_sentence(make: Any, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make()
