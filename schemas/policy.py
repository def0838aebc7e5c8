"""Questions to a user's policy (JSON, with a deadline). Late, absent or unusable: the built-in answer stands."""

from __future__ import annotations

from schemas.base import Count, Message, Tokens
from schemas.decision import Candidate
from schemas.session import RequestKind, SessionIdentity


class RouteQuestion(Message, frozen=True, kw_only=True, omit_defaults=True):
    """``tg.v1.policy.route.<name>``: which of these candidates? ``choice`` is what the built-in policy would take."""

    request_id: str
    model: str
    identity: SessionIdentity
    candidates: tuple[Candidate, ...]
    choice: Count
    deadline_ms: Count
    kind: RequestKind = "turn"
    input_tokens: Tokens = 0
    previous_worker: str | None = None


class RouteAnswer(Message, frozen=True, kw_only=True, omit_defaults=True):
    """``worker`` (and ``rank``, if the policy cares) must be one of the candidates. Empty worker: no opinion."""

    worker: str = ""
    rank: Count | None = None
    reason: str | None = None
