"""Facts for the hint planner, and a planner with a clock."""

from __future__ import annotations

from typing import Any

from schemas.admit import Grant
from schemas.decision import Candidate, Decision
from schemas.hint import ActionResult, HintOutcome
from schemas.index import TierBlocks
from schemas.pool import PoolState, SharedLayout
from schemas.request import RequestEnd
from schemas.session import Family, Lease, RequestKind, SessionFact, SessionIdentity, SessionKey
from schemas.tool import ToolEvent
from schemas.worker import RankLoad, WorkerHealth, WorkerProfile, WorkerState
from services.hints.config import HintsSettings
from services.hints.effects import AskPolicy, AskSession, PlannedHint, PlannerEffect
from services.hints.events import (
    ActionAnswered,
    Decided,
    PlannerEvent,
    PoolSeen,
    SessionChanged,
    Tick,
    ToolChanged,
    TurnEnded,
    WorkerSeen,
)
from services.hints.planner import Planner

START = 1_000_000.0


def key(name: str, family: Family = "dynamo") -> SessionKey:
    return SessionKey(family=family, root=name)


def session(
    name: str,
    state: Any,
    worker: str | None = "a",
    *,
    tokens: int = 1000,
    parent: str | None = None,
    family: Family = "dynamo",
    lease_until: float | None = None,
    reason: str | None = None,
    turns: int = 1,
    **numbers: float,
) -> SessionChanged:
    """``lease_until``: Unix seconds; the fact carries a lease of ``tokens`` then."""
    lease = None
    if lease_until is not None:
        lease = Lease(owner="o", epoch=1, since_ms=0, expires_ms=int(lease_until * 1000), tokens=tokens)
    fact = SessionFact(
        source="admission-1", epoch=1, seq=0, at_ms=0, session=key(name, family), session_id=name, state=state,
        parent=key(parent) if parent is not None else None, model="m", worker=worker, rank=0, turns=turns,
        context_tokens=tokens, reason=reason, numbers=dict(numbers), lease=lease,
    )  # fmt: skip
    return SessionChanged(fact)


def decided(
    name: str,
    worker: str = "a",
    *,
    tokens: int = 1100,
    cached: int = 1000,
    parent: str | None = None,
    kind: RequestKind = "turn",
    reach: dict[str, int] | None = None,
) -> Decided:
    """``reach``: blocks of 16 tokens of the prompt that the index saw at each worker."""
    grant = Grant(grant_id="g", request_id="r", worker=worker, rank=0, owner="i", epoch=1, expires_ms=0)
    identity = SessionIdentity(key=key(name), session_id=name, parent=key(parent) if parent is not None else None)
    decision = Decision(
        source="admission-1", epoch=1, seq=0, at_ms=0, request_id="r", model="m", worker=worker, rank=0,
        identity=identity, grant=grant, kind=kind, input_tokens=tokens, block_size=16, predicted_cached_tokens=cached,
        candidates=tuple(
            Candidate(worker=each, rank=0, blocks=TierBlocks(device=blocks)) for each, blocks in (reach or {}).items()
        ),
    )  # fmt: skip
    return Decided(decision)


def worker(
    name: str = "a",
    *features: str,
    kv_tokens: int = 10_000,
    pool: str | None = None,
    incarnation: str = "1",
    health: WorkerHealth = "ready",
    loads: tuple[RankLoad, ...] = (),
) -> WorkerSeen:
    shared = SharedLayout(pool=pool, scheme="sglang_hicache", page_size=16) if pool is not None else None
    profile = WorkerProfile(
        url="http://x", model="m", engine="simulated", block_size=16, kv_tokens=kv_tokens, features=features,
        shared=shared,
    )  # fmt: skip
    state = WorkerState(
        source=f"bridge-{name}", epoch=1, seq=0, at_ms=0, worker=name, incarnation=incarnation, health=health,
        profile=profile, loads=loads,
    )  # fmt: skip
    return WorkerSeen(state)


def pool(name: str, health: Any = "synced") -> PoolSeen:
    return PoolSeen(PoolState(source="bridge-pool", epoch=1, seq=0, at_ms=0, pool=name, health=health))


def ended(name: str, *tools: str) -> TurnEnded:
    identity = SessionIdentity(key=key(name), session_id=name)
    end = RequestEnd(
        source="ingress-1", epoch=1, seq=0, at_ms=0, request_id="r", model="m", identity=identity, outcome="completed",
        tool_names=tools,
    )  # fmt: skip
    return TurnEnded(end)


def tool(name: str, event: Any, call: str = "1", tool_class: str = "bash", inferred: bool = False) -> ToolChanged:
    told = ToolEvent(
        source="recorder", epoch=1, seq=0, at_ms=0, session=key(name), session_id=name, event=event, tool_call_id=call,
        tool_class=tool_class, status="running" if event == "start" else "succeeded",
        inferred=inferred,
    )  # fmt: skip
    return ToolChanged(told)


class Driven:
    """A planner that sends, and its clock. ``asked``: what it wanted to know meanwhile."""

    def __init__(self, *, sees: bool = True, **settings: Any) -> None:
        settings.setdefault("ask_sessions", False)
        self.planner = Planner(HintsSettings(**settings))
        self.now = START
        self.asked: list[AskSession | AskPolicy] = []
        if sees:
            self.do(worker("a", "tier:host"), worker("b", "tier:host"))

    def do(self, *events: PlannerEvent) -> list[PlannedHint]:
        hints: list[PlannedHint] = []
        for event in events:
            for effect in self.planner.handle(event, self.now):
                self._sort(effect, hints)
        return hints

    def _sort(self, effect: PlannerEffect, hints: list[PlannedHint]) -> None:
        if isinstance(effect, PlannedHint):
            hints.append(effect)
        else:
            self.asked.append(effect)

    def answer(self, hint: PlannedHint, outcome: HintOutcome = "accepted") -> list[PlannedHint]:
        """The worker says what became of it."""
        result = ActionResult(action_id=hint.action_id, action_type=hint.action_type, outcome=outcome)
        return self.do(ActionAnswered(hint.worker, result))

    def settle(self, hints: list[PlannedHint], outcome: HintOutcome = "accepted") -> list[PlannedHint]:
        """All of them are answered."""
        return [more for hint in hints for more in self.answer(hint, outcome)]

    def wait(self, seconds: float) -> list[PlannedHint]:
        """Time passes, tick by tick."""
        hints = []
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + 1.0)
            hints += self.do(Tick())
        return hints

    @property
    def not_sent(self) -> dict[tuple[str, str], int]:
        return dict(self.planner.gate.not_sent)  # type: ignore[arg-type]


def told(hints: list[PlannedHint]) -> list[tuple[str, str, str]]:
    return [(each.worker, each.session_id, each.action_type) for each in hints]


def reasons(hints: list[PlannedHint]) -> list[tuple[str, str | None]]:
    return [(each.action_type, each.payload.reason) for each in hints]
