"""What a policy must implement, and three that only choose a place: round robin, least load, and ``kv``.

A policy is told of everything a router would learn, when it would learn it, and answers with admissions: which turn
that is ready goes to which worker now. A turn that it does not admit waits until a later call admits it. It must not
learn anything else: how long a tool will take, or how many turns there will be, are not among the facts (a clairvoyant
bound is given the programs when it is made).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from schemas.index import TierBlocks
from services.admission.cost import CostWeights, Load, Prompt, cost, predicted_cached_tokens


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """What arrives with a program's first request: its name and label, its parent's name when it is a sub-agent."""

    name: str
    label: str
    parent: str | None


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """A request that is ready to run. ``turn`` identifies it; ``index`` counts the program's turns from 0."""

    turn: int
    program: str
    index: int
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TurnUsage:
    """What the engine reported of a finished turn, and what the program does next.

    ``tool``: what it calls (``None``: nothing). ``final``: it was the program's last turn. ``spawned``: names of the
    sub-agents that it waits for from now on.
    """

    turn: int
    program: str
    worker: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    tool: str | None
    final: bool
    spawned: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Admission:
    """``turn`` goes to ``worker`` now. ``priority``: lower runs earlier, where engines have priorities."""

    turn: int
    worker: int
    priority: int = 0


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """One worker's sizes, as its engine reports them."""

    kv_tokens: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers, by number from 0. ``residency(turn)``: blocks of the prompt of a turn that is ready which each
    worker holds as a prefix, exactly (what a synced index answers)."""

    workers: tuple[WorkerFacts, ...]
    residency: Callable[[int], Sequence[int]]


class Policy(Protocol):
    """What a policy implements; `Base` has the empty answers. ``now`` is in seconds of virtual time.

    Calls at one time come in the order in which things happened. ``tick`` comes every ``tick_s`` seconds while anything
    is unfinished (never, when that is ``None``). Admitting a turn twice, or one that is not ready, is an error.
    """

    @property
    def tick_s(self) -> float | None: ...
    def begin(self, fleet: Fleet) -> None: ...
    def program_arrives(self, now: float, program: ProgramFacts) -> None: ...
    def turn_ready(self, now: float, turn: TurnFacts) -> Sequence[Admission]: ...
    def first_token(self, now: float, turn: int) -> Sequence[Admission]: ...
    def turn_finished(self, now: float, usage: TurnUsage) -> Sequence[Admission]: ...
    def tick(self, now: float) -> Sequence[Admission]: ...


class Base:
    """Empty answers to everything, for policies to override."""

    tick_s: float | None = None

    def begin(self, fleet: Fleet) -> None:
        self.fleet = fleet

    def program_arrives(self, now: float, program: ProgramFacts) -> None:
        del now, program

    def turn_ready(self, now: float, turn: TurnFacts) -> Sequence[Admission]:
        raise NotImplementedError

    def first_token(self, now: float, turn: int) -> Sequence[Admission]:
        del now, turn
        return ()

    def turn_finished(self, now: float, usage: TurnUsage) -> Sequence[Admission]:
        del now, usage
        return ()

    def tick(self, now: float) -> Sequence[Admission]:
        del now
        return ()


class RoundRobin(Base):
    """Every request goes to the next worker, at once."""

    def begin(self, fleet: Fleet) -> None:
        super().begin(fleet)
        self._next = 0

    def turn_ready(self, now: float, turn: TurnFacts) -> Sequence[Admission]:
        worker = self._next
        self._next = (worker + 1) % len(self.fleet.workers)
        return (Admission(turn.turn, worker),)


class LeastLoad(Base):
    """The worker with the fewest open requests, at once; of equal ones the next in turn."""

    def begin(self, fleet: Fleet) -> None:
        super().begin(fleet)
        self._open = [0] * len(fleet.workers)
        self._next = 0

    def turn_ready(self, now: float, turn: TurnFacts) -> Sequence[Admission]:
        count = len(self._open)
        worker = min(range(count), key=lambda number: (self._open[number], (number - self._next) % count))
        self._next = (worker + 1) % count
        self._open[worker] += 1
        return (Admission(turn.turn, worker),)

    def turn_finished(self, now: float, usage: TurnUsage) -> Sequence[Admission]:
        self._open[usage.worker] -= 1
        return ()


class Kv(Base):
    """Admission's policy ``kv``: the least cost of `services.admission.cost`, with exact residency, at once.

    What it books per worker is what admission books: requests, prompt tokens until the first token, blocks until the
    end. Equal costs are drawn from a seeded generator. Without admission's preference for a session's previous worker.
    """

    def __init__(self, weights: CostWeights | None = None, seed: int = 0) -> None:
        self._weights = weights or CostWeights()
        self._seed = seed

    def begin(self, fleet: Fleet) -> None:
        super().begin(fleet)
        count = len(fleet.workers)
        self._random = random.Random(self._seed)
        self._requests = [0] * count
        self._prefill = [0] * count
        self._blocks = [0] * count
        self._booked: dict[int, tuple[int, int, int]] = {}

    def turn_ready(self, now: float, turn: TurnFacts) -> Sequence[Admission]:
        reach = self.fleet.residency(turn.turn)
        least = min(self._prefill)
        costs = [
            cost(
                self._weights,
                Prompt(turn.prompt_tokens, worker.block_size),
                Load(self._requests[number], self._prefill[number], self._blocks[number]),
                blocks=TierBlocks(device=reach[number]),
                least_prefill_tokens=least,
            )[0]
            for number, worker in enumerate(self.fleet.workers)
        ]
        best = min(costs)
        tied = [number for number, value in enumerate(costs) if value <= best + 1e-9]
        worker = tied[0] if len(tied) == 1 else tied[self._random.randrange(len(tied))]
        size = self.fleet.workers[worker].block_size
        cached = predicted_cached_tokens(reach[worker], turn.prompt_tokens, size)
        booked = (worker, turn.prompt_tokens - cached, turn.prompt_tokens // size)
        self._booked[turn.turn] = booked
        self._requests[worker] += 1
        self._prefill[worker] += booked[1]
        self._blocks[worker] += booked[2]
        return (Admission(turn.turn, worker),)

    def first_token(self, now: float, turn: int) -> Sequence[Admission]:
        worker, prefill, blocks = self._booked[turn]
        self._prefill[worker] -= prefill
        self._booked[turn] = (worker, 0, blocks)
        return ()

    def turn_finished(self, now: float, usage: TurnUsage) -> Sequence[Admission]:
        worker, prefill, blocks = self._booked.pop(usage.turn)
        self._requests[worker] -= 1
        self._prefill[worker] -= prefill
        self._blocks[worker] -= blocks
        return ()


PLACEMENTS: dict[str, Callable[[], Policy]] = {"round_robin": RoundRobin, "least_load": LeastLoad, "kv": Kv}
"""Policies that hold nothing back, by name."""
