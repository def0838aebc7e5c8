"""Tool events of harnesses: both ways in, one core, facts and rows out.

The window of rows (`intakes`) is the only queue of ours: what ZeroMQ brings while it is full is told all the same
(facts) and its row counted as lost, what HTTP brings is refused and can come again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from prometheus_client.core import Metric
from prometheus_client.registry import REGISTRY, Collector, CollectorRegistry

from bus import subjects
from bus.errors import BusError
from bus.interface import Bus, BusMessage, Subscription
from bus.log import EventLog
from bus.metric_families import gauge, total, totals
from bus.rows import RowPublisher
from bus.tasks import Tasks
from schemas.base import BadMessageError, from_json
from schemas.request import RequestAccepted, RequestEnd
from services.recorder.config import RecorderSettings
from services.recorder.errors import BadToolEventError
from services.recorder.shell.tool_http import Outcome, ToolEventServer
from services.recorder.shell.tool_socket import ToolSocket
from services.recorder.tool_events import (
    NoToolEvents,
    PublishToolFact,
    SessionNamed,
    ToolEventCore,
    ToolInput,
    ToolReported,
    TurnEnded,
)
from services.recorder.tool_messages import ToolReport, read_frames

log = EventLog(__name__)


class ToolEvents(Collector):
    """Open while the recorder runs, if a way in is set."""

    def __init__(self, settings: RecorderSettings, registry: CollectorRegistry = REGISTRY) -> None:
        self._settings = settings
        self._registry = registry
        epoch = time.time_ns() // 1_000_000
        self._core = ToolEventCore(
            settings.instance,
            epoch,
            settings.tenant,
            settings.tool_sessions,
            infer=settings.infer_tools,
            expects=settings.opens_tool_events,
        )
        self._messages: Counter[str] = Counter()
        self._publish_failed: Counter[str] = Counter()
        self._unreadable_facts = 0
        self._socket: ToolSocket | None = None
        self._server: ToolEventServer | None = None
        self._named: Subscription | None = None
        self._bus: Bus
        self._rows: RowPublisher

    async def start(self, bus: Bus, tasks: Tasks, rows: RowPublisher, token: str = "") -> None:
        """Listen to requests first, so that their sessions are known. ``token``: what HTTP must bring. Raises
        `SettingsError` for an address that cannot be had."""
        settings = self._settings
        self._bus = bus
        self._rows = rows
        self._registry.register(self)
        self._named = await bus.subscribe(f"{subjects.ROOT}.request.*.*", self._on_request_fact)
        if settings.tool_events:
            self._socket = ToolSocket(settings.tool_events, self._on_frames)
            endpoint = self._socket.open()
            log.info("tool_events_open", endpoint=endpoint, topic=settings.tool_events_topic)
            tasks.start("tool-events", self._socket.read())
        if settings.tool_events_http_port >= 0:
            self._server = ToolEventServer(self, token)
            url = await self._server.start(settings.tool_events_http_host, settings.tool_events_http_port)
            log.info("tool_events_open", endpoint=url)

    async def stop(self, timeout_s: float) -> None:
        """Take what has arrived; its rows are the publisher's."""
        if self._server is not None:
            await self._server.close(timeout_s)
        if self._socket is not None:
            self._socket.close()
        if self._named is not None:
            await self._named.unsubscribe()
            self._registry.unregister(self)

    # In

    def _on_request_fact(self, message: BusMessage) -> None:
        """One subscription, so that a session's ends and arrivals come in the order they were sent."""
        event = message.subject.split(".")[3]
        try:
            if event == "accepted":
                self._handle(SessionNamed(from_json(message.payload, RequestAccepted)))
            elif event == "end":
                self._handle(TurnEnded(from_json(message.payload, RequestEnd)))
        except BadMessageError as error:
            self._unreadable_facts += 1
            log.warning("bad_message", subject=message.subject, reason=error.reason, detail=str(error))

    def _on_frames(self, frames: list[bytes]) -> None:
        self._messages["zmq"] += 1
        try:
            report = read_frames(frames, self._settings.tool_events_topic)
        except BadToolEventError as error:
            self.reject(error.reason, 1)
            log.warning("tool_event_rejected", reason=error.reason, detail=str(error))
            return
        self._handle(ToolReported(report))

    def came(self, events: int) -> None:
        self._messages["http"] += events

    def room(self) -> int:
        return self._settings.tool_rows - self._rows.depth

    def take(self, report: ToolReport) -> Outcome:
        return "accepted" if self._handle(ToolReported(report)) else "duplicate"

    def reject(self, reason: str, events: int) -> None:
        self._core.rejected[reason] += events

    # Out

    def _handle(self, event: ToolInput) -> bool:
        """Whether anything came of it."""
        effects = self._core.handle(event, time.time())
        for effect in effects:
            if isinstance(effect, PublishToolFact):
                try:
                    self._bus.publish(effect.subject, effect.payload)
                except BusError as error:
                    self._publish_failed[error.reason] += 1
                    log.warning("tool_fact_not_sent", subject=effect.subject, reason=error.reason)
            elif isinstance(effect, NoToolEvents):
                self._warn(effect)
            else:
                self._rows.publish(effect.subject, effect.payload, effect.message_id)
        return bool(effects)

    def _warn(self, effect: NoToolEvents) -> None:
        """User report: a harness and a server that took different names for one endpoint, and nobody noticed."""
        log.warning(
            "no_tool_events",
            turns=effect.turns,
            detail="answers call tools, and no harness has told of any: look at its endpoint, topic and token",
            tool_events=self._settings.tool_events,
            topic=self._settings.tool_events_topic,
            http_port=self._settings.tool_events_http_port,
            rejected=dict(self._core.rejected),
        )

    def collect(self) -> Iterable[Metric]:
        """See `docs/operations.md`, "Tool events"."""
        core = self._core
        yield totals("tool_messages", "Tool events that came, by way in.", "intake", self._messages)
        yield totals("tool_events", "Tool events taken.", "event", core.taken)
        yield totals("tool_events_rejected", "Tool events not taken.", "reason", core.rejected)
        yield total("tool_events_unknown_session", "Taken, of a session no request has named.", core.unknown_session)
        yield total("tool_calling_turns", "Turns whose answers called tools.", core.calling_turns)
        yield total("tool_events_inferred", "Told although no harness said them.", core.inferred)
        yield totals("tool_publish_failed", "Facts about tools that could not be sent.", "reason", self._publish_failed)
        yield gauge("tool_known_sessions", "Session ids that are known.", len(core.sessions))
        yield total("tool_bad_facts", "Facts about requests that cannot be read.", self._unreadable_facts)
        yield totals("facts_missed", "Facts lost on the way, by family.", "family", core.gaps.missed)
