"""Hints: one KvHint envelope as a command to a worker's bridge, and what became of each action."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from schemas.base import Count, Fact, Message, Number, Tokens
from schemas.session import SessionKey

ActionType = Literal["pin", "retain", "prefetch", "demote", "share", "dereference"]
HintOutcome = Literal["accepted", "clipped", "deferred", "rejected", "missing", "unsupported"]
PROTOCOL_VERSION = "0.1"
MAX_HINT_BLOCKS = 4096
MAX_TTL_MS = 600_000
"""A pin is a lease, not for ever: nobody may ask for longer at once."""


class HintAction(Message, frozen=True, kw_only=True, omit_defaults=False):
    """One action, always written whole: engines want every field. ``payload``: `ActionPayload`, open for what other
    senders put there."""

    action_id: str
    action_type: ActionType
    action_version: str = "1.0"
    payload: dict[str, Any] = msgspec.field(default_factory=dict)


class HintTarget(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The part of an action's ``payload`` that says which KV is meant; all actions have it.

    ``session_id``: as the engine was told it; ``session``: the house's key as text. ``first``, ``last``: half-open
    range [first, last) of the session's blocks of ``block_size`` tokens; ``last`` absent: to its end. ``block_hashes``:
    the same blocks by the house's chain hashes (hex), where they are known, at most `MAX_HINT_BLOCKS`.
    """

    session_id: str
    session: str = ""
    first: Count = 0
    last: Count | None = None
    block_size: Count = 0
    block_hashes: Annotated[tuple[str, ...], msgspec.Meta(max_length=MAX_HINT_BLOCKS)] = ()


class ActionPayload(Message, frozen=True, kw_only=True, omit_defaults=True):
    """``payload`` of every action that the planner sends. Which fields count depends on the action:

    - ``pin``: ``ttl_ms`` (the lease's rest, at most `MAX_TTL_MS`), ``tokens``;
    - ``retain``: ``priority`` (higher stays longer), ``ttl_ms``;
    - ``prefetch``: ``to`` (the tier, ``device`` or ``host``), ``deadline_ms`` (Unix ms when it will be needed);
    - ``demote``: ``to`` (the lowest tier that will do), ``ttl_ms`` after which it may be dropped;
    - ``share``: the worker ``source``, to which it is sent, puts what it has of ``parent`` (a session id; the target's
      where it is missing) into the pool (``to``), so that other workers have it too;
    - ``dereference``: ``reason``: ``unpinned``: only the pin goes; ``superseded``: blocks of the session's earlier
      prompt, which its latest one has no more; any other (``closed``, ``moved``, ``forgotten``, ``policy``): all that
      is kept for the session here.

    ``expires_ms``: Unix ms after which the action must not be carried out any more. ``cancels``: the ``action_id`` of
    an earlier action that this one takes back.
    """

    target: HintTarget
    expires_ms: Count
    ttl_ms: Count | None = None
    priority: Number | None = None
    tokens: Tokens | None = None
    to: Literal["device", "host", "disk", "pool"] | None = None
    source: str | None = None
    parent: str | None = None
    deadline_ms: Count | None = None
    reason: str | None = None
    cancels: str | None = None


class HintEnvelope(Message, frozen=True, kw_only=True, omit_defaults=False):
    """``{protocol_version, message_id, actions}``: the shape that vLLM, SGLang and the peer agree on, always whole."""

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
    """What became of one action, and why. ``action_type``: as it was asked; one that nobody here knows is told back."""

    action_id: str
    action_type: Annotated[str, msgspec.Meta(max_length=256)]
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


class HintIntent(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """``tg.v1.hint.intent.<policy>``: what a user's policy would have the caches do, unasked. It goes through the same
    planner and budget as everything else, and through one of its own (`services.hints`)."""

    policy: str
    session: SessionKey
    action_type: ActionType
    worker: str | None = None
    rank: Count | None = None
    ttl_ms: Count | None = None
    priority: Number | None = None
    reason: str | None = None
