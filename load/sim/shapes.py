"""Shapes that published work lets expect (spec scheduling §4.4), and what a run says of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from load.sim.headline import chosen, flatness, main_of, of_first_kind, plain_of, throughput, turns, turns_jct
from load.sim.plan import Plan
from load.sim.scenarios import BOUNDS
from load.sim.sides import TOLERATED, by_perturbation
from load.sim.summary import JCT, P99, ScenarioSummary

FAR = 0.5
"""In units of the knee: at most so much is far below it."""

SHOWN_IN_S4 = ("kv", "continuum", "thunderagent", "commit")
"""Published work has ThunderAgent flat too, and Continuum between (which depends on what gives way to whom)."""

Verdict = Literal["holds", "does not hold", "not run"]


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape of spec scheduling §4.4."""

    name: str
    expected: str
    verdict: Verdict
    seen: str


def shapes(plan: Plan, summaries: Sequence[ScenarioSummary]) -> list[Shape]:
    """S1 to S9, over the seeds of the first kind."""
    first, main = of_first_kind(summaries), main_of(plan, summaries)
    plain = plain_of(plan, summaries)
    past, below, _ = chosen(main, plan.past_load)
    slow = past.get("slow") or chosen(plain)[0].get("slow")
    return [
        _all_equal_below(below),
        _collapse(past.get("swe")),
        _turns_grow(main),
        _throughput_falls(plain),
        _good_mean_bad_tail(past.get("swe")),
        _slow_tools(slow),
        _offload(first),
        _sizes(first),
        _bounded(first, plain),
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
            policy: standing.figures[JCT].mean for policy, standing in summary.standings.items() if policy not in BOUNDS
        }
        apart = max(means.values()) / min(means.values()) - 1
        if apart >= worst:
            worst = apart
            who = f"{name} at {summary.scenario.load}: {min(means, key=means.__getitem__)} to "
            who += f"{max(means, key=means.__getitem__)}"
    seen = f"at most {100 * worst:.1f} % apart ({who})"
    if max(summary.j_over_j50 or 0.0 for summary in below.values()) > FAR:
        return Shape("S1", expected, "not run", f"{seen}, which is not far below it")
    return Shape("S1", expected, _verdict(worst <= 0.01), seen)


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
    expected = "turns x1 to x5: kv over commit grows, commit's own JCT within a factor of 1.5"
    found, lines = turns(summaries), turns_jct(summaries)
    if not found:
        return Shape("S3", expected, "not run", "no turn multipliers")
    verdicts, seen = [], []
    for name, values in found.items():
        own = [jct for _, jct in lines[name]["commit"]]
        verdicts.append(all(a < b for a, b in pairwise(values.values())) and max(own) <= 1.5 * min(own))
        seen.append(f"{name}: {_listed(values, 'x')}; commit {min(own):.0f} to {max(own):.0f} s")
    return Shape("S3", expected, _verdict(all(verdicts)), "; ".join(seen))


def _listed(values: Mapping[str, float], prefix: str = "") -> str:
    return ", ".join(f"{prefix}{key} {value:.2f}" for key, value in values.items())


def _throughput_falls(summaries: Sequence[ScenarioSummary]) -> Shape:
    expected = "closed loop: kv falls with concurrency, commit stays flat (3 %) beyond the best cap"
    found = throughput(summaries)
    verdicts, seen = [], []
    closed = chosen(summaries)[2]
    for name, policies in found.items():
        kv, flat = policies.get("kv", {}), flatness(policies, closed.get(name))
        if len(kv) > 1 and flat is not None:
            verdicts.append(list(kv.values())[-1] < 0.9 * max(kv.values()) and flat >= 0.97)
            said = {policy: policies[policy] for policy in SHOWN_IN_S4 if policy in policies}
            seen.append(f"{name}: " + "; ".join(f"{policy} {_listed(values)}" for policy, values in said.items()))
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


def _offload(summaries: Sequence[ScenarioSummary]) -> Shape:
    expected = "offload on: kv computes next to nothing twice, and its turns still queue"
    hosts = [
        each for each in summaries if each.scenario.fleet.host_tokens and "kv" in each.standings and _is_plain(each)
    ]
    if not hosts:
        return Shape("S7", expected, "not run", "no host memory with kv")
    largest = max(each.scenario.fleet.host_tokens for each in hosts)
    seen, holds = [], True
    for each in hosts:
        again, queued = (_mean(each, "kv", figure) or 0.0 for figure in ("recompute_ratio", "queue_share"))
        ratio = each.ratios.get("jct_ratio_kv_over_commit")
        over = "" if ratio is None else f", kv over commit {ratio.spread.mean:.2f}"
        seen.append(f"{each.scenario.name}: recompute {again:.2f}, queueing {100 * queued:.0f} %{over}")
        holds = holds and (each.scenario.fleet.host_tokens < largest or (again <= 1.1 and queued >= 0.05))
    return Shape("S7", expected, _verdict(holds), "; ".join(seen))


def _is_plain(each: ScenarioSummary) -> bool:
    scenario = each.scenario
    return scenario.fleet.workers == 1 and scenario.turn_multiplier == 1 and not scenario.perturbation


def _sizes(summaries: Sequence[ScenarioSummary]) -> Shape:
    """Ratios on fleets of one worker that differ in chunk or batch size alone, per workload and load."""
    expected = "chunk and batch sizes: kv over commit stays within a factor of 1.5"
    found: dict[tuple[str, str], dict[object, float]] = {}
    for each in summaries:
        scenario = each.scenario
        ratio = each.ratios.get("jct_ratio_kv_over_commit")
        if _is_plain(each) and not scenario.fleet.host_tokens and ratio:
            key = (scenario.workload_name, str(scenario.load))
            size = (scenario.fleet.chunk, scenario.fleet.max_seqs)
            found.setdefault(key, {}).setdefault(size, ratio.spread.mean)
    several = {key: values for key, values in found.items() if len(values) > 1}
    if not several:
        return Shape("S8", expected, "not run", "no comparison of chunk and batch sizes")
    holds = all(max(values.values()) <= 1.5 * min(values.values()) for values in several.values())
    seen = (
        f"{workload} at {load}: " + ", ".join(f"{size} {value:.2f}" for size, value in values.items())
        for (workload, load), values in several.items()
    )
    return Shape("S8", expected, _verdict(holds), "kv over commit: " + "; ".join(seen))


def _bounded(summaries: Sequence[ScenarioSummary], plain: Sequence[ScenarioSummary]) -> Shape:
    expected = "tools ten times slower from half on, and whatever else goes wrong: commit at most 5 % over kv"
    past = chosen(plain)[0]
    seen: dict[str, float] = {}
    for name in ("regime", "two-mode"):
        summary = past.get(name)
        if summary is not None and (ratio := summary.ratios.get("jct_ratio_commit_over_kv")) is not None:
            seen[name] = ratio.spread.mean
    for scenario, wrong in by_perturbation(summaries).items():
        for name, figures in wrong.items():
            over_kv = figures["commit_over_kv"]
            if isinstance(over_kv, float):
                seen[f"{scenario}, {name}"] = over_kv
    if not seen:
        return Shape("S9", expected, "not run", "nothing went wrong")
    worst = max(seen, key=seen.__getitem__)
    text = f"commit over kv at most {seen[worst]:.2f} ({worst}), of {len(seen)}"
    return Shape("S9", expected, _verdict(seen[worst] <= TOLERATED), text)
