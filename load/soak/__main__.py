"""``python -m load.soak [--json] [--minutes M] [--seed S] [--nats 1|3]``; prints one JSON object last."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import uvloop
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from bus.interrupt import INTERRUPTED_EXIT, until_interrupted
from load.soak.house import SoakError
from load.soak.report import Report
from load.soak.run import Options, Progress, soak


@contextmanager
def _progress(quiet: bool) -> Iterator[Progress]:
    """A bar on stderr where somebody watches, else a line for each thing that happens, unless ``quiet``."""
    console = Console(stderr=True, highlight=False)
    if not console.is_terminal:

        def say(what: str, share: float) -> None:
            if not quiet:
                click.echo(f"{share:4.0%} {what}", err=True)

        yield say
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("soak", total=1.0)

        def show(what: str, share: float) -> None:
            bar.update(task, description=f"soak: {what}", completed=share)

        yield show


def _say(found: Report) -> None:
    """The events in a table, and what is wrong, for people."""
    for event in found.summary["events"]:
        whole = "never" if event["whole_ms"] is None else f"{event['whole_ms']} ms"
        suffering = f"{event['failures']} failed, {event['marks']} marked, recovered in {event['recovered_ms']} ms"
        what = f"{event['what']} {event['target']}"
        click.echo(f"{event['at_s']:7.1f} s  {what:24} {suffering} of {event['bound_ms']}; whole: {whole}", err=True)
    for problem in found.problems:
        click.echo(f"  wrong: {problem}", err=True)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON object, and what is wrong.")
@click.option(
    "--minutes", type=click.FloatRange(0.1, 600), default=8.0, show_default=True, help="How long faults last."
)
@click.option("--seed", type=int, default=1, show_default=True, help="Of the faults and of what agents ask.")
@click.option("--nats", type=click.Choice(["1", "3"]), default="1", show_default=True, help="Servers of the bus.")
@click.option("--faults", type=click.IntRange(1), help="So many at most.")
@click.option("--workdir", type=click.Path(path_type=Path), help="Kept; without it, only what failed is kept.")
def main(as_json: bool, minutes: float, seed: int, nats: str, faults: int | None, workdir: Path | None) -> None:
    """Kill, stop, cut off and hang every part of a system in turn while agents ask, then read the books."""
    folder = Path(tempfile.mkdtemp(prefix="tidegate-soak-")) if workdir is None else workdir
    if workdir is not None and workdir.exists() and any(workdir.iterdir()):
        raise click.UsageError(f"--workdir {workdir} is not empty: name another")
    with _progress(as_json) as progress:
        try:
            options = Options(folder.resolve(), minutes * 60, seed, int(nats), faults)
            found = uvloop.run(until_interrupted(soak(options, progress)))
        except SoakError as error:
            raise click.ClickException(str(error)) from error
    if workdir is None and (found is None or found.ok):
        with contextlib.suppress(OSError):
            shutil.rmtree(folder)
    if found is None:
        sys.exit(INTERRUPTED_EXIT)
    if as_json:
        for problem in found.problems:
            click.echo(f"wrong: {problem}", err=True)
    else:
        _say(found)
    if not found.ok:
        click.echo(f"logs: {folder / 'logs'}", err=True)
    click.echo(json.dumps(found.summary))
    sys.exit(0 if found.ok else 1)


if __name__ == "__main__":
    main()
