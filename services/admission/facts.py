"""The facts that admission publishes: numbered per family within our leadership."""

from __future__ import annotations

from bus.facts import FactNumbers
from schemas.admit import AdmitRequest, Grant
from schemas.decision import Decision
from schemas.placed import Placed
from schemas.request import RequestEnd
from schemas.session import MOVES_SESSION, Lease, SessionFact, SessionFactState
from services.admission.asks import Ask
from services.admission.lost import OUTCOME, total_ms
from services.admission.outcomes import LeaseTold
from services.admission.placement import Placement
from services.admission.requests import RequestRecord
from services.admission.sessions import Session, SessionChange


class FactWriter:
    """Makes facts of one leadership; its epoch is theirs."""

    def __init__(self, source: str, epoch: int) -> None:
        self.epoch = epoch
        self._numbers = FactNumbers(source, epoch)

    def session(self, change: SessionChange, now: float) -> SessionFact:
        """A transition of a session."""
        session = change.session
        worker, rank = session.worker, session.rank
        if change.state == "resumed":
            worker, rank = change.place if change.place is not None else (None, None)
        return self._of(session, change.state, now, worker, rank, change.numbers, reason=change.reason)

    def lease(self, session: Session, told: LeaseTold, now: float) -> SessionFact:
        """What became of the KV that an idle session keeps at a rank."""
        terms = told.terms
        lease = Lease(
            owner=told.session.text(),
            epoch=self.epoch if terms.epoch is None else terms.epoch,
            since_ms=int(terms.since * 1000),
            expires_ms=int(terms.until * 1000),
            tokens=terms.tokens,
        )
        numbers = dict(told.numbers)
        return self._of(session, told.state, now, told.worker, told.rank, numbers, reason=told.reason, lease=lease)

    def _of(
        self,
        session: Session,
        state: SessionFactState,
        now: float,
        worker: str | None,
        rank: int | None,
        numbers: dict[str, float],
        *,
        reason: str | None = None,
        lease: Lease | None = None,
    ) -> SessionFact:
        """The session as it stands."""
        return SessionFact(
            **self._numbers.stamp(f"session.{state}", now),
            session=session.identity.key,
            session_id=session.identity.session_id,
            state=state,
            parent=session.identity.parent,
            model=session.model,
            worker=worker,
            rank=rank,
            turns=session.turns,
            context_tokens=session.context_tokens,
            reason=reason,
            numbers=numbers,
            lease=lease,
        )

    def lost_end(self, record: RequestRecord, reason: str, now: float) -> RequestEnd:
        """The end of a request whose ingress is lost."""
        return RequestEnd(
            **self._numbers.stamp("request.end", now),
            request_id=record.request_id,
            model=record.model,
            identity=record.identity,
            outcome=OUTCOME,
            kind=record.kind,
            endpoint=record.endpoint,
            reason=reason,
            worker=record.worker,
            rank=record.rank,
            grant_id=record.grant_id,
            mode=record.mode,
            predicted_cached_tokens=record.predicted_cached_tokens,
            total_ms=total_ms(record, now),
        )

    def placed(self, request: AdmitRequest, decision: Decision, indexed: int | None, now: float) -> Placed:
        """What was sent where. ``indexed``: see `services.admission.placement.IndexView.indexed`."""
        moves = request.kind in MOVES_SESSION
        return Placed(
            **self._numbers.stamp("placed", now),
            request_id=request.request_id,
            model=request.model,
            worker=decision.worker,
            rank=decision.rank,
            session=request.identity.key if moves else None,
            parent=request.identity.parent if moves else None,
            mode=decision.mode,
            unit=request.chain_unit,
            block_size=request.block_size,
            chain=request.chain,
            indexed=indexed,
            message_chain=request.message_chain,
            preamble=request.preamble,
        )

    def hedge_placed(self, request: AdmitRequest, grant: Grant, indexed: int | None, now: float) -> Placed:
        """What a request that is sent twice puts into a second cache. Its session is where it was."""
        return Placed(
            **self._numbers.stamp("placed", now),
            request_id=request.request_id,
            model=request.model,
            worker=grant.worker,
            rank=grant.rank,
            mode="policy",
            unit=request.chain_unit,
            block_size=request.block_size,
            chain=request.chain,
            indexed=indexed,
        )

    def decision(
        self,
        ask: Ask,
        placement: Placement,
        grant: Grant,
        *,
        policy: str | None,
        builtin: str,
        block_size: int,
        predicted_cached_tokens: int,
        predicted_shared_tokens: int,
        previous_worker: str | None,
        now: float,
    ) -> Decision:
        """The decision that made ``grant``, without its candidates (see `effects.PublishDecision`). ``policy``: the
        user's policy that chose, if one did."""
        request, chosen = ask.request, placement.chosen
        return Decision(
            **self._numbers.stamp("decision", now),
            request_id=request.request_id,
            model=request.model,
            worker=chosen.worker,
            rank=chosen.rank,
            identity=request.identity,
            grant=grant,
            attempt=request.attempt,
            kind=request.kind,
            mode="policy" if policy is None else "custom",
            policy=builtin if policy is None else policy,
            input_tokens=request.input_tokens,
            block_size=block_size,
            predicted_cached_tokens=predicted_cached_tokens,
            predicted_shared_tokens=predicted_shared_tokens,
            previous_worker=previous_worker,
            index_health=chosen.health,
            index_reason=chosen.health_reason,
            hold_ms=int(ask.held_s * 1000),
            hold_reason=ask.hold_reason,
            decide_us=max(0, int((now - ask.started_at) * 1e6)),
            policies=ask.policies,
        )
