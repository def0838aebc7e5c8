"""One source of the index: the stream of one rank of one worker, and how far its picture can be trusted."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvcore.stream import Deliver, Limits, StreamRecovery
from replica.parity import ParityRules, SourceParity
from schemas.index import SourceHealth, WorkerMatch
from schemas.worker import RankStream, WorkerState

_ON_ITS_WAY = frozenset({"connecting", "reconnecting", "connected", "restarted", "gap", "late_start"})
"""Reasons of a bridge's stream that pass by themselves; any other says that history is missing for good."""

_REASON_CHARACTERS = 64
"""Of a reason that a bridge gives; it is told and logged."""


def on_its_way(stream: RankStream) -> bool:
    """Whether a bridge is only catching up with its engine."""
    return stream.state == "catching_up" and (stream.reason is None or stream.reason in _ON_ITS_WAY)


def _cut(reason: str | None) -> str | None:
    return reason and reason[:_REASON_CHARACTERS]


@dataclass(slots=True)
class Source:
    """``stream``: as the worker's bridge described it last. ``wants``: token of the fetch that a snapshot answers,
    if it was asked for after the question ``wants_after``.

    ``only_sent``: it is approximate, and its events are not to be trusted at all. ``measured``: its events go on
    without a hole, so that what they would predict can be compared with what the engine reports; ``spell`` counts the
    times that this began. ``backlog``: batches
    in order that wait to be applied, where there were many at once. ``answers``: what was said about it since it last
    changed, by blocks per tier (see `replica.answers`).
    """

    worker: str
    rank: int
    machine: StreamRecovery
    parity: SourceParity
    since: float
    stream: RankStream | None = None
    wants: int | None = None
    wants_after: int = 0
    told: tuple[object, ...] = ()
    health: SourceHealth = "blind"
    reason: str | None = "no_events"
    only_sent: bool = False
    measured: bool = False
    spell: int = 0
    backlog: deque[Deliver] = field(default_factory=deque)
    answers: dict[tuple[int, int, int, int], WorkerMatch] = field(default_factory=dict)

    @classmethod
    def new(cls, worker: str, rank: int, limits: Limits, rules: ParityRules, now: float) -> Source:
        """A source that nothing is known of."""
        return cls(worker, rank, StreamRecovery("snapshot", limits), SourceParity(rules), now)

    @property
    def applied(self) -> int:
        """Number of the last batch that is in the index; -1: none."""
        return self.backlog[0].seq - 1 if self.backlog else self.machine.last

    def judge(self, state: WorkerState | None) -> tuple[SourceHealth, str | None]:
        """How far to trust it, and unless fully, why. ``state``: the worker's last fact."""
        measured = self.measured
        health, reason = self._judge(state)
        self.spell += self.measured and not measured
        if measured and not self.measured:
            self.parity.interrupted()
        if (health, reason) != (self.health, self.reason):
            self.health, self.reason = health, reason
            self.answers.clear()
        return health, reason

    def _judge(self, state: WorkerState | None) -> tuple[SourceHealth, str | None]:
        self.measured = self.only_sent = False
        if state is None:
            return "blind", "unknown_worker"
        if state.health == "mismatch":
            return "blind", "block_size"
        stream, machine = self.stream, self.machine
        self.only_sent = True
        if stream is None:
            return "approximate", "no_events"
        if stream.state == "blind":
            return "approximate", _cut(stream.reason) or "no_events"
        self.only_sent = False
        if machine.state != "synced":
            return machine.state, machine.reason
        if self.backlog:
            return "catching_up", "backlog"
        if stream.state == "catching_up":
            return "catching_up" if on_its_way(stream) else "approximate", _cut(stream.reason)
        self.measured = True
        problem = self.parity.problem
        self.only_sent = problem is not None
        return ("approximate", problem) if problem else ("synced", None)


@dataclass(slots=True)
class Worker:
    """One worker as its bridge described it last. ``models``: every name under which it serves (adapters too).
    ``process``: the engine's process that a bridge named last; one that has just begun does not know it yet."""

    state: WorkerState
    heard_at: float
    models: frozenset[str]
    process: str

    @classmethod
    def new(cls, state: WorkerState, now: float, before: Worker | None = None) -> Worker:
        """``before``: the same worker, as it was known until now."""
        process = state.incarnation or (before.process if before is not None else "")
        return cls(state, now, frozenset({state.profile.model, *state.profile.models}), process)

    def restarted_since(self, before: Worker) -> bool:
        """Whether its engine is another process."""
        return before.process not in ("", self.process)
