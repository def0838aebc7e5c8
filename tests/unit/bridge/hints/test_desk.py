"""The desk: every action is answered once, whatever calls do, and nothing it keeps grows without bound."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from schemas.base import to_json
from schemas.session import SessionFact, SessionKey
from services.bridge.adapters.actions import CallAnswer, EngineFacts
from services.bridge.effects import CallEngine
from services.bridge.hinting import ClosedSessions, HintAnswer, HintDesk
from tests.unit.bridge.hints.commands import NOW_MS, SESSION, TAKES, action, command, raw

NOW = NOW_MS / 1000
ACCEPTED = CallAnswer(200, b'{"results":[{"action_id":"a","outcome":"accepted"}]}')


def desk(max_calls: int = 4, lanes: int = 2) -> HintDesk:
    return HintDesk("w", max_calls=max_calls, lanes=lanes, max_sessions=3)


def session_fact(state: str, root: str = "s1") -> bytes:
    key = SessionKey(family="dynamo", root=root)
    return to_json(
        SessionFact(source="admission-1", epoch=1, seq=0, at_ms=0, session=key, session_id=root, state=state)  # type: ignore[arg-type]
    )


def called(told: HintAnswer | list[CallEngine]) -> CallEngine:
    assert isinstance(told, list)
    (call,) = told
    return call


def outcomes(told: HintAnswer | list[CallEngine] | None) -> list[tuple[str, str, str, str | None]]:
    assert isinstance(told, HintAnswer)
    return [(each.action_id, each.action_type, each.outcome, each.reason) for each in told.results]


def test_an_envelope_is_answered_when_its_call_is() -> None:
    """In the order of its actions: what was decided at once stands beside what the engine said."""
    hints = desk()
    call = called(hints.received(command(action("old", expires_ms=1), action("a")), TAKES, 1, NOW))
    assert hints.waiting == 1
    assert outcomes(hints.answered(call.ticket, ACCEPTED)) == [
        ("old", "retain", "rejected", "expired"),
        ("a", "retain", "accepted", None),
    ]
    assert hints.answered(call.ticket, ACCEPTED) is None, "an answer that comes twice is none"
    assert hints.waiting == 0
    assert hints.counts == {("retain", "rejected"): 1, ("retain", "accepted"): 1}


def test_unknown_types_are_answered_by_their_name_and_counted_as_other() -> None:
    """A stranger's names never become metric labels."""
    hints = desk()
    message = raw(actions=[{"action_id": "a", "action_type": "kv.fetch"}])
    answer = hints.received(message, EngineFacts(kind="vllm"), 1, NOW)
    assert outcomes(answer) == [("a", "kv.fetch", "unsupported", "action_type")]
    assert hints.counts == {("other", "unsupported"): 1}


def test_a_flood_is_rejected_and_the_line_stays_as_long_as_it_may_be() -> None:
    """A thousand hints at an engine that does not answer: four are under way, the rest is told so at once."""
    hints = desk(max_calls=4)
    told = [hints.received(command(action()), TAKES, 1, NOW) for _ in range(1_000)]
    under_way = [called(each) for each in told if isinstance(each, list)]
    refused = Counter(outcomes(each)[0][2:] for each in told if isinstance(each, HintAnswer))
    assert (len(under_way), hints.waiting, refused) == (4, 4, {("rejected", "bridge_busy"): 996})
    for each in under_way:
        assert outcomes(hints.answered(each.ticket, CallAnswer(problem="engine_timeout"))) == [
            ("a", "retain", "rejected", "engine_timeout")
        ]
    assert hints.waiting == 0


def test_calls_of_one_session_keep_their_order() -> None:
    """They are made in one lane, one after the other."""
    hints = desk(max_calls=100, lanes=4)
    lanes = {called(hints.received(command(action()), TAKES, 1, NOW)).lane for _ in range(20)}
    assert len(lanes) == 1


def test_a_hint_after_its_sessions_end_is_rejected_until_it_opens_again() -> None:
    """The issue's rule: what arrives late keeps nothing. A session that comes back is a session."""
    hints = desk()
    hints.closed.heard(session_fact("closed"))
    answer = hints.received(command(action("a"), action("b", "dereference", reason="closed")), EngineFacts(), 1, NOW)
    assert outcomes(answer) == [
        ("a", "retain", "rejected", "session_closed"),
        ("b", "dereference", "unsupported", "engine_has_no_hint_interface"),
    ]
    hints.closed.heard(session_fact("opened"))
    assert isinstance(hints.received(command(action()), TAKES, 1, NOW), list)


def test_closed_sessions_are_bounded_and_junk_is_counted() -> None:
    """The last three that were closed are known."""
    closed = ClosedSessions(3)
    for number in range(10):
        closed.heard(session_fact("closed", str(number)))
    closed.heard(session_fact("closed", "7"))
    closed.heard(session_fact("acting", "9"))
    closed.heard(b"junk")
    known = [number for number in range(10) if SessionKey(family="dynamo", root=str(number)).text() in closed]
    assert (len(closed), known, closed.unreadable) == (3, [7, 8, 9], 2)


@given(st.data())
def test_every_action_is_answered_once(data: st.DataObject) -> None:
    """Whatever order calls end in, and however: as many results as actions, and nothing is left open."""
    hints = desk(max_calls=3)
    open_calls: list[CallEngine] = []
    answers: list[HintAnswer] = []
    sent = 0
    for number in range(data.draw(st.integers(1, 12))):
        if data.draw(st.booleans()):
            kind = data.draw(st.sampled_from([TAKES, EngineFacts(kind="vllm"), EngineFacts(kind="sglang", pool="p")]))
            actions = [action(f"{number}-{place}") for place in range(data.draw(st.integers(0, 3)))]
            told = hints.received(command(*actions), kind, 1, NOW)
            sent += len(actions)
            if isinstance(told, HintAnswer):
                answers.append(told)
            else:
                open_calls += told
        elif open_calls:
            call = open_calls.pop(data.draw(st.integers(0, len(open_calls) - 1)))
            answered = hints.answered(call.ticket, data.draw(ANSWERS))
            answers += [answered] if answered is not None else []
        assert hints.waiting == len(open_calls) <= 3
    for call in open_calls:
        answered = hints.answered(call.ticket, CallAnswer(500))
        assert answered is not None
        answers.append(answered)
    ids = [each.action_id for answer in answers for each in answer.results]
    assert len(ids) == len(set(ids)) == sent == sum(hints.counts.values())
    assert SESSION in {answer.session for answer in answers} or not answers


ANSWERS = st.one_of(
    st.builds(CallAnswer, st.sampled_from([200, 400, 404, 500]), st.binary(max_size=8)),
    st.builds(CallAnswer, problem=st.sampled_from(["engine_timeout", "engine_unreachable"])),
)
