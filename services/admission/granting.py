"""A grant, once it is known where: what it books, and all that is said of it."""

from __future__ import annotations

from schemas.admit import AdmitRequest, Grant
from schemas.decision import Decision
from services.admission.asks import Ask
from services.admission.cost import booked_prefill_tokens, predicted_cached_tokens, predicted_shared_tokens
from services.admission.counters import Counters
from services.admission.effects import Effect, Publish, PublishDecision, Reply
from services.admission.facts import FactWriter
from services.admission.grants import OpenGrant
from services.admission.placement import Placement, Seat
from services.admission.placing import block_size, previous_worker
from services.admission.replies import granted_reply
from services.admission.requests import RequestRecord
from services.admission.state import AdmissionState
from services.admission.workers import Worker


def grant_turn(
    state: AdmissionState,
    facts: FactWriter,
    ask: Ask,
    placement: Placement,
    record: RequestRecord,
    worker: Worker,
    *,
    number: int,
    policy: str | None,
    now: float,
) -> list[Effect]:
    """The turn of ``record`` runs on ``worker``, where ``placement`` has chosen. ``number``: of the grant, in our
    leadership; ``policy``: the user's policy that chose, if one did. The answer is the first effect."""
    request, chosen = ask.request, placement.chosen
    expires = now + state.settings.grant_ttl_s
    grant = new_grant(request, chosen, facts.epoch, str(number), expires)
    book(state, ask, placement, grant, expires)
    decision = _decision(state, facts, ask, placement, grant, policy, now)
    _count(state.counters, decision)
    placed(record, decision)
    record.named = now  # by us: nobody else had reason to while it waited
    resumed = state.runs_again(record, "granted", now)
    told = state.turn_placed(record, now)
    indexed = ask.index.indexed(chosen) if ask.index is not None else None
    return [
        Reply(ask.reply_to, granted_reply(facts.epoch, grant, worker, record)),
        *resumed,
        PublishDecision(decision, placement),
        Publish(facts.placed(request, decision, indexed, now)),
        *told,
    ]


def new_grant(request: AdmitRequest, chosen: Seat, epoch: int, number: str, expires: float) -> Grant:
    """A grant for ``request`` where ``chosen`` is, not booked yet. ``number``: its own among those of our leadership;
    ``expires``: Unix time (s)."""
    return Grant(
        grant_id=f"{epoch}-{number}",
        request_id=request.request_id,
        worker=chosen.worker,
        rank=chosen.rank,
        owner=request.ingress,
        epoch=epoch,
        expires_ms=int(expires * 1000),
    )


def placed(record: RequestRecord, decision: Decision) -> None:
    """The record of a request that ``decision`` placed."""
    record.worker, record.rank = decision.worker, decision.rank
    record.grant_id, record.mode = decision.grant.grant_id, decision.mode
    record.attempt = decision.attempt
    record.predicted_cached_tokens = decision.predicted_cached_tokens
    record.input_tokens = decision.input_tokens or record.input_tokens
    record.decision = decision


def book(state: AdmissionState, ask: Ask, placement: Placement, grant: Grant, expires: float) -> None:
    """What ``grant`` weighs at its rank, under its request id."""
    request, chosen, weights = ask.request, placement.chosen, state.settings.weights
    size, pages = block_size(state, request), chosen.shared_blocks
    credit = weights.shared_cache_multiplier * chosen.sureness * pages
    state.ledger.open(
        OpenGrant(
            grant,
            request.attempt,
            booked_prefill_tokens(weights, chosen.blocks, request.input_tokens, size, pages, credit),
            request.input_tokens // size,
            expires,
            model=request.model,
            tenant=request.identity.key.tenant,
        )
    )


def _decision(
    state: AdmissionState,
    facts: FactWriter,
    ask: Ask,
    placement: Placement,
    grant: Grant,
    policy: str | None,
    now: float,
) -> Decision:
    request, chosen = ask.request, placement.chosen
    size, reach, pages = block_size(state, request), chosen.blocks.reach, chosen.shared_blocks
    return facts.decision(
        ask,
        placement,
        grant,
        policy=policy,
        builtin=ask.builtin,
        block_size=size,
        predicted_cached_tokens=predicted_cached_tokens(reach, request.input_tokens, size),
        predicted_shared_tokens=predicted_shared_tokens(reach, pages, request.input_tokens, size) if pages else 0,
        previous_worker=previous_worker(state, request),
        now=now,
    )


def _count(counters: Counters, decision: Decision) -> None:
    counters.grants[decision.mode] += 1
    counters.predicted_cached_tokens += decision.predicted_cached_tokens
    counters.predicted_shared_tokens += decision.predicted_shared_tokens
    counters.input_tokens += decision.input_tokens
    if decision.previous_worker is not None:
        counters.sticky["kept" if decision.previous_worker == decision.worker else "moved"] += 1
