"""Judgements on what a policy answered. Pure: each takes what was seen and gives a `Check`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from bus.policy_answers import NotACandidateError, WrongAnswerError, has_opinion
from schemas.base import BadMessageError, from_json
from schemas.decision import PolicyAsk
from schemas.hint import MAX_TTL_MS
from schemas.policy import (
    ANSWERS,
    MAX_ANSWER_BYTES,
    MAX_HOLD_MS,
    AdmitAnswer,
    HintAnswer,
    HintQuestion,
    LeaseAnswer,
    PlannedAction,
    PolicyAnswer,
    PolicyQuestion,
    RouteAnswer,
    RouteQuestion,
)
from tidegate.doctor.checks import Check, counted

LONG_REASON = 200
MANUAL = "docs/custom-policies.md has the shape"

SPARED = {
    "policy_failed": "its function raised",
    WrongAnswerError.reason: "its function gave what is no answer",
    NotACandidateError.reason: "its function chose what is no candidate, or cannot be used now",
}
"""Reasons with which the SDK says "no opinion" in place of a function that could not."""

Ending = Literal["answered", "late", "silent", "absent", "error"]


@dataclass(frozen=True, slots=True)
class Heard:
    """What became of one question: its answer's bytes, or none. ``late``: answered past its deadline; ``error``:
    answered with an error instead (``problem``). ``took_ms``: until then."""

    ending: Ending
    took_ms: float
    payload: bytes = b""
    problem: str = ""


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Times of answers in ms, over questions one after the other. ``late``: past ``deadline_ms``, or never."""

    asked: int
    late: int
    deadline_ms: int
    p50_ms: float
    p99_ms: float
    max_ms: float


def latency(heard: Sequence[Heard], deadline_ms: int) -> Latency:
    """Percentiles by nearest rank."""
    times = sorted(each.took_ms for each in heard)
    late = sum(each.ending != "answered" for each in heard)

    def at(share: float) -> float:
        return round(times[math.ceil(share * len(times)) - 1], 3)

    return Latency(
        asked=len(heard),
        late=late,
        deadline_ms=deadline_ms,
        p50_ms=at(0.5),
        p99_ms=at(0.99),
        max_ms=round(times[-1], 3),
    )


def check_presence(ask: PolicyAsk, subject: str, is_service: bool) -> Check:
    """Is it among the bus's micro services?"""
    name = f"{ask}: in $SRV"
    if is_service:
        return Check(name=name, verdict="ok", found=f"a micro service serves {subject}")
    fix = "serve it with your client's micro API, so that `tidegate policy list` and the doctor see it"
    return Check(name=name, verdict="warning", found=f"no micro service names {subject}", fix=fix)


def check_case(ask: PolicyAsk, name: str, question: PolicyQuestion, heard: Heard, *, expects_nothing: bool) -> Check:
    """One well-formed question."""
    title = f"{ask}: {name}"
    if heard.ending != "answered":
        return Check(name=title, verdict="failed", found=_ending(heard), fix=_fix_of(heard))
    if len(heard.payload) > MAX_ANSWER_BYTES:
        fix = f"at most {MAX_ANSWER_BYTES} bytes are read; a reason is one sentence"
        return Check(name=title, verdict="failed", found=f"an answer of {len(heard.payload)} bytes", fix=fix)
    try:
        answer = from_json(heard.payload, ANSWERS[ask])
    except BadMessageError as error:
        shown = heard.payload[:80].decode(errors="replace")
        return Check(name=title, verdict="failed", found=f"{error} ({shown})", fix=f"answer {_shape(ask)}; {MANUAL}")
    wrong = _wrong(question, answer, expects_nothing=expects_nothing)
    if wrong:
        return Check(name=title, verdict="failed", found=wrong[0], fix=wrong[1])
    odd = _odd(answer)
    if odd:
        return Check(name=title, verdict="warning", found=odd[0], fix=odd[1])
    return Check(name=title, verdict="ok", found=f"{_words(answer)} in {heard.took_ms:.1f} ms")


def check_expired(ask: PolicyAsk, heard: Heard, after: Heard) -> Check:
    """A question whose deadline had passed when it was asked. ``after``: what became of the next good one."""
    name = f"{ask}: deadline passed"
    if after.ending != "answered":
        return Check(name=name, verdict="failed", found=f"the next question: {_ending(after)}", fix=_fix_of(after))
    if heard.ending in ("silent", "error"):
        return Check(name=name, verdict="ok", found="left unanswered, the next one answered")
    return Check(name=name, verdict="ok", found="answered all the same, which nobody reads")


def check_garbage(ask: PolicyAsk, name: str, after: Heard) -> Check:
    """What is no question must not stop the next good one."""
    title = f"{ask}: {name}"
    if after.ending == "answered":
        return Check(name=title, verdict="ok", found="the next question is answered")
    fix = "catch what decoding raises, and answer {} (or nothing); see its log"
    return Check(name=title, verdict="failed", found=f"the next question: {_ending(after)}", fix=fix)


def check_speed(ask: PolicyAsk, measured: Latency) -> Check:
    """One question after the other, against the deadline."""
    name = f"{ask}: speed"
    found = (
        f"p50 {measured.p50_ms:.1f} ms, p99 {measured.p99_ms:.1f} ms, most {measured.max_ms:.1f} ms of "
        f"{measured.deadline_ms} ms; {measured.late} of {measured.asked} late"
    )
    if measured.p99_ms >= measured.deadline_ms:
        fix = "answer from memory (no I/O, no model calls in the function), or give it a longer deadline_ms"
        return Check(name=name, verdict="failed", found=found, fix=fix)
    if measured.late or measured.p99_ms > measured.deadline_ms / 2:
        fix = "little is left for the network and a busy machine: answer faster, or set a longer deadline_ms"
        return Check(name=name, verdict="warning", found=found, fix=fix)
    return Check(name=name, verdict="ok", found=found)


def check_together(ask: PolicyAsk, heard: Sequence[Heard]) -> Check:
    """As many at once as a busy admission may ask."""
    name = f"{ask}: {len(heard)} at once"
    late = sum(each.ending in ("late", "silent") for each in heard)
    broken = sum(each.ending in ("absent", "error") for each in heard)
    if broken:
        fix = "see its log: questions that it answers one by one fail when they come together"
        return Check(name=name, verdict="failed", found=f"{counted(broken, 'question')} failed", fix=fix)
    if late:
        fix = "answer without waiting in between, or run several of it (one queue group shares the questions)"
        return Check(name=name, verdict="warning", found=f"{late} of {len(heard)} late", fix=fix)
    return Check(name=name, verdict="ok", found="all in time")


def check_nobody(ask: PolicyAsk, subject: str) -> Check:
    """Nobody listens at all."""
    fix = f"start its process; it must subscribe to {subject} (spelled exactly so) on this bus"
    return Check(name=f"{ask}: answers", verdict="failed", found=f"nobody answers {subject}", fix=fix)


def _ending(heard: Heard) -> str:
    if heard.ending == "late":
        return f"answered after {heard.took_ms:.0f} ms, past its deadline"
    if heard.ending == "silent":
        return "no answer"
    if heard.ending == "absent":
        return "nobody answers any more"
    return f"an error instead of an answer: {heard.problem}"


def _fix_of(heard: Heard) -> str:
    if heard.ending == "absent":
        return "its process ended or unsubscribed: see its log"
    if heard.ending == "error":
        return "catch what it raises, and answer {} (no opinion); see its log"
    return "answer each question before its deadline_ms (Unix ms: clocks must agree), {} for no opinion"


def _shape(ask: PolicyAsk) -> str:
    shapes: dict[PolicyAsk, str] = {
        "route": '{"worker": "...", "rank": 0}',
        "admit": '{"action": "hold", "hold_ms": 500}',
        "lease": '{"keep": true, "ttl_ms": 5000}',
        "hint": '{"actions": [{"action_type": "retain", "worker": "...", "ttl_ms": 5000}]}',
    }
    return f"{shapes[ask]} or {{}}"


def _wrong(question: PolicyQuestion, answer: PolicyAnswer, *, expects_nothing: bool) -> tuple[str, str] | None:
    """What must not be answered, and what to do."""
    if answer.reason in SPARED and not has_opinion(answer):
        return SPARED[answer.reason], "its log says more; admission takes its own choice meanwhile"
    if isinstance(question, HintQuestion) and isinstance(answer, HintAnswer) and answer.actions:
        return _wrong_actions(question, answer.actions, expects_nothing=expects_nothing)
    if not isinstance(question, RouteQuestion) or not isinstance(answer, RouteAnswer) or not answer.worker:
        return None
    named = answer.worker + ("" if answer.rank is None else f" rank {answer.rank}")
    if expects_nothing:
        return f"names {named}, although nothing can be used", "answer {} when no candidate is without `excluded`"
    meant = [one for one in question.candidates if one.worker == answer.worker and answer.rank in (None, one.rank)]
    if not meant:
        return f"names {named}, which is no candidate", "choose among the question's candidates only"
    if all(one.excluded is not None for one in meant):
        return f"names {named}, which is excluded ({meant[0].excluded})", "leave candidates with `excluded` out"
    return None


def _wrong_actions(
    question: HintQuestion, actions: Sequence[PlannedAction], *, expects_nothing: bool
) -> tuple[str, str] | None:
    """Actions that the hint planner would refuse."""
    for action in actions:
        named = f"{action.action_type} at {action.worker} rank {action.rank}"
        if expects_nothing:
            return f"names {named}, although the session has run nowhere", "answer {} when `worker` is missing"
        elsewhere = (action.worker, action.rank) != (question.worker, question.rank or 0)
        if elsewhere and action.action_type not in ("prefetch", "share"):
            return f"names {named}, where the session has nothing", "only prefetch and share may name another worker"
    return None


def _odd(answer: PolicyAnswer) -> tuple[str, str] | None:
    """What is taken, but not as it was meant."""
    if answer.reason is not None and len(answer.reason) > LONG_REASON:
        return f"a reason of {len(answer.reason)} characters", f"only the first {LONG_REASON} are told"
    if isinstance(answer, AdmitAnswer) and answer.action == "hold" and (answer.hold_ms or 0) > MAX_HOLD_MS:
        return f"holds for {answer.hold_ms} ms", f"at most {MAX_HOLD_MS} ms count; it is asked again then"
    actions = (answer.actions or ()) if isinstance(answer, HintAnswer) else ()
    longest = max((each.ttl_ms or 0 for each in actions), default=0)
    if longest > MAX_TTL_MS:
        return f"keeps for {longest} ms", f"at most {MAX_TTL_MS} ms count; renew it, or leave ttl_ms out"
    if isinstance(answer, AdmitAnswer) and answer.action == "refuse" and not answer.reason:
        return "refuses without a reason", "say why: the client reads it beside policy_refused"
    return None


def _words(answer: PolicyAnswer) -> str:
    if isinstance(answer, RouteAnswer):
        return f"{answer.worker or 'no opinion'}{'' if answer.rank is None else f' rank {answer.rank}'}"
    if isinstance(answer, LeaseAnswer):
        return "no opinion" if answer.keep is None else "keep" if answer.keep else "give up"
    if isinstance(answer, HintAnswer):
        if answer.actions is None:
            return "no opinion"
        return ", ".join(each.action_type for each in answer.actions) or "nothing"
    bias = f", {answer.order_bias_s:+g} s" if answer.order_bias_s else ""
    return f"{answer.action or ('admit' if bias else 'no opinion')}{bias}"
