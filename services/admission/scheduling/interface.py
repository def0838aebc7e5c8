"""What a scheduling policy implements: it is told what a router learns, when it learns it, and answers with actions.

A policy must not learn anything else: how long a tool will take, or how many turns there will be, are not among the
facts. A turn that it does not admit waits until a later answer admits or refuses it.

A seat is one rank of one worker, as a number; whoever drives the policy gives the numbers. ``now`` is in seconds and
never goes back. Randomness comes from a seeded generator that the policy is made with. One policy serves one pool: the
seats that serve one model.

Facts may be late, lost, or told twice. What concerns a turn or a program that is not known (any more) is nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class ProgramFacts:
    """What arrives with a program's first request.

    ``label``: what the client says it is (agent type), empty where it says nothing. ``parent``: the program that
    started it, where it is a sub-agent. ``arrival``: when its root arrived, where that is known to be earlier
    (seconds). ``single``: one request without a session, which ends the program.
    """

    name: str
    label: str
    parent: str | None
    model: str = ""
    arrival: float | None = None
    single: bool = False


@dataclass(frozen=True, slots=True)
class TurnFacts:
    """A request that is ready to run. ``turn`` identifies it, once; ``index`` counts the program's turns from 0.

    ``max_output_tokens``, ``expected_output_tokens``: what the client allows, and expects, where it says so.
    ``seat_bias``: what route policies on the bus say of seats: blocks added to a seat's placement cost, by seat
    (negative: preferred). ``order_bias_s``: what admit policies say of its turn in the queue: seconds added to its
    program's arrival (negative: earlier). ``held_s``: how long it was held already by somebody else, who let it run
    (`Policy.turn_runs`): no time of its program's tool.
    """

    turn: int
    program: str
    index: int
    prompt_tokens: int
    max_output_tokens: int | None = None
    seat_bias: Mapping[int, float] = field(default_factory=dict)
    order_bias_s: float = 0.0
    held_s: float = 0.0
    expected_output_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TurnUsage:
    """What the engine reported of a finished turn, and what the program does next.

    ``cached_tokens``: ``None`` where the engine does not say. ``tool``: what it calls (``None``: nothing, so that a
    person is next, or nobody). ``final``: it was the program's last turn. ``spawned``: names of the sub-agents that it
    waits for from now on, where they are known.
    """

    turn: int
    program: str
    seat: int
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    tool: str | None
    final: bool
    spawned: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """The sizes of one seat, as its engine reports them, in tokens.

    ``host_tokens``: of a tier below the device. ``foreign_tokens``: KV in use that no turn told to the policy accounts
    for (another router's load, requests sent past us); what is left for programs is ``kv_tokens - foreign_tokens``.
    """

    kv_tokens: int
    block_size: int
    host_tokens: int = 0
    foreign_tokens: int = 0


def no_shared_pool(turn: int) -> Sequence[float] | None:
    """`Fleet.loadable` where no seat reads a shared pool."""
    del turn
    return None


@dataclass(frozen=True, slots=True)
class Fleet:
    """The seats at the beginning, by number from 0; `Policy.worker_changed` tells of every change.

    ``residency(turn)``: blocks of the prompt of a turn that is ready which each seat holds as a prefix, by seat (what a
    synced index answers); ``None``: the index is blind.
    ``loadable(turn)``: blocks of its prompt beyond that which each seat can load from the shared pool that it reads, by
    seat, each as much as it is sure; ``None``: nobody has one. They save prefill, but are no memory of the seat: what
    it holds and is charged for does not change by them (docs/adr/0015).
    """

    workers: tuple[WorkerFacts, ...]
    residency: Callable[[int], Sequence[int] | None]
    loadable: Callable[[int], Sequence[float] | None] = no_shared_pool


@dataclass(frozen=True, slots=True)
class Admission:
    """``turn`` goes to ``seat`` now. ``priority``: lower runs earlier, where engines have priorities."""

    turn: int
    seat: int
    priority: int = 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """``turn`` will never be admitted. ``reason``: ``oversize`` (no seat can hold it), ``no_seat``."""

    turn: int
    reason: str


LeaseState = Literal["leased", "released", "revoked", "expired"]


@dataclass(frozen=True, slots=True)
class LeaseChange:
    """The memory that an idle program holds at ``seat``: for whom to tell (bus, hints, reports).

    ``released``: given back by its owner, which returned or ended. ``numbers``: why, by name. ``until``: of one that is
    ``leased``, when it ends by itself (seconds), where the policy knows that.
    """

    program: str
    seat: int
    state: LeaseState
    numbers: Mapping[str, float] = field(default_factory=dict)
    until: float | None = None


@dataclass(frozen=True, slots=True)
class Pin:
    """The engine at ``seat`` is to keep the program's blocks until then (seconds), whatever else it needs room for.

    Only policies that act inside the engine ask for it. A newer one replaces an older one of the same program.
    """

    program: str
    seat: int
    until: float


@dataclass(frozen=True, slots=True)
class Unpin:
    """The engine at ``seat`` is free to evict the program's blocks again."""

    program: str
    seat: int


@dataclass(frozen=True, slots=True)
class PauseChange:
    """A program that ran before is put aside until the policy resumes it: for whom to tell, like `LeaseChange`.

    ``seat``: of one that is ``paused``, the one that it gives up; of one that is ``resumed``, where its next turn goes
    (``None``: it is not paused any more, and nobody knows).
    """

    program: str
    seat: int | None
    state: Literal["paused", "resumed"]


Action = Admission | Refusal | LeaseChange | PauseChange | Pin | Unpin
Actions = Sequence[Action]


class Policy(Protocol):
    """What a policy implements; `Base` has the empty answers.

    Calls at one time come in the order in which things happened. ``tick`` comes every ``tick_s`` seconds while anything
    is unfinished (never, when that is ``None``); it only prices anew, events admit. Admitting a turn twice, or one that
    is not ready, or to a seat that is not there, is an error of the policy.
    """

    @property
    def tick_s(self) -> float | None: ...

    @property
    def hold_limit_s(self) -> float | None:
        """Its own safety net, in seconds: who was held for so long is admitted next, ahead of all others. ``None``: it
        has none."""

    def begin(self, fleet: Fleet) -> None:
        """Once, before everything else."""

    def worker_changed(self, now: float, seat: int, facts: WorkerFacts | None) -> Actions:
        """A seat appeared, changed its sizes, or is gone (``None``). Turns that ran on one that is gone are over:
        `turn_aborted` comes for each, before or after."""

    def program_arrives(self, now: float, program: ProgramFacts) -> None:
        """Before the first turn of a program. Told twice: the first counts."""

    def turn_ready(self, now: float, turn: TurnFacts) -> Actions: ...

    def turn_runs(self, now: float, turn: TurnFacts, seat: int) -> Actions:
        """The turn runs there although the policy has not admitted it: another process did, or its sender chose by
        itself. What it takes is booked, and no `Admission` answers."""

    def first_token(self, now: float, turn: int) -> Actions: ...

    def turn_finished(self, now: float, usage: TurnUsage) -> Actions: ...

    def turn_aborted(self, now: float, turn: int) -> Actions:
        """The turn is over without usage, wherever it was: its client went away, its engine failed. All that it had
        booked is given back. Tried again it is another turn."""

    def program_closed(self, now: float, program: str) -> Actions:
        """The program is over: its client said so, or it was idle for too long. A final turn closes it by itself."""

    def tick(self, now: float) -> Actions: ...

    def tool_ended(self, now: float, program: str, tool: str, seconds: float) -> Actions:
        """A harness says that a call of its program took so long, before the program's next turn tells."""

    def lease_advice(self, now: float, program: str, keep: bool | None, until: float | None) -> Actions:
        """What somebody else says of the memory that an idle program holds. ``keep`` false: give it up now; true: no
        turn takes it away before ``until`` (seconds; the policy bounds how much is held in this way)."""

    def place(self, turn: int) -> int | None:
        """How many turns go before one that waits, in the policy's order; ``None``: it has no order, or does not say.
        Asked at most once per keep-alive of a turn: cheap, and it changes nothing."""

    def figures(self, seat: int) -> Mapping[str, float]:
        """What the policy goes by at this seat, by name, for whoever watches. Cheap, and it changes nothing."""


class Base:
    """Empty answers to everything, for policies to override."""

    tick_s: float | None = None
    hold_limit_s: float | None = None

    def begin(self, fleet: Fleet) -> None:
        self.fleet = fleet

    def worker_changed(self, now: float, seat: int, facts: WorkerFacts | None) -> Actions:
        del now, seat, facts
        return ()

    def program_arrives(self, now: float, program: ProgramFacts) -> None:
        del now, program

    def turn_ready(self, now: float, turn: TurnFacts) -> Actions:
        raise NotImplementedError

    def turn_runs(self, now: float, turn: TurnFacts, seat: int) -> Actions:
        del now, turn, seat
        return ()

    def first_token(self, now: float, turn: int) -> Actions:
        del now, turn
        return ()

    def turn_finished(self, now: float, usage: TurnUsage) -> Actions:
        del now, usage
        return ()

    def turn_aborted(self, now: float, turn: int) -> Actions:
        del now, turn
        return ()

    def program_closed(self, now: float, program: str) -> Actions:
        del now, program
        return ()

    def tick(self, now: float) -> Actions:
        del now
        return ()

    def tool_ended(self, now: float, program: str, tool: str, seconds: float) -> Actions:
        del now, program, tool, seconds
        return ()

    def lease_advice(self, now: float, program: str, keep: bool | None, until: float | None) -> Actions:
        del now, program, keep, until
        return ()

    def place(self, turn: int) -> int | None:
        del turn
        return None

    def figures(self, seat: int) -> Mapping[str, float]:
        del seat
        return {}
