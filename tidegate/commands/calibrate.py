"""``tidegate calibrate``"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from bus.interrupt import INTERRUPTED_EXIT, until_interrupted
from bus.subjects import BUCKET_CALIBRATIONS
from schemas.calibration import MAX_POINTS, MAX_RUNS, Calibration
from services.admission.estimators.reload_cost import MIN_CONTEXTS
from tidegate.calibrate.run import Outcome, Wishes, calibrate
from tidegate.calibrate.store import key_of
from tidegate.calibrate.sweep import Run
from tidegate.commands.options import find_bus_options
from tidegate.commands.progress import ProgressBar
from tidegate.errors import WrongUseError
from tidegate.locate import locate

POOR_FIT = 0.15
"""A miss of this share at any point is said: such a curve is worth measuring again."""


def _contexts(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    del context, parameter
    try:
        found = tuple(int(part) for part in value.split(",")) if value else ()
    except ValueError:
        found = (0,)
    if any(not 0 < tokens < 1 << 40 for tokens in found):
        raise click.BadParameter("write numbers of tokens with commas, for example 1000,2000,4000,8000")
    return found


@click.command("calibrate")
@click.argument("engine", metavar="[ENGINE-URL]", required=False)
@click.option("--worker", metavar="NAME", help="The engine of this worker; asks the bus for its address.")
@click.option("--model", metavar="NAME", help="One that the engine serves (default: its first).")
@click.option(
    "--max-context", type=click.IntRange(1), metavar="TOKENS", help="End of the sweep (default: all it takes)."
)
@click.option(
    "--contexts",
    callback=_contexts,
    metavar="TOKENS,...",
    help=f"Measure these instead of 1000, 2000, ...: {MIN_CONTEXTS} to {MAX_POINTS} different ones.",
)
@click.option(
    "--runs", type=click.IntRange(1, MAX_RUNS), default=3, show_default=True, help="At each; the median counts."
)
@click.option("--force", is_flag=True, help="Measure although other requests run; their work is in the times too.")
@click.option("--no-store", "keep", is_flag=True, default=True, flag_value=False, help="Only print the curve.")
@click.option(
    "--api-key",
    envvar="TIDEGATE_BRIDGE_ENGINE_API_KEY",
    default="",
    metavar="KEY",
    help="Of the engine, where it wants one (or TIDEGATE_BRIDGE_ENGINE_API_KEY).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with the curve and all measurements.")
@find_bus_options
def command(
    engine: str | None,
    worker: str | None,
    model: str | None,
    max_context: int | None,
    contexts: tuple[int, ...],
    runs: int,
    force: bool,
    keep: bool,
    api_key: str,
    as_json: bool,
    nats: str | None,
    workdir: Path | None,
) -> int:
    """Measure how long an engine takes to compute a prompt anew, fit a curve, and store it for admission.

    Sends prompts that no cache holds, of 1000, 2000, 4000, ... tokens up to the model's longest, and takes the time to
    the first token; what every request takes anyway is measured too, and taken off. The engine should have nothing
    else to do; afterwards its cache is full of these prompts. Takes a minute or a few; Ctrl-C ends it, and nothing is
    stored.

    Exit code 1: not measured, or not stored (the curve is printed all the same); 2: wrong use; 130: interrupted.

    \b
    Examples:
      tidegate calibrate --worker engine-1
      tidegate calibrate http://10.0.0.5:8000 --nats nats://10.0.0.2:4222
      tidegate calibrate http://127.0.0.1:8000 --no-store --max-context 32000 --json
    """
    if (engine is None) == (worker is None):
        raise WrongUseError("name one engine: its URL (http://HOST:PORT), or --worker NAME")
    if contexts and max_context is not None:
        raise WrongUseError("--contexts and --max-context exclude each other")
    wishes = Wishes(
        url=engine,
        worker=worker,
        model=model,
        contexts=contexts,
        max_context=max_context,
        runs=runs,
        force=force,
        keep=keep,
        api_key=api_key,
    )
    located = locate(nats, workdir)
    with Progressing() as listener:
        outcome = asyncio.run(until_interrupted(calibrate(wishes, located, listener)))
    if outcome is None:
        click.echo("tidegate: interrupted; nothing was stored", err=True)
        return INTERRUPTED_EXIT
    if as_json:
        print(json.dumps(as_object(outcome)), flush=True)
    else:
        print_outcome(outcome)
    if outcome.not_stored:
        click.echo(f"tidegate: not stored: {outcome.not_stored}", err=True)
    return 1 if outcome.not_stored else 0


def as_object(outcome: Outcome) -> dict[str, Any]:
    """For scripts: every field of the curve is there, also where it has its default."""
    curve = outcome.calibration
    fields = {name: msgspec.to_builtins(getattr(curve, name)) for name in curve.__struct_fields__}
    return {
        "stored": outcome.stored,
        "not_stored": outcome.not_stored or None,
        "bucket": BUCKET_CALIBRATIONS,
        "key": key_of(curve),
        "calibration": fields,
    }


def print_outcome(outcome: Outcome) -> None:
    """For people: the points beside the curve, the curve, how good it is, where it went."""
    curve = outcome.calibration
    console = Console(highlight=False, soft_wrap=True)
    console.print(_points(curve))
    console.print(
        f"\ntime to first token of n tokens: [bold]{curve.quadratic:.3g} n² + {curve.linear:.3g} n + "
        f"{curve.fitted_constant:.3g}[/] s"
    )
    console.print(
        f"error {1000 * curve.error_s:.1f} ms, worst {100 * curve.worst:.1f} % at {curve.worst_tokens} tokens; "
        f"{1000 * curve.overhead_s:.1f} ms of each request are no prefill, so the stored constant is "
        f"{1000 * curve.constant:.1f} ms"
    )
    if curve.dropped:
        console.print(f"came out negative, and is 0: {', '.join(curve.dropped)}")
    if curve.worst > POOR_FIT:
        console.print("[yellow]the curve misses a point by much: measure again on an idle machine, with more --runs[/]")
    if outcome.stored:
        console.print(f"stored in {BUCKET_CALIBRATIONS} under {key_of(curve)}", markup=False)


def _points(curve: Calibration) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("tokens", "median s", "curve s", "miss", "runs s"):
        table.add_column(head, justify="left" if head == "runs s" else "right", no_wrap=head != "runs s")
    for point in curve.points:
        told = curve.quadratic * point.tokens**2 + curve.linear * point.tokens + curve.fitted_constant
        miss = f"{100 * (told / point.seconds - 1):+.1f} %"
        runs = " ".join(f"{run:.3f}" for run in point.runs_s)
        table.add_row(str(point.tokens), f"{point.seconds:.3f}", f"{told:.3f}", miss, runs)
    return table


class Progressing(ProgressBar):
    """A progress bar on standard error, by prompt tokens; a few plain lines where that is no terminal."""

    def __init__(self) -> None:
        super().__init__(
            TextColumn("{task.fields[count]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            fields={"count": ""},
            soft_wrap=True,
        )
        self._progress.update(self._task, description="looking at the engine")
        self._runs = 0
        self._done = 0

    def note(self, sentence: str) -> None:
        self._console.print(f"tidegate: {sentence}", markup=False)

    def planned(self, contexts: Sequence[int], runs: int) -> None:
        self._runs = runs * len(contexts)
        self._progress.update(
            self._task, description="measuring", total=runs * sum(contexts), completed=0, count=f"0/{self._runs}"
        )
        if not self._console.is_terminal:
            listed = ", ".join(map(str, contexts))
            self._console.print(f"measuring contexts of {listed} tokens, {runs} times each", markup=False)

    def done(self, run: Run) -> None:
        self._done += 1
        self._progress.update(self._task, advance=run.tokens, count=f"{self._done}/{self._runs}")
