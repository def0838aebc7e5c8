"""What is promised of the default policy, and which shapes published work lets expect; what a run says of each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from load.sim.summary import JCT, P99, ScenarioSummary, chosen, flatness, throughput, turns

HEAVY = ("lognormal", "pareto")
Verdict = Literal["holds", "does not hold", "not run"]


@dataclass(frozen=True, slots=True)
class Promise:
    """A bound of one figure of `load.sim.summary.headline`'s ``workloads``. ``workloads``: of these, or of all."""

    figure: str
    bound: float
    at_least: bool
    workloads: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def concerns(self, workload: str) -> bool:
        return workload not in self.without and (not self.workloads or workload in self.workloads)


PROMISES = (
    Promise("jct_ratio_kv_over_commit", 3.66, at_least=True, workloads=("swe",)),
    Promise("jct_ratio_best_rival_over_commit", 1 / 0.75, at_least=True, workloads=("swe", "mix")),
    Promise("jct_ratio_best_rival_over_commit", 1 / 0.9, at_least=True, workloads=HEAVY),
    Promise("p99_ratio_best_rival_over_commit", 1 / 0.7, at_least=True, workloads=("swe", "mix")),
    Promise("jct_ratio_commit_over_clairvoyant", 1.20, at_least=False),
    Promise("throughput_ratio_commit_over_kv", 1.16, at_least=True),
    Promise("throughput_ratio_commit_over_best_cap", 0.97, at_least=True),
    Promise("throughput_flatness_commit", 0.97, at_least=True),
    Promise("recompute_commit", 1.10, at_least=False, without=HEAVY),
    Promise("recompute_commit", 1.25, at_least=False, workloads=HEAVY),
    Promise("below_knee_ratio_commit_over_kv", 1.03, at_least=False),
    Promise("slowdown_ratio_program_fcfs_over_commit", 2.0, at_least=True, workloads=("mix", *HEAVY)),
)


@dataclass(frozen=True, slots=True)
class Kept:
    """One promise for one workload, and whether it held."""

    workload: str
    promise: Promise
    value: float

    @property
    def holds(self) -> bool:
        return self.value >= self.promise.bound if self.promise.at_least else self.value <= self.promise.bound


def promises(workloads: Mapping[str, Mapping[str, object]]) -> list[Kept]:
    """Of every figure that was measured, in the order of `PROMISES`."""
    kept = []
    for promise in PROMISES:
        for name, figures in workloads.items():
            value = figures.get(promise.figure)
            if promise.concerns(name) and isinstance(value, int | float):
                kept.append(Kept(name, promise, value))
    return kept


# Shapes


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape of spec scheduling §4.4."""

    name: str
    expected: str
    verdict: Verdict
    seen: str


def shapes(summaries: Sequence[ScenarioSummary]) -> list[Shape]:
    """S1 to S9, over the seeds of the first kind."""
    first = [each for each in summaries if each.kind == summaries[0].kind] if summaries else []
    past, below, _ = chosen(first)
    return [
        _all_equal_below(below),
        _collapse(past.get("swe")),
        _turns_grow(first),
        _throughput_falls(first),
        _good_mean_bad_tail(past.get("swe")),
        _slow_tools(past.get("slow")),
        Shape("S7", "offload on: reload cheap, queueing remains", "not run", "the laboratory has no host tier yet"),
        Shape("S8", "chunk and batch sizes: ratios stable", "not run", "no sweep of chunk and batch sizes"),
        _regime(past.get("regime"), past.get("swe")),
    ]


def _mean(summary: ScenarioSummary, policy: str, figure: str = JCT) -> float | None:
    standing = summary.standings.get(policy)
    return None if standing is None else standing.figures[figure].mean


def _verdict(holds: bool) -> Verdict:
    return "holds" if holds else "does not hold"


def _all_equal_below(below: Mapping[str, ScenarioSummary]) -> Shape:
    expected = "far below the knee all policies within 1 %"
    if not below:
        return Shape("S1", expected, "not run", "no load below the knee")
    worst, who = 0.0, ""
    for name, summary in below.items():
        means = {
            policy: standing.figures[JCT].mean for policy, standing in summary.standings.items() if policy != "cap"
        }
        apart = max(means.values()) / min(means.values()) - 1
        if apart >= worst:
            worst = apart
            who = f"{name} at {summary.scenario.load}: {min(means, key=means.__getitem__)} to "
            who += f"{max(means, key=means.__getitem__)}"
    return Shape("S1", expected, _verdict(worst <= 0.01), f"at most {100 * worst:.1f} % apart ({who})")


def _collapse(past: ScenarioSummary | None) -> Shape:
    expected = "past the knee kv, InferCept and PLAS recompute more than 2 times, retention 1.0 to 1.6"
    if past is None:
        return Shape("S2", expected, "not run", "no swe")
    named = {
        policy: _mean(past, policy, "recompute_ratio")
        for policy in ("kv", "infercept", "plas", "static_ttl", "continuum", "thunderagent", "commit")
    }
    seen = {policy: value for policy, value in named.items() if value is not None}
    holds = all(value > 2 if policy in ("kv", "infercept", "plas") else value <= 1.6 for policy, value in seen.items())
    return Shape("S2", expected, _verdict(holds), ", ".join(f"{policy} {value:.2f}" for policy, value in seen.items()))


def _turns_grow(summaries: Sequence[ScenarioSummary]) -> Shape:
    expected = "turns x1 to x5: kv over commit grows"
    found = turns(summaries)
    if not found:
        return Shape("S3", expected, "not run", "no turn multipliers")
    holds = all(a < b for values in found.values() for a, b in pairwise(values.values()))
    seen = "; ".join(f"{name}: " + _listed(values, "x") for name, values in found.items())
    return Shape("S3", expected, _verdict(holds), seen)


def _listed(values: Mapping[str, float], prefix: str = "") -> str:
    return ", ".join(f"{prefix}{key} {value:.2f}" for key, value in values.items())


def _throughput_falls(summaries: Sequence[ScenarioSummary]) -> Shape:
    expected = "closed loop: kv falls with concurrency, commit stays flat (3 %) beyond the best cap"
    found = throughput(summaries)
    verdicts, seen = [], []
    for name, policies in found.items():
        kv, flat = policies.get("kv", {}), flatness(summaries, name)
        if len(kv) > 1 and flat is not None:
            verdicts.append(list(kv.values())[-1] < 0.9 * max(kv.values()) and flat >= 0.97)
            seen.append(f"{name}: kv {_listed(kv)}; commit {_listed(policies['commit'])}")
    if not verdicts:
        return Shape("S4", expected, "not run", "fewer than two concurrencies")
    return Shape("S4", expected, _verdict(all(verdicts)), "; ".join(seen))


def _good_mean_bad_tail(past: ScenarioSummary | None) -> Shape:
    expected = "ThunderAgent: mean far below kv's, P99 over its mean above commit's"
    if past is None or not {"thunderagent", "kv", "commit"} <= set(past.standings):
        return Shape("S5", expected, "not run", "no swe with kv, thunderagent and commit")
    tails = {}
    for policy in ("thunderagent", "commit"):
        figures = past.standings[policy].figures
        tails[policy] = figures[P99].mean / figures[JCT].mean
    gain = past.standings["thunderagent"].figures[JCT].mean / past.standings["kv"].figures[JCT].mean
    holds = gain < 0.8 and tails["thunderagent"] > tails["commit"]
    seen = f"mean {gain:.2f} of kv's; P99 over mean: " + _listed(tails)
    return Shape("S5", expected, _verdict(holds), seen)


def _slow_tools(past: ScenarioSummary | None) -> Shape:
    expected = "slow tools: commit no worse than kv and than pinning by TTL"
    if past is None or not {"kv", "commit", "continuum"} <= set(past.standings):
        return Shape("S6", expected, "not run", "no slow with kv, continuum and commit")
    means = {policy: past.standings[policy].figures[JCT].mean for policy in ("kv", "continuum", "commit")}
    return Shape("S6", expected, _verdict(means["commit"] <= 1.03 * min(means.values())), _listed(means))


def _regime(past: ScenarioSummary | None, usual: ScenarioSummary | None) -> Shape:
    expected = "tools ten times slower from half on: commit still below kv"
    if past is None or usual is None or not {"kv", "commit"} <= set(past.standings):
        return Shape("S9", expected, "not run", "no regime beside swe, with kv and commit")
    means = {policy: past.standings[policy].figures[JCT].mean for policy in ("kv", "commit")}
    return Shape("S9", expected, _verdict(means["commit"] < means["kv"]), _listed(means))


def broken(kept: Sequence[Kept]) -> Iterator[str]:
    """Of those that do not hold, one sentence each."""
    for each in kept:
        if not each.holds:
            word = "at least" if each.promise.at_least else "at most"
            yield f"{each.workload}: {each.promise.figure} {each.value:.3f}, promised {word} {each.promise.bound:.3g}"
