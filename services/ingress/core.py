"""The front door's decisions: every accepted request is placed, perhaps retried once, and ends exactly once.

The core hears of a request what its task did and saw (`events`) and says what to do next (`effects`); a chunk of an
answer is none of its business. States and what happens in them are the tables of `requests`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bus import subjects
from bus.facts import FactNumbers
from schemas.admit import AdmitCancel, AdmitRequest, DecisionMode, Granted, Held, Refused
from schemas.base import Fact, to_json
from schemas.ingress import InFlight, IngressState
from schemas.placed import Placed
from schemas.request import (
    Outcome,
    RequestAccepted,
    RequestDispatched,
    RequestEnd,
    RequestFirstToken,
    RequestProgress,
)
from schemas.session import MOVES_SESSION
from services.ingress import events, placement
from services.ingress.answers import AnswerFacts
from services.ingress.effects import (
    Answer,
    AskAdmission,
    BreakOff,
    CancelAdmission,
    CloseUpstream,
    CountPrompt,
    Effect,
    Forward,
    Publish,
    PublishRow,
    Relay,
)
from services.ingress.errors import IngressError, MisuseError, OverloadedError, UnavailableError, UnknownModelError
from services.ingress.replies import error_event, error_reply, reply_to
from services.ingress.requests import FAILURES, RETRY_STATUSES, STEPS, Record, Step
from services.ingress.rows import Ending, request_end_row, usage_of
from services.ingress.workers import Workers

STATE_PART_BYTES = 4 * 1024 * 1024
"""Requests in one `IngressState` weigh at most so much: half of what a message may (DESIGN.md §3)."""

UNKNOWN_BLOCK_SIZE = 16
"""Tokens a block, where no worker of the model says: the chain then tells what was sent where."""

_MESSAGES = {
    "no_worker": "No worker can serve this model at the moment.",
    "admission_unavailable": "The admission service does not answer.",
    "hold_timeout": "No worker had room for this request in time.",
    "stopping": "This process is stopping.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressRules:
    """``admit_deadline_s``: how long a request may be held. ``fallback``: place by hash when no leader answers.
    ``retry``: once, before the first byte. ``in_flight_part``: requests in one `IngressState` message."""

    admit_deadline_s: float = 600.0
    worker_lost_s: float = 5.0
    max_in_flight: int = 4096
    fallback: bool = True
    retry: bool = True
    in_flight_part: int = 2000


class IngressCore:
    """State of one ingress. ``ingress`` is its name, ``epoch`` grows with each of its incarnations."""

    def __init__(self, ingress: str, epoch: int, rules: IngressRules) -> None:
        self.workers = Workers(rules.worker_lost_s)
        self.stopping = False
        self.late_events: Counter[str] = Counter()
        self._ingress = ingress
        self._epoch = epoch
        self._rules = rules
        self._records: dict[str, Record] = {}
        self._numbers = FactNumbers(ingress, epoch)
        self._steps: dict[Step, Callable[[Record, Any, float], list[Effect]]] = {
            "ask": self._counted,
            "replied": self._replied,
            "undecided": self._undecided,
            "begin": self._begin,
            "progress": self._progress,
            "complete": self._complete,
            "retry_or_fail": self._retry_or_fail,
            "break_off": self._break_off,
            "leave": self._leave,
            "give_up": self._give_up,
        }

    def __len__(self) -> int:
        """Requests in flight."""
        return len(self._records)

    def handle(self, event: events.Event, now: float) -> list[Effect]:
        """One event at Unix time ``now`` (s); the effects in the order in which they must happen.

        Raises `MisuseError` for a request id that is in flight already.
        """
        match event:
            case events.RequestReceived():
                return self._received(event, now)
            case events.WorkerHeard():
                self.workers.hear(event.state, now)
                return []
            case events.Tick(connected=connected):
                if connected:
                    self.workers.expire(now)
                else:
                    self.workers.forgive(now)
                return self._state(now)
            case events.StopAsked():
                self.stopping = True
                return []
            case events.Stopped():
                return self._stopped(now)
        record = self._records.get(event.request_id)
        step = STEPS[record.state].get(type(event)) if record else None
        if record is None or step is None or getattr(event, "attempt", record.attempt) != record.attempt:
            self.late_events[type(event).__name__] += 1
            return []
        return self._steps[step](record, event, now)

    # Acceptance and the question

    def _received(self, event: events.RequestReceived, now: float) -> list[Effect]:
        request = event.request
        if event.request_id in self._records:
            raise MisuseError(f"request id {event.request_id} is in flight already")
        refusal = self._refusal(request.model)
        if refusal is not None:
            return [Answer(event.request_id, reply_to(request.endpoint, refusal))]
        record = Record(event.request_id, request, event.resolved, now, event.x_request_id)
        self._records[record.request_id] = record
        accepted = self._publish(
            "accepted",
            record,
            RequestAccepted(
                **self._numbers.stamp("request.accepted", now),
                request_id=record.request_id,
                model=record.model,
                identity=record.identity,
                received_ms=record.received_ms,
                kind=record.kind,
                endpoint=request.endpoint,
                stream=request.stream,
                x_request_id=record.x_request_id,
            ),
        )
        if request.prompt is None or record.kind == "count_tokens":
            return [accepted, self._ask(record, now)]
        pool = self.workers.pool(record.model, now)
        block_size = pool.block_size or UNKNOWN_BLOCK_SIZE
        return [accepted, CountPrompt(record.request_id, request, block_size, pool.adapter)]

    def _refusal(self, model: str) -> IngressError | None:
        """Why a request for ``model`` is not accepted at all; it leaves no facts and no row."""
        if self.stopping:
            return UnavailableError(_MESSAGES["stopping"], "stopping")
        if len(self._records) >= self._rules.max_in_flight:
            return OverloadedError(self._rules.max_in_flight)
        if self.workers.knows(model):
            return None
        if self.workers.knows_any:
            return UnknownModelError(model)
        return UnavailableError(_MESSAGES["no_worker"], "no_worker")

    def _counted(self, record: Record, event: events.PromptCounted, now: float) -> list[Effect]:
        record.tokens = event.tokens
        record.tokens_from = event.tokens_from
        record.text = event.text
        return [self._ask(record, now)]

    def _ask(self, record: Record, now: float) -> AskAdmission:
        record.state = "asking"
        record.asked_at = now
        unit, block_size, chain = record.chain
        question = AdmitRequest(
            request_id=record.request_id,
            model=record.model,
            ingress=self._ingress,
            ingress_epoch=self._epoch,
            identity=record.identity,
            received_ms=record.received_ms,
            deadline_ms=int((now + self._rules.admit_deadline_s) * 1000),
            attempt=record.attempt,
            kind=record.kind,
            endpoint=record.request.endpoint,
            input_tokens=record.input_tokens,
            tokens_from=record.tokens_from,
            block_size=block_size,
            chain=chain,
            chain_unit=unit,
            max_output_tokens=record.request.max_output_tokens,
            priority=record.request.priority,
            excluded=record.excluded,
        )
        return AskAdmission(subjects.admit(record.model), question)

    # The decision

    def _replied(self, record: Record, event: events.AdmitReplied, now: float) -> list[Effect]:
        match event.reply:
            case Held(reason=reason, place=place):
                record.state = "held"
                record.hold_reason = record.hold_reason or reason
                record.place = record.place or place
                return []
            case Refused(reason=reason, status=status, retry_after_s=retry_after_s):
                return self._refuse(record, reason, status, retry_after_s, now)
            case Granted() as granted:
                record.granted = granted
                known = self.workers.get(granted.grant.worker)
                url = known.profile.url if known else granted.url
                ranks = known.profile.ranks if known else granted.grant.rank + 1
                return self._dispatch(
                    record, granted.grant.worker, granted.grant.rank, ranks, url, granted.mode, granted.priority, now
                )

    def _undecided(self, record: Record, event: events.AdmitFailed, now: float) -> list[Effect]:
        if event.reason == "hold_timeout":
            return [self._cancel(record, event.reason), *self._refuse(record, event.reason, 429, 1, now)]
        if not self._rules.fallback:
            return self._refuse(record, "admission_unavailable", 503, 1, now)
        place = placement.place(record.identity.key.text(), self.workers.placeable(record.model, now), record.excluded)
        if place is None:
            return self._refuse(record, "no_worker", 503, 1, now)
        state, rank = place
        url, ranks = state.profile.url, state.profile.ranks
        return [
            self._placed(record, state.worker, rank, now),
            *self._dispatch(record, state.worker, rank, ranks, url, "fallback", None, now),
        ]

    def _placed(self, record: Record, worker: str, rank: int, now: float) -> Publish:
        """What we place ourselves we say ourselves: where approximate sources and sessions are known from."""
        unit, block_size, chain = record.chain
        moves = record.kind in MOVES_SESSION
        fact = Placed(
            **self._numbers.stamp("placed", now),
            request_id=record.request_id,
            model=record.model,
            worker=worker,
            rank=rank,
            session=record.identity.key if moves else None,
            parent=record.identity.parent if moves else None,
            mode="fallback",
            unit=unit,
            block_size=block_size,
            chain=chain,
        )
        return Publish(subjects.placed(worker), fact, packed=True)

    def _dispatch(
        self,
        record: Record,
        worker: str,
        rank: int,
        ranks: int,
        url: str,
        mode: DecisionMode,
        priority: int | None,
        now: float,
    ) -> list[Effect]:
        record.state = "dispatched"
        record.worker, record.rank, record.mode, record.decided_at = worker, rank, mode, now
        fact = RequestDispatched(
            **self._numbers.stamp("request.dispatched", now),
            request_id=record.request_id,
            model=record.model,
            worker=worker,
            rank=rank,
            attempt=record.attempt,
            mode=mode,
            grant_id=record.grant_id,
        )
        return [
            self._publish("dispatched", record, fact),
            Forward(record.request_id, record.attempt, worker, url, rank, ranks, priority),
        ]

    def _refuse(self, record: Record, reason: str, status: int, retry_after_s: int | None, now: float) -> list[Effect]:
        message = _MESSAGES.get(reason, f"The request was refused: {reason.replace('_', ' ')}.")
        reply = error_reply(record.request.endpoint, status, reason, message, retry_after_s=retry_after_s)
        return [
            Answer(record.request_id, reply),
            *self._end(record, Ending(outcome="refused", at=now, reason=reason, status=status)),
        ]

    # The answer

    def _begin(self, record: Record, event: events.FirstByte, now: float) -> list[Effect]:
        if event.status in RETRY_STATUSES and self._may_retry(record, now):
            return self._retry(record, now)
        record.state = "streaming"
        record.status = event.status
        record.first_byte_at = now
        relay = Relay(record.request_id)
        if event.status >= 400:
            return [relay]
        fact = RequestFirstToken(
            **self._numbers.stamp("request.first_token", now),
            request_id=record.request_id,
            model=record.model,
            ttft_ms=round(max(0.0, now - record.received_at) * 1000, 3),
        )
        return [relay, self._publish("first_token", record, fact)]

    def _progress(self, record: Record, event: events.AnswerProgress, now: float) -> list[Effect]:
        record.chunks = event.chunks
        fact = RequestProgress(
            **self._numbers.stamp("request.progress", now),
            request_id=record.request_id,
            model=record.model,
            chunks=event.chunks,
        )
        return [self._publish("progress", record, fact)]

    def _complete(self, record: Record, event: events.AnswerEnded, now: float) -> list[Effect]:
        status = record.status or 0
        outcome: Outcome = "completed"
        reason: str | None = None
        if status >= 400:
            outcome, reason = ("client_error" if status < 500 else "upstream_error"), "engine_status"
        elif event.answer.error is not None:
            outcome, reason = "upstream_error", "in_band_error"
        elif record.request.stream and not event.answer.complete:
            outcome, reason = "upstream_lost", "incomplete_answer"
        return self._end(
            record, Ending(outcome=outcome, at=now, reason=reason, status=record.status, answer=event.answer)
        )

    def _retry_or_fail(self, record: Record, event: events.AnswerFailed, now: float) -> list[Effect]:
        status, retryable = FAILURES[event.reason]
        if retryable and self._may_retry(record, now):
            return self._retry(record, now)
        message = f"The engine did not answer: {event.reason.replace('_', ' ')}."
        return [
            CloseUpstream(record.request_id, record.attempt),
            Answer(record.request_id, error_reply(record.request.endpoint, status, event.reason, message)),
            *self._end(
                record,
                Ending(
                    outcome="upstream_timeout" if status == 504 else "upstream_error",
                    at=now,
                    reason=event.reason,
                    status=status,
                    answer=event.answer,
                ),
            ),
        ]

    def _break_off(self, record: Record, event: events.AnswerFailed, now: float) -> list[Effect]:
        status, _ = FAILURES[event.reason]
        outcome: Outcome = "upstream_timeout" if status == 504 else "upstream_error"
        if event.reason == "connection_lost":
            outcome = "upstream_lost"
        return [
            CloseUpstream(record.request_id, record.attempt),
            self._broken(record, status, event.reason, "The engine's answer broke off"),
            *self._end(
                record,
                Ending(outcome=outcome, at=now, reason=event.reason, status=record.status, answer=event.answer),
            ),
        ]

    def _broken(self, record: Record, status: int, reason: str, message: str) -> BreakOff:
        if not record.request.stream:
            return BreakOff(record.request_id, b"")
        text = f"{message}: {reason.replace('_', ' ')}."
        return BreakOff(record.request_id, error_event(record.request.endpoint, status, reason, text))

    def _may_retry(self, record: Record, now: float) -> bool:
        """Once, before the first byte, and only if another worker is there."""
        if not self._rules.retry or record.attempt > 0:
            return False
        tried = {*record.excluded, record.worker}
        return any(state.worker not in tried for state in self.workers.placeable(record.model, now))

    def _retry(self, record: Record, now: float) -> list[Effect]:
        close = CloseUpstream(record.request_id, record.attempt)
        record.next_attempt()
        return [close, self._ask(record, now)]

    # Other ends

    def _leave(self, record: Record, event: events.ClientGone, now: float) -> list[Effect]:
        ending = Ending(
            outcome="client_disconnect", at=now, reason="client_gone", status=record.status, answer=event.answer
        )
        return [*self._let_go(record, "client_disconnect"), *self._end(record, ending)]

    def _give_up(self, record: Record, event: events.RequestFailed, now: float) -> list[Effect]:
        if record.state == "streaming":
            said: Effect = self._broken(record, 500, event.reason, "Tidegate failed")
        else:
            message = f"Tidegate failed: {event.reason.replace('_', ' ')}."
            said = Answer(record.request_id, error_reply(record.request.endpoint, 500, event.reason, message))
        status = record.status if record.state == "streaming" else 500
        ending = Ending(outcome="internal_error", at=now, reason=event.reason, status=status, answer=event.answer)
        return [*self._let_go(record, event.reason), said, *self._end(record, ending)]

    def _let_go(self, record: Record, reason: str) -> list[Effect]:
        """Stop what others do for this request."""
        if record.state in ("asking", "held"):
            return [self._cancel(record, reason)]
        return [CloseUpstream(record.request_id, record.attempt)] if record.is_open_upstream else []

    def _cancel(self, record: Record, reason: str) -> CancelAdmission:
        cancel = AdmitCancel(request_id=record.request_id, ingress=self._ingress, reason=reason)
        return CancelAdmission(subjects.admit_cancel(record.model), cancel)

    def _end(self, record: Record, ending: Ending) -> list[Effect]:
        """The one end: the record is gone, the fact and the row are said."""
        del self._records[record.request_id]
        usage = usage_of(record, ending.answer)
        answer = ending.answer or AnswerFacts()
        row = request_end_row(record, ending, usage)
        assert row.request is not None
        fact = RequestEnd(
            **self._numbers.stamp("request.end", ending.at),
            request_id=record.request_id,
            model=record.model,
            identity=record.identity,
            outcome=ending.outcome,
            kind=record.kind,
            endpoint=record.request.endpoint,
            reason=ending.reason,
            status=ending.status,
            worker=record.worker,
            rank=record.rank,
            grant_id=record.grant_id,
            mode=record.mode,
            usage=usage,
            predicted_cached_tokens=record.granted.predicted_cached_tokens if record.granted else None,
            finish_reason=answer.finish_reason,
            tool_names=tuple(call.name for call in answer.tool_calls if call.name),
            total_ms=row.request.total_time_ms,
        )
        subject = subjects.trace("request_end", record.model, record.identity.key.text())
        return [self._publish("end", record, fact), PublishRow(subject, row, record.request_id)]

    # Facts

    def _publish(self, event: str, record: Record, fact: Fact) -> Publish:
        return Publish(subjects.request(event, record.model), fact)

    def _state(self, now: float, final: bool = False) -> list[Effect]:
        """Who is in flight, in as many messages as it takes."""
        parts = _parts([_in_flight(record) for record in self._records.values()], self._rules.in_flight_part)
        subject = subjects.ingress_state(self._ingress)
        return [
            Publish(
                subject,
                IngressState(
                    **self._numbers.stamp("ingress.state", now),
                    ingress=self._ingress,
                    in_flight=part,
                    final=final,
                    part=number,
                    parts=len(parts),
                ),
            )
            for number, part in enumerate(parts)
        ]

    def _stopped(self, now: float) -> list[Effect]:
        self.stopping = True
        effects: list[Effect] = []
        for record in list(self._records.values()):
            effects += self._give_up(record, events.RequestFailed(request_id=record.request_id, reason="stopping"), now)
        return [*effects, *self._state(now, final=True)]


def _parts(in_flight: list[InFlight], most: int) -> list[tuple[InFlight, ...]]:
    """At least one part, each of at most ``most`` requests and, as long as ids may be, `STATE_PART_BYTES`."""
    parts: list[tuple[InFlight, ...]] = []
    part: list[InFlight] = []
    room = STATE_PART_BYTES
    for one in in_flight:
        size = len(to_json(one))
        if part and (len(part) >= most or size > room):
            parts.append(tuple(part))
            part, room = [], STATE_PART_BYTES
        part.append(one)
        room -= size + 1
    return [*parts, tuple(part)] if part or not parts else parts


def _in_flight(record: Record) -> InFlight:
    granted = record.granted
    return InFlight(
        request_id=record.request_id,
        model=record.model,
        identity=record.identity,
        received_ms=record.received_ms,
        kind=record.kind,
        endpoint=record.request.endpoint,
        worker=record.worker,
        rank=record.rank,
        grant_id=record.grant_id,
        grant_epoch=granted.grant.epoch if granted else None,
        mode=record.mode,
        input_tokens=record.input_tokens,
        attempt=record.attempt,
        predicted_cached_tokens=granted.predicted_cached_tokens if granted else 0,
    )
