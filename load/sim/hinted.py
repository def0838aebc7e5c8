"""A simulation in which somebody tells caches what to keep (`load.sim.hinting`), and they do it (`load.sim.actions`).

A hint takes a while to arrive; one that arrives after its time is not carried out. Hints are soft: without them, or
where no engine understands them, every turn runs all the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from load.sim.actions import Answer, CacheActions, Command
from load.sim.clock import to_ps, to_s
from load.sim.hinting import Arm, Hinter, make_hinter
from load.sim.programs import Program
from load.sim.requests import SimRequest
from load.sim.results import Result
from load.sim.run import HAPPENING, STALLED_S, TICK, Event, OpenTurn, SimConfig, Simulation
from services.admission.estimators.reload_cost import H100_8B, ReloadCost
from services.admission.scheduling.interface import Admission, LeaseChange, Policy, TurnUsage

PIN, PREFERENCE = "pin", "preference"
LASTING: dict[str, str] = {"pin": PIN, "retain": PREFERENCE, "demote": PREFERENCE}
"""Actions that go on for a while; of those of one kind the last counts."""

EXPIRED = Answer("rejected", "expired")
UNSUPPORTED = Answer("unsupported", "unknown_action")


@dataclass(eq=False)
class HintedSimulation(Simulation):
    """``hinter`` says what is asked for, ``arm`` what becomes of it."""

    hinter: Hinter = field(default_factory=Hinter)
    arm: Arm = "none"
    _held: dict[tuple[int, str, str], Command] = field(default_factory=dict)
    """Pins and preferences that end by themselves: the last of each rank, action and program."""

    def _prepare(self) -> None:
        self._actions = CacheActions(self._ranks)
        config = self.config
        self.hinter.begin(self._ranks, has_disk=config.disk_tokens > 0, has_pool=config.pool_tokens > 0)
        self._plan_hint_tick()

    def _plan_hint_tick(self) -> None:
        if self.hinter.tick_s is not None:
            self._queue.put(self._queue.now + to_ps(self.hinter.tick_s), Event("hint_tick"), TICK)

    # What the hinter hears

    def _ready(self, turn: OpenTurn) -> None:
        self._send(self.hinter.turn_ready(to_s(self._queue.now), turn))
        super()._ready(turn)

    def _admit(self, admission: Admission) -> None:
        now = to_s(self._queue.now)
        turn = self._open.get(admission.turn)
        if turn is not None:
            priority = self.hinter.priority(now, turn, admission.seat)
            admission = admission if priority is None else replace(admission, priority=priority)
        super()._admit(admission)
        if turn is not None:
            self._send(self.hinter.turn_placed(now, turn))

    def _first_tokens(self, requests: Sequence[SimRequest]) -> None:
        super()._first_tokens(requests)
        for request in requests:
            turn = self._open.get(request.number)
            if turn is not None:
                self.hinter.first_token(to_s(self._queue.now), turn)

    def _turn_over(self, turn: OpenTurn, usage: TurnUsage) -> None:
        self._send(self.hinter.turn_over(to_s(self._queue.now), turn, usage))
        super()._turn_over(turn, usage)

    def _lease(self, change: LeaseChange) -> None:
        super()._lease(change)
        running = self._alive.get(change.program)
        if running is not None:
            self._send(self.hinter.lease_changed(to_s(self._queue.now), change, running))

    # What becomes of hints

    def _send(self, commands: Iterable[Command]) -> None:
        for command in commands:
            if self.arm == "lost":
                self.result.hints[f"{command.asked.action_type}.lost"] += 1
            elif self.hinter.delay_s:
                at = self._queue.now + to_ps(self.hinter.delay_s)
                self._queue.put(at, Event("hint", command=command), HAPPENING)
            else:
                self._carry_out(command)

    def _happen(self, event: Event) -> None:
        now = self._queue.now
        if event.kind == "hint_tick":
            self._send(self.hinter.tick(to_s(now)))
            if now - self._last_ps < to_ps(STALLED_S):
                self._plan_hint_tick()
        elif event.kind == "hint" and event.command is not None:
            self._carry_out(event.command)
        elif event.kind == "hint_over" and event.command is not None:
            command = event.command
            if self._held.get(_key(command)) is command:
                del self._held[_key(command)]
                self._actions.end(command.rank, command.asked, now)
                self._look_again(command.rank)
        else:
            super()._happen(event)

    def _carry_out(self, command: Command) -> None:
        now, asked = self._queue.now, command.asked
        if self.arm == "unsupported":
            answer = UNSUPPORTED
        elif command.expires_ps is not None and now > command.expires_ps:
            answer = EXPIRED
        else:
            answer = self._actions.carry_out(command.rank, asked, now)
            self._arrange(command, answer)
            for number in dict.fromkeys((command.rank, asked.source)):
                if number is not None:
                    self._told_of_copies(number)
        self.result.hints[f"{asked.action_type}.{answer.outcome}"] += 1
        self._send(self.hinter.answered(to_s(now), command, answer))

    def _arrange(self, command: Command, answer: Answer) -> None:
        """What ends by itself ends then; what was taken back, or took its place, does not."""
        asked = command.asked
        if asked.action_type == "dereference":
            kinds = (PIN,) if asked.reason in ("unpinned", "superseded") else (PIN, PREFERENCE)
            for kind in kinds:
                self._held.pop((command.rank, kind, asked.owner), None)
        elif asked.action_type in LASTING and answer.outcome in ("accepted", "clipped"):
            if asked.action_type == "demote":
                self._held.pop((command.rank, PIN, asked.owner), None)
            self._held[_key(command)] = command
            if asked.ttl_ps is not None:
                self._queue.put(self._queue.now + asked.ttl_ps, Event("hint_over", command=command), HAPPENING)

    def _told_of_copies(self, number: int) -> None:
        for due in self._ranks[number].take_loads():
            self._queue.put(due, Event("loaded", rank=number), HAPPENING)
        self._look_again(number)


def _key(command: Command) -> tuple[int, str, str]:
    return command.rank, LASTING[command.asked.action_type], command.asked.owner


def hinted(
    programs: Sequence[Program],
    policy: Policy,
    config: SimConfig,
    arm: Arm,
    reload_cost: ReloadCost = H100_8B,
) -> Result:
    """As `load.sim.run.simulate`, with hints by ``arm``. ``reload_cost``: what the plug-in believes."""
    hinter = make_hinter(arm, reload_cost)
    if hinter.rules is not None:
        config = replace(config, rules=hinter.rules)
    return HintedSimulation(programs, policy, config, hinter=hinter, arm=arm).run()
