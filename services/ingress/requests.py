"""One request from its acceptance to its one end: its states, and what is known of it.

    accepted ──counted──▶ asking ──held──▶ held
                            │ ▲              │
              granted, or   │ │ failed before│ granted, or
              fallback      ▼ │ first byte   ▼ fallback
                          dispatched ◀───────┘
                            │ first byte
                            ▼
                          streaming ──▶ ended

From every state a refusal, a failure or the client's going leads to ``ended``, which leads nowhere: the record is
gone, and whatever comes after is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from schemas.admit import DecisionMode, Granted
from schemas.index import ChainUnit
from schemas.session import RequestKind, SessionIdentity
from services.ingress import events
from services.ingress.endpoints import ClientRequest
from services.ingress.identity import Resolved
from services.ingress.texts import TextBlocks
from services.ingress.tokens import PromptTokens

State = Literal["accepted", "asking", "held", "dispatched", "streaming"]

Step = Literal[
    "ask", "replied", "undecided", "begin", "progress", "complete", "retry_or_fail", "break_off", "leave", "give_up"
]
"""What the core does about an event; `services.ingress.core` has a method of each name."""

_ANYWHERE: dict[type[events.RequestEvent], Step] = {events.ClientGone: "leave", events.RequestFailed: "give_up"}

STEPS: dict[State, dict[type[events.RequestEvent], Step]] = {
    "accepted": {events.PromptCounted: "ask", **_ANYWHERE},
    "asking": {events.AdmitReplied: "replied", events.AdmitFailed: "undecided", **_ANYWHERE},
    "held": {events.AdmitReplied: "replied", events.AdmitFailed: "undecided", **_ANYWHERE},
    "dispatched": {events.FirstByte: "begin", events.AnswerFailed: "retry_or_fail", **_ANYWHERE},
    "streaming": {
        events.AnswerProgress: "progress",
        events.AnswerEnded: "complete",
        events.AnswerFailed: "break_off",
        **_ANYWHERE,
    },
}
"""What to do about an event in a state; what is not here is late, and is ignored."""

RETRY_STATUSES = frozenset({502, 503, 504})
"""An engine that answers so has not worked on the request; another may."""

FAILURES: dict[str, tuple[int, bool]] = {
    "connect_error": (502, True),
    "connect_timeout": (504, True),
    "connection_lost": (502, True),
    "bad_answer": (502, True),
    "first_byte_timeout": (504, True),
    "idle_timeout": (504, True),
    "total_timeout": (504, False),
    "event_too_large": (502, False),
    "bad_url": (502, True),
}
"""The status that a client sees for a failure before the first byte, and whether another worker may do better."""


@dataclass(slots=True)
class Record:
    """One request in flight. Times in Unix seconds. What concerns the current attempt is overwritten by a retry."""

    request_id: str
    request: ClientRequest
    resolved: Resolved
    received_at: float
    x_request_id: str | None = None
    state: State = "accepted"
    attempt: int = 0
    excluded: tuple[str, ...] = ()

    tokens: PromptTokens | None = None
    text: TextBlocks | None = None
    tokens_from: Literal["tokenizer", "engine", "estimate"] = "estimate"

    asked_at: float | None = None
    hold_reason: str | None = None
    place: int = 0

    granted: Granted | None = None
    mode: DecisionMode | None = None
    worker: str | None = None
    rank: int | None = None
    decided_at: float | None = None

    first_byte_at: float | None = None
    status: int | None = None
    chunks: int = field(default=0)

    @property
    def model(self) -> str:
        return self.request.model

    @property
    def identity(self) -> SessionIdentity:
        return self.resolved.identity

    @property
    def kind(self) -> RequestKind:
        return self.resolved.kind

    @property
    def received_ms(self) -> int:
        return int(self.received_at * 1000)

    @property
    def input_tokens(self) -> int:
        """Tokens of the prompt, estimated at four bytes of body each where nobody counted them."""
        return len(self.tokens) if self.tokens is not None else len(self.request.body) // 4

    @property
    def chain(self) -> tuple[ChainUnit, int, bytes]:
        """Unit, block size (tokens) and chain hashes of the prompt; the chain is empty where there is none."""
        if self.tokens is not None:
            return "tokens", self.tokens.block_size, self.tokens.cached_as
        return ("text", self.text.block_size, self.text.chain) if self.text is not None else ("tokens", 0, b"")

    @property
    def grant_id(self) -> str | None:
        return self.granted.grant.grant_id if self.granted else None

    @property
    def is_open_upstream(self) -> bool:
        return self.state in ("dispatched", "streaming")

    def next_attempt(self) -> None:
        """Forget what the failed attempt was given; its worker is not asked again."""
        if self.worker is not None:
            self.excluded = (*self.excluded, self.worker)
        self.attempt += 1
        self.granted = self.mode = self.worker = self.rank = None
        self.asked_at = self.decided_at = self.first_byte_at = self.status = self.hold_reason = None
        self.place = self.chunks = 0
