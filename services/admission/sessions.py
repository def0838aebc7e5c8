"""The session table: where each session is in its life, what it weighs, and where it ran last.

A side request (title, compaction, count_tokens) shares its session's id but not its prefix, and never moves it. A
request without identity is a session of its own, closed with its only turn.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from schemas.request import Usage
from schemas.session import MOVES_SESSION, RequestKind, SessionIdentity, SessionKey

FactState = Literal["opened", "acting", "paused", "resumed", "closed"]
"""The transitions that the bus is told."""

MAX_TOOLS = 64
MAX_TOOL_CHARACTERS = 128
"""Of the names that one turn called: they are the model's words."""

MAX_ID_CHARACTERS = 256 * 1024 * 1024
"""Of all sessions together: ids are the client's, and a header may have tens of thousands of characters."""


class SessionState(Enum):
    """``OPENED``: known, no turn yet. ``REASONING``: a turn runs. ``ACTING``: its tools run. ``PAUSED``: none runs, and
    the policy lets none. ``CLOSED``: over."""

    OPENED = "opened"
    REASONING = "reasoning"
    ACTING = "acting"
    PAUSED = "paused"
    CLOSED = "closed"


class SessionEvent(Enum):
    """What moves a session. ``TURN_ENDED``: others of its turns still run."""

    TURN_BEGAN = "turn_began"
    TURN_ENDED = "turn_ended"
    LAST_TURN_ENDED = "last_turn_ended"
    FINAL_TURN_ENDED = "final_turn_ended"
    PAUSED = "paused"
    RESUMED = "resumed"
    EXPIRED = "expired"


TRANSITIONS: dict[tuple[SessionState, SessionEvent], SessionState] = {
    (SessionState.OPENED, SessionEvent.TURN_BEGAN): SessionState.REASONING,
    (SessionState.OPENED, SessionEvent.EXPIRED): SessionState.CLOSED,
    (SessionState.REASONING, SessionEvent.TURN_BEGAN): SessionState.REASONING,
    (SessionState.REASONING, SessionEvent.TURN_ENDED): SessionState.REASONING,
    (SessionState.REASONING, SessionEvent.LAST_TURN_ENDED): SessionState.ACTING,
    (SessionState.REASONING, SessionEvent.FINAL_TURN_ENDED): SessionState.CLOSED,
    (SessionState.ACTING, SessionEvent.TURN_BEGAN): SessionState.REASONING,
    (SessionState.ACTING, SessionEvent.PAUSED): SessionState.PAUSED,
    (SessionState.ACTING, SessionEvent.EXPIRED): SessionState.CLOSED,
    (SessionState.PAUSED, SessionEvent.RESUMED): SessionState.ACTING,
    (SessionState.PAUSED, SessionEvent.EXPIRED): SessionState.CLOSED,
}
"""Every move there is; a pair that is not here is a bug of the caller (`KeyError`)."""


@dataclass(slots=True)
class Pause:
    """Why a session is paused. ``request_id``: its turn that waits, empty where the policy paused it while it was idle.
    ``place_in_line``: of that turn when it was paused, in the policy's order, where that is known."""

    reason: str
    request_id: str = ""
    place_in_line: int | None = None


@dataclass(slots=True)
class Session:
    """One session. ``context_tokens``: prompt and answer of its last turn, ``tools``: what that called. ``touched``:
    Unix seconds. ``pause``: while it is paused. ``digest``: of its last turn's body; ``answered``: that one
    was completed. ``final_ms``: when the turn was received that said it was the last (Unix ms)."""

    identity: SessionIdentity
    model: str
    touched: float
    state: SessionState = SessionState.OPENED
    in_flight: int = 0
    turns: int = 0
    context_tokens: int = 0
    worker: str | None = None
    rank: int | None = None
    final_ms: int | None = None
    tools: tuple[str, ...] = ()
    pause: Pause | None = None
    digest: bytes = b""
    answered: bool = False

    def is_resent(self, digest: bytes) -> bool:
        """Whether a turn with this body is its last one again, which has not come through."""
        return bool(digest) and digest == self.digest and not self.answered


@dataclass(frozen=True, slots=True)
class SessionChange:
    """A transition to tell the bus, with its numbers (tokens, turns). ``place``: (worker, rank) where a session that is
    resumed goes next, if that is known."""

    session: Session
    state: FactState
    reason: str | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    place: tuple[str, int] | None = None


class SessionTable:
    """Sessions by key, the longest untouched first. Bounded, in number and in the characters of all ids together (an id
    may have any length): the longest idle ones are closed for a new one."""

    def __init__(self, max_sessions: int, max_id_characters: int = MAX_ID_CHARACTERS) -> None:
        self._max_sessions = max_sessions
        self._max_id_characters = max_id_characters
        self.id_characters = 0
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()
        self.paused: dict[SessionKey, None] = {}
        """In the order in which they were paused."""

    def __len__(self) -> int:
        return len(self._sessions)

    def get(self, key: SessionKey) -> Session | None:
        return self._sessions.get(key)

    def states(self) -> dict[str, int]:
        """How many sessions are in each state."""
        counts = dict.fromkeys((state.value for state in SessionState if state is not SessionState.CLOSED), 0)
        for session in self._sessions.values():
            counts[session.state.value] += 1
        return counts

    def begin_turn(
        self,
        identity: SessionIdentity,
        model: str,
        kind: RequestKind,
        now: float,
        digest: bytes = b"",
        received_ms: int | None = None,
    ) -> list[SessionChange]:
        """A turn was placed: call once per request, however often it is placed anew. A pause is over (`resume`) before
        it. ``digest``: of its body: one that is sent again because it did not come through is no other turn.
        ``received_ms``: by its ingress (default: now). A session that comes again after its last turn goes on."""
        if kind not in MOVES_SESSION:
            return []
        changes: list[SessionChange] = []
        session = self._sessions.get(identity.key)
        if session is None:
            changes += self._make_room(_id_characters(identity))
            session = self._sessions[identity.key] = Session(identity, model, now)
            changes.append(SessionChange(session, "opened"))
            self.id_characters += _id_characters(identity)
        self._touch(session, now)
        if session.identity != identity:
            self.id_characters += _id_characters(identity) - _id_characters(session.identity)
        session.identity, session.model = identity, model
        session.state = TRANSITIONS[session.state, SessionEvent.TURN_BEGAN]
        session.in_flight += 1
        session.turns += not session.is_resent(digest)
        session.digest, session.answered = digest, False
        at_ms = int(now * 1000) if received_ms is None else received_ms
        if kind == "final" or identity.final:
            session.final_ms = at_ms if session.final_ms is None else max(session.final_ms, at_ms)
        elif session.final_ms is not None and at_ms > session.final_ms:
            session.final_ms = None
        return changes

    def learn(
        self, identity: SessionIdentity, model: str, turns: int, context_tokens: int, now: float
    ) -> list[SessionChange]:
        """One that is not known here, and of which another leader speaks: its turns were before this process. It is
        idle. Returns those that had to make room."""
        changes = self._make_room(_id_characters(identity))
        session = self._sessions[identity.key] = Session(identity, model, now, SessionState.ACTING)
        session.turns, session.context_tokens = turns, context_tokens
        self.id_characters += _id_characters(identity)
        return changes

    def pause(self, key: SessionKey, pause: Pause, numbers: dict[str, float]) -> list[SessionChange]:
        """The policy lets no turn of the session run. Only of one that is idle, and has run somewhere that is not lost:
        others have no KV that anybody could move."""
        session = self._sessions.get(key)
        if session is None or session.state is not SessionState.ACTING or session.worker is None:
            return []
        session.state = TRANSITIONS[session.state, SessionEvent.PAUSED]
        session.pause = pause
        self.paused[key] = None
        return [SessionChange(session, "paused", pause.reason, numbers)]

    def resume(self, key: SessionKey, reason: str, place: tuple[str, int] | None) -> list[SessionChange]:
        """It is not paused any more, if it was."""
        session = self._sessions.get(key)
        if session is None or session.state is not SessionState.PAUSED:
            return []
        session.state = TRANSITIONS[session.state, SessionEvent.RESUMED]
        session.pause = None
        del self.paused[key]
        return [SessionChange(session, "resumed", reason, place=place)]

    def placed(self, key: SessionKey, kind: RequestKind, worker: str, rank: int) -> None:
        """The session's turn runs (or was tried again) on this rank."""
        session = self._sessions.get(key)
        if session is not None and kind in MOVES_SESSION:
            session.worker, session.rank = worker, rank

    def called(self, key: SessionKey, kind: RequestKind, tools: tuple[str, ...]) -> None:
        """A turn of the session is over, and called these tools."""
        session = self._sessions.get(key)
        if session is not None and kind in MOVES_SESSION:
            session.tools = tuple(tool[:MAX_TOOL_CHARACTERS] for tool in tools[:MAX_TOOLS])

    def leave(self, key: SessionKey, kind: RequestKind, worker: str) -> None:
        """The session's turn failed on this worker: do not prefer it."""
        session = self._sessions.get(key)
        if session is not None and kind in MOVES_SESSION and session.worker == worker:
            session.worker = session.rank = None

    def end_turn(
        self,
        key: SessionKey,
        kind: RequestKind,
        usage: Usage,
        input_tokens: int,
        reason: str,
        now: float,
        *,
        final_ms: int | None = None,
    ) -> list[SessionChange]:
        """A turn that `begin_turn` counted is over. ``input_tokens``: of its prompt, where ``usage`` has none;
        ``final_ms``: when it was received, if it said that it was the last (Unix ms). One that did not come through
        takes that back: it is sent again."""
        session = self._sessions.get(key)
        if session is None or kind not in MOVES_SESSION:
            return []
        self._touch(session, now)
        session.in_flight -= 1
        session.answered = session.answered or reason == "completed"
        if final_ms is not None and final_ms == session.final_ms and reason != "completed":
            session.final_ms = None
        prompt = usage.input_tokens if usage.input_tokens is not None else input_tokens
        if prompt:
            session.context_tokens = prompt + (usage.output_tokens or 0)
        numbers = {"input_tokens": float(prompt), "turns": float(session.turns)}
        if usage.output_tokens is not None:
            numbers["output_tokens"] = float(usage.output_tokens)
        if usage.cached_tokens is not None:
            numbers["cached_tokens"] = float(usage.cached_tokens)
        if session.in_flight:
            session.state = TRANSITIONS[session.state, SessionEvent.TURN_ENDED]
            return []
        single = session.identity.key.family == "request"
        if session.final_ms is not None or single:
            session.state = TRANSITIONS[session.state, SessionEvent.FINAL_TURN_ENDED]
            self._drop(key)
            return [SessionChange(session, "closed", "single_request" if single else "final", numbers)]
        session.state = TRANSITIONS[session.state, SessionEvent.LAST_TURN_ENDED]
        return [SessionChange(session, "acting", reason, numbers)]

    def forget_worker(self, worker: str) -> int:
        """The worker is lost: no session prefers it any more. Returns how many did."""
        forgotten = 0
        for session in self._sessions.values():
            if session.worker == worker:
                session.worker = session.rank = None
                forgotten += 1
        return forgotten

    def expire(self, idle_since: float) -> list[SessionChange]:
        """Close sessions untouched since ``idle_since`` (Unix seconds) that have nothing in flight."""
        changes: list[SessionChange] = []
        for key, session in list(self._idle(idle_since)):
            self._drop(key)
            changes.append(self._expired(session, "idle"))
        return changes

    def set_back(self, seconds: float) -> None:
        """The clock was set back by so much: they are idle as long as before."""
        for session in self._sessions.values():
            session.touched -= seconds

    def _idle(self, idle_since: float) -> list[tuple[SessionKey, Session]]:
        idle = []
        for key, session in self._sessions.items():
            if session.touched > idle_since:
                break
            if session.in_flight == 0:
                idle.append((key, session))
        return idle

    def _make_room(self, characters: int) -> list[SessionChange]:
        changes: list[SessionChange] = []
        while self._is_full_with(characters):
            idle = next(((key, session) for key, session in self._sessions.items() if session.in_flight == 0), None)
            if idle is None:
                break  # all have turns in flight: the bound on open requests is the bound here
            self._drop(idle[0])
            changes.append(self._expired(idle[1], "table_full"))
        return changes

    def _is_full_with(self, characters: int) -> bool:
        full = len(self._sessions) >= self._max_sessions
        return full or self.id_characters + characters > self._max_id_characters

    def _drop(self, key: SessionKey) -> None:
        self.id_characters -= _id_characters(self._sessions.pop(key).identity)
        self.paused.pop(key, None)

    @staticmethod
    def _expired(session: Session, reason: str) -> SessionChange:
        session.state = TRANSITIONS[session.state, SessionEvent.EXPIRED]
        return SessionChange(session, "closed", reason, {"turns": float(session.turns)})

    def _touch(self, session: Session, now: float) -> None:
        session.touched = now
        self._sessions.move_to_end(session.identity.key)


def _id_characters(identity: SessionIdentity) -> int:
    key, parent = identity.key, identity.parent
    texts = (key.tenant, key.root, key.agent, identity.session_id, identity.parent_session_id, identity.turn_id)
    known = sum(len(text) for text in texts if text is not None)
    return known + (len(parent.root) + len(parent.agent) if parent is not None else 0)
