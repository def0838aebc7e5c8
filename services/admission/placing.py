"""Where an ask would go by cost, by all that is known at this moment."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from schemas.admit import AdmitRequest
from schemas.index import MatchReply, MatchRequest
from schemas.session import MOVES_SESSION
from services.admission.asks import Ask
from services.admission.cost import Prompt
from services.admission.placement import NO_PREFERENCE, IndexView, Placement, Preference, place
from services.admission.scoring import EVENT_LAG_S
from services.admission.state import AdmissionState
from services.admission.workers import Worker

DEFAULT_BLOCK_SIZE = 16
"""Tokens a block, where neither the ask nor a worker's profile says."""


def block_size(state: AdmissionState, request: AdmitRequest) -> int:
    """Tokens a block: of the chain of tokens, else of a worker's, so that costs are in blocks of the same size."""
    if request.block_size > 0 and request.chain_unit == "tokens":
        return request.block_size
    for worker in state.fleet.serving(request.model):
        if worker.state.profile.block_size:
            return worker.state.profile.block_size
    return DEFAULT_BLOCK_SIZE


def index_question(state: AdmissionState, request: AdmitRequest) -> MatchRequest | None:
    """What an index is asked about a prompt; ``None``: it has no chain."""
    if not request.chain or request.block_size <= 0:
        return None
    question = MatchRequest(
        model=request.model,
        block_size=request.block_size,
        chain=request.chain,
        unit=request.chain_unit,
        pages=request.pages,
        page_size=request.page_size,
    )
    salt_rule = state.fleet.salt_rule(request.model)
    return question if salt_rule is None else msgspec.structs.replace(question, salt_rule=salt_rule)


def index_view(state: AdmissionState, request: AdmitRequest, reply: MatchReply) -> IndexView:
    """What the index answered about it."""
    if request.chain_unit == "text":
        return IndexView.of_text(reply, request.block_size, block_size(state, request))
    return IndexView.of(reply, state.settings.weights.shared_unsure_multiplier)


def place_by_cost(state: AdmissionState, ask: Ask, now: float) -> Placement:
    """The choice of policy ``kv``, with what users' policies say of the ask."""
    request = ask.request
    prompt = Prompt(request.input_tokens, block_size(state, request))
    return place(
        state.fleet.serving(request.model),
        state.ledger,
        prompt,
        ask.index or IndexView.blind("not_asked"),
        weights=state.settings.weights,
        max_grants_per_rank=state.settings.max_grants_per_rank,
        choose=state.choose,
        preference=_preference(state, request, prompt, now),
        excluded=barred(request, state.fleet.serving(request.model)),
        bias=ask.verdict.bias if ask.verdict.preferred else None,
    )


def barred(request: AdmitRequest, workers: Iterable[Worker]) -> tuple[str, ...]:
    """Names where it shall not run: where it failed, and where others failed unless nobody else is left."""
    if not request.avoided:
        return request.excluded
    shunned = (*request.excluded, *request.avoided)
    return shunned if any(worker.placeable and worker.name not in shunned for worker in workers) else request.excluded


def previous_worker(state: AdmissionState, request: AdmitRequest) -> str | None:
    """Where its session's last turn ran."""
    if request.kind not in MOVES_SESSION:
        return None
    session = state.sessions.get(request.identity.key)
    return session.worker if session is not None else None


def _preference(state: AdmissionState, request: AdmitRequest, prompt: Prompt, now: float) -> Preference:
    if request.kind not in MOVES_SESSION:
        return NO_PREFERENCE
    settings, sessions = state.settings, state.sessions
    session = sessions.get(request.identity.key)
    if session is not None and session.worker is not None:
        kept = min(session.context_tokens, request.input_tokens) // prompt.block_size
        fresh = now - session.touched <= EVENT_LAG_S
        return Preference(session.worker, session.rank, settings.stickiness, kept, fresh)
    if request.sticky is not None:
        return Preference(request.sticky, None, settings.stickiness)
    if session is None and request.identity.parent is not None:
        parent = sessions.get(request.identity.parent)
        if parent is not None and parent.worker is not None:
            return Preference(parent.worker, parent.rank, settings.child_stickiness)
    return NO_PREFERENCE
