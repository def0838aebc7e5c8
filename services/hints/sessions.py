"""Sessions as the planner needs them: where they ran, whether they are idle, and what caches were asked to keep."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

from schemas.index import SessionResidency
from schemas.session import Lease, SessionKey
from services.hints.wishes import Place, Tier

State = Literal["reasoning", "acting", "paused"]

MAX_CLOSED = 16_384
"""Closed sessions remembered, so that what comes too late for them is told from what nobody knows."""
MAX_CLOSED_CHARACTERS = 1024
"""Of an id that is remembered: ids are the client's, and may have any length."""
MAX_ID_CHARACTERS = 64 * 1024 * 1024
"""Of the ids of all open sessions: a client may make each as long as its headers."""
MAX_TOOLS = 64
"""Tool calls of one session that run at once."""
MAX_TOOL_CHARACTERS = 128
MAX_ON_DEVICE = 16
"""Places that have a session's whole prefix, so many are remembered."""


@dataclass(slots=True)
class Kept:
    """What one place was asked to keep for a session. ``pin``, ``retain``: actions that were sent last; until when, in
    Unix seconds. ``pinned``: the pin was accepted. ``demoted``: the tier that its KV was sent to."""

    place: Place
    pin: str | None = None
    pin_until: float = 0.0
    pinned: bool = False
    retain: str | None = None
    retain_until: float = 0.0
    demote: str | None = None
    demoted: Tier | None = None
    demoted_until: float = 0.0

    def is_over(self, now: float) -> bool:
        """Nothing is kept there any more."""
        return max(self.pin_until, self.retain_until, self.demoted_until) <= now

    def undo(self, action_id: str) -> None:
        """The action was not carried out: what it asked for is not kept."""
        if self.pin == action_id:
            self.pin, self.pin_until, self.pinned = None, 0.0, False
        if self.retain == action_id:
            self.retain, self.retain_until = None, 0.0
        if self.demote == action_id:
            self.demote, self.demoted, self.demoted_until = None, None, 0.0


@dataclass(frozen=True, slots=True)
class KnownPrefix:
    """What of an indexer's answer about a session is remembered. In blocks of ``block_size`` tokens: its ``depth``, and
    ``shared`` with others at its beginning. ``on_device``: places that have all of it on the device."""

    depth: int
    shared: int
    block_size: int
    on_device: tuple[Place, ...]

    @classmethod
    def of(cls, residency: SessionResidency) -> KnownPrefix | None:
        """``None`` where its blocks are of text: engines know nothing of those."""
        if residency.unit != "tokens":
            return None
        whole = (
            Place(match.worker, match.rank)
            for match in residency.resident
            if match.health == "synced" and match.blocks.device >= residency.depth > 0
        )
        places = tuple(islice(whole, MAX_ON_DEVICE))
        return cls(residency.depth, residency.shared_blocks, residency.block_size, places)


@dataclass(slots=True)
class Session:
    """One session that is open.

    ``generation`` grows whenever a turn begins or ends, or it is paused or resumed: what was meant for an earlier one
    is not sent. ``prompt_tokens``: of its last prompt, as its decision said (perhaps an estimate: only the next one's
    can be compared with it); ``context_tokens``: of it and its answer, as they were counted. ``lease``: of its idle KV.
    ``tools``: calls that run; ``tool``: the last one's class. ``children``: sub-agents that are open. ``known``: by an
    indexer. ``superseded_in``: the turn at which a rewrite was noticed last; ``shared_blocks``: put into a pool for
    children.
    """

    key: SessionKey
    session_id: str
    state: State = "reasoning"
    generation: int = 0
    model: str | None = None
    parent: SessionKey | None = None
    place: Place | None = None
    turns: int = 0
    prompt_tokens: int = 0
    context_tokens: int = 0
    idle_since: float = 0.0
    lease: Lease | None = None
    tool: str = ""
    tools: set[str] = field(default_factory=set)
    children: int = 0
    kept: Kept | None = None
    known: KnownPrefix | None = None
    superseded_in: int = -1
    shared_blocks: int = 0

    @property
    def characters(self) -> int:
        """Of its ids."""
        keys = (self.key, self.parent) if self.parent is not None else (self.key,)
        return len(self.session_id) + sum(len(key.root) + len(key.agent) for key in keys)

    def keep(self, place: Place) -> Kept:
        """What is kept at ``place``, which is the only one."""
        if self.kept is None or self.kept.place != place:
            self.kept = Kept(place)
        return self.kept

    def let_go(self, place: Place, *, pin_only: bool) -> None:
        """Nothing is kept at ``place`` any more, or nothing is pinned there."""
        if self.kept is None or self.kept.place != place:
            return
        if pin_only:
            self.kept.pin, self.kept.pin_until, self.kept.pinned = None, 0.0, False
        else:
            self.kept = None

    def blocks(self, tokens: int, block_size: int) -> int:
        """Full blocks that ``tokens`` are."""
        return tokens // block_size if block_size else 0


class SessionTable:
    """Open sessions, the one touched longest ago in front; and which were closed lately. Bounded by sessions and by the
    characters of their ids: `overflow` says which must be closed for a new one."""

    def __init__(self, max_sessions: int, max_id_characters: int = MAX_ID_CHARACTERS) -> None:
        self._max_sessions = max_sessions
        self._max_characters = max_id_characters
        self._characters = 0
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()
        self._closed: OrderedDict[SessionKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def all(self) -> list[Session]:
        return list(self._sessions.values())

    def get(self, key: SessionKey | None) -> Session | None:
        return self._sessions.get(key) if key is not None else None

    def was_closed(self, key: SessionKey) -> bool:
        """It is over, as far as is remembered."""
        return key in self._closed

    def touch(self, key: SessionKey, session_id: str, parent: SessionKey | None) -> Session:
        """The open session of this key, new where there is none."""
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = Session(key, session_id, parent=parent)
            self._characters += session.characters
            self._closed.pop(key, None)
            above = self._sessions.get(parent) if parent is not None else None
            if above is not None:
                above.children += 1
        else:
            self._sessions.move_to_end(key)
            self._characters += len(session_id) - len(session.session_id)
            session.session_id = session_id
        return session

    def overflow(self) -> Session | None:
        """One that must go, if there are too many, or their ids are too long."""
        too_many = len(self._sessions) > self._max_sessions
        too_long = self._characters > self._max_characters and len(self._sessions) > 1
        return next(iter(self._sessions.values())) if too_many or too_long else None

    def close(self, key: SessionKey) -> Session | None:
        """The session is over; ``None`` when it was not open."""
        if len(key.root) + len(key.agent) <= MAX_CLOSED_CHARACTERS:
            self._closed[key] = None
            self._closed.move_to_end(key)
        while len(self._closed) > MAX_CLOSED:
            self._closed.popitem(last=False)
        session = self._sessions.pop(key, None)
        self._characters -= session.characters if session is not None else 0
        above = self._sessions.get(session.parent) if session is not None and session.parent is not None else None
        if above is not None:
            above.children = max(0, above.children - 1)
        return session
