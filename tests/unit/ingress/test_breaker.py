"""Workers that are left alone for a while: the breaker by itself, and what the core does by it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.ingress import events
from services.ingress.breaker import FAILED_STATUSES, Breaker, BreakerRules
from services.ingress.core import IngressRules
from services.ingress.effects import AskAdmission, Forward
from services.ingress.requests import API_NOT_SERVED
from tests.unit.ingress.builders import Scene, counted, granted, received, worker

RULES = BreakerRules(failures=3, open_s=5.0, longest_s=15.0)
NAMES = ("a", "b")


def tripped() -> Breaker:
    """``a`` is open until 5."""
    breaker = Breaker(RULES)
    for _ in range(3):
        breaker.failed("a", 0.0)
    return breaker


def test_it_opens_after_so_many_failures_in_a_row() -> None:
    breaker = Breaker(RULES)
    for _ in range(5):
        breaker.failed("a", 0.0)
        breaker.failed("a", 0.0)
        breaker.answered("a")
    assert (breaker.avoided(NAMES, 0.0), breaker.states(0.0), breaker.trips) == ((), {}, 0)
    assert tripped().avoided(NAMES, 4.9) == ("a",)


def test_one_probe_at_a_time_and_longer_after_each_that_fails() -> None:
    breaker, opened, now = tripped(), [], 0.0
    for _ in range(4):
        start = now
        while breaker.states(now) == {"a": "open"}:
            now += 1.0
        opened.append(now - start)
        assert (breaker.states(now), breaker.avoided(NAMES, now)) == ({"a": "half_open"}, ())
        breaker.sent("a", now)
        assert breaker.avoided(NAMES, now) == ("a",)  # while the probe runs
        breaker.failed("a", now)
    assert opened == [5.0, 10.0, 15.0, 15.0]


def test_a_probe_that_says_nothing_is_followed_by_another() -> None:
    breaker = tripped()
    breaker.sent("a", 6.0)
    assert breaker.states(10.9) == {"a": "open"}
    assert breaker.states(11.0) == {"a": "half_open"}
    breaker.sent("a", 11.0)
    breaker.answered("a")
    assert breaker.states(11.0) == {}


def test_those_under_way_when_it_opened_do_not_open_it_longer() -> None:
    breaker = tripped()
    for _ in range(50):
        breaker.failed("a", 1.0)
    assert breaker.states(5.0) == {"a": "half_open"}
    assert breaker.trips == 1


def test_a_clock_that_is_set_back_leaves_nobody_alone_for_longer() -> None:
    """The rest of its time is as long as it was."""
    breaker = Breaker(BreakerRules(failures=1, open_s=5.0))
    breaker.failed("a", 1000.0)
    assert breaker.states(1003.0) == {"a": "open"}
    assert breaker.avoided(["a", "b"], 500.0) == ("a",)
    assert breaker.avoided(["a", "b"], 502.0) == ()
    breaker.sent("a", 502.0)
    assert breaker.states(502.0) == {"a": "open"}
    assert breaker.states(507.0) == {"a": "half_open"}


def test_where_all_are_open_all_are_tried() -> None:
    breaker = tripped()
    assert breaker.avoided(["a"], 1.0) == ()
    for _ in range(3):
        breaker.failed("b", 0.0)
    assert breaker.avoided(NAMES, 1.0) == ()
    assert breaker.avoided([*NAMES, "c"], 1.0) == NAMES


def test_no_failures_is_off() -> None:
    breaker = Breaker(BreakerRules(failures=0))
    for _ in range(100):
        breaker.failed("a", 0.0)
    assert breaker.states(0.0) == {}


@given(st.lists(st.tuples(st.sampled_from(["failed", "answered", "sent"]), st.floats(0, 20)), max_size=40))
def test_whatever_happens_a_worker_is_tried_again_in_time(steps: list[tuple[str, float]]) -> None:
    breaker, now = Breaker(RULES), 0.0
    for what, after_s in steps:
        now += after_s
        if what == "failed":
            breaker.failed("a", now)
        elif what == "answered":
            breaker.answered("a")
            assert breaker.states(now) == {}
        else:
            breaker.sent("a", now)
        assert len(breaker.avoided(NAMES, now)) < len(NAMES)
    assert breaker.states(now + RULES.longest_s).get("a") in (None, "half_open")


# In the core


def scene(*workers: str) -> Scene:
    return Scene(*workers, rules=IngressRules(retry=False, breaker=RULES))


def ask(house: Scene, request_id: str) -> AskAdmission:
    found = house.play(received(request_id), counted(request_id))
    (question,) = [effect for effect in found if isinstance(effect, AskAdmission)]
    return question


def fail(house: Scene, name: str, *outcomes: int | events.AnswerFailure) -> None:
    """Requests that are sent to this worker, and what comes of each."""
    for outcome in outcomes:
        request_id = f"r{house.now}"
        ask(house, request_id)
        house.play(granted(request_id, name))
        house.play(
            events.FirstByte(request_id=request_id, attempt=0, status=outcome)
            if isinstance(outcome, int)
            else events.AnswerFailed(request_id=request_id, attempt=0, reason=outcome),
            after_s=0.001,
        )


def test_admission_is_asked_to_avoid_a_worker_that_fails() -> None:
    house = scene("a", "b")
    fail(house, "a", "connect_error", 502, "connection_lost")
    question = ask(house, "next").question
    assert (question.avoided, question.excluded) == (("a",), ())


@pytest.mark.parametrize("outcome", [400, 404, 429, 501, 200, API_NOT_SERVED, "event_too_large", "total_timeout"])
def test_what_is_not_the_workers_fault_never_opens(outcome: int | events.AnswerFailure) -> None:
    """A client that sends nonsense must not take a worker away from others."""
    house = scene("a", "b")
    fail(house, "a", *[outcome] * 20)
    assert house.core.breaker.states(house.now) == {}


def test_the_statuses_that_count() -> None:
    assert {500, 502, 503, 529} <= FAILED_STATUSES
    assert not FAILED_STATUSES & {200, 404, 429, 501}


def test_a_grant_after_its_time_is_the_probe_and_its_answer_closes() -> None:
    house = scene("a", "b")
    fail(house, "a", 500, 500, 500)
    house.play(worker("a", seq=1), worker("b", seq=1), after_s=5.0)
    assert ask(house, "probe").question.avoided == ()
    house.play(granted("probe", "a"))
    assert ask(house, "beside").question.avoided == ("a",)
    house.play(events.FirstByte(request_id="probe", attempt=0, status=200))
    assert ask(house, "after").question.avoided == ()


def test_the_hash_passes_by_and_tries_where_there_is_nobody_else() -> None:
    house = scene("a", "b")
    fail(house, "a", 500, 500, 500)
    for number in range(20):
        ask(house, f"h{number}")
        found = house.play(events.AdmitFailed(request_id=f"h{number}", attempt=0, reason="no_responders"))
        assert [effect.worker for effect in found if isinstance(effect, Forward)] == ["b"]
    house.play(worker("b", seq=1, health="left"))
    ask(house, "alone")
    found = house.play(events.AdmitFailed(request_id="alone", attempt=0, reason="no_responders"))
    assert [effect.worker for effect in found if isinstance(effect, Forward)] == ["a"]


def test_a_worker_that_left_is_another_when_it_comes_back() -> None:
    house = scene("a", "b")
    fail(house, "a", 500, 500, 500)
    house.play(worker("a", seq=1, health="left"), worker("a", seq=2))
    assert house.core.breaker.states(house.now) == {}
