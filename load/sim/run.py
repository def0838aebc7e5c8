"""The simulation: programs, a policy and ranks in one virtual time.

Of what happens at one time: programs and turns first, then iterations that end, then the policy's tick, then iterations
that begin; within each, in the order in which it was planned.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from load.sim.actions import Command
from load.sim.block_store import BlockStore
from load.sim.clock import PS_PER_S, EventQueue, to_ps, to_s
from load.sim.engine import Rank, RankConfig
from load.sim.programs import Program, Turn
from load.sim.requests import SimRequest
from load.sim.results import ProgramRow, Result, TurnRow
from load.sim.tiers import Depths
from load.sim.timing import TIMINGS, Timing
from services.admission.policies.engine_rules import FCFS, EngineRules
from services.admission.policies.in_engine import InEngine
from services.admission.policies.round_robin import RoundRobin
from services.admission.scheduling.interface import (
    Action,
    Admission,
    Fleet,
    LeaseChange,
    Pin,
    Policy,
    ProgramFacts,
    Refusal,
    TurnFacts,
    TurnUsage,
    Unpin,
)

HAPPENING, _END, TICK, _START = range(4)

STALLED_S = 7200.0
"""Nothing but ticks for so long: the policy will never admit what it holds."""


class PolicyError(Exception):
    """A policy admitted a turn that is not ready, or to a seat that is not there (the policy's fault)."""

    reason = "bad_admission"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimConfig:
    """The fleet, and how programs come: open loop at their ``arrival_s``, or closed loop, ``concurrency`` at a time.

    ``kv_tokens``: of one worker (``None``: as its ``timing`` says). ``host_tokens``, ``disk_tokens``: of memory below
    it; ``pool_tokens``: of a pool that all share, written through or back; each over a link of so many GB/s for each
    GPU. ``rules``, ``whole_prompt``, ``jump``: see `RankConfig`; a policy that acts inside the engine brings its own
    rules. ``report_cached``: engines say how many tokens they found cached.
    """

    workers: int = 1
    timing: Timing | Literal["h100-8b", "h100x4-70b", "instant"] = "h100-8b"
    kv_tokens: int | None = None
    host_tokens: int = 0
    host_gbps: float = 50.0
    disk_tokens: int = 0
    disk_gbps: float = 6.0
    pool_tokens: int = 0
    pool_gbps: float = 25.0
    pool_through: bool = True
    block_size: int = 16
    token_budget: int = 2048
    max_num_seqs: int = 256
    rules: EngineRules = FCFS
    prefix_caching: bool = True
    whole_prompt: bool = False
    concurrency: int | None = None
    report_cached: bool = True
    jump: bool = True

    def ranks(self) -> list[Rank]:
        """One rank per worker."""
        timing: Timing = TIMINGS[self.timing] if isinstance(self.timing, str) else self.timing
        kv_tokens = self.kv_tokens or timing.kv_tokens
        config = RankConfig(
            num_blocks=kv_tokens // self.block_size + 1,
            block_size=self.block_size,
            token_budget=self.token_budget,
            max_num_seqs=self.max_num_seqs,
            rules=self.rules,
            prefix_caching=self.prefix_caching,
            whole_prompt=self.whole_prompt,
            jump=self.jump,
            host_blocks=self.host_tokens // self.block_size,
            host_block_ps=self._block_ps(timing, self.host_gbps),
            disk_blocks=self.disk_tokens // self.block_size,
            disk_block_ps=self._block_ps(timing, self.disk_gbps),
            pool_block_ps=self._block_ps(timing, self.pool_gbps),
            pool_through=self.pool_through,
        )
        pool = BlockStore(self.pool_tokens // self.block_size) if self.pool_tokens else None
        return [Rank(config, timing, pool) for _ in range(self.workers)]

    def _block_ps(self, timing: Timing, gbps: float) -> int:
        return round(self.block_size * timing.kv_bytes / (gbps * 1e9) * PS_PER_S)


@dataclass(eq=False, slots=True)
class Running:
    """A program that has started."""

    program: Program
    started_ps: int
    parent: Running | None = None
    next_turn: int = 0
    queued_ps: int = 0
    priority: int = 0
    waits_for: int = 0
    """Of the tool and of its sub-agents, how many are not over."""

    @property
    def root(self) -> Running:
        return self if self.parent is None else self.parent.root


@dataclass(eq=False, slots=True)
class OpenTurn:
    """A turn that is ready, or on a worker."""

    number: int
    running: Running
    index: int
    plan: Turn
    ready_ps: int
    dispatched_ps: int | None = None
    worker: int = -1
    request: SimRequest | None = None
    overlap: int = 0
    best_overlap: int = 0
    again: bool = False
    """It was tried before."""


@dataclass(frozen=True, slots=True)
class Event:
    kind: Literal[
        "program", "tool", "unpin", "end", "tick", "start", "loaded", "patience", "retry", "fleet", "hint", "hint_over",
        "hint_tick", "node", "closed",
    ]  # fmt: skip
    running: Running | None = None
    rank: int = -1
    turn: int = -1
    word: str = ""
    command: Command | None = None


@dataclass(eq=False)
class Simulation:
    """One run. `run` may be called once. `load.sim.disturbed` is one in which something goes wrong."""

    programs: Sequence[Program]
    policy: Policy
    config: SimConfig
    result: Result = field(default_factory=Result)
    _queue: EventQueue[Event] = field(default_factory=EventQueue)
    _ranks: list[Rank] = field(default_factory=list)
    _waiting: deque[Program] = field(default_factory=deque)
    _open: dict[int, OpenTurn] = field(default_factory=dict)
    _alive: dict[str, Running] = field(default_factory=dict)
    _pinned: dict[tuple[str, int], int | None] = field(default_factory=dict)
    _turns: int = 0
    _unfinished: int = 0
    _last_ps: int = 0

    def run(self) -> Result:
        """Until every program is over, or nothing can happen any more."""
        if isinstance(self.policy, InEngine):
            self.config = replace(self.config, rules=self.policy.engine)
        self._ranks = self.config.ranks()
        self._unfinished = len(self.programs)
        self.policy.begin(Fleet(tuple(rank.config.facts for rank in self._ranks), self._residency, self._loadable))
        self._begin()
        self._prepare()
        self._plan_tick()
        while len(self._queue) and self._unfinished:
            self._happen(self._queue.pop())
        self.result.workers = [rank.counters for rank in self._ranks]
        self.result.unfinished = self._unfinished
        return self.result

    def _begin(self) -> None:
        """Plans the beginning of programs."""
        for program in self.programs:
            if self.config.concurrency is None or program.single:
                self._plan(program, to_ps(program.arrival_s))
            else:
                self._waiting.append(program)
        for _ in range(min(self.config.concurrency or 0, len(self._waiting))):
            self._plan(self._waiting.popleft(), 0)

    def _prepare(self) -> None:
        """Before anything happens."""

    def _plan(self, program: Program, time_ps: int, parent: Running | None = None) -> None:
        self._queue.put(time_ps, Event("program", Running(program, time_ps, parent)), HAPPENING)

    def _plan_tick(self) -> None:
        if self.policy.tick_s is not None:
            self._queue.put(self._queue.now + to_ps(self.policy.tick_s), Event("tick"), TICK)

    def _happen(self, event: Event) -> None:
        now = self._queue.now
        if event.kind not in ("tick", "hint_tick"):
            self._last_ps = now
        if event.kind == "end":
            if self._ranks[event.rank].due_ps == now:
                self._end(event.rank)
        elif event.kind == "start":
            rank = self._ranks[event.rank]
            if rank.idle:
                rank.start(now)
                for due in rank.take_loads():
                    self._queue.put(due, Event("loaded", rank=event.rank), HAPPENING)
                self._watch(event.rank)
        elif event.kind == "loaded":
            self._ranks[event.rank].loaded(now)
            self._look_again(event.rank)
        elif event.kind == "tick":
            self._act(self.policy.tick(to_s(now)))
            if len(self._queue) or now - self._last_ps < to_ps(STALLED_S):
                self._plan_tick()
        elif event.running is not None and event.kind == "program":
            running = event.running
            program = running.program
            if running.parent is None and not program.single:
                self.result.last_start_s = to_s(now)
            self._alive[program.name] = running
            arrival = None if running.parent is None else to_s(running.root.started_ps)
            facts = ProgramFacts(program.name, program.label, program.parent, arrival=arrival, single=program.single)
            self.policy.program_arrives(to_s(now), facts)
            self._next_turn(running)
        elif event.running is not None and event.kind == "unpin":
            name = event.running.program.name
            if self._pinned.get((name, event.rank)) == now:
                del self._pinned[name, event.rank]
                self._ranks[event.rank].expire(name, now)
                self._look_again(event.rank)
        elif event.running is not None:
            self._gap_over(event.running)

    def _gap_over(self, running: Running) -> None:
        """The tool, or a sub-agent, is over; the next turn is ready when all are."""
        running.waits_for -= 1
        if running.waits_for == 0:
            self._next_turn(running)

    def _next_turn(self, running: Running) -> None:
        now = self._queue.now
        plan = running.program.turns[running.next_turn]
        turn = OpenTurn(self._turns, running, running.next_turn, plan, now)
        self._turns += 1
        running.next_turn += 1
        self._open[turn.number] = turn
        self._ready(turn)

    def _ready(self, turn: OpenTurn) -> None:
        facts = TurnFacts(turn.number, turn.running.program.name, turn.index, turn.plan.prompt_tokens)
        self._act(self.policy.turn_ready(to_s(self._queue.now), facts))

    def _residency(self, number: int) -> list[int]:
        """As the index answers: the rank's own tiers together."""
        return [each.total - each.pool for each in self._depths(number)]

    def _loadable(self, number: int) -> list[float] | None:
        """What the pool has beyond that."""
        if not self.config.pool_tokens:
            return None
        return [float(each.pool) for each in self._depths(number)]

    def _depths(self, number: int) -> list[Depths]:
        turn = self._open[number]
        full = turn.plan.prompt_tokens // self.config.block_size
        return [rank.depths(turn.plan.chain, full, self._queue.now) for rank in self._ranks]

    def _act(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Admission):
                self._admit(action)
            elif isinstance(action, Refusal):
                self._refuse(action)
            elif isinstance(action, Pin):
                self._pin(action)
            elif isinstance(action, Unpin):
                self._unpin(action.program, action.seat)
            elif isinstance(action, LeaseChange):
                self._lease(action)

    def _admit(self, admission: Admission) -> None:
        now = self._queue.now
        turn = self._ready_turn(admission.turn)
        if not self._is_there(admission.seat):
            raise PolicyError(f"{admission} at {to_s(now)} s: no such seat")
        overlaps = self._residency(turn.number)
        turn.best_overlap, turn.overlap = max(overlaps), overlaps[admission.seat]
        turn.dispatched_ps, turn.worker, turn.running.priority = now, admission.seat, admission.priority
        turn.request = SimRequest(
            turn.number,
            turn.plan.chain,
            turn.plan.prompt_tokens,
            turn.plan.output_tokens,
            priority=admission.priority,
            owner=turn.running.program.name,
        )
        self._ranks[admission.seat].submit(turn.request, now)
        self._look_again(admission.seat)

    def _is_there(self, seat: int) -> bool:
        return 0 <= seat < len(self._ranks)

    def _ready_turn(self, number: int) -> OpenTurn:
        turn = self._open.get(number)
        if turn is None or turn.request is not None:
            raise PolicyError(f"turn {number} at {to_s(self._queue.now)} s: it is not ready")
        return turn

    def _refuse(self, refusal: Refusal) -> None:
        """The turn's program is over, without having finished."""
        turn = self._ready_turn(refusal.turn)
        del self._open[refusal.turn]
        self.result.refused += 1
        self._leave(turn.running)

    def _pin(self, pin: Pin) -> None:
        now = self._queue.now
        until = None if math.isinf(pin.until) else to_ps(pin.until)
        running = self._alive.get(pin.program)
        if running is None or running.next_turn == 0 or (until is not None and until <= now):
            return
        done = running.program.turns[running.next_turn - 1]
        tokens = done.prompt_tokens + done.output_tokens - 1
        rank = self._ranks[pin.seat]
        rank.pin(pin.program, done.chain, tokens, now, priority=running.priority, until_ps=until)
        self._pinned[pin.program, pin.seat] = until
        if until is not None:
            self._queue.put(until, Event("unpin", running, pin.seat), HAPPENING)
        self._look_again(pin.seat)

    def _unpin(self, program: str, seat: int) -> None:
        if (program, seat) in self._pinned:
            del self._pinned[program, seat]
            self._ranks[seat].unpin(program, self._queue.now)
            self._look_again(seat)

    def _lease(self, change: LeaseChange) -> None:
        counts = self.result.leases
        counts[change.state] = counts.get(change.state, 0) + 1

    def _look_again(self, number: int) -> None:
        """The rank's queue or memory changed: it may begin, or end what it does earlier."""
        rank = self._ranks[number]
        if rank.idle:
            self._queue.put(self._queue.now, Event("start", rank=number), _START)
        else:
            self._watch(number)

    def _watch(self, number: int) -> None:
        due = self._ranks[number].due_ps
        if due is not None:
            self._queue.put(due, Event("end", rank=number), _END)

    def _end(self, number: int) -> None:
        now = self._queue.now
        outcome = self._ranks[number].finish(now)
        self._queue.put(now, Event("start", rank=number), _START)
        self._first_tokens(outcome.first_tokens)
        for request in outcome.finished:
            self._finished(self._open.pop(request.number), request)

    def _first_tokens(self, requests: Sequence[SimRequest]) -> None:
        for request in requests:
            self._act(self.policy.first_token(to_s(self._queue.now), request.number))

    def _finished(self, turn: OpenTurn, request: SimRequest) -> None:
        now = self._queue.now
        running, plan = turn.running, turn.plan
        assert turn.dispatched_ps is not None
        assert request.admitted_ps is not None
        assert request.first_token_ps is not None
        running.queued_ps += request.admitted_ps - turn.ready_ps
        cached = request.cached_tokens or 0
        self.result.turns.append(
            TurnRow(
                program=running.program.name,
                index=turn.index,
                worker=turn.worker,
                prompt_tokens=plan.prompt_tokens,
                cached_tokens=cached,
                reused_tokens=request.reused_tokens,
                output_tokens=plan.output_tokens,
                new_tokens=plan.new_tokens,
                preemptions=request.preemptions,
                ready_s=to_s(turn.ready_ps),
                dispatched_s=to_s(turn.dispatched_ps),
                scheduled_s=to_s(request.admitted_ps),
                first_token_s=to_s(request.first_token_ps),
                finished_s=to_s(now),
                overlap_blocks=turn.overlap,
                best_overlap_blocks=turn.best_overlap,
            )
        )
        final = self._is_final(turn)
        self._turn_over(turn, self._usage(turn, cached, final=final))
        self._go_on(turn, final=final)

    def _is_final(self, turn: OpenTurn) -> bool:
        return turn.running.next_turn == len(turn.running.program.turns)

    def _go_on(self, turn: OpenTurn, *, final: bool) -> None:
        """What follows a turn that finished."""
        now, running, plan = self._queue.now, turn.running, turn.plan
        if final:
            self._over(running)
            return
        running.waits_for = 1 + len(plan.children)
        for child in plan.children:
            self._plan(child, now, running)
        self._queue.put(now + to_ps(plan.gap_s), Event("tool", running), HAPPENING)

    def _turn_over(self, turn: OpenTurn, usage: TurnUsage) -> None:
        """The policy hears of it."""
        del turn
        self._act(self.policy.turn_finished(to_s(self._queue.now), usage))

    def _usage(self, turn: OpenTurn, cached: int, *, final: bool) -> TurnUsage:
        """What the policy is told of a turn that found ``cached`` tokens."""
        plan = turn.plan
        return TurnUsage(
            turn=turn.number,
            program=turn.running.program.name,
            seat=turn.worker,
            prompt_tokens=plan.prompt_tokens,
            cached_tokens=cached if self.config.report_cached else None,
            output_tokens=plan.output_tokens,
            tool=plan.tool,
            final=final,
            spawned=tuple(child.name for child in plan.children),
        )

    def _over(self, running: Running) -> None:
        now = self._queue.now
        program = running.program
        root = running.parent is None and not program.single
        self.result.programs.append(
            ProgramRow(
                program=program.name,
                label=program.label,
                root=root,
                turns=len(program.turns),
                started_s=to_s(running.started_ps),
                finished_s=to_s(now),
                queued_s=to_s(running.queued_ps),
            )
        )
        self._leave(running)

    def _leave(self, running: Running) -> None:
        now = self._queue.now
        del self._alive[running.program.name]
        if running.parent is not None:
            self._gap_over(running.parent)
            return
        self._unfinished -= 1
        if self._waiting and not running.program.single:
            self._plan(self._waiting.popleft(), now)


def simulate(programs: Sequence[Program], policy: Policy, config: SimConfig) -> Result:
    """Run ``programs`` under ``policy``. Equal arguments give equal results.

    Raises `PolicyError`, and `load.sim.engine.TooLargeError` for a turn that no worker can ever hold.
    """
    return Simulation(programs, policy, config).run()


def alone(programs: Sequence[Program], config: SimConfig) -> dict[str, float]:
    """JCT in seconds of each program alone on one idle worker, by name."""
    single = SimConfig(
        timing=config.timing,
        kv_tokens=config.kv_tokens,
        block_size=config.block_size,
        token_budget=config.token_budget,
        max_num_seqs=config.max_num_seqs,
    )
    jct = {}
    for program in programs:
        result = simulate([Program(program.name, program.label, 0.0, program.turns)], RoundRobin(), single)
        jct[program.name] = result.roots[0].jct_s
    return jct
