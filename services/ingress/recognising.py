"""Requests that name nobody, where sessions are recognised by their content: who they are until that is known, the
question to an indexer, and what its answer makes of them (docs/adr/0016).

Such a request is a session of its own, of the family ``prefix``, unless it is said to go on from another (or to ask
again for what another got no answer to). Whatever goes wrong, it is a new one: nobody is guessed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec

from schemas.index import RecogniseReply, RecogniseRequest
from schemas.session import MOVES_SESSION, Family, ImplicitIdentity, SessionIdentity, SessionKey
from services.ingress.endpoints import ChatPrompt, ClientRequest
from services.ingress.identity import Resolved
from services.ingress.message_chain import MessageChain

FAMILY: Family = "prefix"
BELOW = "below_confidence"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecognitionRules:
    """``on``: whether anybody is asked. ``least``: confidence below which an answer counts as new."""

    on: bool = False
    least: float = 0.0


def names_nobody(request: ClientRequest, resolved: Resolved) -> bool:
    """Whether it has no identity, would move its session, and has messages to know it by."""
    return (
        resolved.identity.key.family == "request"
        and resolved.kind in MOVES_SESSION
        and isinstance(request.prompt, ChatPrompt)
    )


def unknown(resolved: Resolved) -> Resolved:
    """Who it is until an indexer says more: a session of its own."""
    return named(resolved, None, "not_asked", 0.0)


def question(request_id: str, model: str, tenant: str, messages: MessageChain) -> RecogniseRequest:
    """What an indexer is asked."""
    return RecogniseRequest(
        model=model,
        message_chain=messages.hashes,
        preamble=messages.preamble,
        tenant=tenant,
        request_id=request_id,
    )


def named(resolved: Resolved, reply: RecogniseReply | None, failure: str | None, least: float) -> Resolved:
    """Who it is by the answer, or a session of its own where none came (``failure`` says why)."""
    return replace(resolved, identity=_identity(resolved.identity, reply, failure, least))


def _identity(
    before: SessionIdentity, reply: RecogniseReply | None, failure: str | None, least: float
) -> SessionIdentity:
    own = SessionKey(tenant=before.key.tenant, family=FAMILY, root=before.session_id)
    new = msgspec.structs.replace(before, key=own, implicit=ImplicitIdentity(reason=failure))
    if reply is None:
        return new
    implicit = ImplicitIdentity(relation=reply.relation, confidence=reply.confidence, reason=reply.reason)
    related = reply.session or reply.parent
    if related is None:
        return msgspec.structs.replace(new, implicit=implicit)
    if related.family != FAMILY or related.tenant != own.tenant:
        return msgspec.structs.replace(new, implicit=ImplicitIdentity(reason="bad_reply"))
    if reply.confidence < least:
        return msgspec.structs.replace(new, implicit=ImplicitIdentity(confidence=reply.confidence, reason=BELOW))
    if reply.session is not None:
        return msgspec.structs.replace(new, key=related, session_id=related.root, implicit=implicit)
    return msgspec.structs.replace(new, parent=related, parent_session_id=related.root, implicit=implicit)
