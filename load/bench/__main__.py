"""``python -m load.bench [NAME|all] [--json]``; ``--help`` says which there are."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from bus.interrupt import INTERRUPTED_EXIT
from load.bench import (
    admission,
    capture,
    decision,
    events,
    hashing,
    index,
    pool,
    questions,
    router,
    sessions,
    streams,
    traces,
)
from load.bench.options import RUNS, BenchError, InterruptedByUser, Options, Progress, no_progress
from services.admission.policies.registry import PolicyParameterError, make_policy

Result = dict[str, object]


def _agents(options: Options) -> Result:
    """Imported here: it needs a package that the others do not."""
    if importlib.util.find_spec("openai") is None:
        raise BenchError("agents drives the official openai client; install it: pip install 'tidegate[demo]'")
    from load.bench import agents

    return agents.run(options)


BENCHMARKS: dict[str, Callable[[Options], Result]] = {
    "index": index.run,
    "events": events.run,
    "hash": hashing.run,
    "pool": pool.run,
    "sessions": sessions.run,
    "question": questions.run,
    "decision": decision.run,
    "admission": admission.run,
    "traces": traces.run,
    "capture": capture.run,
    "router": router.run,
    "streams": streams.run,
    "agents": _agents,
}

LONG = ("agents", "router", "streams")
"""What takes minutes, and is not run by ``all``."""


def _workers(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    try:
        workers = tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter("numbers with commas between them, for example 64,256") from None
    if not workers or min(workers) < 1 or max(workers) > 4_096 or len(set(workers)) != len(workers):
        raise click.BadParameter("different numbers between 1 and 4096")
    return workers


def _policies(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = tuple(name.strip() for name in value.split(","))
    for name in names:
        try:
            make_policy(name)
        except PolicyParameterError as error:
            raise click.BadParameter(str(error)) from None
    if len(set(names)) != len(names):
        raise click.BadParameter("each policy once")
    return names


@contextmanager
def _progress(name: str) -> Iterator[Progress]:
    """A bar on stderr that says what is being done, where somebody watches."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield no_progress
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task(name, total=None, count="")

        def progress(stage: str, done: int = 0, total: int | None = None) -> None:
            count = "" if total is None else f"{done}/{total}"
            bar.update(task, description=f"{name}: {stage}", completed=done, total=total, count=count)

        yield progress


def _show(result: Result) -> None:
    """A line a key; what is told of several side by side, in a column each."""
    for key, value in result.items():
        if isinstance(value, dict):
            click.echo(f"  {key:40} " + " ".join(f"{name:>14}" for name in value), err=True)
            for inner in dict.fromkeys(name for each in value.values() for name in each):
                click.echo(f"    {inner:38} " + " ".join(f"{each[inner]!s:>14}" for each in value.values()), err=True)
        else:
            click.echo(f"  {key:40} {value}", err=True)


@click.command()
@click.argument("name", type=click.Choice([*BENCHMARKS, "all"]), default="all")
@click.option("--json", "as_json", is_flag=True, help="Print only the JSON object.")
@click.option("--workers", callback=_workers, default="64,256", show_default=True, help="index: sizes of the fleet.")
@click.option("--variant", type=click.Choice(["shared", "nested"]), default="shared", help="index: kind of prefixes.")
@click.option("--runs", type=click.IntRange(1, 100), default=RUNS, show_default=True, help="Medians are of so many.")
@click.option("--quick", is_flag=True, help="Small: shows that it works; its figures say nothing.")
@click.option("--policies", callback=_policies, help="agents: of admission, with commas between them.")
@click.option("--concurrency", type=click.IntRange(1, 1024), help="agents: root sessions at a time.")
@click.option("--sessions", type=click.IntRange(1, 100_000), help="agents: root sessions in all.")
@click.option("--scale", type=click.FloatRange(1, 64), help="agents: by which all is smaller and faster.")
@click.option("--seed", type=int, default=1, show_default=True, help="agents: of what they do.")
@click.option("--seconds", type=click.FloatRange(1, 86_400), help="streams: for which they are held; 120 by default.")
def main(
    name: str,
    as_json: bool,
    workers: tuple[int, ...],
    variant: str,
    runs: int,
    quick: bool,
    policies: tuple[str, ...] | None,
    concurrency: int | None,
    sessions: int | None,
    scale: float | None,
    seed: int,
    seconds: float | None,
) -> None:
    """Run one benchmark, or all but agents, router and streams (they take minutes), and print one JSON object last.

    Machines are shared and noisy: trust the ratios, which come from the same run.
    """
    names = [each for each in BENCHMARKS if each not in LONG] if name == "all" else [name]
    results: dict[str, Result] = {}
    for each in names:
        if not as_json:
            click.echo(f"{each} ...", err=True)
        with _progress(each) as progress:
            options = Options(
                *(workers, runs, quick, variant, progress),
                *(policies, sessions, concurrency, scale, seed),
                seconds=seconds,
            )
            try:
                results[each] = BENCHMARKS[each](options)
            except InterruptedByUser:
                sys.exit(INTERRUPTED_EXIT)
            except BenchError as error:
                raise click.ClickException(str(error)) from error
        if not as_json:
            _show(results[each])
    click.echo(json.dumps(results if name == "all" else results[name]))


if __name__ == "__main__":
    sys.exit(main())
