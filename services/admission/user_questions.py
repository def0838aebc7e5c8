"""Users' policies and what they are asked about: questions made from asks and leases, and their answers taken in.

A turn is asked about each time it comes out of the line, when the index has answered. One that is tried again on
another worker has waited its turn: where it goes is asked, whether it goes is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from schemas.decision import PolicyAsk
from schemas.policy import AdmitQuestion, BuiltinLease, LeaseQuestion, PolicyAnswer, PolicyQuestion, RouteQuestion
from schemas.session import SessionKey
from services.admission.asks import Ask
from services.admission.consulting import NO_VERDICT, Consultation, Consulting, LeaseVerdict
from services.admission.effects import AskPolicy, Effect
from services.admission.outcomes import LeaseTold
from services.admission.placement import Placement
from services.admission.scheduled_facts import positive
from services.admission.state import AdmissionState
from services.admission.turn_counts import TurnCounts


class Said(NamedTuple):
    """What users' policies say of the KV that a session keeps: an answer to nobody who waits."""

    session: SessionKey
    verdict: LeaseVerdict


@dataclass(slots=True)
class _Lease:
    session: SessionKey
    consultation: Consultation


class UserQuestions:
    """Open questions to users' policies, by ask and by lease. ``waiting``: who waits, in lines that are counted."""

    def __init__(self, state: AdmissionState, waiting: Sequence[TurnCounts]) -> None:
        self._state = state
        self._waiting = waiting
        settings = state.settings
        self.consulting = Consulting(settings.policies, settings.policy_questions, state.counters.policies)
        self._leases: dict[str, _Lease] = {}

    @property
    def are_there(self) -> bool:
        """Whether turns are asked about at all."""
        return self.consulting.asks("route") or self.consulting.asks("admit")

    # Turns

    def ask(self, ask: Ask, placement: Placement | None, previous_worker: str | None, now: float) -> list[AskPolicy]:
        """Ask about a turn. ``placement``: where it would go by cost, for those that choose. The ask's consultation is
        new from now on, and finished when there is nobody to ask."""
        self.forget(ask)
        questions: dict[PolicyAsk, PolicyQuestion] = {}
        if self.consulting.asks("admit") and not ask.request.excluded:
            questions["admit"] = self._admit_question(ask, now)
        if placement is not None and placement.choice is not None:
            questions["route"] = _route_question(ask, placement, placement.choice, previous_worker)
        ask.consultation, effects = self.consulting.consult(ask.request.request_id, questions, now)
        ask.times.update((asked.policy.name, asked.ask) for asked in ask.consultation.asked)
        return effects

    def forget(self, ask: Ask) -> None:
        """Nobody wants to know any more."""
        if ask.consultation is not None:
            self.consulting.forget(ask.consultation)
        ask.verdict = NO_VERDICT

    def weigh(self, ask: Ask, block_size: int) -> None:
        """The ask's consultation is finished: its verdict. ``block_size``: tokens a block, the unit of weights."""
        if ask.consultation is not None:
            ask.verdict = self.consulting.weigh(ask.consultation, -(-ask.request.input_tokens // block_size))

    def placed(self, ask: Ask, placement: Placement) -> str | None:
        """The ask is about to be granted: what became of each choice. Returns the first policy that has its way."""
        if placement.choice is None:
            return None
        chosen, first = placement.chosen, None
        for preferred in ask.verdict.preferred:
            if preferred.means(chosen.worker, chosen.rank):
                first = first or preferred.asked.policy.name
                outcome = "used"
            else:
                meant = [seat for seat in placement.seats if preferred.means(seat.worker, seat.rank)]
                outcome = "outvoted" if any(seat.excluded is None for seat in meant) else "unusable"
            self.consulting.became(preferred, outcome)
        return first

    def _admit_question(self, ask: Ask, now: float) -> AdmitQuestion:
        request, ledger = ask.request, self._state.ledger.counts
        model, tenant = request.model, request.identity.key.tenant
        record = self._state.requests.get(request.request_id)
        tenants = {tenant, *ledger.tenants(model)}.union(*(line.tenants(model) for line in self._waiting))
        return AdmitQuestion(
            request_id=request.request_id,
            model=model,
            identity=request.identity,
            deadline_ms=0,
            kind=request.kind,
            turn_index=self._state.turn_index(record) if record is not None else 0,
            input_tokens=request.input_tokens,
            max_output_tokens=positive(request.max_output_tokens),
            expected_output_tokens=positive(request.expected_output_tokens),
            priority=request.priority,
            held_ms=max(0, int(ask.held_s * 1000)),
            expires_ms=max(0, int(ask.expires * 1000)),
            waiting=sum(line.turns(model) for line in self._waiting),
            waiting_main=sum(line.main(model) for line in self._waiting),
            open_grants=ledger.turns(model),
            tenants=len(tenants),
            tenant_open_grants=ledger.of_tenant(model, tenant),
            tenant_waiting=sum(line.of_tenant(model, tenant) for line in self._waiting),
        )

    # Leases

    def lease_told(self, told: LeaseTold, now: float) -> list[Effect]:
        """A lease was given, which is asked about, or is over, and what is said of it is nothing any more."""
        subject = f"lease:{told.session.text()}"
        known = self._leases.pop(subject, None)
        if known is not None:
            self.consulting.forget(known.consultation)
        session = self._state.sessions.get(told.session)
        if told.state != "leased" or session is None or not self.consulting.asks("lease"):
            return []
        question = LeaseQuestion(
            identity=session.identity,
            model=session.model,
            worker=told.worker,
            rank=told.rank,
            deadline_ms=0,
            turns=session.turns,
            context_tokens=session.context_tokens,
            tool_names=session.tools,
            builtin=BuiltinLease(state=told.state, numbers=dict(told.numbers)),
        )
        consultation, effects = self.consulting.consult(subject, {"lease": question}, now)
        if not consultation.finished:
            self._leases[subject] = _Lease(told.session, consultation)
        return list(effects)

    def drop_leases(self) -> None:
        """We do not lead any more: what is said of leases is for the next leader."""
        for lease in self._leases.values():
            self.consulting.forget(lease.consultation)
        self._leases.clear()

    # Answers

    def answered(self, ticket: int, answer: PolicyAnswer, now: float) -> list[Consultation | Said]:
        """As `finished`, of the one consultation that this answer finishes."""
        return self._finished(self.consulting.answered(ticket, answer, now))

    def failed(self, ticket: int, cause: str, now: float) -> list[Consultation | Said]:
        """As `answered`, where there is no answer."""
        return self._finished(self.consulting.failed(ticket, cause, now))

    def overdue(self, now: float) -> list[Consultation | Said]:
        """Consultations about asks that need not wait any longer, and what is said of leases."""
        return [each for consultation in self.consulting.overdue(now) for each in self._finished(consultation)]

    def _finished(self, consultation: Consultation | None) -> list[Consultation | Said]:
        if consultation is None:
            return []
        lease = self._leases.get(consultation.subject)
        if lease is None or lease.consultation is not consultation:
            return [consultation]
        del self._leases[consultation.subject]
        return [Said(lease.session, self.consulting.weigh_lease(consultation))]


def _route_question(ask: Ask, placement: Placement, choice: int, previous_worker: str | None) -> RouteQuestion:
    request = ask.request
    return RouteQuestion(
        request_id=request.request_id,
        model=request.model,
        identity=request.identity,
        candidates=placement.candidates(),
        choice=choice,
        deadline_ms=0,
        kind=request.kind,
        input_tokens=request.input_tokens,
        previous_worker=previous_worker,
    )
