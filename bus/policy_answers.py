"""What a user's function may answer, made into the message that travels; what it may not is said in words."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from bus.errors import BusError
from schemas.base import BadMessageError, from_json, to_json
from schemas.decision import Candidate, PolicyAsk
from schemas.policy import (
    AdmitAction,
    AdmitAnswer,
    AdmitQuestion,
    HintAnswer,
    HintQuestion,
    LeaseAnswer,
    PlannedAction,
    PolicyAnswer,
    PolicyQuestion,
    RouteAnswer,
    RouteQuestion,
)

RouteChoice = str | Candidate | RouteAnswer | None
"""A worker's name, one of the question's candidates, a whole answer, or ``None``: no opinion."""

AdmitChoice = AdmitAction | AdmitAnswer | None
"""``"admit"``, ``"hold"``, ``"refuse"``, a whole answer (with times and reasons), or ``None``: no opinion."""

LeaseChoice = bool | LeaseAnswer | None
"""``True``: keep it; ``False``: give it up; a whole answer (for how long), or ``None``: no opinion."""

HintChoice = Sequence[PlannedAction] | HintAnswer | None
"""Actions instead of the planner's (none: nothing is sent), a whole answer, or ``None``: no opinion."""

A = TypeVar("A", RouteAnswer, AdmitAnswer, LeaseAnswer, HintAnswer)


class WrongAnswerError(BusError):
    """A user's function answered with something that is no answer (the function's fault)."""

    reason = "wrong_answer"


class NotACandidateError(WrongAnswerError):
    """A route function named a worker that is no candidate, or one that cannot be used now."""

    reason = "not_a_candidate"


def answer_to(ask: PolicyAsk, question: PolicyQuestion, choice: object) -> PolicyAnswer:
    """The message for what the user's function gave. Raises `WrongAnswerError`, `NotACandidateError`."""
    if isinstance(question, RouteQuestion):
        return _route(question, choice)
    if isinstance(question, AdmitQuestion):
        return _checked(_admit(choice), AdmitAnswer, ask)
    if isinstance(question, HintQuestion):
        return _checked(_hint(choice), HintAnswer, ask)
    return _checked(_lease(choice), LeaseAnswer, ask)


def has_opinion(answer: PolicyAnswer) -> bool:
    """Whether the answer would change anything."""
    if isinstance(answer, RouteAnswer):
        return bool(answer.worker)
    if isinstance(answer, AdmitAnswer):
        return bool(answer.action or answer.order_bias_s)
    if isinstance(answer, HintAnswer):
        return answer.actions is not None
    return answer.keep is not None


def check_function(ask: PolicyAsk, function: Callable[..., Any]) -> None:
    """Raises `TypeError` for what cannot be called with one question and answer at once."""
    name = getattr(function, "__name__", repr(function))
    if not callable(function):
        raise TypeError(f"{ask}: {name} is no function")
    if asyncio.iscoroutinefunction(function):
        raise TypeError(f"{ask}: {name} must be a plain function (def, not async def): it answers at once")
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        raise TypeError(f"{ask}: {name} must take one argument, the question") from None


def _route(question: RouteQuestion, choice: object) -> RouteAnswer:
    if isinstance(choice, Candidate):
        answer = RouteAnswer(worker=choice.worker, rank=choice.rank)
    elif isinstance(choice, RouteAnswer):
        answer = _checked(choice, RouteAnswer, "route")
    elif choice is None or isinstance(choice, str):
        answer = RouteAnswer(worker=choice or "")
    else:
        raise _wrong("route", "a worker's name, one of the question's candidates, a RouteAnswer or None", choice)
    if answer.worker and not any(_fits(answer, candidate) for candidate in question.candidates):
        usable = sorted({each.worker for each in question.candidates if each.excluded is None})
        rank = "" if answer.rank is None else f" rank {answer.rank}"
        raise NotACandidateError(f"{answer.worker}{rank} cannot be used now; there are {', '.join(usable) or 'none'}")
    return answer


def _fits(answer: RouteAnswer, candidate: Candidate) -> bool:
    return candidate.worker == answer.worker and answer.rank in (None, candidate.rank) and candidate.excluded is None


def _admit(choice: object) -> AdmitAnswer:
    if choice is None or isinstance(choice, AdmitAnswer):
        return choice or AdmitAnswer()
    if isinstance(choice, str):
        return AdmitAnswer(action=choice)  # type: ignore[arg-type]  # checked as it would be read
    raise _wrong("admit", '"admit", "hold", "refuse", an AdmitAnswer or None', choice)


def _lease(choice: object) -> LeaseAnswer:
    if choice is None or isinstance(choice, bool):
        return LeaseAnswer(keep=choice)
    if isinstance(choice, LeaseAnswer):
        return choice
    raise _wrong("lease", "True, False, a LeaseAnswer or None", choice)


def _hint(choice: object) -> HintAnswer:
    if choice is None or isinstance(choice, HintAnswer):
        return choice or HintAnswer()
    if isinstance(choice, list | tuple) and all(isinstance(each, PlannedAction) for each in choice):
        return HintAnswer(actions=tuple(choice))
    raise _wrong("hint", "a list of PlannedAction, a HintAnswer or None", choice)


def _wrong(ask: PolicyAsk, wanted: str, choice: object) -> WrongAnswerError:
    return WrongAnswerError(f"{ask} must answer with {wanted}, not {type(choice).__name__}")


def _checked(answer: A, kind: type[A], ask: PolicyAsk) -> A:
    """As it will be read: a struct's fields are not checked when it is made."""
    try:
        return from_json(to_json(answer), kind)
    except (BadMessageError, TypeError, ValueError, OverflowError) as error:
        raise WrongAnswerError(f"{ask}: {error}") from error
