"""An experiment as plots, with matplotlib (the optional extra ``simulate``)."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from load.sim.headline import main_of, plain_of, throughput, turns_jct
from load.sim.plan import Plan
from load.sim.summary import JCT, ScenarioSummary

MISSING = "no plots: matplotlib is not installed; pip install 'tidegate[simulate]'"
OURS = "commit"

Style = tuple[str, str, str]

STYLES: dict[str, Style] = {
    "round_robin": ("0.6", "s", "--"),
    "least_load": ("0.6", "D", "--"),
    "kv": ("black", "s", "--"),
    "program_fcfs": ("tab:cyan", "o", "-"),
    "plas": ("tab:purple", "o", "-"),
    "infercept": ("tab:brown", "v", "-"),
    "static_ttl": ("tab:olive", "^", "-"),
    "continuum": ("tab:blue", "o", "-"),
    "continuum_b": ("tab:blue", "v", "--"),
    "continuum_c": ("tab:blue", "x", "-."),
    "thunderagent": ("tab:orange", "o", "-"),
    "thunderagent_paper": ("tab:orange", "v", "--"),
    "concur": ("tab:green", "D", "-"),
    "lease": ("tab:pink", "^", "-"),
    "commit_fcfs": ("tab:red", "v", "--"),
    "commit": ("tab:red", "o", "-"),
    "clairvoyant": ("0.45", "*", ":"),
    "belady": ("0.45", "x", ":"),
    "cap": ("0.45", "+", ":"),
}
"""Colour, marker and line of each policy; the bounds are dotted."""
OTHERS: tuple[Style, ...] = (("tab:gray", "P", "-"), ("gold", "X", "-"), ("navy", "h", "-"), ("lime", "p", "-"))


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_all(plan: Plan, summaries: Sequence[ScenarioSummary], folder: Path) -> list[tuple[str, str]]:
    """Write what there is to plot; (file name, caption) of each. Needs `can_plot`. Raises `OSError`."""
    main, plain = main_of(plan, summaries), plain_of(plan, summaries)
    written: list[tuple[str, str]] = []
    for workload, lines in by_load(main).items():
        written.append((f"jct-{_file(workload)}.png", f"{workload}: mean JCT against load"))
        _lines(folder / written[-1][0], lines, written[-1][1], "load in units of J50", "mean JCT, s", log=True)
    for workload, steps in throughput(plain).items():
        lines = {policy: [(float(n), value) for n, value in points.items()] for policy, points in steps.items()}
        if any(len(points) > 1 for points in lines.values()):
            caption = f"{workload}: steps a minute against concurrency"
            written.append((f"throughput-{_file(workload)}.png", caption))
            _lines(
                folder / written[-1][0], lines, caption, "programs at a time", "steps a minute", log_x=True, ticks=True
            )
    for workload, lines in turns_jct(main).items():
        caption = f"{workload}: mean JCT against the number of turns"
        written.append((f"turns-{_file(workload)}.png", caption))
        _lines(folder / written[-1][0], lines, caption, "turns, multiplied", "mean JCT, s", log=True, ticks=True)
    for each in main:
        if each.scenario.concurrency is None and each.scenario.turn_multiplier == 1:
            name = each.scenario.workload_name
            caption = f"{name} at {each.scenario.load}: what KV memory was for"
            written.append((f"token-seconds-{_file(each.scenario.workload_name)}-{each.scenario.load}.png", caption))
            _bars(folder / written[-1][0], each, caption)
    return written


def _file(workload: str) -> str:
    """Of a workload, in a file's name."""
    return re.sub(r"[^\w.-]", "_", workload)


def by_load(summaries: Sequence[ScenarioSummary]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Workload, policy, (load in units of J50, mean JCT), where a knee is known and several loads ran."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for each in summaries:
        if each.j_over_j50 is not None and each.scenario.turn_multiplier == 1:
            for policy, standing in each.standings.items():
                points = found.setdefault(each.scenario.workload_name, {}).setdefault(policy, [])
                points.append((each.j_over_j50, standing.figures[JCT].mean))
    return {
        workload: {policy: sorted(points) for policy, points in lines.items()}
        for workload, lines in found.items()
        if len(next(iter(lines.values()))) > 1
    }


def _figure(height: float = 5.5) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _style(policy: str) -> dict[str, Any]:
    """The same for a policy in every plot: no two have colour and marker in common."""
    colour, marker, dashes = STYLES.get(policy, OTHERS[sum(policy.encode()) % len(OTHERS)])
    width = 3.0 if policy == OURS else 1.4
    return {"color": colour, "marker": marker, "linestyle": dashes, "linewidth": width, "markersize": 6}


def _lines(
    path: Path,
    lines: Mapping[str, Sequence[tuple[float, float]]],
    title: str,
    x: str,
    y: str,
    *,
    log: bool = False,
    log_x: bool = False,
    ticks: bool = False,
) -> None:
    """``ticks``: at the points alone."""
    from matplotlib.ticker import NullLocator, ScalarFormatter

    figure, axes = _figure()
    for name, points in lines.items():
        axes.plot([point[0] for point in points], [point[1] for point in points], label=name, **_style(name))
    for wanted, scale, axis in ((log, axes.set_yscale, axes.yaxis), (log_x, axes.set_xscale, axes.xaxis)):
        if wanted:
            scale("log", base=2)
            axis.set_major_formatter(ScalarFormatter())
    if ticks:
        axes.set_xticks(sorted({point[0] for points in lines.values() for point in points}))
        axes.xaxis.set_minor_locator(NullLocator())
    if not log:
        axes.set_ylim(bottom=0)
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(visible=True, alpha=0.3)
    figure.legend(loc="outside right center", fontsize="small")
    figure.savefig(path, dpi=100, metadata={"Software": None})


def _bars(path: Path, summary: ScenarioSummary, title: str) -> None:
    names = list(summary.standings)
    figure, axes = _figure(1.5 + 0.3 * len(names))
    left = [0.0] * len(names)
    for part, text in (("running", "running turns"), ("kept", "kept for the next turn"), ("rest", "free, or lost")):
        values = [summary.standings[name].figures[f"token_seconds.{part}"].mean for name in names]
        axes.barh(names, values, left=left, label=text)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set(title=title, xlabel="share of token-seconds", xlim=(0, 1))
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(path, dpi=100, metadata={"Software": None})
