"""``tidegate simulate``"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

import click
from rich.console import Console
from rich.progress import TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from bus.interrupt import INTERRUPTED_EXIT
from load.sim.experiment import Listener, run_plan
from load.sim.options import Options, with_options
from load.sim.parallel import WorkerLostError
from load.sim.plan import ExperimentError, Plan
from load.sim.presets import PRESETS, QUICK
from load.sim.scenarios import EngineName, Load
from tidegate.commands.options import SPEED, FiniteRange, skip_unplayable_option
from tidegate.commands.progress import ProgressBar
from tidegate.errors import SimulationError, WrongUseError

if TYPE_CHECKING:
    from load.sim.document import Findings
    from load.sim.summary import ScenarioSummary

T = TypeVar("T")

DOCUMENT, REPORT, JOURNAL = "simulate.json", "report.md", "unfinished.jsonl"
LINE_S = 30.0
"""So often a run that takes long says how far it is, where there is no bar."""
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


def capacities(text: str) -> tuple[int, ...]:
    """As `numbers`, of at least one block of 16 tokens."""
    found = numbers(text)
    if min(found) < 16:
        raise ValueError(f"{text!r}: at least a block, 16 tokens")
    return found


def names(text: str) -> tuple[str, ...]:
    """Of ``kv,commit``, each once."""
    return tuple(dict.fromkeys(part.strip().lower() for part in text.split(",") if part.strip()))


def loads(text: str) -> tuple[Load, ...]:
    """Of ``0.7j50,1.0rho``, each once. Raises `ValueError`."""
    return tuple(dict.fromkeys(Load.parse(part) for part in text.split(",")))


def parameter(text: str) -> tuple[str, str, str]:
    """Of ``commit.span_s=40``: policy, dotted name, value. Raises `ValueError`."""
    name, equals, value = text.partition("=")
    policy, dot, rest = name.strip().partition(".")
    if not (equals and dot and policy and rest and value.strip()):
        raise ValueError(f"{text!r}: write policy.parameter=value, for example commit.span_s=40")
    return policy, rest, value.strip()


def _parameters(context: click.Context, option: click.Parameter, values: tuple[str, ...]) -> list[tuple[str, str, str]]:
    del context, option
    try:
        return [parameter(text) for text in values]
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


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
@click.option("--preset", type=click.Choice(list(PRESETS)), help="What is run (default: quick); see below.")
@click.option("--quick", is_flag=True, help="The same as --preset quick; of --preset hints a small one.")
@click.option("--policies", callback=_option(names), metavar="NAMES", help="With commas; also the bounds.")
@click.option("--policy", "policy", multiple=True, metavar="NAME", help="One more of them. Repeatable.")
@click.option("--workloads", callback=_option(names), metavar="NAMES", help="With commas.")
@click.option("--loads", callback=_option(loads), metavar="LOADS", help="Open loops: as 0.7j50,1.0rho,0.07jps.")
@click.option("--concurrency", callback=_option(counts), metavar="NUMBERS", help="Closed loops: programs at a time.")
@click.option(
    "--turn-multiplier",
    callback=_option(counts),
    metavar="NUMBERS",
    help="Every turn becomes so many, at the last load.",
)
@click.option(
    "--trace",
    "traces",
    multiple=True,
    type=click.Path(path_type=Path, exists=True),
    metavar="FILE",
    help="A recorded trace (see below), or a workload: lines in Mooncake's format. Maybe gzipped. Repeatable.",
)
@click.option("--speed", type=SPEED, help="Of a recorded trace: divides its delays.")
@click.option("--lanes", type=click.IntRange(1, 1_000_000), help="Of a recorded trace: so many plays at a time.")
@skip_unplayable_option
@click.option("--block-size", type=click.IntRange(1, 1 << 20), help="Of Mooncake lines with --speed or --lanes (512).")
@click.option("--perturb", callback=_option(names), metavar="NAMES", help="What goes wrong, at the last load; or: all.")
@click.option("--seeds", callback=_option(numbers), metavar="NUMBERS", help="As 21-25; 1 to 20 are design seeds.")
@click.option("--programs", type=click.IntRange(2, 100_000), help="Of each run, for each worker; changes the knee.")
@click.option("--workers", callback=_option(counts), metavar="NUMBERS", help="Sizes of the fleet.")
@click.option("--kv-tokens", callback=_option(capacities), metavar="NUMBERS", help="KV capacity of one worker: tokens.")
@click.option("--chunk", callback=_option(counts), metavar="NUMBERS", help="Tokens of one iteration of an engine.")
@click.option("--max-seqs", callback=_option(counts), metavar="NUMBERS", help="Requests that an engine runs at once.")
@click.option("--host-tokens", callback=_option(numbers), metavar="NUMBERS", help="Host memory below it; 0: none.")
@click.option("--host-gbps", type=FiniteRange(0.1, 10_000), help="Its link to a GPU, in GB/s (default: 50).")
@click.option("--disk-tokens", type=click.IntRange(0, 1 << 40), help="A disk below that (6 GB/s); 0: none.")
@click.option("--pool-tokens", type=click.IntRange(0, 1 << 40), help="A pool that all share (25 GB/s); 0: none.")
@click.option("--engine", type=click.Choice(["h100-8b", "h100x4-70b"]), help="Whose times and KV capacity.")
@click.option(
    "--set",
    "parameters",
    multiple=True,
    callback=_parameters,
    metavar="POLICY.NAME=VALUE",
    help="A parameter of a policy, as commit.span_s=40. Repeatable.",
)
@click.option("--processes", type=click.IntRange(1, 1_024), help="In parallel (default: one a core).")
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), metavar="DIR", help=f"Write {DOCUMENT}, {REPORT}, plots."
)
@click.option("--list", "as_list", is_flag=True, help="Say what there is: policies and parameters, workloads, ...")
@click.option("--json", "as_json", is_flag=True, help="Print the headline as one JSON object, and nothing else.")
def command(
    preset: str | None,
    quick: bool,
    policies: tuple[str, ...] | None,
    policy: tuple[str, ...],
    workloads: tuple[str, ...] | None,
    loads: tuple[Load, ...] | None,
    concurrency: tuple[int, ...] | None,
    turn_multiplier: tuple[int, ...] | None,
    traces: tuple[Path, ...],
    speed: float | None,
    lanes: int | None,
    skip_unplayable: bool,
    block_size: int | None,
    perturb: tuple[str, ...] | None,
    seeds: tuple[int, ...] | None,
    programs: int | None,
    workers: tuple[int, ...] | None,
    kv_tokens: tuple[int, ...] | None,
    chunk: tuple[int, ...] | None,
    max_seqs: tuple[int, ...] | None,
    host_tokens: tuple[int, ...] | None,
    host_gbps: float | None,
    disk_tokens: int | None,
    pool_tokens: int | None,
    engine: EngineName | None,
    parameters: list[tuple[str, str, str]],
    processes: int | None,
    out: Path | None,
    as_list: bool,
    as_json: bool,
) -> int:
    """Compare scheduling policies in virtual time: the admission core that serves requests, with simulated engines and
    programs. No system is needed, nothing is sent anywhere. Equal arguments give equal results, byte for byte.

    Loads: rho (arrival rate x GPU seconds of a program; 1.0 is the edge of what a worker can do), j50 (in units of the
    knee, where the mean time of a program under kv is twice that alone; found first), jps (programs a second).
    Of loads, closed loops (--concurrency), turns and perturbations, only those run that are given, where any are.

    The bounds are called clairvoyant and belady (know the future) and cap (the best static number of programs). --list
    says what else there is.

    A recorded trace (--trace with files or folders of ours, of Dynamo's, or in agentic Mooncake's format, version 2;
    also Mooncake lines with --speed or --lanes) is played request by request, each after what it waited for, under
    every policy and fleet that is given (default: kv and commit, the fleet as recorded), beside what was recorded. It
    has one load, its own: no --loads, --seeds or presets. docs/policies.md says more.

    Presets: quick (under a minute, small, on design seeds: shows that it works), seeds (minutes, on seeds that nobody
    tuned on), full (the whole matrix: an hour or less), hints (what it is worth to tell caches what to keep: minutes).
    With --out an interrupted run leaves a report of what there is, and goes on when it is called again. Exit code 1
    when a policy did not finish what it began, or could not serve a request of a recorded trace.

    \b
    Examples:
      tidegate simulate --quick
      tidegate simulate --preset seeds --json | tail -n 1 | jq .jct_ratio_best_rival_over_commit
      tidegate simulate --preset seeds --out results
      tidegate simulate --policies kv,continuum,commit --workloads swe --loads 0.7j50,1.0rho,1.2rho --seeds 6-10
      tidegate simulate --policies kv,commit,cap --workloads swe --concurrency 6,12,24,48
      tidegate simulate --policies kv,commit --workloads mix --loads 1.0rho --workers 1,2,4 --kv-tokens 200000,412000
      tidegate simulate --policies kv,commit --workloads mix --loads 1.0rho --workers 2 --perturb all
      tidegate simulate --policies kv,commit --trace conversation.jsonl.gz --loads 1.0rho --set commit.span_s=40
      tidegate simulate --trace .tidegate/traces --policy kv --policy commit --workers 2 --kv-tokens 40000
      tidegate simulate --trace run.jsonl.gz --speed 5 --json | jq '.runs[] | {policy, prefix_hit_ratio, jct_ms}'
    """
    if as_list:
        from load.sim.listing import listing

        for line in listing():
            print(line)
        return 0
    from tidegate.commands.simulate_trace import is_recorded, simulate_trace

    chosen_policies = (*(policies or ()), *(each for part in policy for each in names(part)))
    options = Options(
        policies=tuple(dict.fromkeys(chosen_policies)) if policies is not None or policy else None,
        workloads=workloads,
        traces=traces,
        loads=loads,
        concurrency=concurrency,
        turn_multipliers=turn_multiplier,
        perturbations=perturb,
        seeds=seeds,
        programs=programs,
        workers=workers,
        kv_tokens=kv_tokens,
        chunk=chunk,
        max_seqs=max_seqs,
        host_tokens=host_tokens,
        host_gbps=host_gbps,
        disk_tokens=disk_tokens,
        pool_tokens=pool_tokens,
        engine=engine,
        parameters=tuple(parameters),
    )
    if is_recorded(traces, as_recorded=speed is not None or lanes is not None):
        if quick or preset is not None:
            raise WrongUseError(
                "presets are of made-up workloads: leave --preset and --quick out beside a recorded trace"
            )
        return simulate_trace(
            traces,
            options,
            speed=speed or 1.0,
            lanes=lanes,
            block_size=block_size,
            skip_unplayable=skip_unplayable,
            processes=processes or _cores(),
            out=out,
            as_json=as_json,
        )
    if skip_unplayable:
        raise WrongUseError("--skip-unplayable is of a recorded trace: give one with --trace")
    if block_size is not None:
        raise WrongUseError("--block-size is of Mooncake lines that are played as recorded: add --speed 1, or --lanes")
    if quick and preset not in (None, "quick", *QUICK):
        raise WrongUseError(f"--quick is --preset quick: leave it out, or --preset {preset}")
    chosen = QUICK.get(preset or "", None) if quick else None
    plan = with_options(chosen or PRESETS[preset or "quick"], options)
    findings = simulate(plan, processes or _cores(), out, quiet=as_json)
    if findings.outcome.missing:
        click.echo(f"tidegate: interrupted; {out} has what there is, and the same command goes on from there", err=True)
        return INTERRUPTED_EXIT
    if as_json:
        print(json.dumps(findings.headline), flush=True)
    else:
        print_findings(findings)
    for sentence in findings.outcome.failed:
        click.echo(f"not finished: {sentence}", err=True)
    return 1 if findings.outcome.failed else 0


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def simulate(plan: Plan, processes: int, out: Path | None, *, quiet: bool) -> Findings:
    """Run the plan; write what goes into ``out``. Raises `WrongUseError`, `SimulationError`."""
    from load.sim.document import Findings, read_calibrations, to_bytes
    from load.sim.journal import Journal
    from load.sim.plots import MISSING, can_plot, plot_all
    from load.sim.report import report

    try:
        plan.check()
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
            if not can_plot():
                click.echo(f"tidegate: {MISSING}", err=True)
        known = {} if out is None else read_calibrations(out / DOCUMENT)
        with (
            terminated_like_interrupted(),
            Journal(None if out is None else out / JOURNAL, plan.traces()) as journal,
            Progressing(quiet=quiet) as listener,
        ):
            listener.expect(plan, processes, len(journal))
            findings = Findings.of(run_plan(plan, processes, listener, known, journal))
            if findings.outcome.missing and out is None:
                raise KeyboardInterrupt
            if out is not None:
                write_whole(out / DOCUMENT, to_bytes(findings))
                plots = plot_all(plan, findings.summaries, out) if can_plot() else []
                write_whole(out / REPORT, report(findings, plots).encode())
            if not findings.outcome.missing:
                journal.remove()
    except ExperimentError as error:
        raise WrongUseError(str(error)) from None
    except WorkerLostError as error:
        raise SimulationError(str(error)) from None
    except OSError as error:
        where = "" if out is None else f"--out {out}: "
        raise SimulationError(f"{where}{error.strerror or error}") from None
    return findings


def write_whole(path: Path, content: bytes) -> None:
    """Whole, or not at all."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(content)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def terminated_like_interrupted() -> Iterator[None]:
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
        columns = (TextColumn("{task.fields[count]}"), TimeElapsedColumn(), TimeRemainingColumn())
        super().__init__(*columns, fields={"count": ""}, quiet=quiet)
        self._quiet = quiet
        self._lines = not quiet and not self._console.is_terminal
        self._began = self._said = time.monotonic()
        self._jobs = self._done = 0
        self._total = self._passed = 0.0

    def expect(self, plan: Plan, processes: int, known: int) -> None:
        """How long a long plan takes, and what is there already."""
        from load.sim.effort import minutes_of

        if self._quiet:
            return
        cells, minutes = minutes_of(plan)
        if minutes >= 1:
            said = f"about {cells} simulations, {minutes:.0f} CPU minutes on an idle machine"
            click.echo(f"{said}: {minutes / processes:.0f} minutes in {processes} processes", err=True)
        if known:
            click.echo(f"{known} results are there from an interrupted run", err=True)

    def stage(self, what: str, jobs: int, seconds: float = 0.0) -> None:
        self._jobs, self._done = jobs, 0
        self._total, self._passed = seconds or jobs, 0.0
        self._progress.reset(self._task, total=self._total, description=what, count=f"0/{jobs}")
        if self._lines and jobs:
            self._line(f"{what}: {jobs}")

    def done(self, seconds: float = 0.0) -> None:
        self._done += 1
        self._passed += seconds or 1
        self._progress.update(self._task, advance=seconds or 1, count=f"{self._done}/{self._jobs}")
        if self._lines and time.monotonic() - self._said > LINE_S:
            self._line(f"{self._done} of {self._jobs}, {100 * self._passed / self._total:.0f} % of the work")

    def _line(self, text: str) -> None:
        self._said = time.monotonic()
        print(f"{self._said - self._began:6.1f} s  {text}", file=sys.stderr, flush=True)


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
