"""A simulation of recorded requests: each goes when what it waits for has happened, whatever its session does else.

A program of `load.sim.run` is one turn after another with children in between; here turns of a program may overlap,
sub-agents run beside their parent, and any request may wait for any others of its play. All else is the same loop:
policy, ranks, caches, times. A request that cannot be served (no worker can ever hold it, the policy refuses it) has no
end: who waits for that is skipped, with all that wait for those in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from load.sim.clock import to_s
from load.sim.hinted import HintedSimulation
from load.sim.hinting import Arm, make_hinter
from load.sim.recorded import Recording
from load.sim.requests import SimRequest
from load.sim.results import Result
from load.sim.run import HAPPENING, Event, OpenTurn, Running, SimConfig, Simulation
from services.admission.estimators.reload_cost import H100_8B, ReloadCost
from services.admission.scheduling.interface import Policy, ProgramFacts, Refusal


@dataclass(eq=False)
class PlayedSimulation(Simulation):
    """``programs`` are those of ``recording``. ``lanes``: so many plays at a time, each from its own beginning on, when
    an earlier one is over; ``None``: each when it began. `Result.refused` counts requests, ``skipped`` those that were
    never sent for it; `Result.programs` stays empty."""

    recording: Recording = field(default_factory=lambda: Recording((), (), (), 1))
    lanes: int | None = None
    skipped: int = 0
    _followers: list[dict[str, list[tuple[int, int]]]] = field(default_factory=list)
    """Of each node, by trigger: who waits for it, and how long after it."""
    _left: list[int] = field(default_factory=list)
    _due_ps: list[int] = field(default_factory=list)
    _settled: list[bool] = field(default_factory=list)
    _zero_ps: list[int] = field(default_factory=list)
    _turns_left: list[int] = field(default_factory=list)
    _nodes_left: list[int] = field(default_factory=list)
    _began_ps: dict[int, int] = field(default_factory=dict)
    _running: dict[int, Running] = field(default_factory=dict)
    _node_of: dict[int, int] = field(default_factory=dict)
    _next_play: int = 0

    def _begin(self) -> None:
        nodes, plays = self.recording.nodes, self.recording.plays
        self._unfinished = len(nodes)
        self._left = [len(node.waits) for node in nodes]
        self._due_ps = [0] * len(nodes)
        self._settled = [False] * len(nodes)
        self._zero_ps = [0] * len(plays)
        self._turns_left = [len(program.turns) for program in self.programs]
        self._nodes_left = [len(play) for play in plays]
        self._followers = [{"dispatch": [], "completion": []} for _ in nodes]
        for number, node in enumerate(nodes):
            for wait in node.waits:
                self._followers[wait.number][wait.trigger].append((number, wait.delay_ps))
        for _ in range(len(plays) if self.lanes is None else min(self.lanes, len(plays))):
            self._begin_play()

    def _begin_play(self) -> None:
        number = self._next_play
        self._next_play += 1
        free = [each for each in self.recording.plays[number] if not self._left[each]]
        if self.lanes is not None:
            self._zero_ps[number] = self._queue.now - min(self.recording.nodes[each].not_before_ps for each in free)
        for each in free:
            self._plan_node(each)

    def _plan_node(self, number: int) -> None:
        """Nobody is waited for any more."""
        node = self.recording.nodes[number]
        due_ps = max(self._queue.now, self._due_ps[number], self._zero_ps[node.play] + node.not_before_ps)
        self._queue.put(due_ps, Event("node", turn=number), HAPPENING)

    def _fire(self, number: int, trigger: str) -> None:
        now = self._queue.now
        for follower, delay_ps in self._followers[number][trigger]:
            self._left[follower] -= 1
            self._due_ps[follower] = max(self._due_ps[follower], now + delay_ps)
            if not self._left[follower] and not self._settled[follower]:
                self._plan_node(follower)

    def _happen(self, event: Event) -> None:
        if event.kind == "node":
            self._last_ps = self._queue.now
            self._go(event.turn)
        elif event.kind == "closed" and event.running is not None:
            name = event.running.program.name
            del self._alive[name]
            self._act(self.policy.program_closed(to_s(self._queue.now), name))
        else:
            super()._happen(event)

    def _go(self, number: int) -> None:
        """The request's client sends it."""
        now, node = self._queue.now, self.recording.nodes[number]
        self._began_ps.setdefault(node.play, now)
        running = self._running.get(node.program)
        if running is None:
            running = self._running[node.program] = Running(self.programs[node.program], now)
            self._arrive(running, node.play)
        plan = running.program.turns[node.turn]
        turn = OpenTurn(self._turns, running, node.turn, plan, now)
        self._turns += 1
        self._fire(number, "dispatch")
        if plan.prompt_tokens + plan.output_tokens - 1 > max(rank.config.kv_tokens for rank in self._ranks):
            self._fail(number)
            return
        self._open[turn.number] = turn
        self._node_of[turn.number] = number
        self._ready(turn)

    def _arrive(self, running: Running, play: int) -> None:
        program = running.program
        self._alive[program.name] = running
        arrival = None if program.parent is None else to_s(self._began_ps[play])
        facts = ProgramFacts(program.name, program.label, program.parent, arrival=arrival, single=program.single)
        self.policy.program_arrives(to_s(self._queue.now), facts)

    def _finished(self, turn: OpenTurn, request: SimRequest) -> None:
        turn.running.next_turn = turn.index + 1  # what it left is what a pin keeps
        super()._finished(turn, request)

    def _is_final(self, turn: OpenTurn) -> bool:
        return self._turns_left[self.recording.nodes[self._node_of[turn.number]].program] == 1

    def _go_on(self, turn: OpenTurn, *, final: bool) -> None:
        number = self._node_of.pop(turn.number)
        self._fire(number, "completion")
        self._settle(number)
        if final:
            del self._alive[turn.running.program.name]

    def _refuse(self, refusal: Refusal) -> None:
        self._ready_turn(refusal.turn)
        del self._open[refusal.turn]
        self._fail(self._node_of.pop(refusal.turn))

    def _fail(self, number: int) -> None:
        """The request was sent, and has no end."""
        self.result.refused += 1
        self._settle(number)
        self._close_if_over(number)
        gone = [follower for follower, _ in self._followers[number]["completion"]]
        while gone:
            number = gone.pop()
            if not self._settled[number]:
                self.skipped += 1
                self._settle(number)
                self._close_if_over(number)
                gone += [follower for followers in self._followers[number].values() for follower, _ in followers]

    def _settle(self, number: int) -> None:
        """Nothing more comes of the node; a lane that its play held is free when it was the last."""
        node = self.recording.nodes[number]
        self._settled[number] = True
        self._unfinished -= 1
        self._turns_left[node.program] -= 1
        self._nodes_left[node.play] -= 1
        if not self._nodes_left[node.play] and self.lanes is not None and self._next_play < len(self.recording.plays):
            self._begin_play()

    def _close_if_over(self, number: int) -> None:
        """Its program, if no turn is left that would tell the policy."""
        program = self.recording.nodes[number].program
        running = self._running.get(program)
        if running is not None and not self._turns_left[program]:
            self._queue.put(self._queue.now, Event("closed", running), HAPPENING)


@dataclass(eq=False)
class HintedPlayedSimulation(PlayedSimulation, HintedSimulation):
    """The same while somebody tells caches what to keep."""


def played(
    recording: Recording,
    policy: Policy,
    config: SimConfig,
    lanes: int | None = None,
    arm: Arm = "none",
    reload_cost: ReloadCost = H100_8B,
) -> tuple[Result, int]:
    """The result, and how many requests were never sent. ``arm``: who gives hints; ``reload_cost``: what the plug-in
    believes. Equal arguments give equal results. Raises `load.sim.run.PolicyError`."""
    simulation: PlayedSimulation
    if arm == "none":
        simulation = PlayedSimulation(recording.programs, policy, config, recording=recording, lanes=lanes)
    else:
        hinter = make_hinter(arm, reload_cost)
        if hinter.rules is not None:
            config = replace(config, rules=hinter.rules)
        simulation = HintedPlayedSimulation(
            recording.programs, policy, config, recording=recording, lanes=lanes, hinter=hinter, arm=arm
        )
    return simulation.run(), simulation.skipped


def node_rows(recording: Recording, result: Result) -> dict[int, int]:
    """Place in `Result.turns` by node, of those that finished."""
    names: Sequence[str] = [program.name for program in recording.programs]
    places = {(row.program, row.index): place for place, row in enumerate(result.turns)}
    found = {}
    for number, node in enumerate(recording.nodes):
        place = places.get((names[node.program], node.turn))
        if place is not None:
            found[number] = place
    return found
