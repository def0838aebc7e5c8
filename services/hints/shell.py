"""The hints service on the bus: session facts, decisions and results in, commands out. All judgement is `core`'s."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from prometheus_client import REGISTRY, CollectorRegistry

from bus import subjects
from bus.errors import BusError
from bus.facts import GapCounter, subject_family
from bus.interface import Bus, BusMessage
from bus.leadership import Leadership
from bus.log import EventLog
from bus.tasks import Tasks
from schemas.base import BadMessageError, Fact, from_json, to_json
from schemas.decision import Decision
from schemas.hint import HintResult
from schemas.session import SessionFact
from services.hints.config import HintsSettings
from services.hints.core import Core
from services.hints.events import Answered, Decided, Event, LeadershipChanged, SessionChanged, Tick
from services.hints.metrics import HintMetrics

log = EventLog(__name__)

LEADER_KEY = "hints"
TICK_S = 1.0
F = TypeVar("F", bound=Fact)


class HintsService:
    """See `bus.service.Service`."""

    def __init__(self, settings: HintsSettings, registry: CollectorRegistry = REGISTRY) -> None:
        self._settings = settings
        self._registry = registry
        self._core = Core(settings, settings.instance)
        self._gaps = GapCounter()
        self._metrics = HintMetrics(self._core, self._gaps)
        self._bus: Bus
        self._leadership: Leadership

    async def start(self, bus: Bus, tasks: Tasks) -> None:
        """Listen first, then try to lead."""
        self._bus = bus
        self._registry.register(self._metrics)
        for state in ("acting", "closed"):
            subject = f"{subjects.ROOT}.session.{state}.*"
            await bus.subscribe(subject, self._facts(SessionFact, SessionChanged))
        await bus.subscribe(f"{subjects.ROOT}.decision.*", self._facts(Decision, Decided))
        await bus.subscribe(f"{subjects.ROOT}.hint.result.*", self._facts(HintResult, Answered))
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
        self._registry.unregister(self._metrics)

    def _facts(self, kind: type[F], event: Callable[[F], Event]) -> Callable[[BusMessage], None]:
        """A handler of the facts of one kind."""

        def on_fact(message: BusMessage) -> None:
            try:
                fact = from_json(message.payload, kind)
            except BadMessageError as error:
                self._metrics.bad_messages[kind.__name__] += 1
                log.warning("bad_message", subject=message.subject, reason=error.reason, detail=str(error))
                return
            self._gaps.see(subject_family(message.subject), fact)
            self._handle(event(fact))

        return on_fact

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._handle(Tick())

    def _handle(self, event: Event) -> None:
        for effect in self._core.handle(event, time.time()):
            command = effect.command
            try:
                self._bus.publish(subjects.hint(command.worker), to_json(command))
            except BusError as error:
                self._metrics.publish_failed[error.reason] += 1
                log.warning("publish_failed", worker=command.worker, reason=error.reason)
