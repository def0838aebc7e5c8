"""An experiment as plots, with matplotlib (the optional extra ``simulate``)."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from load.sim.cells import BOUNDS
from load.sim.summary import JCT, ScenarioSummary, throughput, turns

MISSING = "no plots: matplotlib is not installed; pip install 'tidegate[simulate]'"
OURS = "commit"


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def plot_all(summaries: Sequence[ScenarioSummary], folder: Path) -> list[tuple[str, str]]:
    """Write what there is to plot; (file name, caption) of each. Needs `can_plot`. Raises `OSError`."""
    first = [each for each in summaries if each.kind == summaries[0].kind] if summaries else []
    written: list[tuple[str, str]] = []
    for workload, lines in by_load(first).items():
        name, caption = f"jct-{workload}.png", f"{workload}: mean JCT against load"
        _lines(folder / name, lines, caption, "load in units of J50", "mean JCT, s", log=True)
        written.append((name, caption))
    for workload, steps in throughput(first).items():
        lines = {policy: [(float(n), value) for n, value in points.items()] for policy, points in steps.items()}
        name, caption = f"throughput-{workload}.png", f"{workload}: steps a minute against concurrency"
        _lines(folder / name, lines, caption, "programs at a time", "steps a minute", log=False)
        written.append((name, caption))
    if grown := turns(first):
        lines = {workload: [(float(n), value) for n, value in points.items()] for workload, points in grown.items()}
        name, caption = "turns.png", "mean JCT of kv over commit against the number of turns"
        _lines(folder / name, lines, caption, "turns, multiplied", "kv over commit", log=False)
        written.append((name, caption))
    for each in first:
        if each.scenario.concurrency is None and each.scenario.turn_multiplier == 1:
            name = f"token-seconds-{each.scenario.workload}-{each.scenario.load}.png"
            caption = f"{each.scenario.workload} at {each.scenario.load}: what KV memory was for"
            _bars(folder / name, each, caption)
            written.append((name, caption))
    return written


def by_load(summaries: Sequence[ScenarioSummary]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Workload, policy, (load in units of J50, mean JCT), where a knee is known and several loads ran; first fleet."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for each in summaries:
        same_fleet = each.scenario.fleet == summaries[0].scenario.fleet
        if same_fleet and each.j_over_j50 is not None and each.scenario.turn_multiplier == 1:
            for policy, standing in each.standings.items():
                points = found.setdefault(each.scenario.workload, {}).setdefault(policy, [])
                points.append((each.j_over_j50, standing.figures[JCT].mean))
    return {
        workload: {policy: sorted(points) for policy, points in lines.items()}
        for workload, lines in found.items()
        if len(next(iter(lines.values()))) > 1
    }


def _figure() -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots()


def _lines(
    path: Path, lines: Mapping[str, Sequence[tuple[float, float]]], title: str, x: str, y: str, *, log: bool
) -> None:
    figure, axes = _figure()
    for number, (name, points) in enumerate(lines.items()):
        axes.plot(
            [point[0] for point in points],
            [point[1] for point in points],
            label=name,
            color=f"C{number % 10}" if name != OURS else "black",
            linewidth=2.5 if name == OURS else 1.2,
            linestyle=":" if name in BOUNDS else "-" if number < 10 else "--",
            marker="o",
            markersize=3,
        )
    if log:
        axes.set_yscale("log")
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=100, metadata={"Software": None})


def _bars(path: Path, summary: ScenarioSummary, title: str) -> None:
    figure, axes = _figure()
    names = list(summary.standings)
    left = [0.0] * len(names)
    for part, text in (("running", "running turns"), ("kept", "kept for the next turn"), ("rest", "free, or lost")):
        values = [summary.standings[name].figures[f"token_seconds.{part}"].mean for name in names]
        axes.barh(names, values, left=left, label=text)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set(title=title, xlabel="share of token-seconds")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=100, metadata={"Software": None})
