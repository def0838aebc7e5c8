"""The picture that `tidegate top` shows, made from facts alone: begun in the middle, whatever is lost, late or said
twice, and bounded. Pure.

    model.handle(fact, now); model.tick(now); model.snapshot(now)
"""

from __future__ import annotations

from collections import defaultdict

from bus.facts import GapCounter
from schemas.base import Fact
from schemas.decision import Decision
from schemas.hint import HintResult
from schemas.index import IndexSource
from schemas.ingress import IngressState
from schemas.request import RequestAccepted, RequestDispatched, RequestEnd, RequestFirstToken
from schemas.session import MOVES_SESSION, SessionFact
from schemas.tool import ToolEvent
from schemas.worker import WorkerState
from tidegate.top.requests import Request, Requests, Stage, place
from tidegate.top.sessions import Sessions, row_of
from tidegate.top.snapshot import STATES, Headline, SessionRow, Snapshot
from tidegate.top.text import bounded
from tidegate.top.window import Minute, Window
from tidegate.top.workers import Workers

MAX_SESSIONS = 2_000
NOT_FAILED = frozenset({"completed", "client_disconnect"})
"""Outcomes that are nobody's failure here."""


class Model:
    """``now``: Unix seconds of the clock that hears; rates and silences are by it, everything else by the facts' own
    times. ``dropped``, ``unreadable``: counted by who reads the bus."""

    def __init__(self, max_sessions: int = MAX_SESSIONS) -> None:
        self._requests = Requests()
        self._sessions = Sessions(max_sessions)
        self._workers = Workers()
        self._window = Window()
        self._gaps = GapCounter()
        self._facts = 0
        self.dropped = 0
        self.unreadable = 0

    def begin(self, now: float) -> None:
        """Watching begins."""
        self._window.begin(now)

    def handle(self, family: str, fact: Fact, now: float) -> None:
        """One fact. ``family``: `bus.facts.subject_family` of its subject."""
        self._facts += 1
        self._gaps.see(family, fact)
        match fact:
            case RequestAccepted():
                self._accepted(fact, now)
            case RequestDispatched():
                self._dispatched(fact, now)
            case RequestFirstToken():
                self._first_token(fact, now)
            case RequestEnd():
                self._ended(fact, now)
            case Decision():
                self._decision(fact, now)
            case IngressState():
                self._ingress(fact, now)
            case WorkerState():
                self._workers.state(fact, now)
            case IndexSource():
                self._workers.index(fact, now)
            case SessionFact():
                self._sessions.told(fact, now)
            case ToolEvent():
                self._sessions.tool(fact, now)
            case HintResult():
                self._hints(fact, now)
            case _:
                pass

    def tick(self, now: float) -> None:
        """Time goes on: call about once a second."""
        self._requests.tick(now)
        self._sessions.tick(now)
        self._workers.tick(now)

    def snapshot(self, now: float) -> Snapshot:
        """All of it; sessions in the order in which they were last heard of."""
        now_ms, minute = int(now * 1000), self._window.sums(now)
        by_session: defaultdict[str, list[Request]] = defaultdict(list)
        grants: defaultdict[str, int] = defaultdict(int)
        held = 0
        for request in self._requests.values():
            by_session[request.session].append(request)
            held += request.stage is Stage.ACCEPTED
            if request.worker is not None:
                grants[request.worker] += 1
        leased: defaultdict[str, int] = defaultdict(int)
        rows: list[SessionRow] = []
        for text, session in self._sessions.items():
            rows.append(row_of(text, session, by_session.get(text, []), now_ms))
            lease = session.lease_at(now_ms)
            if lease is not None and lease[3] is not None:
                leased[lease[3]] += lease[2]
        return Snapshot(
            at_ms=now_ms,
            headline=self._headline(rows, held, minute),
            workers=tuple(self._workers.rows(grants, leased, minute, now)),
            sessions=tuple(rows),
        )

    def _headline(self, rows: list[SessionRow], held: int, minute: Minute) -> Headline:
        states = dict.fromkeys(STATES, 0)
        for row in rows:
            states[row.state] += 1
        return Headline(
            window_s=round(minute.window_s, 3),
            ingresses=self._requests.ingresses,
            in_flight=len(self._requests),
            held=held,
            ended_per_s=round(minute.ended / max(1.0, minute.window_s), 3),
            failed=minute.failed,
            ttft_ms_p50=minute.percentile(50),
            ttft_ms_p95=minute.percentile(95),
            hit_ratio=minute.cached_tokens / minute.input_tokens if minute.input_tokens else None,
            cached_tokens_predicted=minute.predicted,
            cached_tokens_reported=minute.reported,
            facts=self._facts,
            facts_missed=sum(self._gaps.missed.values()),
            facts_dropped=self.dropped,
            facts_unreadable=self.unreadable,
            sessions_forgotten=self._sessions.forgotten,
            requests_forgotten=self._requests.forgotten,
            requests_vanished=self._requests.vanished,
            workers_forgotten=self._workers.forgotten,
            states={state: count for state, count in states.items() if count},
        )

    def _accepted(self, fact: RequestAccepted, now: float) -> None:
        ingress = bounded(fact.source)
        self._requests.hear(ingress, now)
        self._requests.accept(fact.request_id, ingress, fact.identity, fact.kind, fact.received_ms, fact.at_ms)
        self._sessions.began(fact.identity, fact.model, fact.received_ms, fact.kind in MOVES_SESSION, now)

    def _dispatched(self, fact: RequestDispatched, now: float) -> None:
        ingress = bounded(fact.source)
        self._requests.hear(ingress, now)
        request = self._requests.get_or_guess(fact.request_id, ingress, fact.at_ms)
        if request is not None:
            place(request, fact.worker, fact.rank, fact.attempt, fact.at_ms)

    def _first_token(self, fact: RequestFirstToken, now: float) -> None:
        ingress = bounded(fact.source)
        self._requests.hear(ingress, now)
        self._window.first_token(fact.ttft_ms, now)
        request = self._requests.get_or_guess(fact.request_id, ingress, fact.at_ms)
        if request is not None:
            request.stage = Stage.ANSWERING

    def _ended(self, fact: RequestEnd, now: float) -> None:
        first = self._requests.end(fact.request_id)
        self._sessions.ended(fact, now, first)
        if not first:
            return
        slot, usage = self._window.at(now), fact.usage
        slot.ended += 1
        slot.failed += fact.outcome not in NOT_FAILED
        if usage.cached_tokens is None:
            return
        if usage.input_tokens:
            slot.input_tokens += usage.input_tokens
            slot.cached_tokens += min(usage.cached_tokens, usage.input_tokens)
        if fact.predicted_cached_tokens is not None:
            slot.predicted += fact.predicted_cached_tokens
            slot.reported += usage.cached_tokens

    def _decision(self, fact: Decision, now: float) -> None:
        owner = bounded(fact.grant.owner)
        self._requests.hear(owner, now)
        request = self._requests.get_or_guess(fact.request_id, owner, fact.at_ms)
        if request is not None:
            request.session, request.kind = bounded(fact.identity.key.text()), fact.kind
            place(request, fact.worker, fact.rank, fact.attempt, fact.at_ms)
        self._sessions.placed(fact, now)
        self._workers.decision(fact, now)
        self._window.at(now).decisions[bounded(fact.worker)] += 1

    def _ingress(self, fact: IngressState, now: float) -> None:
        ingress = bounded(fact.source)
        self._requests.hear(ingress, now)
        for one in fact.in_flight:
            request = self._requests.accept(
                one.request_id, ingress, one.identity, one.kind, one.received_ms, fact.at_ms
            )
            if request is None:
                continue
            if fact.at_ms >= request.told_ms:
                request.told_ms, request.held_ms = fact.at_ms, one.held_since_ms
                request.hold_reason = bounded(one.hold_reason) if one.hold_reason else None
            moves = one.kind in MOVES_SESSION
            session = self._sessions.began(one.identity, one.model, one.received_ms, moves, now)
            if one.worker is not None:
                place(request, one.worker, one.rank, one.attempt, fact.at_ms)
                if moves:
                    self._sessions.sent(session, one.worker, one.rank, fact.at_ms)
        self._requests.reported(fact)

    def _hints(self, fact: HintResult, now: float) -> None:
        slot, worker = self._window.at(now), bounded(fact.worker)
        for result in fact.results:
            (slot.hints_accepted if result.outcome in ("accepted", "clipped") else slot.hints_other)[worker] += 1
        if fact.error is not None:
            slot.hints_other[worker] += 1
