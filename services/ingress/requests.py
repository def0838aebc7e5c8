"""One request from its acceptance to its one end: its states, and what is known of it.

    accepted ──counted──▶ asking ──held──▶ held
                            │ ▲              │
              granted, or   │ │ failed before│ granted, or
              fallback      ▼ │ first byte   ▼ fallback
                          dispatched ◀───────┘
                            │ first byte
                            ▼
                          streaming ──▶ ended

While it is ``dispatched`` it may be sent to a second engine (`Race`); what to do about that one: `HEDGE_STEPS`.

A request that names nobody is ``recognising`` between being counted and asking, where that is on.

From every state a refusal, a failure or the client's going leads to ``ended``, which leads nowhere: the record is
gone, and whatever comes after is ignored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Final, Literal

from xxhash import xxh3_64_digest

from schemas.admit import DecisionMode, Granted
from schemas.index import ChainUnit
from schemas.ingress import InFlight
from schemas.session import MOVES_SESSION, RequestKind, SessionIdentity
from services.ingress import events
from services.ingress.endpoints import ClientRequest
from services.ingress.identity import Resolved
from services.ingress.message_chain import MessageChain
from services.ingress.modalities import TEXT_ONLY, Media
from services.ingress.texts import TextBlocks
from services.ingress.tokens import PromptTokens

State = Literal["accepted", "recognising", "asking", "held", "dispatched", "streaming"]

Step = Literal[
    "ask",
    "recognised",
    "replied",
    "undecided",
    "begin",
    "progress",
    "complete",
    "retry_or_fail",
    "break_off",
    "leave",
    "give_up",
    "hedge_due",
    "hedge_decided",
    "hedge_begins",
    "hedge_fails",
]
"""What the core does about an event; `services.ingress.core` has a method of each name."""

_ANYWHERE: dict[type[events.RequestEvent], Step] = {events.ClientGone: "leave", events.RequestFailed: "give_up"}

STEPS: dict[State, dict[type[events.RequestEvent], Step]] = {
    "accepted": {events.PromptCounted: "ask", **_ANYWHERE},
    "recognising": {events.Recognised: "recognised", **_ANYWHERE},
    "asking": {events.AdmitReplied: "replied", events.AdmitFailed: "undecided", **_ANYWHERE},
    "held": {events.AdmitReplied: "replied", events.AdmitFailed: "undecided", **_ANYWHERE},
    "dispatched": {
        events.FirstByte: "begin",
        events.AnswerFailed: "retry_or_fail",
        events.HedgeDue: "hedge_due",
        **_ANYWHERE,
    },
    "streaming": {
        events.AnswerProgress: "progress",
        events.AnswerEnded: "complete",
        events.AnswerFailed: "break_off",
        **_ANYWHERE,
    },
}
"""What to do about an event in a state; what is not here is late, and is ignored."""

HEDGE_STEPS: dict[bool, dict[type[events.RequestEvent], Step]] = {
    False: {events.HedgeAnswered: "hedge_decided"},
    True: {events.FirstByte: "hedge_begins", events.AnswerFailed: "hedge_fails"},
}
"""What to do about an event of the second sending, by whether it was sent."""

COUNTING = frozenset({"count_tokens", "tokenize", "detokenize"})
"""APIs in which no engine computes anything."""

MEDIA_TOKENS = 1024
"""Assumed for an image, a sound, a file: about an image of 1000 by 800 pixels. The engine's usage says what it was."""

RETRY_STATUSES = frozenset({502, 503, 504})
"""An engine that answers so has not worked on the request; another may."""

UNSENT = frozenset({"connect_error", "connect_timeout", "bad_url"})
"""Failures before anything was sent."""

API_NOT_SERVED: Final = "api_not_served"
"""The engine has no such API; nothing is wrong with it, and nothing is translated."""

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
    API_NOT_SERVED: (501, True),
}
"""The status that a client sees for a failure before the first byte, and whether another worker may do better."""


@dataclass(slots=True)
class Race:
    """A request that is sent twice, while neither engine answers. ``attempt``: of the second sending. ``granted``:
    where that goes (``None``: admission is asked)."""

    attempt: int
    asked_at: float
    granted: Granted | None = None
    sent_at: float = 0.0


@dataclass(slots=True)
class Record:
    """One request in flight. Times in Unix seconds. What concerns the current attempt is overwritten by a retry.

    ``held_at``, ``hold_reason``, ``place``: when it was first told to wait, why, and where in the line (from 1; 0:
    nobody said). ``nameless``: it has no identity, and is recognised by its ``messages`` if it can be. ``is_accepted``:
    `schemas.request.RequestAccepted` was said of it. ``sticky``: where its turn ran before, as its client says.
    ``block_size``: the pool's, in tokens (0: not asked for).
    ``is_open``: the client has the head of a stream and comments, and nothing of an engine's answer yet.
    ``in_flight``: of a stream, what is said of it each second, and its size in bytes.
    ``race``: with a second sending, while it is on; ``hedge_asked``: for one, which is done once; ``hedged``: there was
    one, and whether it became the request's.
    """

    request_id: str
    request: ClientRequest
    resolved: Resolved
    received_at: float
    x_request_id: str | None = None
    sticky: str | None = None
    nameless: bool = False
    is_accepted: bool = False
    state: State = "accepted"
    attempt: int = 0
    excluded: tuple[str, ...] = ()

    block_size: int = 0
    tokens: PromptTokens | None = None
    text: TextBlocks | None = None
    messages: MessageChain | None = None
    tokens_from: Literal["tokenizer", "engine", "estimate"] = "estimate"
    counted_media: Media = TEXT_ONLY

    is_open: bool = False
    commented_at: float | None = None

    asked_at: float | None = None
    held_at: float | None = None
    hold_reason: str | None = None
    place: int = 0

    granted: Granted | None = None
    mode: DecisionMode | None = None
    worker: str | None = None
    rank: int | None = None
    decided_at: float | None = None

    race: Race | None = None
    hedge_asked: bool = False
    hedged: Literal["won", "lost"] | None = None

    first_byte_at: float | None = None
    status: int | None = None
    chunks: int = field(default=0)
    in_flight: tuple[InFlight, int] | None = None
    _digest: bytes = field(init=False)
    _body_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self._digest = xxh3_64_digest(self.request.body)
        self._body_bytes = len(self.request.body)

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
    def digest(self) -> bytes:
        """Of a turn's body, as its client sent it; empty for what is no turn."""
        return self._digest if self.kind in MOVES_SESSION else b""

    @property
    def received_ms(self) -> int:
        return int(self.received_at * 1000)

    @property
    def input_tokens(self) -> int:
        """Tokens of the prompt; where nobody counted them, estimated at four bytes of body each, and `MEDIA_TOKENS` for
        each image or the like, whose bytes say nothing."""
        if self.tokens is not None:
            return len(self.tokens)
        return max(0, self._body_bytes - self.media.bytes) // 4 + self.media.parts * MEDIA_TOKENS

    @property
    def media(self) -> Media:
        """What the prompt holds besides text."""
        return self.counted_media if self.counted_media.parts else self.request.media

    @property
    def chain(self) -> tuple[ChainUnit, int, bytes]:
        """Unit, block size (tokens) and chain hashes of the prompt; the chain is empty where there is none."""
        if self.tokens is not None:
            return "tokens", self.tokens.block_size, self.tokens.cached_as
        return ("text", self.text.block_size, self.text.chain) if self.text is not None else ("tokens", 0, b"")

    @property
    def hold_ms(self) -> int:
        """How long it was held: as admission says, else to where we placed it ourselves; 0 where nobody decided."""
        if self.granted is not None:
            return self.granted.hold_ms
        if self.held_at is None or self.decided_at is None:
            return 0
        held_s = self.decided_at - self.held_at
        return round(max(0.0, held_s) * 1000) if math.isfinite(held_s) else 0

    @property
    def grant_id(self) -> str | None:
        return self.granted.grant.grant_id if self.granted else None

    @property
    def counts_only(self) -> bool:
        """It asks for a number, and no engine computes anything for it."""
        return self.request.endpoint in COUNTING

    @property
    def is_open_upstream(self) -> bool:
        return self.state in ("dispatched", "streaming")

    def let_go(self) -> None:
        """An engine answers: it is sent to no other, and what it asks for need not be kept until the answer's end."""
        self.request = self.request.answered()

    def next_attempt(self) -> None:
        """Forget what the failed attempt was given; its worker is not asked again."""
        if self.worker is not None:
            self.excluded = (*self.excluded, self.worker)
        self.attempt += 1
        self.granted = self.mode = self.worker = self.rank = None
        self.asked_at = self.held_at = self.decided_at = self.first_byte_at = self.status = self.hold_reason = None
        self.place = self.chunks = 0

    def switch(self, granted: Granted, race: Race) -> None:
        """The second sending is the request's from here on."""
        self.next_attempt()
        self.race, self.hedged = None, "won"
        self.granted, self.mode = granted, granted.mode
        self.worker, self.rank = granted.grant.worker, granted.grant.rank
        self.asked_at, self.decided_at = race.asked_at, race.sent_at
