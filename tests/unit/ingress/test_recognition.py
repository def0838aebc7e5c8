"""Requests that name nobody, where they are recognised by what they say: who they are, in every fact about them."""

from __future__ import annotations

import pytest

from schemas.admit import AdmitRequest
from schemas.index import RecogniseReply, Relation
from schemas.placed import Placed
from schemas.request import RequestAccepted, RequestEnd
from schemas.session import ImplicitIdentity, SessionKey
from services.ingress import events
from services.ingress.core import IngressRules
from services.ingress.effects import AskAdmission, AskIndexer, CountPrompt, Forward
from services.ingress.message_chain import MessageChain
from services.ingress.recognising import RecognitionRules
from tests.unit.ingress.builders import GOOD, MODEL, Scene, counted, granted, received

R = "r2"
OWN = SessionKey(family="prefix", root=R)
KNOWN = SessionKey(family="prefix", root="r1")
MESSAGES = MessageChain(bytes(range(16)), 1)


def scene(least: float = 0.0, *, on: bool = True) -> Scene:
    return Scene("w1", rules=IngressRules(recognition=RecognitionRules(on=on, least=least)))


def counted_with_messages(messages: MessageChain | None = MESSAGES) -> events.PromptCounted:
    plain = counted(R)
    return events.PromptCounted(request_id=R, tokens=plain.tokens, tokens_from=plain.tokens_from, messages=messages)


def recognised(
    relation: Relation, *, session: SessionKey | None = None, parent: SessionKey | None = None, confidence: float = 0.9
) -> events.Recognised:
    reply = RecogniseReply(
        indexer="i", relation=relation, session=session, parent=parent, confidence=confidence, reason="why"
    )
    return events.Recognised(request_id=R, reply=reply)


def asked(at: Scene) -> AdmitRequest:
    return next(effect.question for effect in at.effects if isinstance(effect, AskAdmission))


def test_a_next_turn_is_its_session_s() -> None:
    """Counted with its messages, asked about, accepted as who it is; admission, engine, end and row are told the same,
    and that it was content that said so."""
    at = scene()
    at.play(received(R))
    assert [effect.messages for effect in at.effects if isinstance(effect, CountPrompt)] == [True]
    at.play(counted_with_messages())
    (question,) = [effect.question for effect in at.effects if isinstance(effect, AskIndexer)]
    assert (question.model, question.message_chain, question.preamble, question.request_id) == (
        MODEL, MESSAGES.hashes, 1, R
    )  # fmt: skip
    assert not any(isinstance(fact, RequestAccepted) for fact in at.facts())
    at.play(recognised("continues", session=KNOWN))
    accepted = next(fact for fact in at.facts() if isinstance(fact, RequestAccepted))
    expected = ImplicitIdentity(relation="continues", confidence=0.9, reason="why")
    assert (accepted.identity.key, accepted.identity.session_id, accepted.identity.implicit) == (KNOWN, "r1", expected)
    admit = asked(at)
    assert (admit.identity, admit.message_chain, admit.preamble) == (accepted.identity, MESSAGES.hashes, 1)
    at.play(granted(R, "w1"))
    assert next(effect for effect in at.effects if isinstance(effect, Forward)).session_id == "r1"
    at.play(events.FirstByte(request_id=R, attempt=0, status=200))
    at.play(events.AnswerEnded(request_id=R, attempt=0, answer=GOOD))
    end, row = at.end()
    assert end.identity == accepted.identity
    assert row.agent_context is not None
    assert (row.agent_context.session_id, row.agent_context.session, row.agent_context.implicit) == (
        "r1", KNOWN, expected
    )  # fmt: skip


def test_a_fork_names_its_parent() -> None:
    """A session of its own, and whose child it is."""
    at = scene()
    at.play(received(R), counted_with_messages(), recognised("forks", parent=KNOWN))
    identity = asked(at).identity
    assert (identity.key, identity.session_id, identity.parent, identity.parent_session_id) == (OWN, R, KNOWN, "r1")


@pytest.mark.parametrize(
    ("answer", "implicit"),
    [
        (recognised("new", confidence=1.0), ImplicitIdentity(relation="new", confidence=1.0, reason="why")),
        (events.Recognised(request_id=R, failure="index_silent"), ImplicitIdentity(reason="index_silent")),
        (
            recognised("continues", session=SessionKey(family="prefix", root="r1", tenant="other")),
            ImplicitIdentity(reason="bad_reply"),
        ),
        (recognised("continues", session=SessionKey(family="codex", root="r1")), ImplicitIdentity(reason="bad_reply")),
        (
            recognised("continues", session=KNOWN, confidence=0.5),
            ImplicitIdentity(confidence=0.5, reason="below_confidence"),
        ),
    ],
)
def test_else_it_is_a_session_of_its_own(answer: events.Recognised, implicit: ImplicitIdentity) -> None:
    """New; nobody answered; an answer that cannot be right; one that is not sure enough."""
    at = scene(least=0.8)
    at.play(received(R), counted_with_messages(), answer)
    identity = asked(at).identity
    assert (identity.key, identity.session_id, identity.parent, identity.implicit) == (OWN, R, None, implicit)


def test_who_names_somebody_is_not_asked_about() -> None:
    """Identity in a header or the body counts, and nothing is chained; nor are side requests, or prompts without
    messages."""
    for request in (
        received(R, headers={"x-session-id": "s"}),
        received(R, prompt_cache_key="k"),
        received(R, path="/v1/completions"),
    ):
        at = scene()
        at.play(request, counted(R))
        assert not any(isinstance(effect, AskIndexer) for effect in at.effects)
        assert asked(at).message_chain == b""
    at = scene()
    at.play(received(R), counted_with_messages(None))
    assert (asked(at).identity.key, asked(at).identity.implicit) == (OWN, ImplicitIdentity(reason="not_asked"))
    assert sum(isinstance(fact, RequestAccepted) for fact in at.facts()) == 1


def test_off_nothing_changes() -> None:
    """Without the setting each request without identity is a session of its own, and nobody is asked."""
    at = scene(on=False)
    at.play(received(R), counted_with_messages())
    assert asked(at).identity.key == SessionKey(family="request", root=R)
    assert not any(isinstance(effect, AskIndexer) for effect in at.effects)


def test_what_an_ingress_places_itself_says_who_it_was() -> None:
    """Without a leader, indexers learn of the turn from the ingress."""
    at = scene()
    at.play(received(R), counted_with_messages(), recognised("continues", session=KNOWN))
    at.play(events.AdmitFailed(request_id=R, attempt=0, reason="no_responders"))
    fact = next(fact for fact in at.facts() if isinstance(fact, Placed))
    assert (fact.session, fact.message_chain, fact.preamble) == (KNOWN, MESSAGES.hashes, 1)


def test_a_client_that_leaves_while_it_is_asked_about() -> None:
    """Accepted and ended once, as nobody's session; what comes late is ignored."""
    at = scene()
    at.play(received(R), counted_with_messages(), events.ClientGone(request_id=R))
    assert [type(fact) for fact in at.facts()] == [RequestAccepted, RequestEnd]
    end, _ = at.end()
    assert (end.outcome, end.identity.key, len(at.core)) == ("client_disconnect", OWN, 0)
    at.play(recognised("continues", session=KNOWN))
    assert at.core.late_events["Recognised"] == 1
