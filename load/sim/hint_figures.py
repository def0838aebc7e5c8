"""What hints are worth: each policy beside itself with nobody, a plug-in and the planner telling caches what to keep.

Ratios are paired by seed. ``recomputed_tokens``: prefill tokens that had been computed before (`Result.summary`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from load.sim.hinting import ARMS
from load.sim.summary import JCT, ScenarioSummary, pair_rows

RECOMPUTED = "recomputed_tokens"
SHOWN = (JCT, "jct_s.p95", "jct_s.p99", RECOMPUTED, "loaded_tokens", "loaded_pool_tokens", "preemptions")
OUTCOMES = ("sent", "accepted", "clipped", "deferred", "rejected", "missing", "unsupported", "lost")


def by_hints(summaries: Sequence[ScenarioSummary]) -> list[dict[str, object]]:
    """One entry for each scenario and policy that ran with hints: ``arms`` by name (means over seeds), and of each arm
    but ``none`` the mean over seeds of its recomputed tokens and its JCT over those without hints (``None``: nothing
    was recomputed)."""
    found: list[dict[str, object]] = []
    for each in summaries:
        for policy in dict.fromkeys(name.partition("+")[0] for name in each.rows if "+" in name):
            names = [(arm, policy if arm == "none" else f"{policy}+{arm}") for arm in ARMS]
            there: dict[str, str] = {arm: name for arm, name in names if name in each.rows}
            entry: dict[str, object] = {
                "scenario": each.scenario.name,
                "workload": each.scenario.workload_name,
                "policy": policy,
                "host_tokens": each.scenario.fleet.host_tokens,
                "disk_tokens": each.scenario.fleet.disk_tokens,
                "pool_tokens": each.scenario.fleet.pool_tokens,
                "pool_through": each.scenario.fleet.pool_through,
                "seeds": list(each.seeds),
                "rate_per_s": round(each.rate_per_s, 6),
                "arms": {arm: _arm(each, name) for arm, name in there.items()},
            }
            for arm, name in there.items():
                if arm != "none" and "none" in there:
                    entry[f"recomputed_{arm}_over_none"] = _ratio(each, name, policy, RECOMPUTED)
                    entry[f"jct_{arm}_over_none"] = _ratio(each, name, policy, JCT)
            found.append(entry)
    return found


def _arm(summary: ScenarioSummary, name: str) -> Mapping[str, float]:
    rows = list(summary.rows[name].values())
    figures = {figure: _mean([row.figures[figure] for row in rows]) for figure in SHOWN}
    for outcome in OUTCOMES:
        figures[f"hints_{outcome}"] = _mean([row.figures.get(f"hints.{outcome}", 0.0) for row in rows])
    return figures


def _ratio(summary: ScenarioSummary, over: str, under: str, figure: str) -> float | None:
    ratios = list(pair_rows(summary.rows[over], summary.rows[under], figure).values())
    return _mean(ratios) if ratios else None


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 6)


HEADS = (
    "scenario",
    "policy",
    "hints",
    "JCT s (over none)",
    "P95 / P99 s",
    "computed again, M tokens (over none)",
    "loaded, of it from the pool, M tokens",
    "hints sent",
    "accepted / clipped / missing / rejected",
)


def hint_rows(entries: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Of `by_hints`, for people: one row an arm."""
    for entry in entries:
        for arm, figures in entry["arms"].items():
            yield (
                memory_name(entry),
                f"`{entry['policy']}`",
                arm,
                f"{figures[JCT]:.0f}" + _over(entry.get(f"jct_{arm}_over_none")),
                f"{figures['jct_s.p95']:.0f} / {figures['jct_s.p99']:.0f}",
                f"{figures[RECOMPUTED] / 1e6:.2f}" + _over(entry.get(f"recomputed_{arm}_over_none")),
                f"{figures['loaded_tokens'] / 1e6:.1f}, {figures['loaded_pool_tokens'] / 1e6:.1f}",
                f"{figures['hints_sent']:.0f}",
                " / ".join(
                    f"{figures[f'hints_{each}']:.0f}" for each in ("accepted", "clipped", "missing", "rejected")
                ),
            )


def memory_name(entry: Mapping[str, Any]) -> str:
    """The workload, and the memory below the device, in thousands of tokens: of each worker, and of all."""
    sizes = [(name, entry[f"{name}_tokens"] // 1000) for name in ("host", "disk", "pool")]
    back = "" if entry["pool_through"] or not entry["pool_tokens"] else ", written back"
    below = " + ".join(f"{name} {size:,}k" for name, size in sizes if size)
    return f"{entry['workload']}, {below or 'device alone'}{back}"


def _over(ratio: float | None) -> str:
    return "" if ratio is None else f" ({ratio:.2f})"
