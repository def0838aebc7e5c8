"""``python -m load.bench [index|events|hash|question|decision|all] [--json]``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console

from load.bench import decision, events, hashing, index, questions
from load.bench.options import RUNS, Options, no_progress

Result = dict[str, object]
BENCHMARKS: dict[str, Callable[[Options], Result]] = {
    "index": index.run,
    "events": events.run,
    "hash": hashing.run,
    "question": questions.run,
    "decision": decision.run,
}


def _workers(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        workers = tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter("numbers with commas between them, for example 64,256") from None
    if not workers or min(workers) < 1 or max(workers) > 4_096 or len(set(workers)) != len(workers):
        raise click.BadParameter("different numbers between 1 and 4096")
    return workers


@contextmanager
def _progress(name: str, *, quiet: bool) -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is being done, where somebody watches."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield no_progress
        return
    with console.status(name) as status:
        yield lambda stage: status.update(f"{name}: {stage}")


@click.command()
@click.argument("name", type=click.Choice([*BENCHMARKS, "all"]), default="all")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON object.")
@click.option("--workers", callback=_workers, default="64,256", show_default=True, help="index: sizes of the fleet.")
@click.option("--variant", type=click.Choice(["shared", "nested"]), default="shared", help="index: kind of prefixes.")
@click.option("--runs", type=click.IntRange(1, 100), default=RUNS, show_default=True, help="Medians are of so many.")
@click.option("--quick", is_flag=True, help="Small: shows that it works; its figures say nothing.")
def main(name: str, as_json: bool, workers: tuple[int, ...], variant: str, runs: int, quick: bool) -> None:
    """Run one benchmark, or all, and print one JSON object last.

    Machines are shared and noisy: trust the ratios, which come from the same run.
    """
    chosen = BENCHMARKS if name == "all" else {name: BENCHMARKS[name]}
    results: dict[str, Result] = {}
    for each, run in chosen.items():
        if not as_json:
            click.echo(f"{each} ...", err=True)
        with _progress(each, quiet=as_json) as progress:
            results[each] = run(Options(workers, runs, quick, variant, progress))
        if not as_json:
            for key, value in results[each].items():
                click.echo(f"  {key:40} {value}", err=True)
    click.echo(json.dumps(results if name == "all" else results[name]))


if __name__ == "__main__":
    sys.exit(main())
