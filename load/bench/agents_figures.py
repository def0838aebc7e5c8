"""What `load.bench.agents` reports of one policy. Pure.

Times with ``_s`` are of the published workload: seconds of the run times the scale; ``wall_s`` and what ends with
``_ms`` is as measured. ``decision_*_ms``: from the front door's question to its answer, less the hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from load.bench.agents_client import RunResult, TurnResult
from load.bench.measure import percentile
from schemas.trace import RequestMetrics

OVER_KV = ("steps_per_min", "jct_mean_s", "jct_p95_s", "jct_p99_s", "recomputed_tokens", "makespan_s")
"""Figures of which the ratio to ``kv``'s of the same run is told."""

Figures = dict[str, float | int | str | None]


@dataclass(frozen=True, slots=True)
class Sizes:
    """``shared``: tokens of each kind's system prompt, of which ``tools`` are every kind's. ``block_size``: of engines,
    in tokens. ``concurrency``: root sessions at a time."""

    shared: Mapping[str, int]
    tools: int
    block_size: int
    concurrency: int
    scale: float


def measure(result: RunResult, rows: Mapping[str, RequestMetrics], sizes: Sizes) -> Figures:
    """The figures of one run. ``rows``: request_end rows by request id."""
    good = [turn for turn in result.turns if turn.error is None]
    prompt = sum(turn.prompt_tokens for turn in good)
    computed = prompt - sum(turn.cached_tokens for turn in good)
    necessary = necessary_tokens(good, sizes)
    figures: Figures = {
        "turns": len(result.turns),
        "failures": len(result.turns) - len(good),
        "rows_missing": sum(turn.request_id not in rows for turn in result.turns),
        "prompt_tokens": prompt,
        "necessary_tokens": necessary,
        "recomputed_tokens": computed - necessary,
        "computed_over_necessary": _ratio(computed, necessary),
        "prefix_hit_ratio": _ratio(prompt - computed, prompt),
    }
    return figures | _times(result, sizes) | _decisions(good, rows, sizes.scale)


def necessary_tokens(turns: Sequence[TurnResult], sizes: Sizes) -> int:
    """Prompt tokens that engines of endless memory would compute: of a session's turn what no whole block of its
    previous prompt and answer holds, of its first turn what no whole block of the shared system prompt does. The first
    session of each kind has to compute that too, but for the tools, which the very first computes."""
    necessary = 0
    known: dict[str, int] = {}
    kinds: set[str] = set()
    for turn in sorted(turns, key=lambda turn: turn.turn):  # by turn, whatever ended when
        held = known.get(turn.session_id)
        if held is None:
            held = sizes.shared[turn.kind] if turn.kind in kinds else sizes.tools if kinds else 0
            kinds.add(turn.kind)
        necessary += turn.prompt_tokens - min(held, turn.prompt_tokens - 1) // sizes.block_size * sizes.block_size
        known[turn.session_id] = turn.prompt_tokens + turn.output_tokens - 1
    return necessary


def _times(result: RunResult, sizes: Sizes) -> Figures:
    """Throughput while as many sessions ran as were to run, and completion times of root sessions."""
    ended = sorted(root.ended_s for root in result.roots)
    jct = [(root.ended_s - root.started_s) * sizes.scale for root in result.roots]
    full_s = ended[max(0, len(ended) - sizes.concurrency)]
    steps = sum(turn.ended_s <= full_s for turn in result.turns)
    return {
        "steps_per_min": _round(steps / (full_s * sizes.scale / 60)),
        "jct_mean_s": _round(sum(jct) / len(jct)),
        "jct_p95_s": _round(percentile(jct, 95)),
        "jct_p99_s": _round(percentile(jct, 99)),
        "makespan_s": _round(ended[-1] * sizes.scale),
        "wall_s": _round(ended[-1]),
    }


def _decisions(turns: Sequence[TurnResult], rows: Mapping[str, RequestMetrics], scale: float) -> Figures:
    found = [(turn, rows.get(turn.request_id or "")) for turn in turns]
    known = [(turn, row) for turn, row in found if row is not None]
    by_policy = [row for _, row in known if row.decision_mode == "policy"]
    decision_ms = [row.decision_ms for row in by_policy if row.decision_ms is not None] or [0.0]
    holds = [(turn.turn, row.hold_ms / 1000 * scale) for turn, row in known if row.hold_ms]
    return {
        "decision_p50_ms": _round(percentile(decision_ms, 50)),
        "decision_p99_ms": _round(percentile(decision_ms, 99)),
        "held_turns": len(holds),
        "held_mid_session": sum(turn > 0 for turn, _ in holds),
        "longest_hold_s": _round(max((hold for _, hold in holds), default=0.0)),
        "longest_mid_session_hold_s": _round(max((hold for turn, hold in holds if turn), default=0.0)),
        "without_policy": len(known) - len(by_policy),
    }


def over_kv(figures: Figures, kv: Figures | None) -> Figures:
    """This policy's figures over those of ``kv``; ``None`` where that did not run."""
    ratios: Figures = {}
    for name in OVER_KV:
        own, other = figures[name], kv[name] if kv is not None else None
        is_known = isinstance(own, float | int) and isinstance(other, float | int)
        ratios[f"{name.removesuffix('_s')}_over_kv"] = _ratio(float(own or 0), float(other or 0)) if is_known else None
    return ratios


def _ratio(part: float, whole: float) -> float | None:
    return round(part / whole, 4) if whole else None


def _round(value: float) -> float:
    return round(value, 2)
