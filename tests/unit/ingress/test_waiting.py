"""Comments to clients whose stream is held, and what becomes of a request whose stream has begun with one."""

from __future__ import annotations

import json

import pytest

from schemas.admit import Held
from schemas.request import RequestFirstToken
from services.ingress import events
from services.ingress.core import IngressRules
from services.ingress.effects import (
    Answer,
    AskAdmission,
    BreakOff,
    CancelAdmission,
    CloseUpstream,
    Effect,
    HeldComment,
    Publish,
    Relay,
)
from services.ingress.replies import relayed_error_event
from tests.unit.ingress.builders import GOOD, Scene, counted, granted, held, received, refused
from tests.unit.ingress.test_core import ended, failed, first_byte, undecided

R = "r1"
EVERY_S = 15.0


def comments(effects: list[Effect]) -> list[bytes]:
    return [effect.text for effect in effects if isinstance(effect, HeldComment)]


def holding(*workers: str, stream: bool = True, every_s: float = EVERY_S, path: str = "/v1/chat/completions") -> Scene:
    """A request that admission holds."""
    scene = Scene(*workers, rules=IngressRules(held_comment_s=every_s, worker_lost_s=1e6))
    scene.play(received(R, stream=stream, path=path), counted(R), held(R))
    return scene


def opened(*workers: str) -> Scene:
    """A held request whose client was told so once."""
    scene = holding(*workers)
    assert len(comments(scene.play(events.Tick(), after_s=EVERY_S))) == 1
    return scene


def in_band(effects: list[Effect]) -> dict[str, object]:
    """The error of the one event that ends the stream."""
    assert not [effect for effect in effects if isinstance(effect, Answer)]
    (event,) = [effect.event for effect in effects if isinstance(effect, BreakOff)]
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    error: dict[str, object] = json.loads(event[6:])["error"]
    return error


def test_a_held_stream_is_told_so_as_often_as_wanted_until_its_engine_answers() -> None:
    """C4: not before it has been held for so long; then every time as long has passed, while it waits for its engine
    too; the first token is the engine's."""
    scene = holding("w1")
    assert comments(scene.play(events.Tick(), after_s=EVERY_S - 1)) == []
    assert comments(scene.play(events.Tick(), after_s=1)) == [b": held 15 s, no_room\n\n"]
    assert comments(scene.play(events.Tick(), held(R), events.Tick(), after_s=EVERY_S / 2)) == []
    assert comments(scene.play(events.Tick(), after_s=EVERY_S / 2)) == [b": held 30 s, no_room\n\n"]
    assert comments(scene.play(granted(R, "w1"))) == []
    assert comments(scene.play(events.Tick(), after_s=EVERY_S)) == [b": waiting for the engine\n\n"]
    effects = scene.play(first_byte(), after_s=5)
    assert [effect for effect in effects if isinstance(effect, Relay)]
    (fact,) = [effect.fact for effect in effects if isinstance(effect, Publish)]
    assert isinstance(fact, RequestFirstToken)
    assert fact.ttft_ms == 50_000
    assert comments(scene.play(events.Tick(), after_s=EVERY_S)) == []
    scene.play(ended())
    end, row = scene.end()
    assert (end.outcome, end.status) == ("completed", 200)
    assert row.request is not None
    assert row.request.ttft_ms == 50_000


@pytest.mark.parametrize(("stream", "every_s"), [(False, EVERY_S), (True, 0.0)])
def test_nobody_else_is_told(stream: bool, every_s: float) -> None:
    """C4: an answer that is no stream has nothing to put a comment into; and comments are off by default."""
    assert IngressRules().held_comment_s == 0
    scene = holding("w1", stream=stream, every_s=every_s)
    assert comments(scene.play(events.Tick(), after_s=1000)) == []
    assert isinstance(next(effect for effect in scene.play(refused(R)) if not isinstance(effect, Publish)), Answer)


def test_a_request_that_is_not_held_is_not_told() -> None:
    """Waiting for admission's first word, or for an engine without having been held, is nothing to tell."""
    scene = Scene("w1", rules=IngressRules(held_comment_s=EVERY_S, worker_lost_s=1e6))
    scene.play(received(R, stream=True), counted(R))
    assert comments(scene.play(events.Tick(), after_s=EVERY_S * 2)) == []
    scene.play(granted(R, "w1"))
    assert comments(scene.play(events.Tick(), after_s=EVERY_S * 2)) == []


def test_the_reason_of_a_hold_cannot_end_the_comment() -> None:
    """It came over the bus: what could end a line is not passed on."""
    scene = Scene("w1", rules=IngressRules(held_comment_s=EVERY_S, worker_lost_s=1e6))
    reply = Held(request_id=R, epoch=7, reason="x\n\ndata: {}\r" + "y" * 100, place=1)
    scene.play(received(R, stream=True), counted(R), events.AdmitReplied(request_id=R, attempt=0, reply=reply))
    (text,) = comments(scene.play(events.Tick(), after_s=EVERY_S))
    assert text.startswith(b": held 15 s, x_data: ")
    assert text.count(b"\n") == 2
    assert b"\r" not in text
    assert len(text) < 100


def test_a_refusal_after_a_comment_is_an_event_in_the_stream() -> None:
    """The head has gone out with 200: the refusal, its reason and when to come back stand in the event; the row says
    429 all the same."""
    scene = opened("w1")
    error = in_band(scene.play(refused(R)))
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert str(error["message"]).endswith("Try again in 2 s.")
    end, _ = scene.end()
    assert (end.outcome, end.reason, end.status) == ("refused", "queue_full", 429)


def test_a_hold_that_ends_at_its_deadline_cancels_once_and_says_so_in_the_stream() -> None:
    """Admission is told to forget it, before the client is."""
    scene = opened("w1")
    effects = scene.play(undecided("hold_timeout"))
    assert len([effect for effect in effects if isinstance(effect, CancelAdmission)]) == 1
    assert in_band(effects)["code"] == "hold_timeout"


def test_another_worker_is_tried_while_nothing_of_an_engine_was_sent() -> None:
    """A comment is no answer: the retry is as before, and only its failure is told, in the stream."""
    scene = opened("w1", "w2")
    scene.play(granted(R, "w1"))
    effects = scene.play(failed("connection_lost"))
    assert [effect for effect in effects if isinstance(effect, AskAdmission)]
    assert not [effect for effect in effects if isinstance(effect, Answer | BreakOff)]
    scene.play(granted(R, "w2", 1))
    assert in_band(scene.play(failed("connect_timeout", 1)))["code"] == "connect_timeout"


def test_an_engine_that_does_not_stream_has_given_a_bad_answer() -> None:
    """The client has been promised a stream. An error, which is never one, is passed on."""
    scene = opened("w1")
    scene.play(granted(R, "w1"))
    effects = scene.play(events.FirstByte(request_id=R, attempt=0, status=200, is_stream=False))
    assert in_band(effects)["code"] == "bad_answer"
    assert len([effect for effect in effects if isinstance(effect, CloseUpstream)]) == 1
    scene = opened("w1")
    scene.play(granted(R, "w1"))
    effects = scene.play(events.FirstByte(request_id=R, attempt=0, status=400, is_stream=False))
    assert [effect for effect in effects if isinstance(effect, Relay)]
    scene.play(ended(answer=GOOD))
    assert scene.end()[0].outcome == "client_error"


def test_a_client_that_leaves_its_opened_stream_is_forgotten_once() -> None:
    """One cancel for admission, one end; nothing more is said."""
    scene = opened("w1")
    effects = scene.play(events.ClientGone(request_id=R))
    assert len([effect for effect in effects if isinstance(effect, CancelAdmission)]) == 1
    assert not [effect for effect in effects if isinstance(effect, Answer | BreakOff)]
    scene.play(events.ClientGone(request_id=R), events.Tick(), after_s=EVERY_S * 2)
    assert comments(scene.effects) == [b": held 15 s, no_room\n\n"]
    assert scene.end()[0].outcome == "client_disconnect"


def test_a_bug_and_a_stop_are_told_in_the_stream_too() -> None:
    """What ends everything ends opened streams in their own shape."""
    scene = opened("w1")
    assert in_band(scene.play(events.RequestFailed(request_id=R)))["code"] == "internal_error"
    scene = opened("w1")
    assert in_band(scene.play(events.Stopped()))["code"] == "stopping"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "too long", "type": "BadRequestError", "code": 400}}', "too long"),
        (b'{"object": "error", "message": "old shape"}', "old shape"),
        (b'{"error": {"message": null}}', "The engine answered with status 400."),
        (b'{"error": "words"}', "The engine answered with status 400."),
        (b"<html>\n\ndata: {}</html>", "The engine answered with status 400."),
        (b"\xff", "The engine answered with status 400."),
    ],
)
def test_an_engines_own_error_keeps_its_words_in_the_stream(body: bytes, message: str) -> None:
    """Harnesses read them. Each API has its own shape; what is no error of an engine gets ours."""
    event = relayed_error_event("chat_completions", 400, body)
    assert json.loads(event.removeprefix(b"data: "))["error"] == {
        "message": message,
        "type": "invalid_request_error",
        "param": None,
        "code": "engine_status",
    }
    event = relayed_error_event("messages", 400, body)
    assert event.startswith(b"event: error\ndata: ")
    said = json.loads(event.split(b"data: ", 1)[1])
    assert said == {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
