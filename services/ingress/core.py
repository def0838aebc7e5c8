"""The front door's decisions: every accepted request is placed, perhaps retried once, and ends exactly once.

The core hears of a request what its task did and saw (`events`) and says what to do next (`effects`); a chunk of an
answer is none of its business. States and what happens in them are the tables of `requests`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bus import subjects
from schemas.admit import DecisionMode, Granted, Held, Refused
from schemas.request import (
    Outcome,
)
from schemas.worker import WorkerState
from services.ingress import events, placement, recognising, waiting
from services.ingress.breaker import Breaker, BreakerRules
from services.ingress.dispatching import Forwards
from services.ingress.effects import (
    Answer,
    AskAdmission,
    AskIndexer,
    CloseUpstream,
    CountPrompt,
    Effect,
    Forward,
    Publish,
    PublishRow,
    Relay,
)
from services.ingress.engine_fields import FieldRules
from services.ingress.errors import IngressError, MisuseError, OverloadedError, UnavailableError, UnknownModelError
from services.ingress.facts import Facts
from services.ingress.hedging import Hedging
from services.ingress.recognising import RecognitionRules
from services.ingress.replies import MESSAGES, refusal_message, reply_to
from services.ingress.requests import (
    API_NOT_SERVED,
    FAILURES,
    HEDGE_STEPS,
    RETRY_STATUSES,
    STEPS,
    UNSENT,
    Record,
    Step,
)
from services.ingress.rows import FINE_TOKENS, Ending, request_end_row, usage_of
from services.ingress.workers import Workers

UNKNOWN_BLOCK_SIZE = 16
"""Tokens a block, where no worker of the model says: the chain then tells what was sent where."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressRules:
    """``admit_deadline_s``: how long a request may be held. ``fallback``: place by hash when no leader answers.
    ``retry``: once, before the first byte. ``hedge``: a slow request may be sent twice. ``held_comment_s``: how often a
    held stream is told so; 0: never.
    ``in_flight_part``: requests in one `IngressState` message. ``session_id``, ``continuum``, ``kv_hints``: what
    requests tell caches (`services.ingress.engine_fields`). ``trace_fine_tokens``: see `services.ingress.rows`.
    ``breaker``: when a worker is left alone (`services.ingress.breaker`)."""

    admit_deadline_s: float = 600.0
    worker_lost_s: float = 5.0
    max_in_flight: int = 4096
    fallback: bool = True
    retry: bool = True
    hedge: bool = False
    held_comment_s: float = 0.0
    in_flight_part: int = 2000
    recognition: RecognitionRules = field(default_factory=RecognitionRules)
    session_id: bool = False
    continuum: bool = False
    kv_hints: bool = False
    trace_fine_tokens: int = FINE_TOKENS
    breaker: BreakerRules = field(default_factory=BreakerRules)


class IngressCore:
    """State of one ingress. ``ingress`` is its name, ``epoch`` grows with each of its incarnations."""

    def __init__(self, ingress: str, epoch: int, rules: IngressRules) -> None:
        self.workers = Workers(rules.worker_lost_s)
        self.fields = FieldRules(
            self.workers, session_id=rules.session_id, continuum=rules.continuum, kv_hints=rules.kv_hints
        )
        self.breaker = Breaker(rules.breaker)
        self.stopping = False
        self.late_events: Counter[str] = Counter()
        self._facts = Facts(ingress, epoch)
        self._rules = rules
        self._forwards = Forwards(self.workers, self.fields)
        self._records: dict[str, Record] = {}
        self._hedging = Hedging(self._facts, self.workers, self.breaker, self._forwards)
        self._steps: dict[Step, Callable[[Record, Any, float], list[Effect]]] = {
            "ask": self._counted,
            "recognised": self._recognised,
            "replied": self._replied,
            "undecided": self._undecided,
            "begin": self._begin,
            "progress": self._progress,
            "complete": self._complete,
            "retry_or_fail": self._retry_or_fail,
            "break_off": self._break_off,
            "leave": self._leave,
            "give_up": self._give_up,
            "hedge_due": self._hedge_due,
            "hedge_decided": self._hedge_decided,
            "hedge_begins": self._hedge_begins,
            "hedge_fails": self._hedge_fails,
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
            case events.WorkerHeard(state=state):
                known = self.workers.get(state.worker)
                if state.health == "left" or (known is not None and known.incarnation != state.incarnation):
                    self.breaker.answered(state.worker)
                self.workers.hear(state, now)
                return []
            case events.HintHeard():
                self.fields.heard(event.payload, now)
                return []
            case events.Tick(connected=connected):
                if connected:
                    for lost in self.workers.expire(now):
                        self.breaker.answered(lost)
                else:
                    self.workers.forgive(now)
                return [*self._state(now), *self._comments(now)]
            case events.StopAsked():
                self.stopping = True
                return []
            case events.Stopped():
                return self._stopped(now)
        record = self._records.get(event.request_id)
        step = STEPS[record.state].get(type(event)) if record else None
        attempt = getattr(event, "attempt", record.attempt) if record else 0
        if record is not None and record.race is not None and attempt == record.race.attempt:
            step = HEDGE_STEPS[record.race.granted is not None].get(type(event))
        elif record is not None and attempt != record.attempt:
            step = None
        if record is None or step is None:
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
        record = Record(event.request_id, request, event.resolved, now, event.x_request_id, event.sticky)
        record.nameless = self._rules.recognition.on and recognising.names_nobody(request, event.resolved)
        if record.nameless:
            record.resolved = recognising.unknown(record.resolved)
        self._records[record.request_id] = record
        if record.counts_only:
            return [self._accepted(record, now), *self._send_unasked(record, now)]
        if request.prompt is None:
            return [self._accepted(record, now), self._ask(record, now)]
        pool = self.workers.pool(record.model, now)
        block_size = record.block_size = pool.block_size or UNKNOWN_BLOCK_SIZE
        count = CountPrompt(
            record.request_id, request, block_size, pool.adapter, pool.pages, record.nameless, pool.dialect
        )
        return [count] if record.nameless else [self._accepted(record, now), count]

    def _accepted(self, record: Record, now: float) -> Publish:
        """Said once it is known whose request it is, and once only."""
        record.is_accepted = True
        return self._facts.accepted(record, now)

    def _refusal(self, model: str) -> IngressError | None:
        """Why a request for ``model`` is not accepted at all; it leaves no facts and no row."""
        if self.stopping:
            return UnavailableError(MESSAGES["stopping"], "stopping")
        if len(self._records) >= self._rules.max_in_flight:
            return OverloadedError(self._rules.max_in_flight)
        if self.workers.knows(model):
            return None
        if self.workers.knows_any:
            return UnknownModelError(model)
        return UnavailableError(MESSAGES["no_worker"], "no_worker")

    def _counted(self, record: Record, event: events.PromptCounted, now: float) -> list[Effect]:
        record.tokens = event.tokens
        record.tokens_from = event.tokens_from
        record.text = event.text
        record.counted_media = event.media
        if not record.nameless:
            return [self._ask(record, now)]
        if event.messages is None:
            return [self._accepted(record, now), self._ask(record, now)]
        record.state, record.messages = "recognising", event.messages
        tenant = record.identity.key.tenant
        return [
            AskIndexer(record.request_id, recognising.question(record.request_id, record.model, tenant, event.messages))
        ]

    def _recognised(self, record: Record, event: events.Recognised, now: float) -> list[Effect]:
        least = self._rules.recognition.least
        record.resolved = recognising.named(record.resolved, event.reply, event.failure, least)
        return [self._accepted(record, now), self._ask(record, now)]

    def _ask(self, record: Record, now: float) -> AskAdmission:
        record.state = "asking"
        record.asked_at = now
        return self._facts.question(record, now, self._rules.admit_deadline_s, self._avoided(record, now))

    def _avoided(self, record: Record, now: float) -> tuple[str, ...]:
        """Workers that it shall not go to now, though it has not failed there."""
        serving = (state.worker for state in self.workers.placeable(record.model, now))
        return self.breaker.avoided((name for name in serving if name not in record.excluded), now)

    def _hashed(self, record: Record, now: float) -> tuple[WorkerState, int] | None:
        """Where it goes when nobody decides: on with its turn where that ran, if it can."""
        excluded = (*record.excluded, *self._avoided(record, now))
        workers = self.workers.placeable(record.model, now)
        stays = [state for state in workers if state.worker == record.sticky and state.worker not in excluded]
        return placement.place(record.identity.key.text(), stays or workers, excluded)

    # The decision

    def _send_unasked(self, record: Record, now: float) -> list[Effect]:
        """To some engine without a decision: it computes nothing there, so it is held by nobody and booked nowhere."""
        place = self._hashed(record, now)
        if place is None:
            return self._refuse(record, "no_worker", 503, 1, now)
        state, rank = place
        record.state = "dispatched"
        record.worker, record.rank, record.decided_at = state.worker, rank, now
        self.breaker.sent(state.worker, now)
        profile = state.profile
        return [Forward(record.request_id, record.attempt, state.worker, profile.url, rank, profile.ranks, None)]

    def _replied(self, record: Record, event: events.AdmitReplied, now: float) -> list[Effect]:
        match event.reply:
            case Held(reason=reason, place=place):
                record.state = "held"
                record.held_at = record.held_at if record.held_at is not None else now
                record.hold_reason = record.hold_reason or reason
                record.place = record.place or place
                return []
            case Refused(reason=reason, status=status, retry_after_s=retry_after_s) as refused:
                return self._refuse(
                    record, reason, status, retry_after_s, now, refusal_message(reason, refused.policy, refused.detail)
                )
            case Granted() as granted:
                record.granted = granted
                grant, forward = granted.grant, self._forwards.granted(record, record.attempt, granted, now)
                return self._dispatch(record, grant.worker, grant.rank, granted.mode, forward, now)

    def _undecided(self, record: Record, event: events.AdmitFailed, now: float) -> list[Effect]:
        if event.reason == "hold_timeout":
            return [self._facts.cancel(record, event.reason), *self._refuse(record, event.reason, 429, 1, now)]
        if not self._rules.fallback:
            return self._refuse(record, "admission_unavailable", 503, 1, now)
        place = self._hashed(record, now)
        if place is None:
            return self._refuse(record, "no_worker", 503, 1, now)
        state, rank = place
        forward = self._forwards.hashed(record, state, rank, now)
        return [
            self._facts.placed(record, state.worker, rank, now),
            *self._dispatch(record, state.worker, rank, "fallback", forward, now),
        ]

    def _dispatch(
        self, record: Record, worker: str, rank: int, mode: DecisionMode, forward: Forward, now: float
    ) -> list[Effect]:
        record.state = "dispatched"
        record.worker, record.rank, record.mode, record.decided_at = worker, rank, mode, now
        self.breaker.sent(worker, now)
        return [self._facts.dispatched(record, worker, rank, mode, now), forward]

    def _refuse(
        self, record: Record, reason: str, status: int, retry_after_s: int | None, now: float, message: str = ""
    ) -> list[Effect]:
        message = message or refusal_message(reason)
        return [
            waiting.failure(record, status, reason, message, retry_after_s),
            *self._end(record, Ending(outcome="refused", at=now, reason=reason, status=status)),
        ]

    # The answer

    def _judge(
        self, record: Record, status: int | None, reason: str | None, now: float, worker: str | None = None
    ) -> None:
        """Of its worker, or of the one of its second sending."""
        name = worker or record.worker
        assert name is not None
        self.breaker.judge(name, status, reason, now, unknown_api=record.request.endpoint == "passthrough")

    def _begin(self, record: Record, event: events.FirstByte, now: float) -> list[Effect]:
        self._judge(record, event.status, None, now)
        if event.status in RETRY_STATUSES and record.request.repeatable and (on := self._elsewhere(record, now)):
            return on
        if record.is_open and event.status < 400 and not event.is_stream:  # the client was promised one
            return self._retry_or_fail(
                record,
                events.AnswerFailed(request_id=record.request_id, attempt=record.attempt, reason="bad_answer"),
                now,
            )
        record.state = "streaming"
        record.status = event.status
        record.let_go()
        record.first_byte_at = now
        said = [self._facts.first_token(record, now)] if event.status < 400 else []
        return [Relay(record.request_id), *said, *self._hedging.drop(record)]

    def _progress(self, record: Record, event: events.AnswerProgress, now: float) -> list[Effect]:
        record.chunks = event.chunks
        return [self._facts.progress(record, now)]

    def _complete(self, record: Record, event: events.AnswerEnded, now: float) -> list[Effect]:
        status = record.status or 0
        outcome: Outcome = "completed"
        reason: str | None = None
        if status >= 400:
            outcome, reason = ("client_error" if status < 500 else "upstream_error"), "engine_status"
        elif event.answer.error is not None:
            outcome, reason = "upstream_error", "in_band_error"
        elif event.answer.unreadable and not event.answer.data_lines and not record.request.passed:
            outcome, reason = "upstream_error", "bad_answer"  # a login page, half a document, nothing at all
        elif record.request.stream and not event.answer.complete:
            outcome, reason = "upstream_lost", "incomplete_answer"
        effects = self._end(
            record, Ending(outcome=outcome, at=now, reason=reason, status=record.status, answer=event.answer)
        )
        if reason == "incomplete_answer" and not record.request.passed:
            # An HTTP/1.0 engine that dies ends its stream as one that is done: its client must not take it for whole.
            return [waiting.broken(record, 502, reason, event.answer, "The engine's answer ended too soon"), *effects]
        return effects

    def _retry_or_fail(self, record: Record, event: events.AnswerFailed, now: float) -> list[Effect]:
        self._judge(record, None, event.reason, now)
        status, retryable = FAILURES[event.reason]
        unsent = event.reason in UNSENT or record.request.repeatable
        if record.race is not None and (on := self._hedging.takes_over(record, now)):
            return on
        if retryable and unsent and (on := self._elsewhere(record, now)):
            return on
        message = event.detail or f"The engine did not answer: {event.reason.replace('_', ' ')}."
        outcome: Outcome = "upstream_timeout" if status == 504 else "upstream_error"
        if event.reason == API_NOT_SERVED:
            outcome = "client_error"
        return [
            *self._hedging.drop(record),
            CloseUpstream(record.request_id, record.attempt),
            waiting.failure(record, status, event.reason, message),
            *self._end(
                record,
                Ending(
                    outcome=outcome,
                    at=now,
                    reason=event.reason,
                    status=status,
                    answer=event.answer,
                ),
            ),
        ]

    def _break_off(self, record: Record, event: events.AnswerFailed, now: float) -> list[Effect]:
        self._judge(record, None, event.reason, now)
        status, _ = FAILURES[event.reason]
        outcome: Outcome = "upstream_timeout" if status == 504 else "upstream_error"
        if event.reason == "connection_lost":
            outcome = "upstream_lost"
        return [
            CloseUpstream(record.request_id, record.attempt),
            waiting.broken(record, status, event.reason, event.answer, "The engine's answer broke off"),
            *self._end(
                record,
                Ending(outcome=outcome, at=now, reason=event.reason, status=record.status, answer=event.answer),
            ),
        ]

    def _may_retry(self, record: Record, now: float) -> bool:
        """Once, before the first byte, and only if another worker is there."""
        if not self._rules.retry or record.attempt > 0 or record.hedged is not None:
            return False
        tried = {*record.excluded, record.worker}
        return any(state.worker not in tried for state in self.workers.placeable(record.model, now))

    def _elsewhere(self, record: Record, now: float) -> list[Effect]:
        """On with its second sending, or with a retry; nothing: neither can be."""
        if on := self._hedging.takes_over(record, now):
            return on
        return [*self._hedging.drop(record), *self._retry(record, now)] if self._may_retry(record, now) else []

    def _retry(self, record: Record, now: float) -> list[Effect]:
        close = CloseUpstream(record.request_id, record.attempt)
        record.next_attempt()
        again = self._send_unasked(record, now) if record.counts_only else [self._ask(record, now)]
        return [close, *again]

    # A second sending

    def _hedge_due(self, record: Record, event: events.HedgeDue, now: float) -> list[Effect]:
        """Its engine is slow. What nobody decided nobody books: that is not sent twice."""
        if not self._rules.hedge or self.stopping or record.hedge_asked or record.granted is None:
            return []
        if record.counts_only or not record.request.repeatable or not self._may_retry(record, now):
            return []
        return self._hedging.ask(record, self._avoided(record, now), now)

    def _hedge_decided(self, record: Record, event: events.HedgeAnswered, now: float) -> list[Effect]:
        assert record.race is not None
        return self._hedging.decided(record, record.race, event, not self.stopping, now)

    def _hedge_begins(self, record: Record, event: events.FirstByte, now: float) -> list[Effect]:
        assert record.race is not None
        assert record.race.granted is not None
        worker = record.race.granted.grant.worker
        self._judge(record, event.status, None, now, worker)
        if event.status >= 400 or (record.is_open and not event.is_stream):
            return self._hedging.drop(record)
        taken = self._hedging.takes_over(record, now)
        return [*taken, *self._begin(record, event, now)]

    def _hedge_fails(self, record: Record, event: events.AnswerFailed, now: float) -> list[Effect]:
        assert record.race is not None
        assert record.race.granted is not None
        self._judge(record, None, event.reason, now, record.race.granted.grant.worker)
        return self._hedging.drop(record)

    # Other ends

    def _leave(self, record: Record, event: events.ClientGone, now: float) -> list[Effect]:
        answer = event.answer if record.state == "streaming" else None
        if answer is not None and answer.last_event:  # Codex does so (spec: harness.md §3): it has the whole answer
            ended = events.AnswerEnded(request_id=record.request_id, attempt=record.attempt, answer=answer)
            return [*self._let_go(record, "client_disconnect"), *self._complete(record, ended, now)]
        ending = Ending(
            outcome="client_disconnect", at=now, reason="client_gone", status=record.status, answer=event.answer
        )
        return [*self._let_go(record, "client_disconnect"), *self._end(record, ending)]

    def _give_up(self, record: Record, event: events.RequestFailed, now: float) -> list[Effect]:
        if record.state == "streaming":
            said: Effect = waiting.broken(record, 500, event.reason, event.answer, "Tidegate failed")
        else:
            message = f"Tidegate failed: {event.reason.replace('_', ' ')}."
            said = waiting.failure(record, 500, event.reason, message)
        status = record.status if record.state == "streaming" else 500
        ending = Ending(outcome="internal_error", at=now, reason=event.reason, status=status, answer=event.answer)
        return [*self._let_go(record, event.reason), said, *self._end(record, ending)]

    def _let_go(self, record: Record, reason: str) -> list[Effect]:
        """Stop what others do for this request."""
        if record.state in ("asking", "held"):
            return [self._facts.cancel(record, reason)]
        second = self._hedging.drop(record)
        return [*second, CloseUpstream(record.request_id, record.attempt)] if record.is_open_upstream else []

    def _end(self, record: Record, ending: Ending) -> list[Effect]:
        """The one end: the record is gone, the fact and the row are said. Nobody's end is said who was not accepted."""
        del self._records[record.request_id]
        accepted = [] if record.is_accepted else [self._accepted(record, ending.at)]
        usage = usage_of(record, ending.answer)
        row = request_end_row(record, ending, usage, self._rules.trace_fine_tokens)
        assert row.request is not None
        end = self._facts.end(record, ending, usage, row.request.total_time_ms)
        subject = subjects.trace("request_end", record.model, record.identity.key.text())
        return [*accepted, end, PublishRow(subject, row, record.request_id)]

    # Ticks

    def _state(self, now: float, *, final: bool = False) -> list[Publish]:
        return self._facts.state(self._records.values(), self._rules.in_flight_part, now, final=final)

    def _comments(self, now: float) -> list[Effect]:
        due = (waiting.comment(record, self._rules.held_comment_s, now) for record in self._records.values())
        return [comment for comment in due if comment is not None]

    def _stopped(self, now: float) -> list[Effect]:
        self.stopping = True
        effects: list[Effect] = []
        for record in list(self._records.values()):
            effects += self._give_up(record, events.RequestFailed(request_id=record.request_id, reason="stopping"), now)
        return [*effects, *self._state(now, final=True)]
