"""Facts of the bus as a scheduling policy gets them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from schemas.session import MOVES_SESSION, RequestKind, SessionIdentity
from schemas.tool import ToolEvent
from services.admission.consulting import Verdict
from services.admission.estimators.errors import MAX_SAMPLE
from services.admission.estimators.learned_pool import LearnedPool
from services.admission.outcomes import Place
from services.admission.pools import KnownWorker
from services.admission.scheduling.interface import ProgramFacts, TurnFacts, WorkerFacts
from services.admission.workers import Worker

FOREIGN_TOLD = 20
"""A change of the load that is not ours is told when it is more than one part in so many of the KV."""


def sizes(worker: Worker | None, told: KnownWorker | None, learned: LearnedPool | None) -> KnownWorker | None:
    """A worker that can be seats, with the load that is not ours as it was told, where it changed little.

    ``learned``: how long answers of ours are; of KV that may be theirs, as much as nine of ten need is not others'.
    """
    if worker is None or not worker.placeable:
        return None
    profile = worker.state.profile
    if not profile.kv_tokens or profile.block_size is None:
        return None
    ranks, answer = [], learned.pooled.output.p90 if learned is not None else 0.0
    for rank in range(max(profile.ranks, 1)):
        beyond = worker.foreign_tokens.get(rank, 0) - round(worker.ours.get(rank, 0) * answer)
        foreign = min(max(0, beyond), profile.kv_tokens)
        before = told.ranks[rank].foreign_tokens if told is not None and rank < len(told.ranks) else 0
        if foreign and abs(foreign - before) * FOREIGN_TOLD <= profile.kv_tokens:
            foreign = before
        ranks.append(WorkerFacts(profile.kv_tokens, profile.block_size, foreign_tokens=foreign))
    return KnownWorker(profile.model, tuple(ranks))


def program_of(request_id: str, identity: SessionIdentity, kind: RequestKind, model: str) -> ProgramFacts:
    """A side request is no turn of its session: it is a program of its own, as a request without a session is. No name
    of those is a session's, which has no colon in it."""
    if kind not in MOVES_SESSION:
        return ProgramFacts(f"{kind}:{request_id}", kind, None, model, single=True)
    if identity.key.family == "request":
        return ProgramFacts(f"request:{request_id}", "", None, model, single=True)
    parent = identity.parent.text() if identity.parent is not None else None
    return ProgramFacts(identity.key.text(), identity.key.family, parent, model)


MOST_WISHED_S = 3600.0
"""A client's priority moves its turn in the line by no more."""


def positive(number: int | None) -> int | None:
    """A client's count of tokens, where it says one that can be."""
    return number if number is not None and number > 0 else None


def wished(verdict: Verdict, priority: int, step_s: float) -> Verdict:
    """With the client's priority (lower for earlier), of which each step counts as ``step_s`` of waiting."""
    bias = max(-MOST_WISHED_S, min(MOST_WISHED_S, priority * step_s))
    return replace(verdict, order_bias_s=verdict.order_bias_s + bias) if bias else verdict


def advised(facts: TurnFacts, verdict: Verdict, seats: Mapping[Place, int]) -> TurnFacts:
    """With what users' policies say of the turn."""
    if not verdict.preferred and not verdict.order_bias_s:
        return facts
    bias = {seat: blocks for place, seat in seats.items() if (blocks := verdict.bias(*place))}
    return replace(facts, seat_bias=bias, order_bias_s=verdict.order_bias_s)


def tool_seconds(fact: ToolEvent) -> float | None:
    """How long the call took; ``None`` where it has not ended by itself, or nobody measured it, or it is no time at all
    (a clock was set back): anybody on the bus can say so."""
    if fact.event == "start" or fact.status in ("running", "cancelled") or fact.inferred:
        return None
    if fact.duration_ms is not None:
        seconds = fact.duration_ms / 1000
    elif fact.started_at_ms is None or fact.ended_at_ms is None:
        return None
    else:
        seconds = (fact.ended_at_ms - fact.started_at_ms) / 1000
    return seconds if 0 <= seconds <= MAX_SAMPLE else None
