"""The hints service on the bus: facts, results, questions and answers in, commands out. All judgement is `core`'s."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec
from prometheus_client import REGISTRY, CollectorRegistry

from bus import subjects
from bus.errors import BusError
from bus.facts import GapCounter, subject_family
from bus.interface import Bus, BusMessage, ServedEndpoints
from bus.leadership import Leadership
from bus.log import EventLog
from bus.policy_asking import ask_policy
from bus.service import package_version
from bus.tasks import Tasks
from schemas.base import BadMessageError, Fact, from_json, to_json
from schemas.decision import Decision
from schemas.hint import HintCommand, HintIntent, HintResult
from schemas.index import SessionQuery, SessionResidency
from schemas.policy import HintAnswer
from schemas.pool import PoolState
from schemas.request import RequestEnd
from schemas.session import SessionFact
from schemas.tool import ToolEvent
from schemas.worker import WorkerState
from services.hints.config import HintsSettings
from services.hints.core import Core
from services.hints.effects import AskPolicy, AskSession, Effect, SendHint
from services.hints.events import (
    Answered,
    Commanded,
    Decided,
    Event,
    IntentGiven,
    LeadershipChanged,
    PolicyAnswered,
    PolicyFailed,
    PoolSeen,
    SessionAnswered,
    SessionChanged,
    Tick,
    ToolChanged,
    TurnEnded,
    WorkerSeen,
)
from services.hints.metrics import HintMetrics

log = EventLog(__name__)

LEADER_KEY = "hints"
TICK_S = 1.0
SESSION_DEADLINE_S = 0.5
"""An indexer's answer that comes later is about another turn."""
F = TypeVar("F", bound=Fact)


class HintsService:
    """See `bus.service.Service`."""

    def __init__(self, settings: HintsSettings, registry: CollectorRegistry = REGISTRY) -> None:
        self._settings = settings
        self._registry = registry
        self._core = Core(settings, settings.instance)
        self._gaps = GapCounter()
        self._metrics = HintMetrics(self._core, self._gaps)
        self._served: ServedEndpoints | None = None
        self._bus: Bus
        self._tasks: Tasks
        self._leadership: Leadership

    async def start(self, bus: Bus, tasks: Tasks) -> None:
        """Listen first, then try to lead."""
        self._bus, self._tasks = bus, tasks
        self._registry.register(self._metrics)
        root = subjects.ROOT
        # One subscription for all of a session's life: its facts come in the order they were sent.
        await bus.subscribe(f"{root}.session.*.*", self._facts(SessionFact, SessionChanged))
        await bus.subscribe(f"{root}.decision.*", self._facts(Decision, Decided))
        await bus.subscribe(f"{root}.request.end.*", self._facts(RequestEnd, TurnEnded))
        await bus.subscribe(f"{root}.tool.*.*", self._facts(ToolEvent, ToolChanged))
        await bus.subscribe(f"{root}.worker.state.*", self._facts(WorkerState, WorkerSeen))
        await bus.subscribe(f"{root}.pool.state.*", self._facts(PoolState, PoolSeen))
        await bus.subscribe(
            f"{root}.hint.*", self._facts(HintCommand, Commanded, lambda fact: subjects.hint(fact.worker))
        )
        await bus.subscribe(
            f"{root}.hint.result.*", self._facts(HintResult, Answered, lambda fact: subjects.hint_result(fact.worker))
        )
        await bus.subscribe(f"{root}.hint.intent.*", self._on_intent)
        self._served = await bus.serve(
            "tidegate-hints", package_version(), "Tidegate's hints: what caches do next", [], self._metadata()
        )
        self._leadership = Leadership(
            bus,
            LEADER_KEY,
            instance=self._settings.instance,
            incarnation=str(time.time_ns()),
            lease_s=self._settings.lease_s,
            renew_s=self._settings.renew_s,
            changed=lambda epoch: self._handle(LeadershipChanged(epoch)),
        )
        tasks.start("leadership", self._leadership.run())
        tasks.start("tick", self._tick())

    def not_ready(self) -> str | None:
        """Ready once it leads or knows that another may."""
        return None if self._leadership.settled else "leadership_unknown"

    async def stop(self, timeout_s: float) -> None:
        """Give the lead back."""
        await self._leadership.give_back(min(timeout_s, 1.0))
        if self._served is not None:
            await self._served.stop()
        self._registry.unregister(self._metrics)

    def _metadata(self) -> dict[str, str]:
        """Who is asked, for ``tidegate policy list``."""
        asked = [
            {"name": policy.name, "asks": ["hint"], "deadline_ms": policy.deadline_ms}
            for policy in self._settings.policies
            if policy.asked
        ]
        metadata = {"instance": self._settings.instance}
        if asked:
            metadata["policies"] = msgspec.json.encode(asked).decode()
        return metadata

    # In

    def _facts(
        self, kind: type[F], event: Callable[[F], Event], subject: Callable[[F], str] | None = None
    ) -> Callable[[BusMessage], None]:
        """A handler of the facts of one kind. ``subject``: the only one on which a fact counts: who may speak of one
        worker may not speak of another."""

        def on_fact(message: BusMessage) -> None:
            fact = self._read(message, kind)
            if fact is not None and subject is not None and subject(fact) != message.subject:
                self._metrics.bad_messages[kind.__name__] += 1
                log.warning("bad_message", subject=message.subject, reason="subject_of_another")
            elif fact is not None:
                self._gaps.see(subject_family(message.subject), fact)
                self._handle(event(fact))

        return on_fact

    def _on_intent(self, message: BusMessage) -> None:
        """An intent counts on its policy's own subject only."""
        intent = self._read(message, HintIntent)
        if intent is not None:
            is_own = subjects.hint_intent(intent.policy) == message.subject
            self._handle(IntentGiven(intent.policy if is_own else "", intent))

    def _read(self, message: BusMessage, kind: type[F]) -> F | None:
        try:
            return from_json(message.payload, kind)
        except BadMessageError as error:
            self._metrics.bad_messages[kind.__name__] += 1
            log.warning("bad_message", subject=message.subject, reason=error.reason, detail=str(error))
            return None

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._handle(Tick())

    # Out

    def _handle(self, event: Event) -> None:
        self._do(self._core.handle(event, time.time()))

    def _do(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case SendHint(command):
                    self._send(command)
                case AskSession():
                    self._tasks.start("ask-session", self._ask_session(effect))
                case AskPolicy():
                    self._tasks.start(f"ask-policy-{effect.ticket}", self._ask_policy(effect))

    def _send(self, command: HintCommand) -> None:
        try:
            self._bus.publish(subjects.hint(command.worker), to_json(command))
        except BusError as error:
            self._metrics.publish_failed[error.reason] += 1
            log.warning("publish_failed", worker=command.worker, reason=error.reason)
            self._do(self._core.not_sent(command, time.time()))

    async def _ask_session(self, effect: AskSession) -> None:
        try:
            question = to_json(SessionQuery(session=effect.session))
            answer = await self._bus.request(subjects.INDEX_SESSION, question, timeout_s=SESSION_DEADLINE_S)
            residency = from_json(answer.payload, SessionResidency)
        except (BusError, BadMessageError) as error:
            self._handle(SessionAnswered(effect.session, None, error.reason))
        else:
            self._handle(SessionAnswered(effect.session, residency))

    async def _ask_policy(self, effect: AskPolicy) -> None:
        said = await ask_policy(self._bus, "hint", effect.name, effect.question, effect.deadline_ms / 1000)
        if isinstance(said, HintAnswer):
            self._handle(PolicyAnswered(effect.ticket, said))
        else:
            self._handle(PolicyFailed(effect.ticket, said if isinstance(said, str) else "malformed"))
