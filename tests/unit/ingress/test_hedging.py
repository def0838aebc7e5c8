"""Requests that are sent twice to be fast: one extra sending at most, one answer, one row, and books that are even."""

from __future__ import annotations

import pytest

from schemas.admit import Granted
from schemas.ingress import HedgePlace, IngressState
from schemas.request import RequestDispatched
from services.ingress import events
from services.ingress.breaker import BreakerRules
from services.ingress.core import IngressRules
from services.ingress.effects import AskAdmission, AskHedge, CancelAdmission, CloseUpstream, Effect, Follow, Forward
from tests.unit.ingress.builders import Scene, counted, granted, received, worker
from tests.unit.ingress.test_core import R, ended, failed, first_byte, kinds, only, undecided

RULES = IngressRules(hedge=True, breaker=BreakerRules(failures=1))
DUE = events.HedgeDue(request_id=R, attempt=0)


def slow(*workers: str, rules: IngressRules = RULES, **members: object) -> Scene:
    """A request that was sent to the first of these, which is silent."""
    scene = Scene(*workers or ("w1", "w2"), rules=rules)
    scene.play(received(R, **members), counted(R), granted(R, "w1"))  # type: ignore[arg-type]
    return scene


def yes(name: str = "w2") -> events.HedgeAnswered:
    """The second sending is granted."""
    reply = granted(R, name, 1).reply
    assert isinstance(reply, Granted)
    return events.HedgeAnswered(request_id=R, attempt=1, granted=reply)


NO = events.HedgeAnswered(request_id=R, attempt=1)


def raced(**members: object) -> Scene:
    """A request that was sent to both."""
    scene = slow(**members)  # type: ignore[arg-type]
    scene.play(DUE, yes())
    return scene


def hedge_cancels(effects: list[Effect]) -> list[bool]:
    return [effect.cancel.hedge for effect in effects if isinstance(effect, CancelAdmission)]


def breakers(scene: Scene) -> set[str]:
    return set(scene.core.breaker.states(scene.now))


def test_a_slow_request_is_asked_for_once_more_and_sent() -> None:
    """Admission is asked for a second grant, not at the first's worker and not for long; no fact says it moved."""
    scene = slow()
    ask = only(scene.play(DUE, after_s=0.5), AskHedge)
    question = ask.question
    assert (question.hedge, question.attempt, question.excluded) == (True, 1, ("w1",))
    assert question.deadline_ms == round((scene.now + 1) * 1000)
    assert question.input_tokens == 10
    effects = scene.play(yes())
    assert kinds(effects) == ["Forward"]
    forward = only(effects, Forward)
    assert (forward.attempt, forward.worker, forward.priority) == (1, "w2", -3)
    (state,) = [fact for fact in (one.fact for one in scene.play(events.Tick())) if isinstance(fact, IngressState)]  # type: ignore[union-attr]
    (one,) = state.in_flight
    assert (one.worker, one.attempt) == ("w1", 0)
    assert one.hedge == HedgePlace(worker="w2", rank=0, grant_id="grant-r1-1", grant_epoch=7)


def test_the_second_begins_first() -> None:
    """It is relayed, the first is closed and said to be neither dead nor alive, and the request has moved."""
    scene = raced()
    effects = scene.play(first_byte(attempt=1), after_s=0.1)
    assert kinds(effects) == ["CloseUpstream", "RequestDispatched", "Follow", "Relay", "RequestFirstToken"]
    assert only(effects, CloseUpstream).attempt == 0
    assert only(effects, Follow).attempt == 1
    (said,) = [fact for fact in scene.facts() if isinstance(fact, RequestDispatched) and fact.attempt == 1]
    assert (said.worker, said.grant_id, said.mode) == ("w2", "grant-r1-1", "policy")
    assert breakers(scene) == set()
    assert scene.play(first_byte()) == []
    scene.play(ended(attempt=1))
    end, row = scene.end()
    assert (end.outcome, end.worker, end.grant_id) == ("completed", "w2", "grant-r1-1")
    assert row.request is not None
    assert (row.request.hedged, row.request.attempts) == ("won", 2)
    assert row.request.worker is not None
    assert row.request.worker.worker == "w2"


def test_the_first_begins_first() -> None:
    """It is relayed, the second is closed, and its booking given back at once; its worker is not judged."""
    scene = raced()
    effects = scene.play(first_byte())
    assert kinds(effects) == ["Relay", "RequestFirstToken", "CloseUpstream", "CancelAdmission"]
    assert only(effects, CloseUpstream).attempt == 1
    assert hedge_cancels(effects) == [True]
    assert breakers(scene) == set()
    assert scene.play(first_byte(attempt=1), failed("connection_lost", 1)) == []
    scene.play(ended())
    _, row = scene.end()
    assert row.request is not None
    assert (row.request.hedged, row.request.attempts) == ("lost", 1)


@pytest.mark.parametrize("answer", [yes(), NO])
def test_an_answer_of_admission_that_comes_late_is_nothing(answer: events.HedgeAnswered) -> None:
    """The first began meanwhile: the question is cancelled, and nothing is sent."""
    scene = slow()
    scene.play(DUE)
    effects = scene.play(first_byte())
    assert hedge_cancels(effects) == [True]
    assert [effect for effect in effects if isinstance(effect, CloseUpstream)] == []
    assert scene.play(answer) == []
    scene.play(ended())
    _, row = scene.end()
    assert row.request is not None
    assert row.request.hedged is None


def test_without_a_grant_there_is_no_second_and_still_a_retry() -> None:
    """A refusal or silence is given back (a grant may be late), and uses nothing up."""
    scene = slow()
    scene.play(DUE)
    assert hedge_cancels(scene.play(NO)) == [True]
    assert scene.play(DUE) == []
    assert only(scene.play(failed("connection_lost")), AskAdmission).question.attempt == 1


@pytest.mark.parametrize("status", [400, 404, 500, 503])
def test_an_error_is_no_beginning_of_the_second(status: int) -> None:
    """The first is waited for, and there is no other sending."""
    scene = raced()
    effects = scene.play(first_byte(status, attempt=1))
    assert kinds(effects) == ["CloseUpstream", "CancelAdmission"]
    assert breakers(scene) == ({"w2"} if status >= 500 else set())
    assert scene.play(DUE) == []
    assert kinds(scene.play(failed("connection_lost"))) == ["CloseUpstream", "Answer", "RequestEnd", "PublishRow"]
    _, row = scene.end()
    assert row.request is not None
    assert (row.request.hedged, row.request.worker.worker if row.request.worker else "") == ("lost", "w1")


def test_the_second_fails() -> None:
    """It is given back at once; the first goes on."""
    scene = raced()
    assert kinds(scene.play(failed("connect_error", 1))) == ["CloseUpstream", "CancelAdmission"]
    assert breakers(scene) == {"w2"}
    assert kinds(scene.play(first_byte())) == ["Relay", "RequestFirstToken"]


@pytest.mark.parametrize("event", [failed("connection_lost"), failed("total_timeout"), first_byte(503)])
def test_the_first_fails(event: events.Event) -> None:
    """The second is the request then; it is the one other try."""
    scene = raced()
    effects = scene.play(event)
    assert kinds(effects) == ["CloseUpstream", "RequestDispatched", "Follow"]
    assert scene.play(DUE, yes()) == []
    effects = scene.play(failed("connection_lost", 1))
    assert kinds(effects) == ["CloseUpstream", "Answer", "RequestEnd", "PublishRow"]
    end, row = scene.end()
    assert (end.outcome, end.worker) == ("upstream_error", "w2")
    assert row.request is not None
    assert row.request.hedged == "won"


def test_a_retry_is_not_sent_twice_and_ends_the_question() -> None:
    """One extra sending at most; the first failed while admission was asked for a second."""
    scene = slow("w1", "w2", "w3")
    scene.play(DUE)
    effects = scene.play(failed("connection_lost"))
    assert kinds(effects) == ["CancelAdmission", "CloseUpstream", "AskAdmission"]
    assert hedge_cancels(effects) == [True]
    scene.play(granted(R, "w2", 1))
    assert scene.play(events.HedgeDue(request_id=R, attempt=1)) == []
    scene.play(first_byte(attempt=1), ended(attempt=1))
    _, row = scene.end()
    assert row.request is not None
    assert (row.request.hedged, row.request.attempts) == (None, 2)


def test_the_client_goes_while_both_are_silent() -> None:
    """Both are closed, the booking is given back, one row."""
    scene = raced()
    effects = scene.play(events.ClientGone(request_id=R))
    assert kinds(effects) == ["CloseUpstream", "CancelAdmission", "CloseUpstream", "RequestEnd", "PublishRow"]
    assert sorted(effect.attempt for effect in effects if isinstance(effect, CloseUpstream)) == [0, 1]
    _, row = scene.end()
    assert row.request is not None
    assert (row.request.outcome, row.request.hedged) == ("client_disconnect", "lost")


def test_what_is_never_sent_twice() -> None:
    """Off; without a retry; with no other worker, or none but avoided ones; while stopping; what nobody decided; what
    computes nothing; what began to answer."""
    assert slow(rules=IngressRules()).play(DUE) == []
    assert slow(rules=IngressRules(hedge=True, retry=False)).play(DUE) == []
    assert slow("w1").play(DUE) == []
    scene = slow()
    scene.core.breaker.failed("w2", scene.now)
    assert scene.play(DUE) == []
    assert slow().play(worker("w2", 1, "unhealthy"), DUE)[:1] == []
    scene = slow()
    assert scene.play(events.StopAsked(), DUE) == []
    scene = Scene("w1", "w2", rules=RULES)
    scene.play(received(R), counted(R), undecided("no_responders"))
    assert scene.play(DUE) == []
    scene = Scene("w1", "w2", rules=RULES)
    scene.play(received(R, path="/v1/messages/count_tokens"))
    assert scene.play(DUE) == []
    scene = slow()
    scene.play(first_byte())
    assert scene.play(DUE) == []


def test_a_stop_between_the_question_and_its_grant() -> None:
    """Nothing is sent twice while draining; what was granted is given back."""
    scene = slow()
    scene.play(DUE, events.StopAsked())
    assert hedge_cancels(scene.play(yes())) == [True]
    assert kinds(scene.play(first_byte())) == ["Relay", "RequestFirstToken"]


def test_a_client_that_was_promised_a_stream_gets_one() -> None:
    """After a comment the second's answer that is none is no beginning."""
    rules = IngressRules(hedge=True, held_comment_s=1.0)
    scene = slow(rules=rules, stream=True)
    scene.core._records[R].is_open = True
    scene.play(DUE, yes())
    whole = events.FirstByte(request_id=R, attempt=1, status=200, is_stream=False)
    assert kinds(scene.play(whole)) == ["CloseUpstream", "CancelAdmission"]
    assert kinds(scene.play(first_byte())) == ["Relay", "RequestFirstToken"]


def test_we_stop_while_both_are_silent() -> None:
    """Both are closed and the client is answered; one row."""
    scene = raced()
    effects = scene.play(events.Stopped())
    assert sorted(effect.attempt for effect in effects if isinstance(effect, CloseUpstream)) == [0, 1]
    _, row = scene.end()
    assert row.request is not None
    assert row.request.outcome == "internal_error"
