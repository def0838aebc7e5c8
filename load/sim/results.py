"""What a simulation measured: one row per turn and per program, and the plain numbers that reports use."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from load.nearest_rank import nearest_rank
from load.sim.engine import RankCounters

QUANTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class TurnRow:
    """One turn. Times in seconds: ready, dispatched to a worker, first scheduled there, first token, finished.

    ``cached_tokens``: found in the cache at its first admission by the engine; ``reused_tokens``: at its last one
    (after a preemption). ``overlap_blocks``: of its prompt on the chosen worker when it was dispatched;
    ``best_overlap_blocks`` on any.
    """

    program: str
    index: int
    worker: int
    prompt_tokens: int
    cached_tokens: int
    reused_tokens: int
    output_tokens: int
    new_tokens: int
    preemptions: int
    ready_s: float
    dispatched_s: float
    scheduled_s: float
    first_token_s: float
    finished_s: float
    overlap_blocks: int
    best_overlap_blocks: int

    @property
    def hold_s(self) -> float:
        return self.dispatched_s - self.ready_s

    @property
    def queued_s(self) -> float:
        """Held by the router, then waiting in the engine for its first iteration."""
        return self.scheduled_s - self.ready_s

    @property
    def ttft_s(self) -> float:
        return self.first_token_s - self.ready_s


@dataclass(frozen=True, slots=True)
class ProgramRow:
    """One finished program. ``queued_s``: of its own turns together. ``slowdown``: JCT over its JCT alone, if known."""

    program: str
    label: str
    root: bool
    turns: int
    started_s: float
    finished_s: float
    queued_s: float

    @property
    def jct_s(self) -> float:
        return self.finished_s - self.started_s


def quantile(ordered: Sequence[float], percent: int) -> float:
    """The smallest value that at least ``percent`` % of the sorted ``ordered`` do not exceed; 0 of nothing."""
    return nearest_rank(ordered, percent) if ordered else 0.0


def spread(values: Iterable[float]) -> dict[str, float]:
    """Mean, quantiles and the largest of ``values``."""
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered) if ordered else 0.0
    named = {f"p{percent}": quantile(ordered, percent) for percent in QUANTILES}
    return {"mean": mean, **named, "max": ordered[-1] if ordered else 0.0}


@dataclass(slots=True)
class Result:
    """Rows in the order in which turns and programs finished. ``unfinished``: programs left when nothing could happen
    any more (a policy that never admits). ``refused``: programs that the policy refused; ``aborted``: whose client went
    away; ``retried``: turns that were asked again. ``leases``: changes by state. ``lost``: counters of workers that
    were lost. ``hints``: what became of them, by action and outcome (``pin.accepted``; ``pin.lost`` on the way)."""

    turns: list[TurnRow] = field(default_factory=list)
    programs: list[ProgramRow] = field(default_factory=list)
    workers: list[RankCounters] = field(default_factory=list)
    last_start_s: float = 0.0
    unfinished: int = 0
    refused: int = 0
    aborted: int = 0
    retried: int = 0
    lost: list[RankCounters] = field(default_factory=list)
    leases: dict[str, int] = field(default_factory=dict)
    hints: Counter[str] = field(default_factory=Counter)

    @property
    def roots(self) -> list[ProgramRow]:
        return [row for row in self.programs if row.root]

    def hint_counts(self) -> dict[str, int]:
        """``sent``, and of them by action, and by outcome."""
        counts = Counter({"sent": self.hints.total()})
        for name, count in self.hints.items():
            action, _, outcome = name.partition(".")
            counts[action] += count
            counts[outcome] += count
        return dict(sorted(counts.items()))

    def summary(self, alone_s: Mapping[str, float] | None = None) -> dict[str, object]:
        """Plain numbers, rounded to nanoseconds. ``alone_s``: JCT of each program alone, for slowdowns.

        ``recomputed_tokens``: prefilled, beyond those that no cache of any size could hold: they were computed before.
        ``steps_per_min_steady`` counts turns up to the last program's start (closed loop: concurrency is full).
        """
        end = max((row.finished_s for row in self.turns), default=0.0)
        prompt = sum(row.prompt_tokens for row in self.turns)
        cached = sum(row.cached_tokens for row in self.turns)
        new = sum(row.new_tokens for row in self.turns)
        workers = (*self.workers, *self.lost)
        prefilled = sum(worker.prefill_tokens for worker in workers)
        output = sum(row.output_tokens for row in self.turns)
        jct = math.fsum(row.jct_s for row in self.roots)
        steady = sum(1 for row in self.turns if row.finished_s <= self.last_start_s)
        mid = [row.hold_s for row in self.turns if row.index > 0]
        generated = [row for row in self.turns if row.output_tokens > 1]
        summary: dict[str, object] = {
            "programs": len(self.roots),
            "unfinished": self.unfinished,
            "refused": self.refused,
            "aborted": self.aborted,
            "retried": self.retried,
            "leases": dict(sorted(self.leases.items())),
            "turns": len(self.turns),
            "makespan_s": end,
            "jct_s": spread(row.jct_s for row in self.roots),
            "queue_share": math.fsum(row.queued_s for row in self.roots) / jct if jct else 0.0,
            "steps_per_min": 60 * len(self.turns) / end if end else 0.0,
            "steps_per_min_steady": 60 * steady / self.last_start_s if self.last_start_s else 0.0,
            "output_tokens_per_s": output / end if end else 0.0,
            "prefix_hit_ratio": cached / prompt if prompt else 0.0,
            "recompute_ratio": prefilled / new if new else 0.0,
            "prefilled_tokens": prefilled,
            "recomputed_tokens": max(0, prefilled - new),
            "loaded_tokens": sum(worker.loaded_tokens for worker in workers),
            "loaded_disk_tokens": sum(worker.disk_tokens for worker in workers),
            "loaded_pool_tokens": sum(worker.pool_tokens for worker in workers),
            "pins_lost": sum(worker.pins_lost for worker in workers),
            "hints": self.hint_counts(),
            "preemptions": sum(worker.preemptions for worker in workers),
            "busy_share": [worker.busy_ps / 1e12 / end if end else 0.0 for worker in self.workers],
            "ttft_s": spread(row.ttft_s for row in self.turns),
            "tpot_s": spread((row.finished_s - row.first_token_s) / (row.output_tokens - 1) for row in generated),
            "latency_s": spread(row.finished_s - row.ready_s for row in self.turns),
            "hold_new_s": spread(row.hold_s for row in self.turns if row.index == 0),
            "hold_mid_s": spread(mid),
            "overlap_regret_blocks": sum(row.best_overlap_blocks - row.overlap_blocks for row in self.turns),
        }
        if alone_s is not None:
            summary["slowdown"] = spread(row.jct_s / alone_s[row.program] for row in self.roots)
        return {name: _rounded(value) for name, value in summary.items()}


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return round(value, 9)
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return value


def beyond_bound_s(turns: Iterable[TurnRow], limit_s: float) -> float:
    """By how much the longest hold of a later turn is beyond its bound: ``limit_s``, then the time in which turns run
    that were held for as long, which are forced in before it, one at a time (scheduling §5.3.3). 0 where none is."""
    late = [row for row in turns if row.index > 0 and row.hold_s >= limit_s]
    beyond = 0.0
    for row in late:
        since_s = row.ready_s + limit_s
        ahead = [
            (max(since_s, other.dispatched_s), min(row.dispatched_s, other.finished_s))
            for other in late
            if other.dispatched_s < row.dispatched_s and other.finished_s > since_s
        ]
        beyond = max(beyond, row.dispatched_s - since_s - _covered(ahead))
    return beyond


def _covered(parts: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    length, end = 0.0, -math.inf
    for start, stop in sorted(parts):
        length += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return length
