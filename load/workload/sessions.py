"""A seeded plan of agent sessions. Pure: equal arguments give equal plans.

Shape (what agent harnesses send): every session begins with its app's system prompt, which all sessions of that app
share; each turn resends the whole conversation and adds a user message or a tool's result; between turns a tool runs.
Some sessions start sub-agents during a tool gap: sessions of their own, with a parent id, that the parent waits for.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

HeaderFamily = Literal["dynamo", "tidegate"]

_VOCABULARY = (
    "about above after again along among answer around because before begin below between branch build call change "
    "check class clean close code collect column commit compare copy count create cross data debug default delete "
    "depth design detail draft drive early edge empty entry error even event every exact example expect field file "
    "final find first fixed follow format found frame front full graph green group guard handle header high hold "
    "image index inner input issue item join keep kind large last later layer layout leaf left length level limit "
    "line list load local lock long loop lower main make map mark match merge message method middle missing mode "
    "model module move name narrow never next node number object offset open option order other outer output owner "
    "page pair parse part pass path pattern plain plan point pool port prefix print process proof queue quick range "
    "rank read reason record remove render repeat reply report request reset result retry return right role root "
    "round route rule same sample scale scan schema search second section seed send series service session set shape "
    "share short side sign simple single size skip slow small sort source space split stack stage start state step "
    "still stop store stream string strong structure sum table tail task test text tidy time token tool top total "
    "trace track tree true turn type under union unit until update upper usage user valid value verb verify view "
    "wait walk warm watch water while whole wide window word work world wrap write yield zero"
)


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. ``text`` joins the conversation before it is sent; ``gap_s`` is the tool's time before that.
    The sessions in ``joins`` run in that gap and are waited for."""

    text: str
    max_tokens: int
    gap_s: float = 0.0
    joins: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """One session. ``start_s``: when it begins, seconds after the plan's start (sub-agents begin with their gap)."""

    session_id: str
    app: str
    system_prompt: str
    headers: HeaderFamily
    turns: tuple[Turn, ...]
    parent_session_id: str | None = None
    start_s: float = 0.0

    def request_headers(self, turn: int) -> dict[str, str]:
        """Identity headers of turn ``turn`` (from 0); the last one says that the session ends."""
        prefix = f"x-{self.headers}"
        headers = {f"{prefix}-session-id": self.session_id}
        if self.parent_session_id is not None:
            headers[f"{prefix}-parent-session-id"] = self.parent_session_id
        if turn == len(self.turns) - 1:
            headers[f"{prefix}-session-final"] = "true"
        return headers


@dataclass(frozen=True, slots=True)
class WorkloadPlan:
    """All sessions, sub-agents included."""

    sessions: tuple[SessionPlan, ...]

    @property
    def requests(self) -> int:
        return sum(len(session.turns) for session in self.sessions)

    @property
    def roots(self) -> tuple[SessionPlan, ...]:
        """Sessions that start by themselves."""
        return tuple(session for session in self.sessions if session.parent_session_id is None)

    def session(self, session_id: str) -> SessionPlan:
        """Raises `KeyError`."""
        for session in self.sessions:
            if session.session_id == session_id:
                return session
        raise KeyError(session_id)


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """Sizes of a plan. Prompts in words (about a token each), times in seconds.

    Each of the ``sub_agents`` belongs to another root session and has ``sub_agent_turns`` turns. ``spread_s``: root
    sessions start evenly over that time.
    """

    sessions: int = 12
    turns: int = 6
    sub_agents: int = 4
    sub_agent_turns: int = 6
    apps: int = 2
    system_words: int = 1_200
    turn_words: int = 60
    max_tokens: int = 32
    gap_s: tuple[float, float] = (0.1, 0.4)
    spread_s: float = 3.0


def plan(shape: WorkloadShape, seed: int = 1, run_id: str = "demo") -> WorkloadPlan:
    """A plan of ``shape``. ``run_id`` begins every session id, so that two runs do not meet in the cache's sessions."""
    if shape.sub_agents > shape.sessions:
        raise ValueError("at most one sub-agent a session")
    sessions: list[SessionPlan] = []
    prompts = {f"app-{number}": words(seed, f"app-{number}", shape.system_words) for number in range(shape.apps)}
    prompts["sub-agent"] = words(seed, "sub-agent", shape.system_words)
    for number in range(shape.sessions):
        session_id = f"{run_id}:session-{number:02d}"
        app = f"app-{number % shape.apps}"
        family: HeaderFamily = "tidegate" if number % 3 == 2 else "dynamo"
        child_id = f"{session_id}:sub-agent" if number < shape.sub_agents else None
        join_turn = shape.turns // 2
        turns = tuple(
            _turn(shape, seed, session_id, turn, (child_id,) if child_id and turn == join_turn else ())
            for turn in range(shape.turns)
        )
        start_s = shape.spread_s * number / max(1, shape.sessions)
        sessions.append(SessionPlan(session_id, app, prompts[app], family, turns, start_s=start_s))
        if child_id:
            child_turns = tuple(_turn(shape, seed, child_id, turn, ()) for turn in range(shape.sub_agent_turns))
            prompt = prompts["sub-agent"]
            sessions.append(SessionPlan(child_id, "sub-agent", prompt, family, child_turns, session_id))
    return WorkloadPlan(tuple(sessions))


def _turn(shape: WorkloadShape, seed: int, session_id: str, turn: int, joins: tuple[str, ...]) -> Turn:
    source = random.Random(f"{seed}/{session_id.partition(':')[2]}/{turn}")
    gap_s = 0.0 if turn == 0 else source.uniform(*shape.gap_s)
    text = f"Step {turn + 1} of {session_id}. " + words(seed, f"{session_id}/{turn}", shape.turn_words)
    return Turn(text=text, max_tokens=shape.max_tokens, gap_s=gap_s, joins=joins)


def words(seed: int, key: str, count: int) -> str:
    """``count`` words of the vocabulary, the same for the same seed and key; 1.35 tokens each."""
    source = random.Random(f"{seed}/{key}")
    return " ".join(source.choices(_VOCABULARY.split(), k=count))
