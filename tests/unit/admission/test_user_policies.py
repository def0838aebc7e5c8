"""Users' policies between ask and answer: routes, holds, refusals, leases, and whatever goes wrong with them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from schemas.admit import Granted
from schemas.decision import Decision
from schemas.policy import (
    AdmitAnswer,
    AdmitQuestion,
    LeaseAnswer,
    LeaseQuestion,
    PolicyAnswer,
    RouteAnswer,
    RouteQuestion,
)
from schemas.request import Usage
from schemas.session import SessionFact
from services.admission.effects import AskPolicy, Effect
from services.admission.events import LeadershipChanged, PolicyAnswered, PolicyFailed, WorkerStated
from services.admission.policies.commit import Commit
from services.admission.user_policies import UserPolicy
from tests.unit.admission.build import (
    Driven,
    ask,
    check_books,
    check_conserved,
    driven,
    end,
    facts,
    granted,
    held,
    identity,
    policy_questions,
    refused,
    replies,
    worker_state,
)

ROUTE = UserPolicy(name="mine")
ADMIT = UserPolicy(name="gate", asks=("admit",))


def asking(*policies: UserPolicy, **settings: Any) -> Driven:
    """A core that asks these, with two workers; the prefix is on the first."""
    core = driven(policies=policies, **settings)
    core.workers("a", "b")
    core.reach = {"a": 4, "b": 0}
    return core


def committing(*policies: UserPolicy, **settings: Any) -> Driven:
    """The same under ``commit``, with one worker of 16,000 tokens."""
    parameters = {"output_tokens": 100}
    core = driven(policy="commit", policy_parameters=parameters, policies=policies, **settings)
    core.do(WorkerStated(worker_state("a")))
    return core


def question(effects: list[Effect]) -> AskPolicy:
    """The only one."""
    (only,) = policy_questions(effects)
    return only


def say(core: Driven, asked: AskPolicy, answer: PolicyAnswer | str) -> list[Effect]:
    """It answers, or does not for this cause."""
    event = PolicyFailed(asked.ticket, answer) if isinstance(answer, str) else PolicyAnswered(asked.ticket, answer)
    return core.do(event)


def counted(core: Driven) -> dict[tuple[str, str, str], int]:
    return dict(core.core.state.counters.policies)


# Routes


def test_a_route_policy_is_followed_when_its_answer_is_usable() -> None:
    """The user's choice stands, marked custom, though the built-in one differs; question and decision show both."""
    core = asking(ROUTE)
    asked = question(core.ask(ask("r1")))
    assert (asked.name, asked.ask) == ("mine", "route")
    assert isinstance(asked.question, RouteQuestion)
    assert asked.question.candidates[asked.question.choice].worker == "a"
    core.now += 0.02
    effects = say(core, asked, RouteAnswer(worker="b", reason="because"))
    answer = granted(effects)
    assert (answer.grant.worker, answer.mode, answer.policy) == ("b", "custom", "mine")
    (decision,) = facts(effects, Decision)
    (told,) = decision.policies
    assert (told.policy, told.ask, told.outcome, told.reason, told.times) == ("mine", "route", "used", "because", 1)
    assert 19 <= told.took_ms <= 21
    assert {each.worker: each.parts.get("policy", 0.0) for each in decision.candidates} == {"a": 0.0, "b": -1e9}
    assert counted(core) == {("mine", "route", "used"): 1}


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (RouteAnswer(worker="nobody"), "unusable"),
        (RouteAnswer(worker="b", rank=7), "unusable"),
        (RouteAnswer(), "no_opinion"),
        ("late", "late"),
        ("absent", "absent"),
        ("malformed", "malformed"),
        ("failed", "failed"),
        ("unsent", "unsent"),
        (AdmitAnswer(action="refuse"), "malformed"),
    ],
)
def test_a_policy_without_a_usable_answer_leaves_the_built_in_choice(answer: PolicyAnswer | str, outcome: str) -> None:
    """A policy can only help: whatever goes wrong with it is counted, said in the decision, and the turn runs."""
    core = asking(ROUTE)
    effects = say(core, question(core.ask(ask("r1"))), answer)
    got = granted(effects)
    assert (got.grant.worker, got.mode, got.policy) == ("a", "policy", "kv")
    assert counted(core) == {("mine", "route", outcome): 1}
    assert [each.outcome for each in facts(effects, Decision)[0].policies] == [outcome]


def test_a_policys_choice_that_became_unusable_meanwhile_is_not_followed() -> None:
    """B1: the worker left between question and answer: the built-in choice among those that live."""
    core = asking(ROUTE)
    asked = question(core.ask(ask("r1")))
    core.do(WorkerStated(worker_state("b", health="left")))
    answer = granted(say(core, asked, RouteAnswer(worker="b")))
    assert (answer.grant.worker, answer.mode) == ("a", "policy")
    assert counted(core) == {("mine", "route", "unusable"): 1}


def test_weights_settle_between_policies_and_cost() -> None:
    """A quarter of the prompt's blocks does not move a prefix of as many; twice of them does, and against another."""
    core = asking(UserPolicy(name="mine", weight=0.25))
    assert granted(say(core, question(core.ask(ask("r1"))), RouteAnswer(worker="b"))).grant.worker == "a"
    assert counted(core) == {("mine", "route", "outvoted"): 1}
    core = asking(UserPolicy(name="mine", weight=2.0), UserPolicy(name="other", order=1, weight=1.0))
    first, second = policy_questions(core.ask(ask("r1")))
    assert say(core, second, RouteAnswer(worker="a")) == []
    answer = granted(say(core, first, RouteAnswer(worker="b")))
    assert (answer.grant.worker, answer.policy) == ("b", "mine")
    assert counted(core) == {("mine", "route", "used"): 1, ("other", "route", "outvoted"): 1}


def test_lost_answers_stall_nothing() -> None:
    """Neither an answer nor a failure ever comes: the deadline passes with time itself."""
    core = asking(ROUTE, ADMIT)
    asked = policy_questions(core.ask(ask("r1")))
    assert len(asked) == 2
    assert granted(core.wait(0.2)).grant.worker == "a"
    assert counted(core) == {("mine", "route", "late"): 1, ("gate", "admit", "late"): 1}
    assert [say(core, each, "late") for each in asked] == [[], []]


# Admission


def test_a_hold_keeps_the_turn_in_line_and_is_asked_again() -> None:
    """Said to the client as a hold, with the policy's name; the decision tells how often it was asked."""
    core = asking(ADMIT)
    first = question(core.ask(ask("r1")))
    assert isinstance(first.question, AdmitQuestion)
    (told,) = held(say(core, first, AdmitAnswer(action="hold", hold_ms=300)))
    assert (told.reason, told.place) == ("policy:gate", 1)
    assert policy_questions(core.wait(0.2)) == []
    again = question(core.wait(0.2))
    assert isinstance(again.question, AdmitQuestion)
    assert 300 <= again.question.held_ms <= 500
    effects = say(core, again, AdmitAnswer(action="admit"))
    answer = granted(effects)
    assert (answer.hold_reason, answer.mode) == ("policy:gate", "policy")
    assert 300 <= answer.hold_ms <= 500
    (asked,) = facts(effects, Decision)[0].policies
    assert (asked.outcome, asked.times) == ("admit", 2)
    assert counted(core) == {("gate", "admit", "hold"): 1, ("gate", "admit", "admit"): 1}


def test_a_hold_ends_with_the_asks_deadline() -> None:
    """A policy that only ever holds does not keep a client longer than it listens."""
    core = asking(ADMIT, hold_deadline_s=2.0)
    effects = say(core, question(core.ask(ask("r1"))), AdmitAnswer(action="hold", hold_ms=30_000))
    effects = core.wait(1.8)
    assert not replies(effects, Granted)
    answer = refused(core.wait(0.3))
    assert (answer.reason, answer.status) == ("hold_deadline", 503)
    assert len(core.core.deciding) == 0


def test_a_refusal_is_the_clients_with_its_reason() -> None:
    core = asking(ADMIT)
    answer = refused(say(core, question(core.ask(ask("r1"))), AdmitAnswer(action="refuse", reason="night")))
    assert (answer.reason, answer.status, answer.policy, answer.detail) == ("policy_refused", 429, "gate", "night")
    assert answer.retry_after_s == 1
    assert len(core.core.deciding) == 0
    check_books(core.core)


def test_later_turns_of_a_held_session_wait_and_others_pass() -> None:
    """Turns of one session keep their order; whom the policy does not hold takes the place."""
    core = asking(ADMIT, max_grants_per_rank=1)
    core.ask(ask("busy", "s0", excluded=("b",)))
    first = question(core.ask(ask("r1", "s1", excluded=())))
    core.ask(ask("r2", "s1"))
    effects = core.ask(ask("r3", "s3"))
    assert held(effects)
    effects = say(core, first, AdmitAnswer(action="hold", hold_ms=1_000))
    other = question(effects)
    assert other.question.request_id == "r3"  # type: ignore[union-attr]
    assert granted(say(core, other, AdmitAnswer())).request_id == "r3"
    assert not policy_questions(core.wait(0.5))


def test_a_retry_has_waited_its_turn() -> None:
    """Where it goes is asked; whether it goes is not."""
    core = asking(ADMIT, ROUTE)
    for asked in policy_questions(core.ask(ask("r1"))):
        effects = say(core, asked, "absent")
    worker = granted(effects).grant.worker
    again = policy_questions(core.ask(ask("r1", attempt=1, excluded=(worker,))))
    assert [each.ask for each in again] == ["route"]


def test_a_cancel_at_any_time_leaves_nothing() -> None:
    """While the question is open, while it is held, and when the answer comes afterwards."""
    for moment in ("asked", "held"):
        core = asking(ADMIT)
        asked = question(core.ask(ask("r1")))
        if moment == "held":
            say(core, asked, AdmitAnswer(action="hold"))
        core.cancel("r1")
        assert not replies(say(core, asked, AdmitAnswer()), Granted)
        assert not policy_questions(core.wait(1.0))
        assert (len(core.core.deciding), core.core.deciding.open_questions) == (0, 0)
        assert core.core.deciding.users.consulting.open_questions == 0
        assert core.core.deciding.holds.counts.turns("m") == 0
        check_books(core.core)


def test_a_new_leader_asks_anew() -> None:
    """We lost the lead with a question open: its answer is nothing, and nobody of ours waits."""
    core = asking(ADMIT)
    asked = question(core.ask(ask("r1")))
    core.do(LeadershipChanged(None))
    assert say(core, asked, AdmitAnswer(action="refuse")) == []
    core.do(LeadershipChanged(11))
    assert question(core.ask(ask("r1"))).ticket != asked.ticket


def test_a_question_says_what_the_tenant_and_the_others_have() -> None:
    """Grants that run and turns that wait, of the model and of the tenant, sub-agents told apart; without this turn."""
    core = asking(ADMIT, max_grants_per_rank=2)

    def request(name: str, tenant: str, parent: str | None = None):  # type: ignore[no-untyped-def]
        made = identity(name, parent=parent)
        return ask(name, msgspec.structs.replace(made, key=msgspec.structs.replace(made.key, tenant=tenant)))

    for name, tenant in (("r1", "acme"), ("r2", "acme"), ("r3", "zeta")):
        say(core, question(core.ask(request(name, tenant))), AdmitAnswer())
    held_back = question(core.ask(request("r4", "acme", parent="r1")))
    say(core, held_back, AdmitAnswer(action="hold", hold_ms=5_000))
    asked = question(core.ask(request("r5", "zeta"))).question
    assert isinstance(asked, AdmitQuestion)
    assert (asked.open_grants, asked.tenant_open_grants, asked.tenants) == (3, 1, 2)
    assert (asked.waiting, asked.waiting_main, asked.tenant_waiting) == (1, 0, 0)
    assert (asked.turn_index, asked.input_tokens) == (0, 64)
    assert asked.expires_ms > asked.deadline_ms
    core.end(
        end(
            "r1",
            msgspec.structs.replace(identity("r1"), key=msgspec.structs.replace(identity("r1").key, tenant="acme")),
        )
    )
    assert core.core.state.ledger.counts.of_tenant("m", "acme") == 1


def test_a_policy_with_too_many_open_questions_is_not_asked() -> None:
    core = asking(ADMIT, policy_questions=1)
    question(core.ask(ask("r1", "s1")))
    assert granted(core.ask(ask("r2", "s2"))).request_id == "r2"
    assert counted(core) == {("gate", "admit", "busy"): 1}


def test_a_held_line_has_its_bound() -> None:
    core = asking(ADMIT, hold_queue_limit=1)
    say(core, question(core.ask(ask("r1", "s1"))), AdmitAnswer(action="hold", hold_ms=5_000))
    effects = say(core, question(core.ask(ask("r2", "s2"))), AdmitAnswer(action="hold", hold_ms=5_000))
    assert (refused(effects).reason, refused(effects).status) == ("hold_queue_full", 429)


# With a scheduling policy


def test_both_lines_have_one_bound() -> None:
    """Those that the scheduling policy holds, and those that a user's policy holds or that wait behind one."""
    core = committing(ADMIT, hold_queue_limit=2)
    for name in ("r1", "r2", "r3"):
        asked = question(core.ask(ask(name, f"of-{name}", tokens=9_000)))
        say(core, asked, AdmitAnswer(action="hold" if name == "r3" else "admit", hold_ms=5_000))
    assert core.core.deciding.held == 2
    answer = refused(core.ask(ask("r4", "of-r3", tokens=100)))
    assert (answer.reason, answer.status) == ("hold_queue_full", 429)
    assert core.core.deciding.held == 2


def test_answers_reach_the_scheduling_policy_as_bias() -> None:
    """Blocks by seat, and seconds of order; the built-in policy decides, and the decision says what became of both."""
    core = committing(UserPolicy(name="mine", asks=("route", "admit"), weight=2.0))
    core.do(WorkerStated(worker_state("b")))
    core.reach = {"a": 60, "b": 0}
    admit, route = policy_questions(core.ask(ask("r1", tokens=960)))
    say(core, admit, AdmitAnswer(order_bias_s=-3.0))
    effects = say(core, route, RouteAnswer(worker="b"))
    scheduled = core.core.state.scheduled
    assert scheduled is not None
    turn = scheduled.turns["r1"]
    assert (turn.facts.seat_bias, turn.facts.order_bias_s) == ({scheduled.pools["m"].seats["b", 0]: -120.0}, -6.0)
    (decision,) = facts(effects, Decision)
    assert (decision.mode, decision.policy, decision.worker) == ("policy", "commit", "b")
    assert [each.ask for each in decision.policies] == ["admit", "route"]
    check_conserved(core)


def test_a_held_turn_is_not_told_to_the_scheduling_policy_before_its_time() -> None:
    core = committing(ADMIT)
    say(core, question(core.ask(ask("r1", tokens=4_000))), AdmitAnswer(action="hold", hold_ms=300))
    scheduled = core.core.state.scheduled
    assert scheduled is not None
    assert not scheduled.turns
    answer = granted(say(core, question(core.wait(0.4)), AdmitAnswer()))
    assert (answer.policy, answer.hold_reason) == ("commit", "policy:gate")
    assert answer.hold_ms >= 300
    check_conserved(core)


def test_a_cancel_under_a_scheduling_policy_leaves_nothing() -> None:
    """Whether it was asked about, held by the user's policy, or by the built-in one."""
    for moment in ("asked", "held", "scheduled"):
        core = committing(ADMIT)
        say(core, question(core.ask(ask("big", "s0", tokens=12_000))), AdmitAnswer())
        asked = question(core.ask(ask("r1", tokens=9_000)))
        if moment != "asked":
            say(core, asked, AdmitAnswer(action="hold" if moment == "held" else "admit"))
        core.cancel("r1")
        say(core, asked, AdmitAnswer())
        assert not policy_questions(core.wait(1.0, ingresses=("ingress-1",)))
        assert len(core.core.deciding) == 0
        check_conserved(core)


# Leases


def leased(*policies: UserPolicy) -> tuple[Driven, AskPolicy]:
    """A session whose first turn has ended with a tool call, and the question about its lease."""
    core = committing(*policies)
    core.ask(ask("r1", tokens=4_000))
    fact = end("r1", usage=Usage(input_tokens=4_000, output_tokens=50, cached_tokens=0), worker="a")
    return core, question(core.end(msgspec.structs.replace(fact, tool_names=("bash",))))


def test_a_lease_is_asked_about_beside_everything_else() -> None:
    """The built-in lease is told at once; the question has the session, its tools and the built-in numbers."""
    core, asked = leased(UserPolicy(name="keeper", asks=("lease",)))
    about = asked.question
    assert isinstance(about, LeaseQuestion)
    assert (about.identity.session_id, about.worker, about.context_tokens) == ("s", "a", 4_050)
    assert (about.tool_names, about.builtin.state, about.turns) == (("bash",), "leased", 1)
    assert about.builtin.numbers["tokens"] >= 4_050
    assert "leased" in [each.state for each in facts(core.said, SessionFact)]


@pytest.mark.parametrize(
    ("answer", "outcome"), [(LeaseAnswer(keep=True, ttl_ms=5_000), "keep"), (LeaseAnswer(keep=False), "release")]
)
def test_a_word_on_a_lease_goes_to_the_scheduling_policy(
    answer: LeaseAnswer, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, asked = leased(UserPolicy(name="keeper", asks=("lease",)))
    advice: list[tuple[str, bool | None, float | None]] = []

    def lease_advice(self: Commit, now: float, program: str, keep: bool | None, until: float | None) -> tuple[()]:
        advice.append((program, keep, until))
        return ()

    monkeypatch.setattr(Commit, "lease_advice", lease_advice)
    say(core, asked, answer)
    until = core.now + 5.0 if answer.keep else None
    assert advice == [(identity("s").key.text(), answer.keep, until)]
    assert counted(core) == {("keeper", "lease", outcome): 1}


def test_a_word_on_a_lease_that_is_over_is_nothing() -> None:
    """The session came back before its policy had answered."""
    core, asked = leased(UserPolicy(name="keeper", asks=("lease",)))
    core.ask(ask("r2", tokens=4_100))
    assert say(core, asked, LeaseAnswer(keep=False)) == []
    assert counted(core) == {("keeper", "lease", "unneeded"): 1}
    check_conserved(core)


@pytest.mark.parametrize("builtin", ["commit", "lease"])
def test_a_lease_that_a_policy_gives_up_is_gone_at_once(builtin: str) -> None:
    """The built-in policy takes the word: the bus hears of it, and nothing is leased any more."""
    core = driven(policy=builtin, policies=(UserPolicy(name="keeper", asks=("lease",)),))
    core.do(WorkerStated(worker_state("a")))
    core.ask(ask("r1", tokens=4_000))
    core.now += 1.0
    fact = end("r1", usage=Usage(input_tokens=4_000, output_tokens=50, cached_tokens=0), worker="a")
    asked = question(core.end(msgspec.structs.replace(fact, tool_names=("bash",))))
    (gone,) = facts(say(core, asked, LeaseAnswer(keep=False)), SessionFact)
    assert (gone.state, gone.worker) == ("revoked", "a")
    scheduled = core.core.state.scheduled
    assert scheduled is not None
    assert scheduled.pools["m"].leases == {}
