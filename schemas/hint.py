"""Hints: one KvHint envelope as a command to a worker's bridge, and what became of each action."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from schemas.base import Count, Fact, Message
from schemas.session import SessionKey

ActionType = Literal["pin", "retain", "prefetch", "demote", "share", "dereference"]
HintOutcome = Literal["accepted", "clipped", "deferred", "rejected", "missing", "unsupported"]
PROTOCOL_VERSION = "0.1"


class HintAction(Message, frozen=True, kw_only=True, omit_defaults=True):
    """One action. ``payload`` names the session and the action's bounds (``ttl_ms``, ``priority``, ...)."""

    action_id: str
    action_type: ActionType
    action_version: str = "1.0"
    payload: dict[str, Any] = msgspec.field(default_factory=dict)


class HintEnvelope(Message, frozen=True, kw_only=True, omit_defaults=True):
    """``{protocol_version, message_id, actions}``: the shape that vLLM, SGLang and the peer agree on."""

    message_id: str
    actions: tuple[HintAction, ...]
    protocol_version: str = PROTOCOL_VERSION


class HintCommand(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """``tg.v1.hint.<worker>``: what the hint planner asks of a worker. Soft: losing it changes timing only."""

    worker: str
    rank: Count
    session: SessionKey
    session_id: str
    envelope: HintEnvelope


class ActionResult(Message, frozen=True, kw_only=True, omit_defaults=True):
    """What became of one action, and why."""

    action_id: str
    action_type: ActionType
    outcome: HintOutcome
    reason: str | None = None


class HintResult(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """``tg.v1.hint.result.<worker>``: the bridge's answer to one envelope.

    ``error``: the command, or an action of it, could not be read; what could not be read has no result.
    """

    worker: str
    rank: Count
    session: SessionKey
    message_id: str
    results: tuple[ActionResult, ...]
    error: str | None = None
