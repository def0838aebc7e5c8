"""Events into the core, its effects out: facts and rows to the bus, the rest to the request that they are about.

Nobody waits for a fact or a row, but somebody does for the step that comes with it: the engine for a request, the
client for an answer. Facts and rows are therefore made at the end of the turn of the loop, in their order; before a
question, what was to be said before it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Protocol

from bus.errors import BusError
from bus.interface import FACTS_LINGER_S, Bus
from bus.log import EventLog
from bus.rows import RowPublisher
from schemas.base import to_json, to_msgpack
from schemas.trace import TraceRow
from services.ingress.core import IngressCore
from services.ingress.effects import AskAdmission, AskHedge, CancelAdmission, Effect, Publish, PublishRow
from services.ingress.events import Event
from services.ingress.shell.capture import Capture
from services.ingress.shell.metrics import IngressMetrics

log = EventLog(__name__)


class RequestTask(Protocol):
    """The task that serves one request."""

    def take(self, effect: Effect) -> None: ...

    def progress(self) -> None: ...

    def ended(self, row: TraceRow) -> None: ...


class Dispatcher:
    """The only caller of the core; everything it does is done on the event loop, in order."""

    def __init__(
        self,
        core: IngressCore,
        bus: Bus,
        rows: RowPublisher,
        metrics: IngressMetrics,
        capture: Capture | None = None,
    ) -> None:
        self._core = core
        self._bus = bus
        self._rows = rows
        self._metrics = metrics
        self._capture = capture
        self._tasks: dict[str, RequestTask] = {}
        self._unsaid: list[Publish | PublishRow | CancelAdmission] = []  # of one turn of the loop
        self._loop = asyncio.get_running_loop()

    def enter(self, request_id: str, task: RequestTask) -> None:
        """Effects about ``request_id`` go to ``task`` from here on."""
        self._tasks[request_id] = task

    def leave(self, request_id: str) -> None:
        self._tasks.pop(request_id, None)

    def progress(self, parts: int) -> Iterator[None]:
        """Let every streaming request say how far it is, in ``parts`` of about one size."""
        waiting = list(self._tasks)
        for part in range(parts):
            for request_id in waiting[part::parts]:
                task = self._tasks.get(request_id)
                if task is not None:
                    task.progress()
            yield

    def deliver(self, event: Event) -> None:
        """One event, and everything that follows from it."""
        for effect in self._core.handle(event, time.time()):
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:
        if isinstance(effect, Publish):
            self._say_later(effect)
        elif isinstance(effect, PublishRow):
            self._say_later(effect)
            if effect.row.request is not None and (task := self._tasks.get(effect.row.request.request_id)) is not None:
                task.ended(effect.row)
            if self._capture is not None:
                self._capture.end(effect.row)
        elif isinstance(effect, CancelAdmission):
            self._say_later(effect)
            self._hand(effect.cancel.request_id, effect)
        elif isinstance(effect, AskAdmission | AskHedge):
            self.say()
            self._hand(effect.question.request_id, effect)
        else:
            self._hand(effect.request_id, effect)

    def _say_later(self, effect: Publish | PublishRow | CancelAdmission) -> None:
        if not self._unsaid:
            self._loop.call_soon(self.say)
        self._unsaid.append(effect)

    def say(self) -> None:
        """What is to be said, now."""
        unsaid, self._unsaid = self._unsaid, []
        for effect in unsaid:
            try:
                self._say_one(effect)
            except Exception as error:  # noqa: BLE001 - a bug takes one fact, and none of other requests
                self._metrics.facts_dropped.labels("internal_error").inc()
                log.error("fact_failed", error=error, subject=effect.subject)  # noqa: TRY400

    def _say_one(self, effect: Publish | PublishRow | CancelAdmission) -> None:
        if isinstance(effect, Publish):
            self._publish(effect.subject, to_msgpack(effect.fact) if effect.packed else to_json(effect.fact))
        elif isinstance(effect, PublishRow):
            self._rows.publish(effect.subject, to_json(effect.row), effect.message_id)
            self._metrics.row(effect.row)
        else:
            self._publish(effect.subject, to_msgpack(effect.cancel))

    def _hand(self, request_id: str, effect: Effect) -> None:
        task = self._tasks.get(request_id)
        if task is not None:
            task.take(effect)

    def _publish(self, subject: str, payload: bytes) -> None:
        try:
            self._bus.publish(subject, payload, linger_s=FACTS_LINGER_S)
        except BusError as error:
            self._metrics.facts_dropped.labels(error.reason).inc()
            log.warning("fact_dropped", subject=subject, reason=error.reason)
