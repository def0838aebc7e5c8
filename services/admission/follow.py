"""What leader and standby learn from facts, and what they owe when somebody falls silent.

A standby does all of it without publishing. It keeps the requests of a lost ingress until the leader has ended them,
and ends them itself once it leads.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from schemas.admit import Grant
from schemas.decision import Candidate, Decision
from schemas.ingress import InFlight, IngressState
from schemas.request import Outcome, RequestAccepted, RequestDispatched, RequestEnd, RequestFirstToken, Usage
from schemas.worker import WorkerState
from services.admission.cost import booked_prefill_tokens
from services.admission.deciding import Deciding
from services.admission.effects import Effect, Publish, WriteRow
from services.admission.granting import placed
from services.admission.grants import OpenGrant
from services.admission.hedging import Hedges
from services.admission.lost import OUTCOME, lost_row
from services.admission.placing import DEFAULT_BLOCK_SIZE
from services.admission.requests import IngressEpoch, RequestRecord
from services.admission.state import AdmissionState, hedge_id

STANDBY_KEEPS_LOST_S = 60.0
"""How long a standby leaves the requests of a lost ingress to the leader, in seconds."""

UNNAMED_S = 3.0
"""A request that no fact has named for so long, and that a whole table of its ingress made as long after its receipt
does not name, is over: its end was lost. Some tables' time, for facts that come late or out of order."""

BROKEN_OFF: frozenset[Outcome] = frozenset({"upstream_lost", "upstream_timeout"})
"""The engine failed under the answer: the session's next turn is placed without regard to it (DESIGN.md §8)."""

_UNSEEN = Candidate(worker="", rank=0)


class Follower:
    """Takes in facts about workers, ingresses and requests."""

    def __init__(self, state: AdmissionState, deciding: Deciding, hedges: Hedges) -> None:
        self._state = state
        self._deciding = deciding
        self._hedges = hedges

    # Workers

    def worker_stated(self, fact: WorkerState, now: float) -> list[Effect]:
        """A heartbeat: someone may fit now; or the worker is gone, or its engine began anew."""
        lost = self._state.fleet.stated(fact, self._state.ledger, now)
        if lost:
            self._worker_lost(fact.worker, "left" if fact.health == "left" else "restarted")
        self._seats_changed(fact.worker, lost=lost)
        return self._deciding.pump_all(now)

    def silent_workers(self, now: float) -> list[Effect]:
        """Workers not heard of for too long."""
        silent = self._state.fleet.silent(now - self._state.settings.worker_lost_s)
        for name in silent:
            self._state.fleet.remove(name)
            self._worker_lost(name, "silence")
            self._seats_changed(name, lost=True)
        return self._deciding.pump_all(now) if silent else []

    def _worker_lost(self, name: str, reason: str) -> None:
        """Nobody prefers it any more. Its grants go with their requests, which the ingress will end or retry."""
        self._state.counters.workers_lost[reason] += 1
        self._state.sessions.forget_worker(name)

    def _seats_changed(self, name: str, *, lost: bool) -> None:
        """Tell the scheduling policy, and what runs there already."""
        state = self._state
        if state.scheduled is None:
            return
        opened = state.scheduled.worker(name, state.fleet.get(name), lost=lost)
        if not opened or lost:
            return
        for entry in state.ledger:
            if (entry.grant.worker, entry.grant.rank) not in opened:
                continue
            record = state.requests.get(entry.grant.request_id)
            if record is not None:
                state.adopted(record)
            else:
                self._hedges.seat_opened(entry)

    # Requests

    def accepted(self, fact: RequestAccepted, now: float) -> list[Effect]:
        """An ingress accepted a request."""
        record = self._note(
            RequestRecord(
                fact.request_id, fact.model, fact.identity, fact.source, fact.epoch, fact.received_ms, now, fact.kind,
                fact.endpoint, digest=bytes.fromhex(fact.digest),
            ),
            now,
        )  # fmt: skip
        if record is not None:
            record.stream, record.x_request_id = fact.stream, fact.x_request_id
        return []

    def dispatched(self, fact: RequestDispatched, now: float) -> list[Effect]:
        """A request runs on a worker: by our grant, by another leader's, or by the ingress's own choice."""
        self._state.requests.heard(fact.source, fact.epoch, now)
        record = self._state.requests.get(fact.request_id)
        if record is None or fact.attempt < record.attempt:
            return []
        if self._deciding.waits(fact.request_id):
            if fact.mode != "fallback":
                return []
            self._deciding.over(fact.request_id)  # its ingress waited long enough and chose by itself
        record.named = now
        entry = self._state.ledger.get(fact.request_id)
        if entry is not None and fact.mode != "fallback":
            runs_there = (entry.grant.worker, entry.grant.rank) == (fact.worker, fact.rank)
            if entry.attempt > fact.attempt or (entry.attempt == fact.attempt and runs_there):
                entry.sent = entry.sent or entry.attempt == fact.attempt
                self._state.ledger.renew(fact.request_id, now + self._state.settings.grant_ttl_s)
                return []
        record.attempt, record.mode = fact.attempt, fact.mode
        record.worker, record.rank, record.grant_id = fact.worker, fact.rank, fact.grant_id
        record.predicted_cached_tokens = None
        hedge = self._state.ledger.get(hedge_id(fact.request_id))
        if hedge is not None and (hedge.grant.worker, hedge.grant.rank) == (fact.worker, fact.rank):
            return self._hedge_won(record, hedge, now)
        return self._adopt(record, 0, record.input_tokens, now)

    def first_token(self, fact: RequestFirstToken, now: float) -> list[Effect]:
        """Its prompt is computed."""
        record = self._state.requests.get(fact.request_id)
        effects: list[Effect] = []
        if record is not None:
            record.ttft_ms = fact.ttft_ms
            record.named = now
            effects = self._hedges.over(record, now)
            self._state.ledger.renew(fact.request_id, now + self._state.settings.grant_ttl_s)
        self._state.ledger.prefilled(fact.request_id)
        if self._state.scheduled is not None:
            self._state.scheduled.first_token(fact.request_id)
        return effects

    def ended(self, fact: RequestEnd, now: float) -> list[Effect]:
        """A request is over, however it came: its place is free, its session's turn done."""
        requests = self._state.requests
        if requests.is_over(fact.request_id):
            return []
        if fact.outcome != OUTCOME:  # that one is a leader's fact
            requests.heard(fact.source, fact.epoch, now)
        record = requests.end(fact.request_id, now) or _from_end(fact, now)
        effects: list[Effect] = []
        if fact.worker is not None and not record.turn_open:
            # Nobody told us where it ran: still good for knowing where its session's cache is.
            record.worker, record.rank = fact.worker, fact.rank
            effects = self._state.turn_placed(record, now)
        if fact.outcome in BROKEN_OFF and fact.worker is not None:
            self._state.sessions.leave(record.identity.key, record.kind, fact.worker)
        self._state.sessions.called(record.identity.key, record.kind, fact.tool_names)
        if self._state.scheduled is not None and fact.outcome == "completed":
            self._state.scheduled.finished(fact, record.input_tokens)
        effects += self._finish(record, fact.usage, fact.outcome, now)
        return effects + self._deciding.pump_all(now)

    def decided(self, decision: Decision, now: float) -> list[Effect]:
        """The leader granted (a standby follows)."""
        grant = decision.grant
        epoch = self._state.requests.newest_epoch(grant.owner)
        if epoch is None:
            return []  # an ingress never heard of: its next heartbeat brings the request
        record = self._state.requests.note(_from_decision(decision, epoch, now))
        if record is None or decision.attempt < record.attempt or self._is_deposed(decision):
            return []
        placed(record, decision)
        before = self._state.release(decision.request_id, "attempt")
        size = decision.block_size or DEFAULT_BLOCK_SIZE
        ranks = {(each.worker, each.rank): each for each in decision.candidates}
        chosen = ranks.get((decision.worker, decision.rank), _UNSEEN)
        pages = decision.predicted_shared_tokens // size
        credit = chosen.parts.get("shared_credit", 0.0) if pages else 0.0
        weights = self._state.settings.weights
        self._state.ledger.open(
            OpenGrant(
                grant,
                decision.attempt,
                booked_prefill_tokens(weights, chosen.blocks, decision.input_tokens, size, pages, credit),
                decision.input_tokens // size,
                now + self._state.settings.grant_ttl_s,
                adopted=True,
                model=record.model,
                tenant=record.identity.key.tenant,
                sent=before is not None and before.sent and before.attempt == decision.attempt,
            )
        )
        self._state.adopted(record)
        return self._state.turn_placed(record, now)

    # Ingresses

    def ingress_stated(self, fact: IngressState, now: float) -> list[Effect]:
        """An ingress's table: what it names lives on, and is known from now on if it was not."""
        self._state.requests.heard(fact.ingress, fact.epoch, now)
        effects: list[Effect] = []
        expires = now + self._state.settings.grant_ttl_s
        for item in fact.in_flight:
            effects += self._named(item, fact, expires, now)
            record = self._state.requests.get(item.request_id) if item.hedge is not None else None
            if record is not None and item.hedge is not None:
                self._hedges.stated(record, item.hedge, expires)
        unnamed = self._unnamed(fact, now)
        return effects + unnamed + (self._deciding.pump_all(now) if unnamed else [])

    def _named(self, item: InFlight, fact: IngressState, expires: float, now: float) -> list[Effect]:
        """One request of a table."""
        known = self._state.requests.get(item.request_id)
        # The decision was lost, and the dispatch does not say how long the prompt is: it is booked anew, once.
        sized = known is None or known.input_tokens > 0 or item.input_tokens == 0
        record = self._note(_record(item, fact, now), now)
        if record is None:
            return []
        if self._state.ledger.renew(item.request_id, expires) and sized and not self._runs_elsewhere(item):
            return []
        if item.worker is None or self._deciding.waits(item.request_id):
            return []
        if item.attempt < record.attempt or self._state.requests.is_cancelled(item.request_id):
            return []
        record.attempt, record.mode = item.attempt, item.mode
        record.worker, record.rank, record.grant_id = item.worker, item.rank, item.grant_id
        record.predicted_cached_tokens = item.predicted_cached_tokens or None
        # It has run for a while: its prompt is taken for computed.
        return self._adopt(record, item.grant_epoch or 0, 0, now)

    def _unnamed(self, fact: IngressState, now: float) -> list[Effect]:
        """Requests that this table would name if they were not over."""
        known = self._state.requests.of(fact.ingress, fact.epoch)
        if fact.parts > 1 or len(known) <= len(fact.in_flight):
            return []
        received_ms = fact.at_ms - UNNAMED_S * 1000
        unnamed = [
            record.request_id
            for record in known
            if record.named <= now - UNNAMED_S
            and record.received_ms <= received_ms
            and not self._deciding.waits(record.request_id)
        ]
        effects: list[Effect] = []
        for request_id in sorted(unnamed):
            self._state.counters.vanished += 1
            effects += self._forget(request_id, "vanished", now)
        return effects

    def lost_ingresses(self, now: float) -> list[Effect]:
        """End every request of an ingress's life that is over: exactly one end and one row each."""
        effects: list[Effect] = []
        for life, reason in self._state.requests.dead(now - self._state.settings.ingress_lost_s):
            if self._state.facts is not None:
                effects += self._end_lost(life, reason, now)
            elif life.requests and life.seen > now - STANDBY_KEEPS_LOST_S:
                continue
            else:
                for request_id in list(life.requests):
                    self._forget(request_id, OUTCOME, now)
            self._state.requests.bury(life)
        return effects + (self._deciding.pump_all(now) if effects else [])

    def _end_lost(self, life: IngressEpoch, reason: str, now: float) -> list[Effect]:
        facts = self._state.facts
        effects: list[Effect] = []
        for request_id in sorted(life.requests):
            record = self._state.requests.end(request_id, now)
            if record is None or facts is None:
                continue
            self._state.counters.lost[reason] += 1
            self._deciding.over(request_id)
            effects.append(Publish(facts.lost_end(record, reason, now)))
            effects.append(
                WriteRow(lost_row(record, reason, now), record.model, record.identity.key.text(), request_id)
            )
            effects += self._finish(record, Usage(), OUTCOME, now)
        return effects

    # Time

    def lapse(self, now: float) -> list[Effect]:
        """Grants and requests that no fact names any more, although their ingress speaks."""
        effects: list[Effect] = []
        since = now - self._state.settings.grant_ttl_s
        for record in self._state.requests.unnamed(since):
            if self._deciding.waits(record.request_id) or self._state.ledger.get(record.request_id) is not None:
                continue
            self._state.counters.vanished += 1
            effects += self._forget(record.request_id, "vanished", now)
        for entry in self._state.ledger.lapsed(now):
            effects += self._forget(entry.grant.request_id, "lapsed", now)
        return effects + (self._deciding.pump_all(now) if effects else [])

    # Inside

    def _is_deposed(self, decision: Decision) -> bool:
        """Whether the turn runs elsewhere: its ingress has said so, or takes a newer leader's answer instead."""
        entry = self._state.ledger.get(decision.request_id)
        if entry is None or entry.attempt != decision.attempt:
            return False
        if (entry.grant.worker, entry.grant.rank) == (decision.worker, decision.rank):
            return False
        return entry.sent or entry.grant.epoch > decision.grant.epoch

    def _note(self, record: RequestRecord, now: float) -> RequestRecord | None:
        self._state.requests.heard(record.ingress, record.ingress_epoch, now)
        return self._state.requests.note(record)

    def _runs_elsewhere(self, item: InFlight) -> bool:
        """Whether the ingress names another place than its grant's, and not one of an attempt that is over: the reply,
        or the `dispatched` fact, was lost."""
        entry = self._state.ledger.get(item.request_id)
        if entry is None or item.worker is None or item.attempt < entry.attempt:
            return False
        return (item.worker, item.rank or 0) != (entry.grant.worker, entry.grant.rank)

    def _hedge_won(self, record: RequestRecord, hedge: OpenGrant, now: float) -> list[Effect]:
        """The second sending is the request now, by the amounts that it was booked with; the first gives its own
        back."""
        self._state.release(record.request_id, "attempt")
        record.hedge_over = True
        grant = msgspec.structs.replace(hedge.grant, request_id=record.request_id)
        expires = now + self._state.settings.grant_ttl_s
        self._state.ledger.open(replace(hedge, grant=grant, expires=expires, sent=True))
        self._state.adopted(record)
        return [*self._state.turn_placed(record, now), *self._deciding.pump_all(now)]

    def _adopt(self, record: RequestRecord, epoch: int, prefill_tokens: int, now: float) -> list[Effect]:
        """Book a placement that we did not make, as its ingress says. ``epoch``: of who did; 0: nobody says."""
        self._state.release(record.request_id, "attempt")
        if record.worker is None:
            return []
        worker = self._state.fleet.get(record.worker)
        size = (worker.state.profile.block_size if worker is not None else None) or DEFAULT_BLOCK_SIZE
        expires = now + self._state.settings.grant_ttl_s
        grant = Grant(
            grant_id=record.grant_id or f"fallback-{record.request_id}",
            request_id=record.request_id,
            worker=record.worker,
            rank=record.rank or 0,
            owner=record.ingress,
            epoch=epoch,
            expires_ms=int(expires * 1000),
        )
        blocks, tenant = record.input_tokens // size, record.identity.key.tenant
        entry = OpenGrant(grant, record.attempt, prefill_tokens, blocks, expires, True, record.model, tenant, sent=True)
        self._state.ledger.open(entry)
        self._state.counters.grants["adopted"] += 1
        self._state.adopted(record)
        return self._state.turn_placed(record, now)

    def _finish(self, record: RequestRecord, usage: Usage, reason: str, now: float) -> list[Effect]:
        self._deciding.over(record.request_id)
        self._state.release(record.request_id, reason if reason == OUTCOME else "end")
        return self._state.turn_over(record, usage, reason, now)

    def _forget(self, request_id: str, why: str, now: float) -> list[Effect]:
        """Let go of a request without ending it: its ingress owns its end."""
        self._deciding.over(request_id)
        self._state.release(request_id, why)
        record = self._state.requests.forget(request_id)
        return self._state.turn_over(record, Usage(), why, now) if record is not None else []


def _record(item: InFlight, fact: IngressState, now: float) -> RequestRecord:
    return RequestRecord(
        item.request_id, item.model, item.identity, fact.ingress, fact.epoch, item.received_ms, now, item.kind,
        item.endpoint, input_tokens=item.input_tokens, digest=bytes.fromhex(item.digest),
    )  # fmt: skip


def _from_end(fact: RequestEnd, now: float) -> RequestRecord:
    return RequestRecord(
        fact.request_id, fact.model, fact.identity, fact.source, fact.epoch, fact.at_ms, now, fact.kind, fact.endpoint,
    )  # fmt: skip


def _from_decision(decision: Decision, epoch: int, now: float) -> RequestRecord:
    return RequestRecord(
        decision.request_id, decision.model, decision.identity, decision.grant.owner, epoch, decision.at_ms, now,
        decision.kind, input_tokens=decision.input_tokens,
    )  # fmt: skip
