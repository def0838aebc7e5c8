"""Sessions: their key, how a request was recognised, and the facts of their life (published by admission)."""

from __future__ import annotations

from typing import Literal
from urllib.parse import quote, unquote

import msgspec

from schemas.base import Count, Fact, Message, Tokens

RequestKind = Literal["turn", "title", "compaction", "count_tokens", "final"]
"""What a request is to its session. Only ``turn`` (and ``final``) may move the session's state: a side request
(title, compaction, count_tokens) shares the id but not the prefix."""

MOVES_SESSION: frozenset[RequestKind] = frozenset({"turn", "final"})
"""Kinds of requests that move their session's place and state."""

InputTrigger = Literal["user_message", "tool_result", "other"]

Family = Literal["tidegate", "dynamo", "claude_code", "codex", "pi", "opencode", "affinity", "body", "request"]
"""Where the identity came from. ``body`` is weak (a body field such as ``prompt_cache_key``); ``request`` means no
identity at all: the request is a session of its own."""


class SessionKey(Message, frozen=True, kw_only=True, omit_defaults=False):
    """A session's identity inside the house: (tenant, family, root, agent), all four always written.

    ``root`` is the harness's conversation or run; ``agent`` is the sub-agent's own id, empty for the root agent and for
    families whose sub-agents are sessions of their own (Dynamo, OpenCode): there only the parent is known.
    """

    tenant: str = "default"
    family: Family = "request"
    root: str = ""
    agent: str = ""

    def text(self) -> str:
        """One reversible string: four percent-encoded parts joined by ``/``. Equal keys, equal text; no collisions."""
        return "/".join(quote(part, safe="") for part in (self.tenant, self.family, self.root, self.agent))

    @classmethod
    def from_text(cls, text: str) -> SessionKey:
        """Inverse of `text`. Raises `ValueError` for anything that `text` did not write."""
        parts = [unquote(part) for part in text.split("/")]
        if len(parts) != 4:
            raise ValueError(f"a session key has four parts, not {len(parts)}")
        tenant, family, root, agent = parts
        return cls(tenant=tenant, family=family, root=root, agent=agent)  # type: ignore[arg-type]


class SessionIdentity(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Who a request belongs to, as read from its headers (or, weakly, its body).

    ``session_id`` and ``parent_session_id`` are what traces show (the peer's rule: a child's own id, its direct
    parent's id); ``parent`` is the parent's key where it can be named. ``weak``: taken from the body, so two sessions
    may share it.
    """

    key: SessionKey
    session_id: str
    parent_session_id: str | None = None
    parent: SessionKey | None = None
    final: bool | None = None
    weak: bool = False
    turn_id: str | None = None


SessionFactState = Literal[
    "opened", "acting", "leased", "released", "revoked", "expired", "paused", "resumed", "closed"
]
"""Of a lease (KV that an idle session keeps at a rank): ``released`` by its session, which returned or ended;
``revoked`` for others' need; ``expired`` with its session."""


class SessionFact(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """A transition of a session, with the numbers that caused it (for a lease: τ or floor, P, benefit, cost, η, T)."""

    session: SessionKey
    session_id: str
    state: SessionFactState
    parent: SessionKey | None = None
    model: str | None = None
    worker: str | None = None
    rank: Count | None = None
    turns: Count = 0
    context_tokens: Tokens = 0
    reason: str | None = None
    numbers: dict[str, float] = msgspec.field(default_factory=dict)
