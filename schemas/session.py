"""Sessions: their key, how a request was recognised, and the facts of their life (published by admission)."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import quote, unquote

import msgspec

from schemas.base import Count, Fact, Message, Number, Tokens

RequestKind = Literal["turn", "title", "compaction", "count_tokens", "final", "passthrough"]
"""What a request is to its session. Only ``turn`` (and ``final``) may move the session's state: a side request
(title, compaction, count_tokens) shares the id but not the prefix. ``passthrough``: of an API that is passed on as it
comes (embeddings, tokens, any other)."""

MOVES_SESSION: frozenset[RequestKind] = frozenset({"turn", "final"})
"""Kinds of requests that move their session's place and state."""

_PLAIN = re.compile(r"[A-Za-z0-9_.~-]*(?:/[A-Za-z0-9_.~-]*){3}")
"""Four parts that percent-encoding leaves as they are."""

InputTrigger = Literal["user_message", "tool_result", "other"]

Family = Literal[
    "tidegate", "dynamo", "claude_code", "codex", "pi", "deepseek", "opencode", "affinity", "body", "prefix", "request"
]
"""Where the identity came from. ``body`` is weak (a body field such as ``prompt_cache_key``); ``request`` means no
identity at all: the request is a session of its own. ``prefix``: no identity either, but sessions are recognised by
their content (`ImplicitIdentity`); ``root`` is the id of the session's first request."""


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
        plain = f"{self.tenant}/{self.family}/{self.root}/{self.agent}"
        if _PLAIN.fullmatch(plain):  # nothing to encode: most keys, in a tenth of the time
            return plain
        return "/".join(quote(part, safe="") for part in (self.tenant, self.family, self.root, self.agent))

    @classmethod
    def from_text(cls, text: str) -> SessionKey:
        """Inverse of `text`. Raises `ValueError` for anything that `text` did not write."""
        parts = [unquote(part) for part in text.split("/")]
        if len(parts) != 4:
            raise ValueError(f"a session key has four parts, not {len(parts)}")
        tenant, family, root, agent = parts
        return cls(tenant=tenant, family=family, root=root, agent=agent)  # type: ignore[arg-type]


def engine_session_id(session: SessionKey, session_id: str) -> str:
    """What engines are told of a session whose own id is ``session_id``: clients choose their ids, and two tenants' may
    be equal, but what is said of one tenant's session must never reach another's. No two tenants' ids are equal here.
    """
    if session.tenant == "default" and "/" not in session_id:
        return session_id
    return f"{quote(session.tenant, safe='')}/{session_id}"


class ImplicitIdentity(Message, frozen=True, kw_only=True, omit_defaults=True):
    """How a request without identity was given one: what its prompt is to a known session (`schemas.index.Relation`),
    how sure that is (0..1), and why not surer."""

    # Always written: readers tell by it that the request had no identity of its own.
    relation: Literal["continues", "forks", "repeats", "new"] = msgspec.field(default_factory=lambda: "new")
    confidence: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0
    reason: str | None = None


class SessionIdentity(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Who a request belongs to, as read from its headers (or, weakly, its body).

    ``session_id`` and ``parent_session_id`` are what traces show (the peer's rule: a child's own id, its direct
    parent's id); ``parent`` is the parent's key where it can be named. ``weak``: taken from the body, so two sessions
    may share it. ``background``: its sender says that nobody waits for it (``x-tidegate-background``). ``implicit``:
    nobody said who it is, its content did.
    """

    key: SessionKey
    session_id: str
    parent_session_id: str | None = None
    parent: SessionKey | None = None
    final: bool | None = None
    weak: bool = False
    turn_id: str | None = None
    background: bool = False
    implicit: ImplicitIdentity | None = None


SessionFactState = Literal[
    "opened", "acting", "leased", "released", "revoked", "expired", "paused", "resumed", "closed"
]
"""Of a lease (KV that an idle session keeps at a rank): ``released`` by its session, which returned or ended;
``revoked`` for others' need; ``expired`` with its session."""


class Lease(Message, frozen=True, kw_only=True, omit_defaults=True):
    """KV that an idle session keeps at a rank, as it was given.

    ``owner``: the session's key as text. ``epoch``: of the leadership that gave it (a later one keeps to it).
    ``expires_ms``: it ends by then (Unix ms), even if every message about it is lost. ``tokens``: what it weighs.
    """

    owner: str
    epoch: Number
    since_ms: Count
    expires_ms: Count
    tokens: Tokens = 0


class SessionFact(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """A transition of a session, with the numbers that caused it (for a lease: τ or floor, P, benefit, cost, η, T).

    ``lease``: the lease that the transition is of. ``reason`` of one that was revoked: ``worker_lost``,
    ``policy_restarted``, or none where others needed its room.
    """

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
    lease: Lease | None = None
