"""The policy SDK: a user's process that watches the bus and answers one kind of question.

    from tidegate import Policy

    policy = Policy("least-open-grants")

    @policy.route
    def route(question):
        usable = [one for one in question.candidates if one.excluded is None]
        return min(usable, key=lambda one: one.open_grants)

    policy.run("nats://127.0.0.1:4222")

Admission asks it when its setting names the policy. What is late, absent or unusable changes nothing: the built-in
choice stands.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import uvloop

from bus import subjects
from bus.interface import Bus, BusMessage, Endpoint, ServedEndpoints, Subscription
from bus.log import EventLog, set_up_logging
from bus.nats import NatsBus
from bus.nats import connect as connect_nats
from schemas.base import BadMessageError, Message, from_json, to_json
from schemas.catalog import channel_of, decode
from schemas.decision import Candidate
from schemas.policy import RouteAnswer, RouteQuestion

log = EventLog(__name__)

DEFAULT_URL = "nats://127.0.0.1:4222"

RouteChoice = str | Candidate | RouteAnswer | None
"""A worker's name, one of the question's candidates, a whole answer, or ``None``: no opinion."""

RouteFunction = Callable[[RouteQuestion], RouteChoice]
FactFunction = Callable[[Any], object]
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(slots=True)
class PolicyCounts:
    """What a policy has done. ``unusable``: it named a worker that was no candidate. ``late``: past the deadline.

    ``failed``: the user's function raised. ``rejected``: a question or fact that does not decode.
    """

    answered: int = 0
    no_opinion: int = 0
    unusable: int = 0
    late: int = 0
    failed: int = 0
    facts: int = 0
    rejected: int = 0


async def connect(url: str | None = None, *, name: str = "tidegate-client", timeout_s: float | None = 10.0) -> NatsBus:
    """A connection to the bus at ``url`` (default: ``TIDEGATE_NATS_URL``, else this machine).

    Raises `NotConnectedError` after ``timeout_s`` (``None``: wait for ever), `SettingsError` for what is no address.
    """
    return await connect_nats(url or os.environ.get("TIDEGATE_NATS_URL") or DEFAULT_URL, name=name, timeout_s=timeout_s)


class Policy:
    """A policy named ``name``. Subclass it and define `choose`, or decorate a function with `route`.

    Functions are plain and quick: they run on the event loop, one after the other. One that raises is counted and
    logged, and answers with no opinion.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.counts = PolicyCounts()
        self._route: RouteFunction | None = None
        self._watched: list[tuple[str, FactFunction]] = []
        self._subscriptions: list[Subscription] = []
        self._served: ServedEndpoints | None = None
        self._bus: Bus | None = None

    # What the user says

    def route(self, function: F) -> F:
        """Decorator: ``function(question)`` chooses a worker; see `RouteChoice`."""
        self._route = function
        return function

    def choose(self, question: RouteQuestion) -> RouteChoice:
        """For subclasses, instead of `route`."""
        raise NotImplementedError

    def on(self, subject: str) -> Callable[[F], F]:
        """Decorator: ``function(message)`` gets every message of ``subject`` (wildcards allowed), decoded.

        KV batches, which carry the engine's own bytes, come as `bus.interface.BusMessage`.
        """

        def register(function: F) -> F:
            self._watched.append((subject, function))
            return function

        return register

    # Running

    async def start(self, bus: Bus) -> None:
        """Watch and answer on ``bus``, which stays its owner's."""
        self._bus = bus
        for subject, function in self._watched:
            self._subscriptions.append(await bus.subscribe(subject, self._fact_handler(function)))
        endpoints = []
        if self._route is not None or type(self).choose is not Policy.choose:
            endpoints.append(Endpoint("route", subjects.policy("route", self.name), self._answer_route))
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

    async def _run(self, url: str | None) -> None:
        told = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, told.set)
        stopping = asyncio.ensure_future(told.wait())
        connecting = asyncio.ensure_future(connect(url, name=f"policy-{self.name}", timeout_s=None))
        await asyncio.wait({stopping, connecting}, return_when=asyncio.FIRST_COMPLETED)
        if not connecting.done():
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
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

    def _answer_route(self, message: BusMessage) -> None:
        try:
            question = from_json(message.payload, RouteQuestion)
        except BadMessageError as error:
            self.counts.rejected += 1
            self._reply(message, RouteAnswer(reason=error.reason))
            return
        if time.time() * 1000 >= question.deadline_ms:
            self.counts.late += 1
            return
        answer = self._chosen(question)
        if time.time() * 1000 >= question.deadline_ms:
            self.counts.late += 1
            return
        self._reply(message, answer)

    def _chosen(self, question: RouteQuestion) -> RouteAnswer:
        choose = self._route or self.choose
        try:
            choice = choose(question)
        except Exception:
            # The border to the user's code: counted and logged, and the built-in choice stands.
            self.counts.failed += 1
            if self.counts.failed & (self.counts.failed - 1) == 0:
                log.exception("policy_failed", policy=self.name, failures=self.counts.failed)
            return RouteAnswer(reason="policy_failed")
        if isinstance(choice, Candidate):
            answer = RouteAnswer(worker=choice.worker, rank=choice.rank)
        elif isinstance(choice, RouteAnswer):
            answer = choice
        else:
            answer = RouteAnswer(worker=choice or "")
        if not answer.worker:
            self.counts.no_opinion += 1
            return answer
        if not any(_fits(answer, candidate) for candidate in question.candidates):
            self.counts.unusable += 1
            log.warning("policy_unusable", policy=self.name, request=question.request_id, worker=answer.worker)
            return RouteAnswer(reason="not_a_candidate")
        self.counts.answered += 1
        return answer

    def _reply(self, message: BusMessage, answer: RouteAnswer) -> None:
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


def _fits(answer: RouteAnswer, candidate: Candidate) -> bool:
    return candidate.worker == answer.worker and answer.rank in (None, candidate.rank) and candidate.excluded is None


def _decoded(message: BusMessage) -> Message | BusMessage:
    channel = channel_of(message.subject)
    if channel is not None and channel.encoding == "engine":
        return message
    return decode(message.subject, message.payload)
