"""What the conformance kit says of a policy's answers."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from schemas.decision import PolicyAsk
from schemas.policy import POLICY_ASKS, QUESTIONS
from services.admission.user_policies import UserPolicy
from tidegate.policy import judging
from tidegate.policy.judging import Heard
from tidegate.policy.listing import Asked, asked_by_admission
from tidegate.policy.questions import Case, cases


def case_of(ask: PolicyAsk, name: str) -> Case:
    return next(each for each in cases(ask) if each.name == name)


def verdict(ask: PolicyAsk, name: str, payload: bytes) -> tuple[str, str]:
    case = case_of(ask, name)
    heard = Heard("answered", 1.0, payload)
    check = judging.check_case(ask, name, case.question, heard, expects_nothing=case.expects_nothing)
    assert (check.fix == "") == (check.verdict == "ok")
    return check.verdict, check.found


@pytest.mark.parametrize("ask", POLICY_ASKS)
def test_every_case_is_a_question_that_admission_may_ask(ask: PolicyAsk) -> None:
    """It decodes as its kind, with the fields of a later version too, and says its deadline."""
    for case in cases(ask):
        question = msgspec.json.decode(case.payload(1_234), type=QUESTIONS[ask])
        assert question == msgspec.structs.replace(case.question, deadline_ms=1_234)


@pytest.mark.parametrize(
    ("ask", "name", "payload", "expected"),
    [
        ("route", "small question", b'{"worker":"worker-1"}', ("ok", "worker-1 in 1.0 ms")),
        ("route", "small question", b"{}", ("ok", "no opinion in 1.0 ms")),
        ("route", "small question", b'{"worker":"nobody"}', ("failed", "names nobody, which is no candidate")),
        ("route", "small question", b'{"worker":"worker-1","rank":3}', ("failed", "names worker-1 rank 3, which…")),
        ("route", "64 candidates", b'{"worker":"worker-1"}', ("failed", "names worker-1, which is excluded (at_li…")),
        ("route", "no candidate usable", b'{"worker":"worker-0"}', ("failed", "names worker-0, although nothing…")),
        ("admit", "small question", b'{"action":"hold","hold_ms":500}', ("ok", "hold in 1.0 ms")),
        ("admit", "small question", b'{"order_bias_s":-2.5}', ("ok", "admit, -2.5 s in 1.0 ms")),
        ("admit", "small question", b'{"action":"hold","hold_ms":60000}', ("warning", "holds for 60000 ms")),
        ("admit", "small question", b'{"action":"refuse"}', ("warning", "refuses without a reason")),
        ("admit", "small question", b'{"reason":"%s"}' % (b"x" * 65_536), ("failed", "an answer of 65549 bytes")),
        ("lease", "small question", b'{"keep":false}', ("ok", "give up in 1.0 ms")),
        ("hint", "small question", b'{"actions":[]}', ("ok", "nothing in 1.0 ms")),
        ("hint", "small question", b"{}", ("ok", "no opinion in 1.0 ms")),
        ("hint", "small question", b'{"actions":[{"action_type":"prefetch","worker":"w9"}]}', ("ok", "prefetch in…")),
        ("hint", "small question", b'{"actions":[{"action_type":"pin","worker":"w9"}]}', ("failed", "names pin at…")),
        ("hint", "a session that ran nowhere", b'{"actions":[{"action_type":"prefetch","worker":"w9"}]}',
         ("failed", "names prefetch at w9 rank 0, although…")),
        ("hint", "small question", b'{"actions":[{"action_type":"pin","worker":"worker-0","ttl_ms":900000}]}',
         ("warning", "keeps for 900000 ms")),
    ],
)  # fmt: skip
def test_an_answer_is_judged_by_what_it_says(
    ask: PolicyAsk, name: str, payload: bytes, expected: tuple[str, str]
) -> None:
    found = verdict(ask, name, payload)
    assert (found[0], found[1].startswith(expected[1].rstrip("…"))) == (expected[0], True), found


@pytest.mark.parametrize(
    "payload", [b"", b"null", b"worker-1", b'{"action":"wait"}', b'{"hold_ms":-1}', b'{"hold_ms":"1"}']
)
def test_what_is_no_answer_fails_and_the_shape_is_shown(payload: bytes) -> None:
    case = case_of("admit", "small question")
    check = judging.check_case("admit", "x", case.question, Heard("answered", 1.0, payload), expects_nothing=False)
    assert check.verdict == "failed"
    assert '{"action": "hold", "hold_ms": 500}' in check.fix


@pytest.mark.parametrize("reason", ["policy_failed", "wrong_answer", "not_a_candidate"])
def test_what_the_sdk_spares_admission_fails_here(reason: str) -> None:
    """A function that raises, or gives what is no answer, reaches admission as "no opinion"; here it fails.
    The same word beside an opinion is only a reason."""
    for ask in POLICY_ASKS:
        payload = msgspec.json.encode({"reason": reason})
        assert verdict(ask, "small question", payload)[0] == "failed"
    hold = msgspec.json.encode({"action": "hold", "hold_ms": 100, "reason": reason})
    assert verdict("admit", "small question", hold)[0] == "ok"


@pytest.mark.parametrize("ending", ["late", "silent", "absent", "error"])
def test_no_answer_in_time_fails(ending: judging.Ending) -> None:
    case = case_of("lease", "small question")
    check = judging.check_case("lease", "x", case.question, Heard(ending, 90.0), expects_nothing=False)
    assert check.verdict == "failed"
    assert check.fix


def test_speed_is_measured_against_the_deadline() -> None:
    """Percentiles by nearest rank; p99 past the deadline fails, past half of it warns."""
    quick = [Heard("answered", float(ms)) for ms in range(1, 101)]
    measured = judging.latency(quick, 1_000)
    assert (measured.p50_ms, measured.p99_ms, measured.max_ms, measured.late) == (50.0, 99.0, 100.0, 0)
    assert judging.check_speed("route", measured).verdict == "ok"
    assert judging.check_speed("route", judging.latency(quick, 150)).verdict == "warning"
    assert judging.check_speed("route", judging.latency(quick, 99)).verdict == "failed"
    one_late = [*quick, Heard("late", 100.0)]
    assert judging.check_speed("route", judging.latency(one_late, 1_000)).verdict == "warning"


def test_what_admission_says_that_it_asks() -> None:
    """From its metadata, of every process together; what another version writes there is nothing."""
    services: list[dict[str, Any]] = [
        {
            "name": "admission",
            "metadata": {"policies": '[{"name": "a", "asks": ["admit", "route"], "deadline_ms": 70}]'},
        },
        {
            "name": "admission",
            "metadata": {"policies": '[{"name": "a", "asks": ["lease"]}, {"name": "b", "asks": ["?"]}]'},
        },
        {"name": "other", "metadata": {"policies": '{"a": 1}'}},
        {"name": "none"},
    ]
    assert asked_by_admission(services) == {"a": Asked(("route", "admit", "lease"), 70), "b": Asked((), None)}
    (written,) = asked_by_admission(
        [{"metadata": {"policies": msgspec.json.encode([UserPolicy(name="x", asks=("lease",))]).decode()}}]
    ).values()
    assert written == Asked(("lease",), 50)
