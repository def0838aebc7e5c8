"""What is known of workers: what their bridges say each second, and what others say of them. Pure; bounded."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Required, TypedDict

from schemas.decision import Decision
from schemas.index import IndexSource, SourceHealth
from schemas.worker import WorkerState
from tidegate.top.snapshot import WorkerRow
from tidegate.top.text import bounded
from tidegate.top.window import Minute

MAX_WORKERS = 512
MAX_RANKS_KEPT = 1_024
"""Of one worker."""

LOST_S = 5.0
"""A bridge that is silent for so long has lost its worker, as admission has it."""

GONE_S = 60.0
"""So long a worker is shown that left, or is lost."""

_WORST: tuple[SourceHealth, ...] = ("synced", "catching_up", "approximate", "blind")


class _StateFigures(TypedDict, total=False):
    """Fields of `WorkerRow` that its bridge's last fact gives."""

    health: Required[str]
    reason: str | None
    engine: str
    model: str
    ranks: int
    silent_ms: int
    running: int | None
    waiting: int | None
    kv_usage: float | None
    kv_used_tokens: int
    kv_tokens: int


@dataclass(slots=True)
class Worker:
    """One worker. ``heard``: Unix seconds here. ``mark``: (epoch, Unix ms) of its bridge's last fact, whose figures are
    kept; ``stream``: the worst of its ranks' streams, and why. ``index``: by rank, the last word on it: when (Unix ms),
    health, reason."""

    heard: float
    mark: tuple[int, int] | None = None
    figures: _StateFigures = field(default_factory=lambda: _StateFigures(health="unknown"))
    stream: tuple[SourceHealth | None, str | None] = (None, None)
    index: OrderedDict[int, tuple[int, SourceHealth, str | None]] = field(default_factory=OrderedDict)


class Workers:
    """By worker id (bounded). ``forgotten``: more than fit, those heard of longest ago."""

    def __init__(self, most: int = MAX_WORKERS) -> None:
        self._most = most
        self._workers: OrderedDict[str, Worker] = OrderedDict()
        self.forgotten = 0

    def __len__(self) -> int:
        return len(self._workers)

    def touch(self, worker: str, now: float) -> Worker:
        """Something names it."""
        name = bounded(worker)
        known = self._workers.get(name)
        if known is None:
            known = self._workers[name] = Worker(now)
            while len(self._workers) > self._most:
                self._workers.popitem(last=False)
                self.forgotten += 1
        self._workers.move_to_end(name)
        return known

    def state(self, fact: WorkerState, now: float) -> None:
        """Its bridge speaks."""
        worker = self.touch(fact.worker, now)
        mark = (fact.epoch, fact.at_ms)
        if worker.mark is None or mark >= worker.mark:
            worker.mark, worker.figures, worker.heard = mark, _figures(fact), now
            worst = max(fact.streams, key=lambda stream: _WORST.index(stream.state), default=None)
            worker.stream = (worst.state, bounded(worst.reason) if worst.reason else None) if worst else (None, None)

    def index(self, fact: IndexSource, now: float) -> None:
        """An indexer says how far it trusts its picture of a rank."""
        self._hear(fact.worker, fact.rank, (fact.at_ms, fact.health, fact.reason), now)

    def decision(self, fact: Decision, now: float) -> None:
        """Admission has looked at these candidates."""
        if not fact.candidates:
            told = (fact.at_ms, fact.index_health, fact.index_reason)
            self._hear(fact.worker, fact.rank, told, now)
        for candidate in fact.candidates[:MAX_WORKERS]:
            told = (fact.at_ms, candidate.health, candidate.health_reason)
            self._hear(candidate.worker, candidate.rank, told, now)

    def tick(self, now: float) -> None:
        """Who left a while ago goes, with what was said of it."""
        for name, worker in list(self._workers.items()):
            if now - worker.heard > GONE_S:
                del self._workers[name]

    def rows(self, open_grants: dict[str, int], leased: dict[str, int], minute: Minute, now: float) -> list[WorkerRow]:
        """In order of their names. ``open_grants``, ``leased`` (tokens) by worker."""
        seconds = max(1.0, minute.window_s)
        rows = []
        for name in sorted(self._workers):
            worker = self._workers[name]
            index, index_reason = _index(worker)
            rows.append(
                WorkerRow(
                    worker=name,
                    index=index,
                    index_reason=index_reason,
                    open_grants=open_grants.get(name, 0),
                    lease_tokens=leased.get(name, 0),
                    decisions_per_s=round(minute.decisions[name] / seconds, 3),
                    hints_accepted=minute.hints_accepted[name],
                    hints_other=minute.hints_other[name],
                    **_of_bridge(worker, now),
                )
            )
        return rows

    def _hear(self, worker: str, rank: int, told: tuple[int, SourceHealth, str | None], now: float) -> None:
        known = self.touch(worker, now)
        if known.mark is None:
            known.heard = now
        at_ms, health, reason = told
        if rank in known.index and known.index[rank][0] > at_ms:
            return
        known.index[rank] = (at_ms, health, bounded(reason) if reason else None)
        while len(known.index) > MAX_RANKS_KEPT:
            known.index.popitem(last=False)


def _index(worker: Worker) -> tuple[SourceHealth | None, str | None]:
    """The worst of the ranks, and why; while nobody has spoken of any, what the bridge says of its streams."""
    told = worker.index.values()
    if not told:
        return worker.stream
    _, health, reason = max(told, key=lambda one: _WORST.index(one[1]))
    return health, reason


def _of_bridge(worker: Worker, now: float) -> _StateFigures:
    """What its bridge last said, and whether that still stands."""
    if worker.mark is None:
        return worker.figures
    silent = max(0.0, now - worker.heard)
    figures = worker.figures.copy()
    figures["silent_ms"] = int(silent * 1000)
    if silent > LOST_S and figures["health"] != "left":
        figures["health"] = "lost"
    return figures


def _figures(state: WorkerState) -> _StateFigures:
    loads, profile = state.loads, state.profile
    usage = sum(load.kv_usage for load in loads) / len(loads) if loads else None
    figures: _StateFigures = {
        "health": state.health,
        "reason": bounded(state.reason) if state.reason else None,
        "engine": profile.engine,
        "model": bounded(profile.model),
        "ranks": profile.ranks,
        "running": sum(load.running for load in loads) if loads else None,
        "waiting": sum(load.waiting for load in loads) if loads else None,
        "kv_usage": usage,
    }
    if profile.kv_tokens is not None:
        figures["kv_tokens"] = profile.kv_tokens * profile.ranks
        if usage is not None:
            figures["kv_used_tokens"] = round(usage * profile.kv_tokens * profile.ranks)
    return figures
