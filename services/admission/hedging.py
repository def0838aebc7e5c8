"""A second sending of a request whose engine is slow: granted at once or refused, and booked beside the first.

Invariants: it is never held, and none is granted while turns of its model wait; a request has one at most, and only
beside its own grant; its booking is under a name of its own, so that it is reversed by exactly its own amounts, and
goes with its request's at the latest (docs/adr/0037).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from schemas.admit import AdmitRequest, Grant, Granted, Refused
from schemas.index import MatchReply
from schemas.ingress import HedgePlace
from schemas.session import SessionIdentity, SessionKey
from services.admission.asks import Ask
from services.admission.cost import predicted_cached_tokens
from services.admission.deciding import Deciding
from services.admission.effects import AskIndex, Effect, Publish, Reply
from services.admission.granting import book, new_grant
from services.admission.grants import OpenGrant
from services.admission.placement import IndexView, Placement
from services.admission.placing import DEFAULT_BLOCK_SIZE, block_size, index_question, index_view, place_by_cost
from services.admission.requests import RequestRecord
from services.admission.state import HEDGE, AdmissionState, hedge_id
from services.admission.workers import Worker

FIRST_TICKET = -2
"""Questions about hedges are numbered downwards: no ask's question has such a number."""


class Hedges:
    """Second sendings that were asked for. Only the leader's questions are ever open."""

    def __init__(self, state: AdmissionState, deciding: Deciding) -> None:
        self._state = state
        self._deciding = deciding
        self._open: dict[int, tuple[Ask, RequestRecord]] = {}
        self._ticket = FIRST_TICKET
        self._grants = 0

    def asked(self, request: AdmitRequest, reply_to: str, record: RequestRecord, now: float) -> list[Effect]:
        """May the request be sent once more? ``record`` is its own."""
        ask = Ask(request, reply_to, 0, now, now)
        ask.started_at = now
        reason = self._reason_against(request, record, now)
        if reason is None and len(self._open) >= self._state.settings.max_deciding:
            reason = "max_deciding"
        if reason is not None:
            return [self._refuse(ask, reason)]
        question = index_question(self._state, request)
        if question is None:
            return self._decide(ask, record, IndexView.blind("no_chain"), now)
        self._ticket -= 1
        self._open[self._ticket] = ask, record
        return [AskIndex(self._ticket, question, self._state.settings.index_deadline_ms)]

    def matched(self, ticket: int, reply: MatchReply, now: float) -> list[Effect]:
        """The index answered."""
        return self._viewed(ticket, lambda request: index_view(self._state, request, reply), now)

    def match_failed(self, ticket: int, reason: str, now: float) -> list[Effect]:
        """The index did not answer: by load."""
        return self._viewed(ticket, lambda _: IndexView.blind(reason), now)

    def drop_all(self) -> None:
        """We do not lead any more: nobody gets an answer, and so none is sent."""
        self._open.clear()

    def over(self, record: RequestRecord, now: float) -> list[Effect]:
        """Its ingress does not send the request twice, or not any more."""
        record.hedge_over = True
        return self._deciding.pump_all(now) if self._state.release_hedge(record.request_id) else []

    def stated(self, record: RequestRecord, place: HedgePlace, expires: float) -> None:
        """An ingress names it: it lives on, and is known from now on if it was not, or not there: another leader may
        have granted it, and its ingress have taken that one's answer."""
        state, name = self._state, hedge_id(record.request_id)
        entry = state.ledger.get(name)
        if entry is not None and (entry.grant.worker, entry.grant.rank) == (place.worker, place.rank):
            state.ledger.renew(name, expires)
            return
        if record.hedge_over or record.attempt > 0 or record.ttft_ms is not None:
            return
        if state.ledger.get(record.request_id) is None:
            return
        state.release_hedge(record.request_id)
        worker = state.fleet.get(place.worker)
        size = (worker.state.profile.block_size if worker is not None else None) or DEFAULT_BLOCK_SIZE
        grant = Grant(
            grant_id=place.grant_id,
            request_id=name,
            worker=place.worker,
            rank=place.rank,
            owner=record.ingress,
            epoch=place.grant_epoch,
            expires_ms=int(expires * 1000),
        )
        tenant, blocks = record.identity.key.tenant, record.input_tokens // size
        state.ledger.open(OpenGrant(grant, 1, record.input_tokens, blocks, expires, True, record.model, tenant))
        self._tell_policy(record, grant)

    def seat_opened(self, entry: OpenGrant) -> None:
        """The rank where a second sending runs has become a seat: its policy has not heard of it."""
        record = self._state.requests.get(entry.grant.request_id.removeprefix(HEDGE))
        if record is not None:
            self._tell_policy(record, entry.grant)

    # Inside

    def _viewed(self, ticket: int, view: Callable[[AdmitRequest], IndexView], now: float) -> list[Effect]:
        entry = self._open.pop(ticket, None)
        if entry is None:
            return []
        ask, record = entry
        reason = self._reason_against(ask.request, record, now)  # much may have happened meanwhile
        return [self._refuse(ask, reason)] if reason else self._decide(ask, record, view(ask.request), now)

    def _reason_against(self, request: AdmitRequest, record: RequestRecord, now: float) -> str | None:
        state = self._state
        if now < state.warm_at:
            return "warming_up"
        entry = state.ledger.get(request.request_id)
        if entry is None or entry.attempt != record.attempt:
            return "not_granted"
        if record.attempt > 0 or record.hedge_over or state.ledger.get(hedge_id(request.request_id)) is not None:
            return "sent_twice"
        if record.ttft_ms is not None:
            return "answered"
        if self._deciding.users.are_there:
            return "user_policies"
        return "turns_wait" if self._deciding.waiting(request.model) else None

    def _decide(self, ask: Ask, record: RequestRecord, index: IndexView, now: float) -> list[Effect]:
        ask.index = index
        placement = place_by_cost(self._state, ask, now)
        worker = self._state.fleet.get(placement.chosen.worker) if placement.choice is not None else None
        if worker is None:
            return [self._refuse(ask, placement.reason or "no_worker")]
        return self._grant(ask, record, placement, worker, now)

    def _grant(self, ask: Ask, record: RequestRecord, placement: Placement, worker: Worker, now: float) -> list[Effect]:
        state, request, chosen, facts = self._state, ask.request, placement.chosen, self._state.facts
        if facts is None:
            raise RuntimeError("a standby decides nothing")
        self._grants += 1
        expires = now + state.settings.grant_ttl_s
        grant = new_grant(request, chosen, facts.epoch, f"h{self._grants}", expires)
        booked = msgspec.structs.replace(grant, request_id=hedge_id(request.request_id))
        book(state, ask, placement, booked, expires)
        self._tell_policy(record, booked)
        state.counters.hedges["granted"] += 1
        size = block_size(state, request)
        granted = Granted(
            request_id=request.request_id,
            epoch=facts.epoch,
            grant=grant,
            url=worker.state.profile.url,
            predicted_cached_tokens=predicted_cached_tokens(chosen.blocks.reach, request.input_tokens, size),
            index_health=chosen.health,
            index_reason=chosen.health_reason,
            priority=record.priority,
        )
        indexed = ask.index.indexed(chosen) if ask.index is not None else None
        return [Reply(ask.reply_to, granted), Publish(facts.hedge_placed(request, grant, indexed, now))]

    def _refuse(self, ask: Ask, reason: str) -> Reply:
        facts = self._state.facts
        if facts is None:
            raise RuntimeError("a standby refuses nothing")
        self._state.counters.hedges[reason] += 1
        return Reply(ask.reply_to, Refused(request_id=ask.request.request_id, epoch=facts.epoch, reason=reason))

    def _tell_policy(self, record: RequestRecord, grant: Grant) -> None:
        """A scheduling policy counts its memory as that of a program of its own, which is over with the race."""
        if self._state.scheduled is None:
            return
        name = grant.request_id
        key = SessionKey(family="request", root=name, tenant=record.identity.key.tenant)
        alone = replace(record, request_id=name, kind="turn", identity=SessionIdentity(key=key, session_id=name))
        self._state.scheduled.runs(alone, grant.worker, grant.rank)
