"""Agents and engines around one scheduling policy, in virtual time: what `load.bench.admission` measures a policy with.

A constant number of programs is alive: one that ends makes room for another. A turn that runs takes its time, whatever
else runs beside it; nothing here schedules, evicts or computes, so that all of the time is the policy's.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from services.admission.estimators.class_key import class_key
from services.admission.estimators.learned_pool import LearnedPool
from services.admission.scheduling.interface import (
    Action,
    Admission,
    Fleet,
    Policy,
    ProgramFacts,
    TurnFacts,
    TurnUsage,
    WorkerFacts,
)

BLOCK_SIZE = 16
FIRST_PROMPT, GROWTH, OUTPUT = 8_000, 5_000, 250
TURNS = 12
FINAL_CONTEXT = FIRST_PROMPT + (TURNS - 1) * (GROWTH + OUTPUT)
"""About what a program ends with, in tokens."""

RUNS_S = 10.0
TOOLS = {"read": 0.5, "test": 20.0, "search": 4.0}
"""Median seconds of each tool."""

LABELS = ("coder", "reviewer", "searcher", "")
SHARED_BLOCKS = 64
"""Of every prompt on every seat: the system prompt."""

ABORTED = 0.01
"""Share of turns that end without usage."""

EventKind = Literal["turn_ready", "first_token", "turn_finished", "turn_aborted", "tick"]


@dataclass(eq=False, slots=True)
class _Agent:
    """A program. ``left``: turns to come; ``index``: of the next one; ``prompt``: of that, in tokens."""

    name: str
    left: int
    prompt: int
    index: int = 0
    seat: int | None = None


def experienced(programs: int = 400) -> LearnedPool:
    """What a policy has learned of such programs before anybody measures it: full windows, and tools that are known."""
    learned, source = LearnedPool(), random.Random(7)
    for number in range(programs):
        key = class_key(agent_type=LABELS[number % len(LABELS)], is_sub_agent=False, model="model")
        prompt = FIRST_PROMPT
        for _ in range(max(1, round(source.gauss(TURNS, 3)))):
            learned.turn_finished(number, key, prompt_tokens=prompt, output_tokens=OUTPUT)
            prompt += OUTPUT + round(source.expovariate(1 / GROWTH)) + 1
            tool = source.choice(list(TOOLS))
            learned.tool_returned(tool, source.lognormvariate(0.0, 1.0) * TOOLS[tool])
        learned.program_finished(number)
    return learned


class Clients:
    """``programs`` that are alive at a time, before ``seats`` with ``kv_tokens`` each.

    ``decide`` makes each call to the policy, and may measure it; ``seed`` is of all chance.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        programs: int,
        seats: int,
        kv_tokens: int,
        decide: Callable[[EventKind, Callable[[], Sequence[Action]]], Sequence[Action]],
        seed: int = 1,
    ) -> None:
        self.now = 0.0
        self.held: dict[int, _Agent] = {}
        self.running: dict[int, _Agent] = {}
        self._policy = policy
        self._decide = decide
        self._random = random.Random(seed)
        self._seats = seats
        self._events: list[tuple[float, int, EventKind, int]] = []
        self._agents: dict[int, _Agent] = {}
        self._prompts: dict[int, int] = {}
        self._count = 0
        facts = WorkerFacts(kv_tokens, BLOCK_SIZE)
        policy.begin(Fleet((facts,) * seats, self._residency))
        for _ in range(programs):
            self._arrive(self._random.randrange(TURNS))
        self._plan(1.0, "tick", 0)

    def step(self) -> EventKind:
        """The next event."""
        self.now, _, kind, number = heapq.heappop(self._events)
        if kind == "tick":
            self._plan(1.0, "tick", 0)
            self._act(self._decide(kind, lambda: self._policy.tick(self.now)))
        elif kind == "turn_ready":
            self._ready(self._agents.pop(number))
        elif kind == "first_token":
            self._act(self._decide(kind, lambda: self._policy.first_token(self.now, number)))
        elif kind == "turn_aborted":
            agent = self.running.pop(number)
            self._prompts.pop(number)
            self._act(self._decide(kind, lambda: self._policy.turn_aborted(self.now, number)))
            self._later(agent, 1.0)
        else:
            self._finish(number)
        return kind

    def _plan(self, delay: float, kind: EventKind, number: int) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay, self._count, kind, number))

    def _later(self, agent: _Agent, delay: float) -> None:
        self._count += 1
        self._agents[self._count] = agent
        self._plan(delay, "turn_ready", self._count)

    def _arrive(self, had: int = 0) -> None:
        """A program; it comes with the context, and has what is left, of one that ``had`` so many turns: so that those
        of the beginning do not end all at once."""
        self._count += 1
        left = max(1, round(self._random.gauss(TURNS, 3)) - had)
        agent = _Agent(f"program-{self._count}", left, FIRST_PROMPT + had * (GROWTH + OUTPUT))
        label = self._random.choice(LABELS)
        self._policy.program_arrives(self.now, ProgramFacts(agent.name, label, None, "model"))
        self._later(agent, self._random.uniform(0, RUNS_S))

    def _ready(self, agent: _Agent) -> None:
        self._count += 1
        number = self._count
        self.held[number], self._prompts[number] = agent, agent.prompt
        facts = TurnFacts(number, agent.name, agent.index, agent.prompt)
        self._act(self._decide("turn_ready", lambda: self._policy.turn_ready(self.now, facts)))

    def _finish(self, number: int) -> None:
        agent = self.running.pop(number)
        prompt = self._prompts.pop(number)
        agent.index, agent.left = agent.index + 1, agent.left - 1
        agent.prompt = prompt + OUTPUT + round(self._random.expovariate(1 / GROWTH)) + 1
        final = agent.left == 0
        tool = self._random.choice(list(TOOLS))
        assert agent.seat is not None
        usage = TurnUsage(number, agent.name, agent.seat, prompt, prompt * 9 // 10, OUTPUT, tool, final)
        self._act(self._decide("turn_finished", lambda: self._policy.turn_finished(self.now, usage)))
        if final:
            self._arrive()
        else:
            self._later(agent, self._random.lognormvariate(0.0, 1.0) * TOOLS[tool])

    def _act(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Admission):
                agent = self.running[action.turn] = self.held.pop(action.turn)
                agent.seat = action.seat
                took = self._random.expovariate(1 / RUNS_S)
                self._plan(took / 10, "first_token", action.turn)
                aborted = self._random.random() < ABORTED
                self._plan(took, "turn_aborted" if aborted else "turn_finished", action.turn)

    def _residency(self, turn: int) -> list[int]:
        blocks = [SHARED_BLOCKS] * self._seats
        agent = self.held.get(turn)
        if agent is not None and agent.seat is not None:
            blocks[agent.seat] = max(SHARED_BLOCKS, (agent.prompt - GROWTH) // BLOCK_SIZE)
        return blocks
