"""An experiment as a Markdown report: what was run, what was promised, every scenario, and what it does not show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from load.sim.document import Findings
from load.sim.headline import HELD, of_first_kind
from load.sim.hint_figures import HEADS, hint_rows
from load.sim.perturb import PERTURBATIONS
from load.sim.scenarios import BOUNDS, workload_name
from load.sim.sides import Figures, by_fleet, by_perturbation, by_workers
from load.sim.summary import JCT, P99, SLOWDOWN, STEPS, Paired, ScenarioSummary, Spread

NOT_SHOWN = """\
- Nothing here ran on a GPU. Iterations take the time of a published formula; prefix cache by least recent use,
  pre-emption by recomputation. Network, tokenization and the router's own time are zero.
- Knees, rates and absolute times belong to these constants, this KV size and this number of programs: a longer run past
  the knee is slower. Compare ratios, and only those that are paired by seed.
- Seeds differ by tens of percent; differences under about 5 % are noise.
- `clairvoyant` and `cap` know the future, and are constructions, not optima: a policy may be better than they are.
- Every run goes on until all its programs are over: nothing is cut off at its end, or its beginning.
- Clients wait for as long as it takes, but for what goes wrong under `aborts` and `retries`.
- Token-seconds: what is not running and not kept until its next turn is free memory, or KV that was lost; which of the
  two is not told apart."""


def report(findings: Findings, plots: Sequence[tuple[str, str]] = ()) -> str:
    """Markdown. ``plots``: (file name, caption)."""
    return "\n".join(_lines(findings, plots)).rstrip() + "\n"


def _lines(findings: Findings, plots: Sequence[tuple[str, str]]) -> Iterator[str]:
    plan, figures = findings.outcome.plan, findings.headline
    yield "# Simulated policies"
    yield ""
    yield f"Preset `{plan.name}`: {plan.programs} programs a run, {plan.engine}, {_seeds(findings)}."
    yield ""
    if figures["seeds_are"] == "design":
        yield "**These seeds were used to design the policies: the figures are no evidence of what others would give.**"
        yield ""
    if findings.outcome.missing:
        yield f"**Interrupted: {findings.outcome.missing} simulations of {_all(findings)} were not run.** Called again"
        yield "with the same arguments, `tidegate simulate` goes on from here."
        yield ""
    if plan.parameters:
        yield "Parameters that are not the usual: " + ", ".join(
            ".".join(each[:2]) + f" {each[2]}" for each in plan.parameters
        )
        yield ""
    yield from _headline(findings)
    for name, caption in plots:
        yield f"![{caption}]({name})"
        yield ""
    yield from _calibration(findings)
    yield from _shapes(findings)
    yield from _sides(findings)
    for summary in findings.summaries:
        yield from _scenario(summary)
    if findings.outcome.failed:
        yield "## What did not finish"
        yield ""
        yield from (f"- {sentence}" for sentence in findings.outcome.failed)
        yield ""
    yield "## What this does not show"
    yield ""
    yield NOT_SHOWN


def _all(findings: Findings) -> int:
    return findings.outcome.missing + len(findings.outcome.rows)


def _seeds(findings: Findings) -> str:
    sets: dict[str, list[str]] = {}
    for summary in findings.summaries:
        known = sets.setdefault(summary.kind, [])
        known.extend(str(seed) for seed in summary.seeds if str(seed) not in known)
    parts = [f"{kind} seeds {', '.join(seeds)}" for kind, seeds in sets.items()]
    return " and ".join(parts) or "no seeds"


def _headline(findings: Findings) -> Iterator[str]:
    figures, plan = findings.headline, findings.outcome.plan
    yield "## Promises"
    yield ""
    past = "the highest load" if plan.past_load is None else str(plan.past_load)
    yield f"Of {figures['seeds_are']} seeds, at {past}, past the knee; below the knee the worst of all loads. Ratios"
    yield "are means of paired ratios by seed."
    yield ""
    yield from table(
        ("workload", "figure", "value", "promised", ""),
        (
            (
                kept.workload,
                kept.promise.figure,
                f"{kept.value:.3f}",
                f"{'>=' if kept.promise.at_least else '<='} {kept.promise.bound:.3g}",
                "holds" if kept.holds else "**does not hold**",
            )
            for kept in findings.kept
        ),
    )
    for policy in HELD:
        held, mean = figures[f"max_hold_s_{policy}"], figures[f"mean_hold_s_{policy}"]
        beyond = figures[f"hold_beyond_bound_s_{policy}"]
        if isinstance(held, float) and isinstance(mean, float) and isinstance(beyond, float):
            yield f"Longest hold of a running session past the knee, `{policy}`: {held:.0f} s, mean {mean:.1f} s, of"
            yield f"any workload; beyond 300 s and the turns forced in before it by at most {beyond:.1f} s."
            yield ""
    yield f"Programs that never finished, of all runs: {figures['unfinished']:g}."
    yield ""


def _calibration(findings: Findings) -> Iterator[str]:
    calibrations = findings.outcome.calibrations
    if not calibrations:
        return
    yield "## Calibration"
    yield ""
    yield "J50: programs a second at which the mean JCT under `kv` is twice that of programs alone; the median over"
    yield "seeds of their own. rho: programs a second times ideal GPU seconds of a program, of each worker."
    yield ""
    rows = []
    for key, value in calibrations.items():
        j50 = value.j50
        rho = "" if j50 is None else f"{j50 * value.work_s / key.fleet.workers:.2f}"
        of_seeds = ", ".join("none" if knee is None else f"{knee:.4f}" for knee in value.knees.values())
        fleet = f"{key.fleet.workers} x {key.fleet.kv_tokens}"
        shown = "none" if j50 is None else f"{j50:.4f}"
        rows.append((workload_name(key.workload), fleet, f"{value.work_s:.2f}", shown, rho, of_seeds))
    yield from table(("workload", "fleet", "GPU s", "J50 /s", "rho at J50", "by seed"), rows)


def _shapes(findings: Findings) -> Iterator[str]:
    yield "## Shapes"
    yield ""
    rows = [(each.name, each.expected, each.verdict, each.seen) for each in findings.shapes]
    yield from table(("", "expected", "", "seen"), rows)


def _sides(findings: Findings) -> Iterator[str]:
    tables = side_tables(findings)
    if "workers" in tables:
        yield "## Several workers, at equal load of each"
        yield ""
        yield "Regret: blocks of prompts that another worker held, and the chosen one did not, of all their blocks."
        yield ""
        yield from tables["workers"]
    if "fleets" in tables:
        yield "## Fleets"
        yield ""
        yield from tables["fleets"]
    hints = findings.headline["hints"]
    if isinstance(hints, list) and hints:
        yield "## Hints"
        yield ""
        yield "Nobody, an engine's plug-in and the planner tell caches what to keep; ratios are means of those by seed."
        yield ""
        yield from table(HEADS, hint_rows(hints))
    if "wrong" in tables:
        yield "## What goes wrong"
        yield ""
        yield "Mean JCT over that of the same policy where nothing goes wrong, then the comparison under it."
        yield ""
        yield from tables["wrong"]
        yield from (f"- `{each.name}`: {each.what}." for each in PERTURBATIONS.values())
        yield ""


def side_tables(findings: Findings) -> dict[str, list[str]]:
    """Lines of the tables of matrices beside the main one, where they ran: ``workers``, ``fleets``, ``wrong``; and of
    whom the best rival is the best."""
    first = of_first_kind(findings.summaries)
    wrong_heads = ("scenario", "what", "`commit` over itself", "`kv` over itself", *COMPARED)
    workers, fleets, wrong = by_workers(first), by_fleet(first), by_perturbation(first)
    tables = {
        "workers": (workers, table(("scenario", "workers", *COMPARED), _compared(workers))),
        "fleets": (fleets, table(("scenario", "fleet", *COMPARED), _compared(fleets))),
        "wrong": (wrong, table(wrong_heads, _wrong(wrong))),
    }
    return {name: [_rivals(figures), "", *lines] for name, (figures, lines) in tables.items() if figures}


def _rivals(tables: Mapping[str, Mapping[str, Figures]]) -> str:
    """Of whom the best rival is the best, in the rows of a table."""
    ran = [tuple(each) for rows in tables.values() for row in rows.values() if isinstance(each := row["rivals"], list)]
    every = [policy for policy in ran[0] if all(policy in each for each in ran)] if ran else []
    some = [policy for policy in dict.fromkeys(policy for each in ran for policy in each) if policy not in every]
    text = "Rivals that ran in every row: " + (", ".join(f"`{policy}`" for policy in every) or "none")
    more = ", ".join(f"`{policy}`" for policy in some)
    return f"{text}; in some also {more}, so that rows of this table differ in that." if more else f"{text}."


COMPARED = (
    "`kv` / `commit`",
    "best rival / `commit`",
    "P99",
    "regret of `kv`, `commit`",
    "longest hold, s",
    "seeds",
    "unfinished",
)


def _compared(tables: Mapping[str, Mapping[str, Figures]]) -> Iterator[tuple[str, ...]]:
    for scenario, rows in tables.items():
        for name, figures in rows.items():
            yield (scenario, name, *_comparison(figures))


def _wrong(tables: Mapping[str, Mapping[str, Figures]]) -> Iterator[tuple[str, ...]]:
    for scenario, rows in tables.items():
        for name, figures in rows.items():
            lost = (_number(figures.get(f"{policy}_over_itself")) for policy in ("commit", "kv"))
            yield (scenario, name, *lost, *_comparison(figures))


def _comparison(figures: Figures) -> tuple[str, ...]:
    regret = figures["overlap_regret_share"]
    seeds = figures["seeds"]
    assert isinstance(regret, dict)
    assert isinstance(seeds, list)
    missed = ", ".join(f"{100 * regret[policy]:.1f} %" for policy in ("kv", "commit") if policy in regret)
    return (
        _number(figures["kv_over_commit"]),
        _number(figures["best_rival_over_commit"], figures.get("best_rival_over_commit_rival")),
        _number(figures["p99_best_rival_over_commit"], figures.get("p99_best_rival_over_commit_rival")),
        missed,
        _number(figures.get("max_hold_s_commit"), digits=0),
        str(len(seeds)),
        _number(figures["unfinished"], digits=0),
    )


def _number(value: object, who: object = None, digits: int = 2) -> str:
    if not isinstance(value, int | float):
        return ""
    return f"{value:.{digits}f}" + ("" if who is None else f" (`{who}`)")


def _scenario(summary: ScenarioSummary) -> Iterator[str]:
    unit = "" if summary.j_over_j50 is None else f" ({summary.rate_per_s:.4f} programs/s, {summary.j_over_j50:.2f} J50)"
    yield f"## {summary.scenario.name}{unit}: {summary.kind} seeds {', '.join(map(str, summary.seeds))}"
    yield ""
    yield from table(
        (
            "policy",
            "JCT mean [range]",
            "P90",
            "P95",
            "P99",
            "queueing, of it mid",
            "steps/min",
            "prefix hits",
            "recompute",
            "max slowdown",
            "fairness",
            "regret",
            "mid hold mean/max",
            "mid wait max",
            "running/kept",
        ),
        (_standing(name, summary) for name in summary.standings),
    )
    if summary.ratios:
        yield from table(
            ("paired ratio", "of", "mean", "median", "range"),
            (_ratio(name, ratio) for name, ratio in summary.ratios.items()),
        )


def _standing(name: str, summary: ScenarioSummary) -> tuple[str, ...]:
    standing = summary.standings[name]
    figures: Mapping[str, Spread] = standing.figures
    steps = figures[STEPS if summary.scenario.load is None else "steps_per_min"]
    shown = f"*{name}*" if name in BOUNDS else name
    jct = figures[JCT]
    return (
        shown if standing.cap is None else f"{shown} {standing.cap}",
        f"{jct.mean:.1f} [{jct.least:.0f}-{jct.most:.0f}]",
        *(f"{figures[figure].mean:.0f}" for figure in ("jct_s.p90", "jct_s.p95", P99)),
        f"{100 * figures['queue_share'].mean:.1f} / {100 * figures['queue_share_mid'].mean:.1f} %",
        f"{steps.mean:.1f}",
        f"{100 * figures['prefix_hit_ratio'].mean:.1f} %",
        f"{figures['recompute_ratio'].mean:.2f}",
        f"{figures[SLOWDOWN].mean:.1f}",
        f"{figures['fairness'].mean:.2f}",
        f"{figures['overlap_regret_blocks'].mean:.0f}",
        f"{figures['hold_mid_s.mean'].mean:.1f} / {figures['hold_mid_s.max'].most:.0f} s",
        f"{figures['wait_mid_s.max'].most:.0f} s",
        f"{100 * figures['token_seconds.running'].mean:.0f} / {100 * figures['token_seconds.kept'].mean:.0f} %",
    )


def _ratio(name: str, ratio: Paired) -> tuple[str, ...]:
    spread = ratio.spread
    return (
        name,
        f"{ratio.over} / {ratio.under}",
        f"{spread.mean:.3f}",
        f"{spread.median:.3f}",
        f"{spread.least:.3f}-{spread.most:.3f}",
    )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Lines of a Markdown table, and an empty one; nothing where there are no rows."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    if lines:
        yield "| " + " | ".join(head) + " |"
        yield "|" + "---|" * len(head)
        yield from lines
        yield ""
