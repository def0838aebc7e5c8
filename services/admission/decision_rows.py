"""A decision as a trace row: what was chosen, from what, and why (docs/operations.md, Reading a row)."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from math import inf

from schemas.decision import Candidate, Decision
from schemas.session import SessionIdentity
from schemas.trace import AgentContext, TracedDecision, TracedWorker, TraceRow


def message_id(decision: Decision) -> str:
    """Its row is stored once, whoever sends it again."""
    return f"decision:{decision.grant.grant_id}"


def decision_row(decision: Decision, most: int) -> TraceRow:
    """The row of one decision, with at most ``most`` of its candidates."""
    return TraceRow(
        event_type="decision",
        event_time_unix_ms=decision.at_ms,
        agent_context=context_of(decision.identity),
        decision=TracedDecision(
            request_id=decision.request_id,
            grant_id=decision.grant.grant_id,
            worker=TracedWorker(worker=decision.worker, rank=decision.rank),
            model=decision.model,
            attempt=decision.attempt,
            kind=decision.kind,
            mode=decision.mode,
            policy=decision.policy,
            input_tokens=decision.input_tokens,
            block_size=decision.block_size,
            predicted_cached_tokens=decision.predicted_cached_tokens,
            predicted_shared_tokens=decision.predicted_shared_tokens,
            previous_worker=decision.previous_worker,
            index_health=decision.index_health,
            index_reason=decision.index_reason,
            hold_ms=decision.hold_ms,
            hold_reason=decision.hold_reason,
            decide_us=decision.decide_us,
            candidates_seen=len(decision.candidates),
            candidates=best(decision, most),
            policies=decision.policies,
        ),
    )


def context_of(identity: SessionIdentity) -> AgentContext | None:
    """Whose request it is; ``None`` for one without identity, as in the rows of an ingress."""
    if identity.key.family == "request":
        return None
    return AgentContext(
        session_id=identity.session_id,
        parent_session_id=identity.parent_session_id,
        session_final=identity.final,
        turn_id=identity.turn_id,
        session=identity.key,
        weak=identity.weak,
        implicit=identity.implicit,
    )


def best(decision: Decision, most: int) -> tuple[Candidate, ...]:
    """At most ``most`` candidates: the chosen one, then those that could be chosen by cost, then the others."""
    candidates: Sequence[Candidate] = decision.candidates
    chosen = (decision.worker, decision.rank)

    def order(candidate: Candidate) -> tuple[bool, bool, float]:
        is_chosen = (candidate.worker, candidate.rank) == chosen
        cost = candidate.cost if candidate.cost is not None else inf
        return not is_chosen, candidate.excluded is not None, cost + candidate.parts.get("policy", 0.0)

    return tuple(nsmallest(most, candidates, key=order))
