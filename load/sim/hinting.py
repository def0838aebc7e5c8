"""Who tells a rank's cache what to keep: nobody, an engine's plug-in, or the hint planner of `services.hints`.

The planner is the service's own, told the facts that admission publishes, and a harness's tool events: a session opens
with the placement of its first turn, acts when a turn ends, has a lease while the policy says so, and is closed by its
last turn. The plug-in is inside the engine: it sees the requests of its own rank, what tool each called (as its front
end is told: ``job_id``, ``this_func_call``, ``is_last_step``), and pins by the rule of Continuum; the queue's order is
its own too. Source: spec scheduling §1.5-1.7 (plug-in: pressure B), thunderagent-and-hints §5.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, get_args

from bus.facts import FactNumbers
from load.sim.actions import Answer, Asked, Command
from load.sim.clock import PS_PER_MS, to_ps
from load.sim.engine import Rank
from load.sim.run import OpenTurn, Running
from schemas.admit import Grant
from schemas.decision import Decision
from schemas.hint import ActionPayload, ActionResult
from schemas.pool import PoolState, SharedLayout
from schemas.session import Lease, SessionFact, SessionFactState, SessionIdentity, SessionKey
from schemas.tool import ToolEvent
from schemas.worker import RankLoad, WorkerProfile, WorkerState
from services.admission.estimators.reload_cost import ReloadCost
from services.admission.policies.continuum import Continuum, ContinuumParameters
from services.admission.policies.engine_rules import EngineRules, Pressure
from services.admission.scheduling.interface import (
    Admission,
    Fleet,
    LeaseChange,
    Pin,
    ProgramFacts,
    TurnFacts,
    TurnUsage,
)
from services.hints.config import HintsSettings
from services.hints.effects import PlannedHint
from services.hints.events import (
    ActionAnswered,
    Decided,
    PlannerEvent,
    PoolSeen,
    SessionChanged,
    Tick,
    ToolChanged,
    WorkerSeen,
)
from services.hints.planner import Planner

Arm = Literal["none", "continuum", "continuum_a", "planner", "lost", "unsupported"]
"""``continuum``: the plug-in as published (pressure B); ``continuum_a``: as the paper's algorithm has it. ``lost``: the
planner's hints never arrive; ``unsupported``: no engine can do what they ask."""
ARMS: tuple[Arm, ...] = get_args(Arm)
MODEL, POOL = "model", "pool"


class Hinter:
    """Nobody: empty answers, for others to override. ``delay_s``: from when a hint is thought of until it is carried
    out. ``rules``: of the engine, where they are not the policy's."""

    delay_s = 0.0
    rules: EngineRules | None = None
    tick_s: float | None = None

    def begin(self, ranks: Sequence[Rank], *, has_disk: bool, has_pool: bool) -> None:
        """Once, before everything else."""

    def priority(self, now: float, turn: OpenTurn, seat: int) -> int | None:
        """Of a turn that goes to ``seat`` now, where it is not the policy's."""
        del now, turn, seat
        return None

    def turn_placed(self, now: float, turn: OpenTurn) -> Sequence[Command]:
        del now, turn
        return ()

    def turn_ready(self, now: float, turn: OpenTurn) -> Sequence[Command]:
        del now, turn
        return ()

    def first_token(self, now: float, turn: OpenTurn) -> None:
        """Of a turn that was placed."""

    def turn_over(self, now: float, turn: OpenTurn, usage: TurnUsage) -> Sequence[Command]:
        del now, turn, usage
        return ()

    def lease_changed(self, now: float, change: LeaseChange, running: Running) -> Sequence[Command]:
        del now, change, running
        return ()

    def answered(self, now: float, command: Command, answer: Answer) -> Sequence[Command]:
        del now, command, answer
        return ()

    def tick(self, now: float) -> Sequence[Command]:
        del now
        return ()


def done_tokens(running: Running) -> tuple[int, int]:
    """Of the turn that was begun last: its number, and tokens of its prompt and answer that a cache may hold."""
    index = max(0, running.next_turn - 1)
    plan = running.program.turns[index]
    return index, plan.prompt_tokens + plan.output_tokens - 1


class PlugIn(Hinter):
    """One per rank, which knows nothing of the others."""

    def __init__(self, pressure: Pressure, reload_cost: ReloadCost) -> None:
        parameters = ContinuumParameters(pressure=pressure, reload_cost=reload_cost)
        self._parameters = parameters
        self.rules = Continuum(parameters).engine

    def begin(self, ranks: Sequence[Rank], *, has_disk: bool, has_pool: bool) -> None:
        del has_disk, has_pool
        self._ranks = [Continuum(self._parameters) for _ in ranks]
        for plug_in, rank in zip(self._ranks, ranks, strict=True):
            plug_in.begin(Fleet((rank.config.facts,), lambda _: None))

    def priority(self, now: float, turn: OpenTurn, seat: int) -> int | None:
        rank, program = self._ranks[seat], turn.running.program
        rank.program_arrives(now, ProgramFacts(program.name, program.label, program.parent))
        facts = TurnFacts(turn.number, program.name, turn.index, turn.plan.prompt_tokens)
        let = [action for action in rank.turn_ready(now, facts) if isinstance(action, Admission)]
        return let[0].priority if let else None

    def first_token(self, now: float, turn: OpenTurn) -> None:
        self._ranks[turn.worker].first_token(now, turn.number)

    def turn_over(self, now: float, turn: OpenTurn, usage: TurnUsage) -> Sequence[Command]:
        actions = self._ranks[turn.worker].turn_finished(now, replace(usage, seat=0))
        tokens = turn.plan.prompt_tokens + turn.plan.output_tokens - 1
        return [
            Command(
                turn.worker,
                Asked(
                    action_type="pin",
                    owner=pin.program,
                    chain=turn.plan.chain,
                    tokens=tokens,
                    ttl_ps=to_ps(pin.until - now),
                ),
            )
            for pin in actions
            if isinstance(pin, Pin)
        ]


class PlannerHints(Hinter):
    """The service's planner, told what the service would be told. ``tools``: harnesses tell of tool calls."""

    delay_s = 0.01
    tick_s = 1.0

    def __init__(self, settings: HintsSettings | None = None, *, tools: bool = True) -> None:
        self._planner = Planner(settings or HintsSettings(ask_sessions=False))
        self._numbers = FactNumbers("laboratory", 0)
        self._tools = tools
        self._running: dict[SessionKey, Running] = {}

    def begin(self, ranks: Sequence[Rank], *, has_disk: bool, has_pool: bool) -> None:
        self._ranks = ranks
        self._has_disk, self._has_pool = has_disk, has_pool
        self._heartbeat(0.0)

    def _heartbeat(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for number, rank in enumerate(self._ranks):
            facts = rank.config.facts
            features = ("kv_hints", *(("tier:host",) if facts.host_tokens else ()))
            features += ("tier:disk",) if self._has_disk else ()
            shared = SharedLayout(pool=POOL, scheme="sglang_hicache", page_size=facts.block_size)
            profile = WorkerProfile(
                url="",
                model=MODEL,
                engine="simulated",
                block_size=facts.block_size,
                kv_tokens=facts.kv_tokens,
                features=features,
                shared=shared if self._has_pool else None,
            )
            state = WorkerState(
                **self._numbers.stamp("worker", now),
                worker=str(number),
                incarnation="1",
                health="ready",
                profile=profile,
                loads=(_load(rank),),
            )
            commands += self._tell(now, WorkerSeen(state))
        if self._has_pool:
            state_of_pool = PoolState(**self._numbers.stamp("pool", now), pool=POOL, health="synced")
            commands += self._tell(now, PoolSeen(state_of_pool))
        return commands

    def turn_ready(self, now: float, turn: OpenTurn) -> Sequence[Command]:
        return self._tool(now, turn.running, turn.index - 1, "end") if turn.index else ()

    def turn_placed(self, now: float, turn: OpenTurn) -> Sequence[Command]:
        commands: list[Command] = []
        running = turn.running
        identity = _identity(running)
        if turn.index == 0:
            self._running[identity.key] = running
            commands += self._session(now, running, "opened", turn.worker)
        request_id = f"{running.program.name}-{turn.index}"
        decision = Decision(
            **self._numbers.stamp("decision", now),
            request_id=request_id,
            model=MODEL,
            worker=str(turn.worker),
            rank=0,
            identity=identity,
            grant=Grant(
                grant_id=request_id,
                request_id=request_id,
                worker=str(turn.worker),
                rank=0,
                owner="laboratory",
                epoch=0,
                expires_ms=int(now * 1000) + 30_000,
            ),
            input_tokens=turn.plan.prompt_tokens,
            block_size=self._ranks[turn.worker].config.block_size,
            predicted_cached_tokens=turn.overlap * self._ranks[turn.worker].config.block_size,
            index_health="synced",
        )
        return commands + self._tell(now, Decided(decision))

    def turn_over(self, now: float, turn: OpenTurn, usage: TurnUsage) -> Sequence[Command]:
        running = turn.running
        numbers = {
            "input_tokens": float(usage.prompt_tokens),
            "output_tokens": float(usage.output_tokens),
            "turns": float(turn.index + 1),
        }
        if usage.cached_tokens is not None:
            numbers["cached_tokens"] = float(usage.cached_tokens)
        if not usage.final:
            commands = self._session(now, running, "acting", turn.worker, numbers)
            return commands + self._tool(now, running, turn.index, "start")
        return self._session(now, running, "closed", turn.worker, numbers, reason="final")

    def lease_changed(self, now: float, change: LeaseChange, running: Running) -> Sequence[Command]:
        until = change.until if change.until is not None else now
        lease = Lease(
            owner=_identity(running).key.text(),
            epoch=0,
            since_ms=int(now * 1000),
            expires_ms=int(until * 1000),
            tokens=round(change.numbers.get("tokens", 0.0)),
        )
        return self._session(now, running, change.state, change.seat, dict(change.numbers), lease=lease)

    def answered(self, now: float, command: Command, answer: Answer) -> Sequence[Command]:
        result = ActionResult(
            action_id=command.action_id,
            action_type=command.asked.action_type,
            outcome=answer.outcome,
            reason=answer.reason,
        )
        return self._tell(now, ActionAnswered(str(command.rank), result))

    def tick(self, now: float) -> Sequence[Command]:
        return [*self._heartbeat(now), *self._tell(now, Tick())]

    def _session(
        self,
        now: float,
        running: Running,
        state: SessionFactState,
        seat: int,
        numbers: dict[str, float] | None = None,
        *,
        lease: Lease | None = None,
        reason: str | None = None,
    ) -> list[Command]:
        identity = _identity(running)
        index, _ = done_tokens(running)
        plan = running.program.turns[index]
        fact = SessionFact(
            **self._numbers.stamp(f"session.{state}", now),
            session=identity.key,
            session_id=identity.session_id,
            state=state,
            parent=identity.parent,
            model=MODEL,
            worker=str(seat),
            rank=0,
            turns=index + 1,
            context_tokens=plan.prompt_tokens + plan.output_tokens,
            reason=reason,
            numbers=numbers or {},
            lease=lease,
        )
        return self._tell(now, SessionChanged(fact))

    def _tool(self, now: float, running: Running, index: int, event: Literal["start", "end"]) -> list[Command]:
        tool = running.program.turns[index].tool
        if not self._tools or tool is None:
            return []
        identity = _identity(running)
        told = ToolEvent(
            **self._numbers.stamp(f"tool.{event}", now),
            session=identity.key,
            session_id=identity.session_id,
            event=event,
            tool_call_id=str(index),
            tool_class=tool,
            status="running" if event == "start" else "succeeded",
        )
        return self._tell(now, ToolChanged(told))

    def _tell(self, now: float, event: PlannerEvent) -> list[Command]:
        commands = []
        for effect in self._planner.handle(event, now):
            if isinstance(effect, PlannedHint):
                command = self._command(effect)
                if command is not None:
                    commands.append(command)
        return commands

    def _command(self, hint: PlannedHint) -> Command | None:
        """``None``: of a session that nobody knows here."""
        payload: ActionPayload = hint.payload
        running = self._running.get(hint.session)
        if running is None:
            return None
        index, tokens = done_tokens(running)
        if payload.target.last is not None and payload.target.block_size:
            tokens = min(tokens, payload.target.last * payload.target.block_size)
        ttl_ps = None if payload.ttl_ms is None else payload.ttl_ms * PS_PER_MS
        return Command(
            int(hint.worker),
            Asked(
                action_type=hint.action_type,
                owner=running.program.name,
                chain=running.program.turns[index].chain,
                tokens=tokens,
                ttl_ps=ttl_ps,
                priority=payload.priority or 0,
                to=payload.to,
                source=None if payload.source is None else int(payload.source),
                reason=payload.reason or "",
            ),
            hint.action_id,
            payload.expires_ms * PS_PER_MS,
        )


def _load(rank: Rank) -> RankLoad:
    """As its metrics say."""
    scheduler, cache = rank.scheduler, rank.cache
    usage = cache.used_blocks / cache.usable
    return RankLoad(rank=0, running=scheduler.in_flight, waiting=len(scheduler.waiting), kv_usage=usage)


def _identity(running: Running) -> SessionIdentity:
    program = running.program
    parent = None if running.parent is None else running.parent.program.name
    return SessionIdentity(
        key=SessionKey(family="tidegate", root=program.name),
        session_id=program.name,
        parent_session_id=parent,
        parent=None if parent is None else SessionKey(family="tidegate", root=parent),
    )


def make_hinter(arm: Arm, reload_cost: ReloadCost) -> Hinter:
    """Of an arm."""
    if arm in ("continuum", "continuum_a"):
        return PlugIn("B" if arm == "continuum" else "A", reload_cost)
    return Hinter() if arm == "none" else PlannerHints()
