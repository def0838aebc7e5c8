"""The admission service on the bus: facts and questions in, answers, facts and rows out. All judgement is `core`'s."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TypeVar

import msgspec
from prometheus_client import REGISTRY, CollectorRegistry

from bus import subjects
from bus.errors import BusError, BusTimeoutError, NoRespondersError
from bus.facts import GapCounter, subject_family
from bus.interface import FACTS_LINGER_S, TURN_S, Bus, BusMessage, Endpoint, ServedEndpoints
from bus.leadership import Leadership
from bus.log import EventLog
from bus.policy_asking import ask_policy
from bus.rows import RowCollector, RowPublisher
from bus.service import package_version
from bus.tasks import Tasks
from schemas.admit import AdmitCancel, AdmitRequest
from schemas.base import BadMessageError, Fact, from_json, from_msgpack, to_json, to_msgpack
from schemas.decision import Decision
from schemas.index import MatchReply
from schemas.ingress import IngressState
from schemas.placed import Placed
from schemas.request import RequestAccepted, RequestDispatched, RequestEnd, RequestFirstToken
from schemas.session import SessionFact
from schemas.tool import ToolEvent
from schemas.worker import WorkerState
from services.admission.config import AdmissionSettings
from services.admission.core import Core
from services.admission.decision_rows import decision_row, message_id
from services.admission.effects import (
    AskIndex,
    AskPolicy,
    Effect,
    Publish,
    PublishDecision,
    Reply,
    WriteRow,
)
from services.admission.events import (
    Accepted,
    AdmitAsked,
    AdmitCancelled,
    Decided,
    Dispatched,
    Ended,
    Event,
    FirstToken,
    IngressStated,
    LeadershipChanged,
    MatchAnswered,
    MatchFailed,
    PauseHeard,
    PolicyAnswered,
    PolicyFailed,
    Tick,
    ToolTold,
    WorkerStated,
)
from services.admission.metrics import AdmissionMetrics
from services.admission.outcomes import Noticed
from services.admission.remembered import Stored
from services.admission.shell_index import OwnIndex, OwnIndexError
from services.admission.shell_stores import Stores
from services.admission.shell_unanswered import Unanswered

log = EventLog(__name__)

LEADER_KEY = "admission"
TICK_S = 0.1
HEADERS_BYTES = 4096
"""Of a message, at most."""
_OF_ASKS = (AdmitAsked, MatchAnswered, MatchFailed, PolicyAnswered, PolicyFailed)
"""Events that end in an answer to an ask."""

M = TypeVar("M")
F = TypeVar("F", bound=Fact)


class AdmissionService:
    """See `bus.service.Service`."""

    def __init__(self, settings: AdmissionSettings, registry: CollectorRegistry = REGISTRY) -> None:
        self._settings = settings
        self._registry = registry
        self._core = Core(settings, settings.instance, random.Random(settings.seed).randrange, time.time())  # noqa: S311
        self._gaps = GapCounter()
        self._unanswered = Unanswered()
        self._metrics = AdmissionMetrics(self._core, self._gaps, lambda: self._unanswered.dropped)
        self._bus: Bus
        self._tasks: Tasks
        self._rows: RowPublisher
        self._row_metrics: RowCollector
        self._leadership: Leadership
        self._served: ServedEndpoints | None = None
        self._request_facts: dict[str, Callable[[BusMessage], None]] = {}
        self._own = OwnIndex(settings) if settings.index == "own" else None
        self._stores = Stores(self._handle) if self._core.state.scheduled is not None else None
        self._loop: asyncio.AbstractEventLoop
        self._unsaid: list[Publish | PublishDecision] = []
        self._events: deque[Event] = deque()
        self._questions: deque[AskIndex] = deque()  # to our own index; as many at most as may be open
        self._answers_later = False
        self._handling = False
        self._traced = False

    async def start(self, bus: Bus, tasks: Tasks) -> None:
        """Listen to facts first, then answer, then try to lead."""
        self._bus, self._tasks = bus, tasks
        self._loop = asyncio.get_running_loop()
        self._registry.register(self._metrics)
        self._rows = RowPublisher(bus, tasks)
        self._row_metrics = RowCollector(self._rows)
        self._registry.register(self._row_metrics)
        if self._own is not None:
            self._registry.register(self._own)
            await self._own.start(bus, tasks)
            await bus.subscribe(f"{subjects.ROOT}.placed.*", self._on_placed)
        if self._stores is not None and self._core.state.scheduled is not None:
            self._core.state.scheduled.remembered.most_bytes = bus.max_payload - HEADERS_BYTES
            await self._stores.start(bus, tasks)
            await bus.subscribe(f"{subjects.ROOT}.tool.*.*", self._facts(ToolEvent, ToolTold))
        await bus.subscribe(f"{subjects.ROOT}.worker.state.*", self._facts(WorkerState, self._worker_stated))
        await bus.subscribe(f"{subjects.ROOT}.ingress.state.*", self._facts(IngressState, IngressStated))
        self._request_facts = {
            "accepted": self._facts(RequestAccepted, Accepted),
            "dispatched": self._facts(RequestDispatched, Dispatched),
            "first_token": self._facts(RequestFirstToken, FirstToken),
            "end": self._facts(RequestEnd, self._ended),
        }
        # One subscription for all of a request's life: its facts come in the order they were sent.
        await bus.subscribe(f"{subjects.ROOT}.request.*.*", self._on_request_fact)
        await bus.subscribe(f"{subjects.ROOT}.decision.*", self._on_decision)
        for state in ("paused", "resumed"):
            await bus.subscribe(f"{subjects.ROOT}.session.{state}.*", self._facts(SessionFact, PauseHeard))
        endpoints = [
            Endpoint("admit", f"{subjects.ROOT}.admit.*", self._on_admit, queue=""),
            Endpoint("cancel", f"{subjects.ROOT}.admit.cancel.*", self._on_cancel, queue=""),
        ]
        metadata = {"instance": self._settings.instance, "index": self._settings.index, "policy": self._settings.policy}
        if self._settings.policies:
            metadata["policies"] = msgspec.json.encode(self._settings.policies).decode()
        self._served = await bus.serve(
            "tidegate-admission",
            package_version(),
            "Tidegate's admission: who may run now, and on which worker",
            endpoints,
            metadata,
        )
        self._leadership = Leadership(
            bus,
            LEADER_KEY,
            instance=self._settings.instance,
            incarnation=str(time.time_ns()),
            lease_s=self._settings.lease_s,
            renew_s=self._settings.renew_s,
            changed=self._lead,
        )
        tasks.start("leadership", self._leadership.run())
        tasks.start("tick", self._tick())

    def not_ready(self) -> str | None:
        """Ready once it leads or knows that another may, and has listened to facts for a while."""
        if not self._leadership.settled:
            return "leadership_unknown"
        if time.time() < self._core.state.warm_at:
            return "warming_up"
        return self._own.not_ready() if self._own is not None else None

    async def stop(self, timeout_s: float) -> None:
        """Give the lead back at once, so that a standby takes over while rows are still being written."""
        learned = self._core.stored_at_stop(time.time())
        await self._leadership.give_back()
        self._say()
        await self._store_last(learned, timeout_s)
        if self._served is not None:
            await self._served.stop()
        if self._own is not None:
            self._own.stop()
            self._registry.unregister(self._own)
        await self._rows.drain(timeout_s)
        self._registry.unregister(self._metrics)
        self._registry.unregister(self._row_metrics)

    async def _store_last(self, learned: list[Stored], timeout_s: float) -> None:
        """What was learned since the last time. A new leader stores its own no sooner than half a minute from now."""
        if self._stores is None:
            return
        try:
            async with asyncio.timeout(timeout_s / 2):
                for value in learned:
                    await self._stores.write(value)
        except TimeoutError:
            log.warning("learned_not_stored", pools=len(learned))

    # In

    def _facts(self, kind: type[F], event: Callable[[F], Event]) -> Callable[[BusMessage], None]:
        """A handler of the facts of one kind."""

        def on_fact(message: BusMessage) -> None:
            fact = self._decode(message, kind, from_json)
            if fact is not None:
                if isinstance(fact, WorkerState | IngressState):  # of a request's facts, progress is not read
                    self._gaps.see(subject_family(message.subject), fact)
                self._handle(event(fact))

        return on_fact

    def _on_request_fact(self, message: BusMessage) -> None:
        handler = self._request_facts.get(message.subject.split(".", 4)[3])
        if handler is not None:
            handler(message)

    def _worker_stated(self, state: WorkerState) -> WorkerStated:
        if self._own is not None:
            self._own.worker_stated(state)
        return WorkerStated(state)

    def _ended(self, end: RequestEnd) -> Ended:
        if self._own is not None:
            self._own.ended(end)
        return Ended(end)

    def _on_decision(self, message: BusMessage) -> None:
        if self._core.leading:
            return  # our own
        decision = self._decode(message, Decision, from_json)
        if decision is not None:
            self._handle(Decided(decision))

    def _on_placed(self, message: BusMessage) -> None:
        """What others sent where: another leader, or an ingress by itself."""
        fact = self._decode(message, Placed, from_msgpack)
        own = fact is not None and (fact.source, fact.epoch) == (self._settings.instance, self._core.epoch)
        if fact is not None and self._own is not None and not own:
            self._own.placed(fact)

    def _on_admit(self, message: BusMessage) -> None:
        if not message.reply:
            return
        if not self._core.leading:
            self._unanswered.add(message, time.monotonic())
            return
        request = self._decode(message, AdmitRequest, from_msgpack)
        if request is not None:
            self._handle(AdmitAsked(request, message.reply))

    def _on_cancel(self, message: BusMessage) -> None:
        cancel = self._decode(message, AdmitCancel, from_msgpack)
        if cancel is not None:
            self._handle(AdmitCancelled(cancel))

    def _lead(self, epoch: int | None) -> None:
        """We lead, or no more. What was asked while nobody did is answered."""
        self._handle(LeadershipChanged(epoch))
        if epoch is not None:
            for message in self._unanswered.take(time.monotonic()):
                self._on_admit(message)

    def _leads(self) -> bool:
        """Whether the lease holds at this moment, even if this process slept and has not noticed yet."""
        return self._core.leading and self._leadership.epoch == self._core.epoch

    def _decode(self, message: BusMessage, kind: type[M], decode: Callable[[bytes, type[M]], M]) -> M | None:
        try:
            return decode(message.payload, kind)
        except BadMessageError as error:
            self._metrics.bad_messages[kind.__name__] += 1
            log.warning("bad_message", subject=message.subject, reason=error.reason, detail=str(error))
            return None

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._handle(Tick(self._bus.connected, self._leadership.in_doubt))

    # Out

    def _handle(self, event: Event) -> None:
        """Take in one event and carry out its effects; events that come of them follow when all are carried out."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            self._handle_all()
            if not self._answers_later:
                self._answer()
        finally:
            self._handling = False

    def _handle_all(self) -> None:
        while self._events:
            now = time.time()
            if self._core.leading and not self._leads():  # we slept through the lease: another leads by now
                self._core.handle(LeadershipChanged(None), now)
            event = self._events.popleft()
            if self._unsaid and not isinstance(event, _OF_ASKS):
                self._say()
            for effect in self._core.handle(event, now):
                self._carry_out(effect, now)
            if self._unsaid and not self._events and not isinstance(event, _OF_ASKS):
                self._say()

    def _answer(self) -> None:
        """Our own index answers at once; where a whole line may begin, a few in each turn of the loop."""
        due = self._loop.time() + TURN_S
        while self._own is not None and self._questions:
            if self._loop.time() >= due:
                self._answers_later = True
                self._loop.call_soon(self._answer_more)
                return
            self._events.append(self._own_answer(self._own, self._questions.popleft(), time.time()))
            self._handle_all()

    def _answer_more(self) -> None:
        self._answers_later = False
        self._handling = True
        try:
            self._answer()
        finally:
            self._handling = False

    def _carry_out(self, effect: Effect, now: float) -> None:
        match effect:
            case Reply(reply_to, message):
                self._publish(reply_to, to_msgpack(message))
            case Publish() | PublishDecision():
                if isinstance(effect, Publish) and self._own is not None:  # of ourselves we hear nothing over the bus
                    self._own.told(effect.fact)
                if not self._unsaid:
                    # Answers go first: the bus client has written them when the loop comes to its next turn.
                    self._loop.call_soon(self._say)
                self._unsaid.append(effect)
            case AskIndex() if self._own is not None:
                self._questions.append(effect)
            case AskIndex():
                self._tasks.start(f"index-{effect.ticket}", self._ask_index(effect))
            case AskPolicy():
                self._tasks.start(f"policy-{effect.ticket}", self._ask_policy(effect))
            case Noticed(name, fields, is_fault):
                (log.warning if is_fault else log.info)(name, **fields)
            case Stored() if self._stores is not None:
                self._stores.store(effect)
            case WriteRow(row, model, session, message_id):
                self._rows.publish(subjects.trace("request_end", model, session), to_json(row), message_id)

    def _say(self) -> None:
        """Publish the facts that waited for the answers before them, in their order."""
        unsaid, self._unsaid = self._unsaid, []
        if self._core.leading and not self._leads():
            return  # we slept; whoever leads by now says what it finds
        for effect in unsaid:
            if isinstance(effect, PublishDecision):
                decision = effect.fact()
                self._metrics.granted(decision)
                self._tell(subjects.decision(decision.worker), to_json(decision))
                if self._settings.trace_decisions:
                    self._trace(decision)
            else:
                fact = effect.fact
                self._tell(_subject(fact), to_msgpack(fact) if isinstance(fact, Placed) else to_json(fact))

    def _trace(self, decision: Decision) -> None:
        """Its row into the stream, sent once: an acknowledgement costs ten times the row, and the request's own row
        shows by its grant when this one is missing. The first one is acknowledged: that makes the stream."""
        if not self._bus.connected:
            self._metrics.decision_rows_dropped += 1
            return
        payload = to_json(decision_row(decision, self._settings.trace_candidates))
        subject = subjects.trace("decision", decision.model, decision.identity.key.text())
        if self._traced:
            self._tell(subject, payload, {subjects.MESSAGE_ID: message_id(decision)})
        else:
            self._traced = self._rows.publish(subject, payload, message_id(decision))

    def _tell(self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None) -> None:
        """What nobody waits for."""
        self._publish(subject, payload, headers, FACTS_LINGER_S)

    def _publish(
        self, subject: str, payload: bytes, headers: Mapping[str, str] | None = None, linger_s: float = 0.0
    ) -> None:
        """One message; what cannot be sent is counted and takes nothing else with it."""
        try:
            self._bus.publish(subject, payload, headers, linger_s=linger_s)
        except (BusError, ValueError) as error:
            reason = error.reason if isinstance(error, BusError) else "bad_subject"
            self._metrics.publish_failed[reason] += 1
            log.warning("publish_failed", subject=subject, reason=reason)

    def _own_answer(self, own: OwnIndex, effect: AskIndex, now: float) -> MatchAnswered | MatchFailed:
        try:
            return MatchAnswered(effect.ticket, own.match(effect.question, now))
        except OwnIndexError as error:
            return MatchFailed(effect.ticket, error.reason)

    async def _ask_index(self, effect: AskIndex) -> None:
        try:
            answer = await self._bus.request(
                subjects.INDEX_MATCH, to_msgpack(effect.question), timeout_s=effect.deadline_ms / 1000
            )
            reply = from_msgpack(answer.payload, MatchReply)
        except NoRespondersError:
            self._handle(MatchFailed(effect.ticket, "index_absent"))
        except BusTimeoutError:
            self._handle(MatchFailed(effect.ticket, "index_late"))
        except (BusError, BadMessageError) as error:
            self._handle(MatchFailed(effect.ticket, error.reason))
        else:
            self._handle(MatchAnswered(effect.ticket, reply))

    async def _ask_policy(self, effect: AskPolicy) -> None:
        began = self._loop.time()
        said = await ask_policy(self._bus, effect.ask, effect.name, effect.question, effect.deadline_ms / 1000)
        if isinstance(said, str):
            self._handle(PolicyFailed(effect.ticket, said))
            return
        self._metrics.policy_answers.labels(effect.name, effect.ask).observe(self._loop.time() - began)
        self._handle(PolicyAnswered(effect.ticket, said))


def _subject(fact: Placed | SessionFact | RequestEnd) -> str:
    if isinstance(fact, Placed):
        return subjects.placed(fact.worker)
    if isinstance(fact, SessionFact):
        return subjects.session(fact.state, fact.session.text())
    return subjects.request("end", fact.model)
