"""The figures of a page of the documentation, from a document: ``python -m load.sim.docs simulate.json PAGE``.

What stands between the page's two marks is replaced; the rest of the page is left as it is. The preset ``hints`` has
marks of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from load.sim.document import DocumentError, Findings, read_findings
from load.sim.headline import chosen, main_of, plain_of, throughput, turns_jct
from load.sim.hint_figures import HEADS, hint_rows
from load.sim.report import side_tables, table
from load.sim.scenarios import BOUNDS
from load.sim.summary import JCT, P99, SLOWDOWN, STEPS, ScenarioSummary

BEGIN = "<!-- figures: made by python -m load.sim.docs; do not edit -->"
END = "<!-- end of figures -->"
HINTS_BEGIN = "<!-- hints: made by python -m load.sim.docs; do not edit -->"
HINTS_END = "<!-- end of hints -->"


def filled(page: str, findings: Findings) -> str:
    """The page with the figures. Raises `ValueError` where it has not each mark once, in their order."""
    of_hints = findings.outcome.plan.name.startswith("hints")
    first, last = (HINTS_BEGIN, HINTS_END) if of_hints else (BEGIN, END)
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end or first in rest or last in after:
        raise ValueError(f"the page needs one line {first} and, below it, one line {last}")
    figures = "\n".join(_hints(findings) if of_hints else _figures(findings)).strip()
    return f"{before}{first}\n\n{figures}\n\n{last}{after}"


def _hints(findings: Findings) -> Iterator[str]:
    plan, headline = findings.outcome.plan, findings.headline
    hints = headline["hints"]
    yield f"Of `tidegate simulate --preset {plan.name}`, version {findings.version}: {plan.programs} programs a worker,"
    yield f"two {plan.engine} workers, **{headline['seeds_are']} seeds** {', '.join(map(str, _seeds(headline)))}, at"
    yield f"{plan.loads[0]} of the knee of `kv` with host memory for {plan.host_tokens[0]:,} tokens and a pool for"
    yield f"{plan.pool_tokens:,}. Means over seeds; ratios are means of ratios by seed."
    yield ""
    for key, value in findings.outcome.calibrations.items():
        if value.j50 is not None:
            rho = value.j50 * value.work_s / key.fleet.workers
            yield f"Knee of {key.workload}: {value.j50:.3f} programs a second, {rho:.2f} rho."
    yield ""
    yield from table(HEADS, hint_rows(hints if isinstance(hints, list) else []))


def _figures(findings: Findings) -> Iterator[str]:
    plan, headline = findings.outcome.plan, findings.headline
    main = main_of(plan, findings.summaries)
    past = chosen(main, plan.past_load)[0]
    yield f"Of `tidegate simulate --preset {plan.name}`, version {findings.version}: {plan.programs} programs a run on"
    yield f"one {plan.engine} worker, **{headline['seeds_are']} seeds** {', '.join(map(str, _seeds(headline)))}."
    if headline["seeds_are"] == "design":
        yield "Policies were made and tuned on these: they show that it works, and are no evidence."
    if findings.outcome.missing:
        yield f"The run was interrupted: {findings.outcome.missing} simulations are missing."
    yield ""
    yield "**Promises** (of the main matrix: means of ratios paired by seed; past the knee; the worst of all loads"
    yield "below it; throughput with the most programs at a time):"
    yield ""
    yield from _promises(findings)
    others = chosen(plain_of(plan, findings.summaries), plan.past_load)[0]
    for title, figure in (("Mean JCT, s", JCT), ("P99 of JCT, s", P99)):
        yield f"**{title}**, past the knee:"
        yield ""
        yield from _by_workload({**others, **past}, figure)
    for name, summary in past.items():
        load = "" if summary.j_over_j50 is None else f" ({summary.j_over_j50:.2f} J50)"
        yield f"**{name}** at {summary.scenario.load}{load}:"
        yield ""
        yield from _standings(summary)
    for title, lines in turns_jct(main).items():
        yield f"**{title}, turns multiplied**, mean JCT in s:"
        yield ""
        yield from _series({policy: {f"x{n:g}": jct for n, jct in points} for policy, points in lines.items()}, 0)
    for title, steps in throughput(plain_of(plan, findings.summaries)).items():
        yield f"**{title}, so many programs at a time**, steps a minute:"
        yield ""
        yield from _series(steps, 1)
    titles = {
        "workers": "Several workers, at equal load of each",
        "fleets": "Other fleets of one worker",
        "wrong": "What goes wrong",
    }
    for name, text in side_tables(findings).items():
        yield f"**{titles[name]}**:"
        yield ""
        yield from text
    yield "**Shapes** that published work lets expect:"
    yield ""
    rows = ((each.name, each.expected, each.verdict, each.seen) for each in findings.shapes)
    yield from table(("", "expected", "", "seen"), rows)


def _seeds(headline: dict[str, object]) -> Sequence[object]:
    seeds = headline["seeds"]
    return seeds if isinstance(seeds, list) else []


def _promises(findings: Findings) -> Iterator[str]:
    rows: dict[tuple[str, str], list[str]] = {}
    for kept in findings.kept:
        sign = "at least" if kept.promise.at_least else "at most"
        said = f"{kept.workload} {kept.value:.2f}"
        key = (kept.promise.figure, f"{sign} {kept.promise.bound:.3g}")
        rows.setdefault(key, []).append(said if kept.holds else f"**{said}**")
    yield from table(
        ("figure", "promised", "seen (bold: does not hold)"),
        ((f"`{figure}`", promised, ", ".join(seen)) for (figure, promised), seen in rows.items()),
    )


def _by_workload(past: dict[str, ScenarioSummary], figure: str) -> Iterator[str]:
    policies = dict.fromkeys(policy for summary in past.values() for policy in summary.standings)
    rows = []
    for policy in policies:
        standings = [summary.standings.get(policy) for summary in past.values()]
        seen = ("" if each is None else f"{each.figures[figure].mean:.0f}" for each in standings)
        rows.append((_name(policy), *seen))
    yield from table(("policy", *past), rows)


def _name(policy: str, cap: int | None = None) -> str:
    name = f"*{policy}*" if policy in BOUNDS else f"`{policy}`"
    return name if cap is None else f"{name} {cap}"


def _standings(summary: ScenarioSummary) -> Iterator[str]:
    heads = ["policy", "JCT mean, s", "P90", "P95", "P99", "queueing, of it mid-session", "steps/min", "prefix hits"]
    heads += ["recompute", "max slowdown", "mid-session hold, mean / longest, s"]
    rows = []
    for policy, standing in summary.standings.items():
        figures = standing.figures
        rows.append(
            (
                _name(policy, standing.cap),
                *(f"{figures[each].mean:.0f}" for each in (JCT, "jct_s.p90", "jct_s.p95", P99)),
                f"{100 * figures['queue_share'].mean:.0f} / {100 * figures['queue_share_mid'].mean:.0f} %",
                f"{figures[STEPS if summary.scenario.load is None else 'steps_per_min'].mean:.1f}",
                f"{100 * figures['prefix_hit_ratio'].mean:.0f} %",
                f"{figures['recompute_ratio'].mean:.2f}",
                f"{figures[SLOWDOWN].mean:.1f}",
                f"{figures['hold_mid_s.mean'].mean:.1f} / {figures['hold_mid_s.max'].most:.0f}",
            )
        )
    yield from table(heads, rows)


def _series(lines: dict[str, dict[str, float]], digits: int) -> Iterator[str]:
    """One row a policy, one column a point."""
    points = list(dict.fromkeys(point for values in lines.values() for point in values))
    rows = (
        (_name(policy), *(f"{values[point]:.{digits}f}" if point in values else "" for point in points))
        for policy, values in lines.items()
    )
    yield from table(("policy", *points), rows)


@click.command()
@click.argument("document", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.argument("page", type=click.Path(path_type=Path, exists=True, dir_okay=False))
def main(document: Path, page: Path) -> None:
    """Put the figures of DOCUMENT (a simulate.json) into PAGE, between its marks."""
    try:
        page.write_text(filled(page.read_text(encoding="utf-8"), read_findings(document)), encoding="utf-8")
    except (DocumentError, ValueError, OSError) as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    sys.exit(main())
