"""The policy SDK: a user's process that watches the bus and answers questions.

    from tidegate import AdmitAnswer, Policy

    policy = Policy("small-first")

    @policy.admit
    def admit(question):
        if question.input_tokens > 100_000 and question.waiting:
            return AdmitAnswer(action="hold", hold_ms=500)

    policy.run("nats://127.0.0.1:4222")

Four kinds of questions: `Policy.route` (where a turn goes), `Policy.admit` (whether it goes now), `Policy.lease`
(whether an idle session's KV stays), `Policy.hint` (what caches are told). Admission asks what
``[[admission.policies]]`` names, the hint planner what ``[[hints.policies]]`` does. What is late, absent or unusable
changes nothing: the built-in choice stands. `Policy.intend` tells the hint planner something unasked.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeVar

import uvloop

from bus import subjects
from bus.errors import SettingsError
from bus.facts import FactNumbers
from bus.interface import Bus, BusMessage, Endpoint, ServedEndpoints, Subscription
from bus.log import EventLog, set_up_logging
from bus.nats import NatsBus, options_from_environment
from bus.nats import connect as connect_nats
from bus.policy_answers import (
    AdmitChoice,
    HintChoice,
    LeaseChoice,
    NotACandidateError,
    RouteChoice,
    WrongAnswerError,
    answer_to,
    check_function,
    has_opinion,
)
from bus.tasks import end
from schemas.base import BadMessageError, Message, from_json, to_json
from schemas.catalog import channel_of, decode
from schemas.decision import PolicyAsk
from schemas.hint import ActionType, HintIntent
from schemas.policy import (
    ANSWERS,
    POLICY_ASKS,
    QUESTIONS,
    AdmitQuestion,
    HintQuestion,
    LeaseQuestion,
    PolicyAnswer,
    PolicyQuestion,
    RouteQuestion,
)
from schemas.session import SessionKey

log = EventLog(__name__)

DEFAULT_URL = "nats://127.0.0.1:4222"

AnswerFunction = Callable[[Any], object]
FactFunction = Callable[[Any], object]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(slots=True)
class PolicyCounts:
    """What a policy has done. ``unusable``: it named a worker that was no candidate. ``late``: past the deadline.

    ``failed``: the user's function raised, or gave what is no answer. ``rejected``: a question or fact that does not
    decode.
    """

    answered: int = 0
    no_opinion: int = 0
    unusable: int = 0
    late: int = 0
    failed: int = 0
    facts: int = 0
    rejected: int = 0


async def connect(url: str | None = None, *, name: str = "tidegate-client", timeout_s: float | None = 10.0) -> NatsBus:
    """A connection to the bus at ``url`` (default: ``TIDEGATE_NATS_URL``, else this machine), with the credentials of
    ``TIDEGATE_NATS_USER`` and ``TIDEGATE_NATS_PASSWORD`` or ``TIDEGATE_NATS_PASSWORD_FILE`` where they are set.

    Raises `NotConnectedError` after ``timeout_s`` (``None``: wait for ever), `SettingsError` for what is no address.
    """
    address = url or os.environ.get("TIDEGATE_NATS_URL") or DEFAULT_URL
    return await connect_nats(address, name=name, timeout_s=timeout_s, options=options_from_environment())


class Policy:
    """A policy named ``name``. Decorate functions with `route`, `admit`, `lease`, `hint`, or subclass it and define
    `choose`, `judge`, `keep`, `plan`.

    Functions are plain and quick: they run on the event loop, one after the other. One that raises is counted and
    logged, and answers with no opinion. Raises `ValueError` for an empty name.
    """

    _METHODS: ClassVar[dict[PolicyAsk, str]] = {"route": "choose", "admit": "judge", "lease": "keep", "hint": "plan"}

    def __init__(self, name: str) -> None:
        if not name:
            raise ValueError("a policy's name must not be empty")
        self.name = name
        self.counts = PolicyCounts()
        self._functions: dict[PolicyAsk, AnswerFunction] = {}
        self._watched: list[tuple[str, FactFunction]] = []
        self._subscriptions: list[Subscription] = []
        self._served: ServedEndpoints | None = None
        self._bus: Bus | None = None
        self._numbers: FactNumbers | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for ask, method in cls._METHODS.items():
            if ask in cls.__dict__:
                raise TypeError(f"{cls.__name__}.{ask} replaces the decorator; name the method {method}")

    # What the user says

    def route(self, function: F) -> F:
        """Decorator: ``function(question)`` chooses a worker; see `RouteChoice`. Raises `TypeError`, `ValueError`."""
        return self._answers("route", function)

    def admit(self, function: F) -> F:
        """Decorator: ``function(question)`` lets a turn go, holds or refuses it; see `AdmitChoice`. Raises as `route`
        does."""
        return self._answers("admit", function)

    def lease(self, function: F) -> F:
        """Decorator: ``function(question)`` keeps or gives up an idle session's KV; see `LeaseChoice`. Raises as
        `route` does."""
        return self._answers("lease", function)

    def hint(self, function: F) -> F:
        """Decorator: ``function(question)`` says what caches are told; see `HintChoice`. Raises as `route` does."""
        return self._answers("hint", function)

    def choose(self, question: RouteQuestion) -> RouteChoice:
        """For subclasses, instead of `route`."""
        raise NotImplementedError

    def judge(self, question: AdmitQuestion) -> AdmitChoice:
        """For subclasses, instead of `admit`."""
        raise NotImplementedError

    def keep(self, question: LeaseQuestion) -> LeaseChoice:
        """For subclasses, instead of `lease`."""
        raise NotImplementedError

    def plan(self, question: HintQuestion) -> HintChoice:
        """For subclasses, instead of `hint`."""
        raise NotImplementedError

    @property
    def asks(self) -> tuple[PolicyAsk, ...]:
        """What it answers."""
        return tuple(ask for ask in POLICY_ASKS if self._function(ask) is not None)

    def _answers(self, ask: PolicyAsk, function: F) -> F:
        check_function(ask, function)
        if ask in self._functions:
            raise ValueError(f"policy {self.name}: {ask} is answered already, by another function")
        self._functions[ask] = function
        return function

    def _function(self, ask: PolicyAsk) -> AnswerFunction | None:
        method = self._METHODS[ask]
        if ask in self._functions:
            return self._functions[ask]
        return getattr(self, method) if getattr(type(self), method) is not getattr(Policy, method) else None

    def on(self, subject: str) -> Callable[[F], F]:
        """Decorator: ``function(message)`` gets every message of ``subject`` (wildcards allowed), decoded.

        KV batches, which carry the engine's own bytes, come as `bus.interface.BusMessage`.
        """

        def register(function: F) -> F:
            self._watched.append((subject, function))
            return function

        return register

    def intend(
        self,
        session: SessionKey,
        action_type: ActionType,
        *,
        worker: str | None = None,
        rank: int | None = None,
        ttl_ms: int | None = None,
        priority: int | None = None,
        reason: str | None = None,
    ) -> None:
        """Tell the hint planner, unasked, what the caches should do for a session (where it ran last, if no ``worker``
        is named). Soft: ``[[hints.policies]]`` must name this policy, and its budget must allow it.

        Raises `ConnectionError` before `start`, `BusError` while the bus is away.
        """
        if self._bus is None or self._numbers is None:
            raise ConnectionError(f"policy {self.name} is not started")
        intent = HintIntent(
            **self._numbers.stamp("hint", time.time()),
            policy=self.name,
            session=session,
            action_type=action_type,
            worker=worker,
            rank=rank,
            ttl_ms=ttl_ms,
            priority=priority,
            reason=reason,
        )
        self._bus.publish(subjects.hint_intent(self.name), to_json(intent))

    # Running

    async def start(self, bus: Bus) -> None:
        """Watch and answer on ``bus``, which stays its owner's."""
        self._bus = bus
        self._numbers = FactNumbers(f"policy-{self.name}", int(time.time() * 1000))
        for subject, function in self._watched:
            self._subscriptions.append(await bus.subscribe(subject, self._fact_handler(function)))
        endpoints = [
            Endpoint(ask, subjects.policy(ask, self.name), self._handler(ask, answering))
            for ask in POLICY_ASKS
            if (answering := self._function(ask)) is not None
        ]
        if not endpoints and not self._watched:
            log.warning(
                "policy_answers_nothing", policy=self.name, fix="decorate a function with route, admit, lease or hint"
            )
        service = "policy-" + re.sub(r"[^A-Za-z0-9_-]", "_", self.name)
        self._served = await bus.serve(
            service, "1.0.0", f"Tidegate policy {self.name}", endpoints, {"policy": self.name}
        )
        log.info("policy_started", policy=self.name, answers=[endpoint.subject for endpoint in endpoints])

    async def stop(self) -> None:
        """Answer and watch no more."""
        if self._served is not None:
            await self._served.stop()
        while self._subscriptions:
            await self._subscriptions.pop().unsubscribe()
        log.info("policy_stopped", policy=self.name, **asdict(self.counts))

    def run(self, url: str | None = None) -> None:
        """Connect (waiting for the bus as long as it takes), answer until SIGINT or SIGTERM, and stop cleanly.

        Raises `SettingsError` for a wrong address, `ConnectionAbortedError` when the bus is gone for good.
        """
        set_up_logging()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._run(url))

    def main(self, arguments: Sequence[str] | None = None) -> None:
        """`run` as a command: ``--nats URL`` names the bus (default: ``TIDEGATE_NATS_URL``, else this machine).

        Ends the process with one sentence and code 2 for a wrong option or address, as `run` raises otherwise.
        """
        parser = argparse.ArgumentParser(description=f"Answers for policy {self.name}: {', '.join(self.asks)}.")
        parser.add_argument("--nats", metavar="URL", help="the bus (default: TIDEGATE_NATS_URL, else this machine)")
        try:
            self.run(parser.parse_args(arguments).nats)
        except SettingsError as error:
            parser.error(str(error))

    async def _run(self, url: str | None) -> None:
        told = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, told.set)
        stopping = asyncio.ensure_future(told.wait())
        connecting = asyncio.ensure_future(connect(url, name=f"policy-{self.name}", timeout_s=None))
        await asyncio.wait({stopping, connecting}, return_when=asyncio.FIRST_COMPLETED)
        if not connecting.done():
            await end(connecting)
            return
        bus = connecting.result()
        lost = asyncio.ensure_future(bus.wait_lost())
        try:
            await self.start(bus)
            await asyncio.wait({stopping, lost}, return_when=asyncio.FIRST_COMPLETED)
            if lost.done():
                raise ConnectionAbortedError(lost.result())
            await self.stop()
        finally:
            for future in (stopping, lost):
                future.cancel()
            await bus.close()

    # Questions

    def _handler(self, ask: PolicyAsk, function: AnswerFunction) -> Callable[[BusMessage], None]:
        def handle(message: BusMessage) -> None:
            try:
                question = from_json(message.payload, QUESTIONS[ask])
            except BadMessageError as error:
                self.counts.rejected += 1
                self._reply(message, ANSWERS[ask](reason=error.reason))
                return
            if _is_late(question):
                self.counts.late += 1
                return
            answer = self._answer(ask, function, question)
            if _is_late(question):
                self.counts.late += 1
                return
            self._reply(message, answer)

        return handle

    def _answer(self, ask: PolicyAsk, function: AnswerFunction, question: PolicyQuestion) -> PolicyAnswer:
        try:
            answer = answer_to(ask, question, function(question))
        except NotACandidateError as error:
            self.counts.unusable += 1
            self._warn(self.counts.unusable, "policy_unusable", str(error))
            return ANSWERS[ask](reason=error.reason)
        except WrongAnswerError as error:
            self.counts.failed += 1
            self._warn(self.counts.failed, "policy_wrong_answer", str(error))
            return ANSWERS[ask](reason=error.reason)
        except Exception:
            # The border to the user's code: counted and logged, and the built-in choice stands.
            self.counts.failed += 1
            if _is_worth_a_line(self.counts.failed):
                log.exception("policy_failed", policy=self.name, ask=ask, failures=self.counts.failed)
            return ANSWERS[ask](reason="policy_failed")
        if has_opinion(answer):
            self.counts.answered += 1
        else:
            self.counts.no_opinion += 1
        return answer

    def _warn(self, count: int, event: str, detail: str) -> None:
        if _is_worth_a_line(count):
            log.warning(event, policy=self.name, detail=detail, times=count)

    def _reply(self, message: BusMessage, answer: PolicyAnswer) -> None:
        if self._bus is not None and message.reply:
            self._bus.publish(message.reply, to_json(answer))

    # Facts

    def _fact_handler(self, function: FactFunction) -> Callable[[BusMessage], None]:
        def handle(message: BusMessage) -> None:
            try:
                fact = _decoded(message)
            except BadMessageError as error:
                self.counts.rejected += 1
                log.warning("fact_rejected", subject=message.subject, reason=error.reason)
                return
            self.counts.facts += 1
            function(fact)

        return handle


def _is_late(question: PolicyQuestion) -> bool:
    return time.time() * 1000 >= question.deadline_ms


def _is_worth_a_line(count: int) -> bool:
    """The first, second, fourth, eighth, ... time."""
    return count & (count - 1) == 0


def _decoded(message: BusMessage) -> Message | BusMessage:
    channel = channel_of(message.subject)
    if channel is not None and channel.encoding == "engine":
        return message
    return decode(message.subject, message.payload)
