"""``tidegate simulate``"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

import click
from rich.console import Console
from rich.progress import MofNCompleteColumn, TimeElapsedColumn
from rich.table import Table

from load.sim.cells import EngineName, Load
from load.sim.experiment import PRESETS, ExperimentError, Listener, Plan, run_plan
from load.sim.parallel import WorkerLostError
from tidegate.commands.progress import ProgressBar
from tidegate.errors import SimulationError, WrongUseError

if TYPE_CHECKING:
    from load.sim.document import Findings
    from load.sim.summary import ScenarioSummary

T = TypeVar("T")

DOCUMENT, REPORT = "simulate.json", "report.md"
REPORT_WIDTH = 120
"""Of tables that are read from a file."""


def numbers(text: str) -> tuple[int, ...]:
    """Of ``1-5,11``, each once. Raises `ValueError`, which says what to write."""
    found: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.strip().partition("-")
            low, high = int(first), int(last or first)
            if not 0 <= low <= high <= 1_000_000_000 or high - low >= 1_000:
                raise ValueError(part)
            found.extend(range(low, high + 1))
    except ValueError:
        raise ValueError(f"{text!r}: write numbers and ranges, for example 1-5,11") from None
    return tuple(dict.fromkeys(found))


def counts(text: str) -> tuple[int, ...]:
    """As `numbers`, of at least 1."""
    found = numbers(text)
    if min(found) < 1:
        raise ValueError(f"{text!r}: at least 1")
    return found


def names(text: str) -> tuple[str, ...]:
    """Of ``kv,commit``, each once."""
    return tuple(dict.fromkeys(part.strip().lower() for part in text.split(",") if part.strip()))


def loads(text: str) -> tuple[Load, ...]:
    """Of ``0.7j50,1.0rho``, each once. Raises `ValueError`."""
    return tuple(dict.fromkeys(Load.parse(part) for part in text.split(",")))


def _option(parse: Callable[[str], tuple[T, ...]]) -> Callable[..., tuple[T, ...] | None]:
    def callback(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[T, ...] | None:
        del context, parameter
        if value is None:
            return None
        try:
            return parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return callback


@click.command("simulate")
@click.option(
    "--preset", type=click.Choice(list(PRESETS)), default="quick", show_default=True, help="What is run; see below."
)
@click.option("--quick", is_flag=True, help="The same as --preset quick.")
@click.option("--policies", callback=_option(names), metavar="NAMES", help="With commas; also the bounds.")
@click.option("--workloads", callback=_option(names), metavar="NAMES", help="With commas.")
@click.option("--loads", callback=_option(loads), metavar="LOADS", help="Open loops: as 0.7j50,1.0rho,0.07jps.")
@click.option("--concurrency", callback=_option(counts), metavar="NUMBERS", help="Closed loops: programs at a time.")
@click.option(
    "--turn-multiplier",
    callback=_option(counts),
    metavar="NUMBERS",
    help="Every turn becomes so many, at the last load.",
)
@click.option("--seeds", callback=_option(numbers), metavar="NUMBERS", help="As 21-25; 1 to 20 are design seeds.")
@click.option("--programs", type=click.IntRange(2, 100_000), help="Of each run; changes the knee.")
@click.option("--workers", callback=_option(counts), metavar="NUMBERS", help="Sizes of the fleet.")
@click.option("--kv-tokens", callback=_option(counts), metavar="NUMBERS", help="KV capacity of one worker, in tokens.")
@click.option("--engine", type=click.Choice(["h100-8b", "h100x4-70b"]), help="Whose times and KV capacity.")
@click.option("--processes", type=click.IntRange(1, 1_024), help="In parallel (default: one a core).")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help=f"Write {DOCUMENT}, {REPORT}, plots."
)
@click.option("--json", "as_json", is_flag=True, help="Print the headline as one JSON object, and nothing else.")
def command(
    preset: str,
    quick: bool,
    policies: tuple[str, ...] | None,
    workloads: tuple[str, ...] | None,
    loads: tuple[Load, ...] | None,
    concurrency: tuple[int, ...] | None,
    turn_multiplier: tuple[int, ...] | None,
    seeds: tuple[int, ...] | None,
    programs: int | None,
    workers: tuple[int, ...] | None,
    kv_tokens: tuple[int, ...] | None,
    engine: EngineName | None,
    processes: int | None,
    out: Path | None,
    as_json: bool,
) -> int:
    """Compare scheduling policies in virtual time: the admission core that serves requests, with simulated engines and
    programs. No system is needed, nothing is sent anywhere. Equal arguments give equal results, byte for byte.

    Loads: rho (arrival rate x GPU seconds of a program; 1.0 is the edge of what a worker can do), j50 (in units of the
    knee, where the mean time of a program under kv is twice that alone; found first), jps (programs a second).
    Of loads, closed loops (--concurrency) and turns, only those run that are given, where any are.

    The bounds are called clairvoyant (knows the future) and cap (the best static number of programs).

    Presets: quick (under a minute, small, on design seeds: shows that it works), seeds (minutes, on seeds that nobody
    tuned on), full (the whole matrix: an hour or more). Exit code 1 when a policy did not finish what it began.

    \b
    Examples:
      tidegate simulate --quick
      tidegate simulate --preset seeds --json | tail -n 1 | jq .jct_ratio_best_rival_over_commit
      tidegate simulate --preset seeds --out results
      tidegate simulate --policies kv,continuum,commit --workloads swe --loads 0.7j50,1.0rho,1.2rho --seeds 21-25
      tidegate simulate --policies kv,commit,cap --workloads swe --concurrency 6,12,24,48
      tidegate simulate --policies kv,commit --workloads mix --loads 1.0rho --workers 1,2,4 --kv-tokens 200000,412000
    """
    plan = _with_options(
        PRESETS["quick" if quick else preset],
        workloads=workloads,
        loads=loads,
        concurrency=concurrency,
        turn_multiplier=turn_multiplier,
    )
    given = {"policies": policies, "seeds": seeds, "programs": programs, "workers": workers, "engine": engine}
    given["kv_tokens"] = kv_tokens
    plan = replace(plan, **{name: value for name, value in given.items() if value is not None})  # type: ignore[arg-type]
    findings = simulate(plan, processes or _cores(), out, quiet=as_json)
    if as_json:
        print(json.dumps(findings.headline), flush=True)
    else:
        print_findings(findings)
    for sentence in findings.outcome.failed:
        click.echo(f"not finished: {sentence}", err=True)
    return 1 if findings.outcome.failed else 0


def _with_options(
    plan: Plan,
    *,
    workloads: tuple[str, ...] | None,
    loads: tuple[Load, ...] | None,
    concurrency: tuple[int, ...] | None,
    turn_multiplier: tuple[int, ...] | None,
) -> Plan:
    """Of loads, closed loops and turns only those run that are given, if any are. Workloads restrict what a preset does
    with some of its own."""
    chosen = plan.workloads if workloads is None else workloads
    turning, closed = plan.turn_workloads, plan.closed_workloads
    if workloads is not None:
        turning = tuple(each for each in workloads if each in turning)
        closed = tuple(each for each in workloads if each in closed)
    if loads is None and concurrency is None and turn_multiplier is None:
        return replace(plan, workloads=chosen, turn_workloads=turning, closed_workloads=closed)
    return replace(
        plan,
        workloads=chosen if loads else (),
        loads=loads or (),
        turn_workloads=chosen if turn_multiplier else (),
        turn_load=loads[-1] if loads else plan.turn_load,
        turn_multipliers=turn_multiplier or (),
        closed_workloads=chosen if concurrency else (),
        concurrency=concurrency or (),
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def simulate(plan: Plan, processes: int, out: Path | None, *, quiet: bool) -> Findings:
    """Run the plan; write what goes into ``out``. Raises `WrongUseError`, `SimulationError`."""
    from load.sim.document import Findings, read_calibrations, to_bytes
    from load.sim.plots import MISSING, can_plot, plot_all
    from load.sim.report import report

    try:
        plan.check()
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            if not can_plot():
                click.echo(f"tidegate: {MISSING}", err=True)
        known = {} if out is None else read_calibrations(out / DOCUMENT)
        with _terminated_like_interrupted(), Progressing(quiet=quiet) as listener:
            findings = Findings.of(run_plan(plan, processes, listener, known))
            if out is not None:
                plots = plot_all(findings.summaries, out) if can_plot() else []
                _write(out / REPORT, report(findings, plots).encode())
                _write(out / DOCUMENT, to_bytes(findings))
    except ExperimentError as error:
        raise WrongUseError(str(error)) from None
    except WorkerLostError as error:
        raise SimulationError(str(error)) from None
    except OSError as error:
        raise SimulationError(f"--out {out}: {error.strerror or error}") from None
    return findings


def _write(path: Path, content: bytes) -> None:
    """Whole, or not at all."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def _terminated_like_interrupted() -> Iterator[None]:
    """SIGTERM ends the run as Ctrl-C does: no process is left behind."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Progressing(ProgressBar, Listener):
    """A progress bar on standard error; plain lines where that is no terminal; nothing where it is to be quiet."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(MofNCompleteColumn(), TimeElapsedColumn(), fields={}, quiet=quiet)
        self._lines = not quiet and not self._console.is_terminal
        self._began = time.monotonic()

    def stage(self, what: str, jobs: int) -> None:
        self._progress.reset(self._task, total=jobs, description=what)
        if self._lines and jobs:
            print(f"{time.monotonic() - self._began:6.1f} s  {what}: {jobs}", file=sys.stderr, flush=True)

    def done(self) -> None:
        self._progress.advance(self._task)


def print_findings(findings: Findings) -> None:
    """For people: one table a scenario, then what was promised."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = REPORT_WIDTH
    for summary in findings.summaries:
        of_seeds = f"{summary.kind} seeds {', '.join(map(str, summary.seeds))}"
        console.print(f"[bold]{summary.scenario.name}[/]  ({of_seeds})")
        console.print(_table(summary))
        console.print()
    for kept in findings.kept:
        mark = "[green]holds[/]" if kept.holds else "[yellow]does not hold[/]"
        sign = ">=" if kept.promise.at_least else "<="
        text = f"{kept.promise.figure} {kept.value:.3f}, promised {sign} {kept.promise.bound:.3g}"
        console.print(f"{kept.workload:10} {text}: {mark}")
    if findings.headline["seeds_are"] == "design":
        console.print("These seeds were used to design the policies; they show that it works, and nothing else.")


def _table(summary: ScenarioSummary) -> Table:
    """In 80 columns: means over seeds (the longest hold: of all); queued: share of JCT; slowdown: the largest."""
    from load.sim.summary import JCT, P99, SLOWDOWN, STEPS

    closed = summary.scenario.load is None
    table = Table(box=None, padding=(0, 1, 0, 0))
    heads = ("policy", "JCT s", "P95 s", "P99 s", "queued", "steps/min", "recomp.", "slowdown", "hold s")
    for head in heads:
        table.add_column(head, justify="left" if head == "policy" else "right", no_wrap=True)
    for name, standing in summary.standings.items():
        figures = standing.figures
        table.add_row(
            name if standing.cap is None else f"{name} {standing.cap}",
            f"{figures[JCT].mean:.1f}",
            *(f"{figures[figure].mean:.0f}" for figure in ("jct_s.p95", P99)),
            f"{100 * figures['queue_share'].mean:.1f} %",
            f"{figures[STEPS if closed else 'steps_per_min'].mean:.1f}",
            f"{figures['recompute_ratio'].mean:.2f}",
            f"{figures[SLOWDOWN].mean:.1f}",
            f"{figures['hold_mid_s.max'].most:.0f}",
        )
    return table
