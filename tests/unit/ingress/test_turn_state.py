"""Turn states: good for their session and time, and as none otherwise."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.ingress import events
from services.ingress.core import IngressRules
from services.ingress.effects import AskAdmission, Forward
from services.ingress.turn_state import PREFIX, TurnStates, foreign
from tests.unit.ingress.builders import Scene, counted, received, worker

SECRET = b"s" * 32
STATES = TurnStates(SECRET, 600)
names = st.text(min_size=1, max_size=64, alphabet=st.characters(codec="utf-8"))


@given(names, names, st.floats(0, 2**40), st.floats(0, 598))
def test_it_is_read_in_its_session_and_time(name: str, session: str, now: float, after_s: float) -> None:
    token = STATES.make(name, session, now).decode("ascii")
    assert token.isprintable()
    assert " " not in token
    assert TurnStates(SECRET, 600).read(token, session, now + after_s) == name
    assert STATES.read(token, session, now + 601) is None
    assert STATES.read(token, session + "x", now) is None
    assert TurnStates(b"other" * 8, 600).read(token, session, now) is None


@given(st.integers(0, 200), st.integers(0, 63))
def test_no_character_of_it_can_be_changed(place: int, value: int) -> None:
    token = STATES.make("worker-1", "s", 1000.0).decode()
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    place = len(PREFIX) + place % (len(token) - len(PREFIX))
    changed = token[:place] + letters[value] + token[place + 1 :]
    read = STATES.read(changed, "s", 1000.0)
    assert changed == token or place == len(token) - 1 or read is None  # the last bits say nothing


@pytest.mark.parametrize(
    "token",
    [None, "", PREFIX, f"{PREFIX}A", f"{PREFIX}é", f"{PREFIX}!!!!", "x" * 30, PREFIX + "A" * 600, "http://10.0.0.1/"],
)
def test_anything_else_is_as_none(token: str | None) -> None:
    assert STATES.read(token, "s", 0.0) is None


def test_off() -> None:
    states = TurnStates(SECRET, 0)
    assert not states.on
    assert states.read(STATES.make("a", "s", 0.0).decode(), "s", 0.0) is None


def test_engines_get_their_own_and_never_ours() -> None:
    ours, theirs = STATES.make("a", "s", 0.0), b"engine-state"
    headers = [(b"X-Codex-Turn-State", ours), (b"x-codex-turn-state", theirs), (b"x", ours)]
    assert foreign(headers) == headers[1:]


# In the core


def sticky(request_id: str, name: str) -> events.RequestReceived:
    found = received(request_id, headers={"x-tidegate-session-id": "s"})
    return events.RequestReceived(request_id=request_id, request=found.request, resolved=found.resolved, sticky=name)


def hashed(house: Scene, request_id: str, name: str) -> str:
    """Where it goes when nobody decides."""
    house.play(sticky(request_id, name), counted(request_id))
    found = house.play(events.AdmitFailed(request_id=request_id, attempt=0, reason="no_responders"))
    return next(effect.worker for effect in found if isinstance(effect, Forward))


def test_admission_is_told_and_without_it_the_turn_stays() -> None:
    house = Scene("a", "b", "c", rules=IngressRules())
    (question,) = [effect for effect in house.play(sticky("q", "b"), counted("q")) if isinstance(effect, AskAdmission)]
    assert question.question.sticky == "b"
    assert {hashed(house, name, name) for name in ("a", "b", "c")} == {"a", "b", "c"}


@pytest.mark.parametrize("name", ["gone", "http://10.0.0.1:80", ""])
def test_a_worker_that_is_not_there_means_nothing(name: str) -> None:
    house = Scene("a", "b")
    assert hashed(house, "r", name) == hashed(house, "r2", "none")


def test_a_worker_that_cannot_take_it_means_nothing() -> None:
    house = Scene("a", "b")
    house.play(worker("a", seq=1, health="unhealthy"))
    assert hashed(house, "r", "a") == "b"
