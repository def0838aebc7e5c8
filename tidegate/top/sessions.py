"""What is known of sessions. Each figure is of its latest fact, by the fact's own time, so that order matters little.
Pure; bounded: of many sessions those heard of last are kept."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from schemas.decision import Decision
from schemas.request import RequestEnd
from schemas.session import MOVES_SESSION, SessionFact, SessionIdentity, SessionKey
from schemas.tool import ToolEvent
from tidegate.top.requests import Request, Stage
from tidegate.top.snapshot import SessionRow, SessionState
from tidegate.top.text import bounded

MAX_CALLS = 64
"""Tool calls of one session that are remembered."""

CLOSED_S = 30.0
"""So long a closed session is shown."""

_LEASE_ENDS = frozenset({"released", "revoked", "expired", "closed"})
_COUNTS_TURNS = frozenset({"acting", "leased", "paused", "closed"})
"""Told while none of the session's turns runs: all of them are counted."""


@dataclass(slots=True)
class Call:
    """A tool call. Unix ms: ``since_ms`` as the harness says, ``at_ms`` as the fact that began it."""

    tool: str
    since_ms: int
    at_ms: int
    ended: bool = False


@dataclass(slots=True)
class Session:
    """One session; ``touched``: Unix seconds here, all ``*_ms`` the facts' own Unix ms."""

    key: SessionKey
    session_id: str
    touched: float
    parent: str | None = None
    model: str | None = None
    began_ms: int = 0
    ended_ms: int = 0
    ended_turns: int = 0
    told_turns: int = 0
    called: tuple[str, ...] = ()
    calls: OrderedDict[str, Call] = field(default_factory=OrderedDict)
    tool_ended_ms: int = 0
    place: tuple[int, str | None, int | None] = (0, None, None)
    context: tuple[int, int | None] = (0, None)
    hit: tuple[int, float | None] = (0, None)
    hold: tuple[int, int | None, str | None] = (0, None, None)
    pause: tuple[int, bool, str | None] = (0, False, None)
    lease: tuple[int, int, int, int, str | None] = (0, 0, 0, 0, None)
    """(told at, since, expires, tokens, worker); all 0 after it ended."""
    closed_ms: int = 0

    def lease_at(self, now_ms: int) -> tuple[int, int, int, str | None] | None:
        """(since, left ms, tokens, worker) of a lease that is alive."""
        _, since, expires, tokens, worker = self.lease
        return (since, expires - now_ms, tokens, worker) if expires > now_ms and not self.closed else None

    @property
    def closed(self) -> bool:
        return self.closed_ms > self.began_ms

    @property
    def running_calls(self) -> list[Call]:
        """Of tools since the session's last turn began: what runs on from before is in the background."""
        return [call for call in self.calls.values() if not call.ended and call.at_ms >= self.began_ms]


class Sessions:
    """By the key's text (bounded). ``forgotten``: more than fit."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._sessions)

    def items(self) -> list[tuple[str, Session]]:
        return list(self._sessions.items())

    def touch(self, key: SessionKey, session_id: str, now: float) -> Session:
        """The session, new or known, as the one heard of last."""
        text = bounded(key.text())
        session = self._sessions.get(text)
        if session is None:
            short = SessionKey(
                tenant=bounded(key.tenant), family=key.family, root=bounded(key.root), agent=bounded(key.agent)
            )
            session = self._sessions[text] = Session(short, bounded(session_id), now)
            while len(self._sessions) > self._most:
                self._sessions.popitem(last=False)
                self.forgotten += 1
        session.touched = now
        self._sessions.move_to_end(text)
        return session

    def began(self, identity: SessionIdentity, model: str, received_ms: int, moves: bool, now: float) -> Session:
        """A request of the session was accepted."""
        session = self.touch(identity.key, identity.session_id, now)
        if identity.parent_session_id:
            session.parent = bounded(identity.parent_session_id)
        if moves and received_ms >= session.began_ms:
            session.began_ms, session.model = received_ms, bounded(model)
        return session

    def placed(self, fact: Decision, now: float) -> None:
        """A decision was made about the session."""
        session = self.touch(fact.identity.key, fact.identity.session_id, now)
        if fact.kind not in MOVES_SESSION:
            return
        if fact.at_ms >= session.hold[0]:
            reason = bounded(fact.hold_reason) if fact.hold_reason else None
            session.hold = (fact.at_ms, max(0, fact.hold_ms), reason)
        self.sent(session, fact.worker, fact.rank, fact.at_ms)

    def sent(self, session: Session, worker: str, rank: int | None, at_ms: int) -> None:
        """A turn went there."""
        if at_ms >= session.place[0]:
            session.place = (at_ms, bounded(worker), rank)

    def ended(self, fact: RequestEnd, now: float, first: bool) -> None:
        """A request is over; ``first``: it was not said before."""
        session = self.touch(fact.identity.key, fact.identity.session_id, now)
        if fact.kind not in MOVES_SESSION:
            return
        session.ended_turns += first
        if fact.at_ms < session.ended_ms:
            return
        session.ended_ms, session.model = fact.at_ms, session.model or bounded(fact.model)
        if fact.worker is not None:
            self.sent(session, fact.worker, fact.rank, fact.at_ms)
        session.called = tuple(bounded(name) for name in fact.tool_names[:8])
        usage = fact.usage
        if usage.input_tokens and fact.at_ms >= session.context[0]:
            session.context = (fact.at_ms, usage.input_tokens + (usage.output_tokens or 0))
        known = usage.input_tokens and usage.cached_tokens is not None
        session.hit = (fact.at_ms, min(1.0, (usage.cached_tokens or 0) / (usage.input_tokens or 1)) if known else None)
        if session.key.family == "request":
            session.closed_ms = max(session.closed_ms, fact.at_ms)

    def told(self, fact: SessionFact, now: float) -> None:
        """Admission says what became of the session."""
        session = self.touch(fact.session, fact.session_id, now)
        if fact.parent is not None and session.parent is None:
            session.parent = bounded(fact.parent.agent or fact.parent.root)
        if fact.state in _COUNTS_TURNS:
            session.told_turns = max(session.told_turns, fact.turns)
        if fact.model:
            session.model = session.model or bounded(fact.model)
        if fact.context_tokens and fact.at_ms >= session.context[0]:
            session.context = (fact.at_ms, fact.context_tokens)
        if fact.worker is not None and fact.state in ("acting", "resumed"):
            self.sent(session, fact.worker, fact.rank, fact.at_ms)
        if fact.state in ("paused", "resumed", "closed") and fact.at_ms >= session.pause[0]:
            reason = bounded(fact.reason) if fact.reason else None
            session.pause = (fact.at_ms, fact.state == "paused", reason)
        if fact.state == "closed":
            session.closed_ms = max(session.closed_ms, fact.at_ms)
        self._lease(session, fact)

    def tool(self, fact: ToolEvent, now: float) -> None:
        """A harness's tool call; what was inferred afterwards is over."""
        session = self.touch(fact.session, fact.session_id, now)
        call_id, ended = bounded(fact.tool_call_id), fact.event != "start"
        if ended and not fact.inferred:
            session.tool_ended_ms = max(session.tool_ended_ms, fact.at_ms)
        call = session.calls.get(call_id)
        if call is None:
            since = fact.at_ms if fact.started_at_ms is None else fact.started_at_ms
            session.calls[call_id] = Call(bounded(fact.tool_class), since, fact.at_ms, ended or fact.inferred)
            while len(session.calls) > MAX_CALLS:
                over = next((key for key, one in session.calls.items() if one.ended), next(iter(session.calls)))
                del session.calls[over]
            return
        call.ended = call.ended or ended
        call.at_ms = min(call.at_ms, fact.at_ms)
        if not ended and fact.started_at_ms is not None:
            call.since_ms = fact.started_at_ms

    def tick(self, now: float) -> None:
        """Closed sessions go after a while; those of requests without identity are many, and go at once."""
        gone = []
        for text, session in self._sessions.items():
            stays = 3.0 if session.key.family == "request" else CLOSED_S
            if session.closed and now - session.touched > stays:
                gone.append(text)
        for text in gone:
            del self._sessions[text]

    @staticmethod
    def _lease(session: Session, fact: SessionFact) -> None:
        if fact.at_ms < session.lease[0]:
            return
        if fact.state == "leased" and fact.lease is not None:
            worker = bounded(fact.worker) if fact.worker else None
            session.lease = (fact.at_ms, fact.lease.since_ms, fact.lease.expires_ms, fact.lease.tokens, worker)
        elif fact.state in _LEASE_ENDS:
            session.lease = (fact.at_ms, 0, 0, 0, None)


def row_of(text: str, session: Session, open_requests: list[Request], now_ms: int) -> SessionRow:
    """The session as it is shown. ``open_requests``: its own, all kinds."""
    turns = [request for request in open_requests if request.moves]
    calls = sorted(session.running_calls, key=lambda call: call.since_ms)
    state, since = _state(session, turns, calls, now_ms)
    lease = session.lease_at(now_ms)
    acting = state == "acting"
    tool, tool_since = _tool(session, calls) if acting else (None, None)
    placed = [request for request in turns if request.stage is not Stage.ACCEPTED]
    place = placed[-1] if placed else None
    return SessionRow(
        session=text,
        session_id=session.session_id,
        tenant=session.key.tenant,
        agent=session.key.agent,
        parent=session.parent,
        model=session.model,
        state=state,
        for_ms=_ago(since, now_ms),
        tool=tool,
        tool_ms=_ago(tool_since, now_ms),
        tool_inferred=acting and not calls,
        tools=len(calls),
        hold_reason=_hold_reason(session, turns) if state == "held" else None,
        last_hold_ms=session.hold[1],
        last_hold_reason=session.hold[2],
        pause_reason=session.pause[2] if session.pause[1] else None,
        lease_ms=lease[1] if lease else None,
        lease_tokens=lease[2] if lease else None,
        context_tokens=session.context[1],
        turns=max(session.told_turns, session.ended_turns) + len(placed),
        requests=len(open_requests),
        worker=place.worker if place else session.place[1],
        rank=place.rank if place else session.place[2],
        hit_ratio=session.hit[1],
    )


def _state(session: Session, turns: list[Request], calls: list[Call], now_ms: int) -> tuple[SessionState, int]:
    """And since when (Unix ms)."""
    waiting = [request.held_ms or request.since_ms for request in turns if request.stage is Stage.ACCEPTED]
    if waiting:
        return "held", min(waiting)
    if turns:
        return "running", min(request.placed_ms or request.since_ms for request in turns)
    if session.closed:
        return "closed", session.closed_ms
    if session.pause[1]:
        return "paused", session.pause[0]
    if calls:
        return "acting", calls[0].since_ms
    if session.called and session.tool_ended_ms < session.ended_ms and session.ended_ms >= session.began_ms:
        return "acting", session.ended_ms
    lease = session.lease_at(now_ms)
    if lease is not None:
        return "leased", lease[0]
    return "idle", max(session.ended_ms, session.tool_ended_ms, session.began_ms, session.pause[0])


def _tool(session: Session, calls: list[Call]) -> tuple[str | None, int | None]:
    if calls:
        return calls[0].tool, calls[0].since_ms
    return session.called[0], session.ended_ms


def _hold_reason(session: Session, turns: list[Request]) -> str | None:
    said = [request.hold_reason for request in turns if request.hold_reason]
    return said[0] if said else session.pause[2] if session.pause[1] else None


def _ago(since: int | None, now_ms: int) -> int | None:
    return max(0, now_ms - since) if since else None
