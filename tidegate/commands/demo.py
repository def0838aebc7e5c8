"""``tidegate demo``"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import TextColumn, TimeElapsedColumn
from rich.table import Table

from bus.interrupt import INTERRUPTED_EXIT, until_interrupted
from tidegate.commands.options import find_bus_options
from tidegate.commands.progress import ProgressBar
from tidegate.errors import MissingPartError, WrongUseError
from tidegate.locate import locate

if TYPE_CHECKING:
    from tidegate.demo.figures import Figures


@click.command("demo")
@click.option("--sessions", type=click.IntRange(min=1), default=12, show_default=True, help="Root sessions.")
@click.option(
    "--turns",
    type=click.IntRange(min=2),
    default=6,
    show_default=True,
    help="Of each session; fewer than 6 miss a promise.",
)
@click.option("--engines", type=click.IntRange(min=1), default=2, show_default=True, help="Simulated engines.")
@click.option("--seed", type=int, default=1, show_default=True, help="Of the sessions' texts and pauses.")
@click.option("--url", metavar="URL", help="Use the front door of a system that runs already; start nothing.")
@click.option("--model", metavar="NAME", help="With --url: the model to ask for (default: the first it names).")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as one JSON object, and nothing else.")
@find_bus_options
def command(
    sessions: int,
    turns: int,
    engines: int,
    seed: int,
    url: str | None,
    model: str | None,
    as_json: bool,
    nats: str | None,
    workdir: Path | None,
) -> int:
    """Show agent sessions served through a whole system, and check the figures.

    Starts everything on free ports with simulated engines, runs sessions with sub-agents and tool pauses through the
    official openai client, stops everything. Exit code 1 when a figure is not as promised.

    \b
    Examples:
      tidegate demo
      tidegate demo --json | jq .hit_ratio
      tidegate demo --url http://127.0.0.1:8080 --nats nats://127.0.0.1:4222
    """
    if importlib.util.find_spec("openai") is None:
        raise MissingPartError("the demo drives the official openai client; install it: pip install 'tidegate[demo]'")
    if url is None and (nats or workdir or model):
        raise WrongUseError("--nats, --workdir and --model go with --url; without it the demo starts its own system")
    from load.workload.sessions import WorkloadShape
    from tidegate.demo.figures import as_json as figures_as_json
    from tidegate.demo.run import run_against, run_own

    shape = WorkloadShape(sessions=sessions, turns=turns, sub_agents=(sessions + 2) // 3, sub_agent_turns=turns)
    with Progressing() as listener:
        if url is None:
            work = run_own(shape, seed, engines, listener)
        else:
            bus = locate(nats, workdir)
            work = run_against(url.rstrip("/").removesuffix("/v1"), bus, model, shape, seed, listener)
        figures = asyncio.run(until_interrupted(work))
    if figures is None:
        return INTERRUPTED_EXIT
    if as_json:
        print(json.dumps(figures_as_json(figures)), flush=True)
    else:
        print_table(figures)
    for problem in figures.problems:
        click.echo(f"not as promised: {problem}", err=True)
    return 0 if figures.good else 1


def print_table(figures: Figures) -> None:
    """For people: each figure, what is promised of it, and whether that holds."""
    from tidegate.demo.table import lines_of

    marks = {True: "[green]ok[/]", False: "[bold red]failed[/]", None: ""}
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    for line in lines_of(figures):
        table.add_row(line.name, line.value, line.promise, marks[line.holds])
    console = Console(highlight=False)
    console.print(table)
    console.print("[bold green]all as promised[/]" if figures.good else "[bold red]not as promised[/]")


class Progressing(ProgressBar):
    """A progress bar on standard error; plain lines where that is no terminal."""

    def __init__(self) -> None:
        super().__init__(
            TextColumn("{task.fields[count]}"),
            TextColumn("{task.fields[failed]}"),
            TimeElapsedColumn(),
            fields={"count": "", "failed": ""},
        )
        self._requests = 0
        self._ended = 0
        self._failed = 0

    def stage(self, what: str) -> None:
        self._progress.update(self._task, description=what)
        if not self._console.is_terminal:
            self._console.print(what)

    def planned(self, requests: int) -> None:
        self._requests = requests
        self._progress.update(self._task, total=requests, completed=0, count=f"0/{requests}")

    def done(self, failed: bool) -> None:
        self._ended += 1
        self._failed += failed
        note = f"[red]{self._failed} failed[/]" if self._failed else ""
        self._progress.update(self._task, advance=1, count=f"{self._ended}/{self._requests}", failed=note)
