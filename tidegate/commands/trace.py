"""``tidegate trace``: tail, stats, export, import, convert"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import click
import msgspec
from rich.progress import MofNCompleteColumn

from tidegate.commands.options import FiniteRange
from tidegate.commands.progress import ProgressBar
from tidegate.commands.tail import command as tail
from tidegate.errors import WrongUseError
from tidegate.safe_text import safe_lines
from tidegate.trace.agentic_mooncake import UNKNOWN_MODEL, agentic_mooncake_lines
from tidegate.trace.dependencies import Node, dependency_graph
from tidegate.trace.dynamo import dynamo_lines, our_rows
from tidegate.trace.errors import TraceFileError
from tidegate.trace.mooncake import mooncake_lines, rows_of_mooncake
from tidegate.trace.mooncake_deltas import mooncake_deltas
from tidegate.trace.otlp import CollectorError, otlp_lines, otlp_spans, send_spans
from tidegate.trace.parquet import TABLES, Table, records_of, write_parquet
from tidegate.trace.perfetto import perfetto_events
from tidegate.trace.reading import NO_EVENT_TYPE, Trace, read_trace
from tidegate.trace.replayable import DEFAULT_BLOCK, Playable, playable
from tidegate.trace.stats import trace_stats
from tidegate.trace.tables import MOST_SESSIONS, stats_text
from tidegate.trace.writing import output, write_lines, write_timeline

Format = Literal["dynamo", "mooncake", "agentic-mooncake", "perfetto", "otlp", "parquet"]

_files = click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
_output = click.option(
    "-o",
    "--output",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The file to write, gzipped if it ends in .gz; default: standard output.",
)


@click.group("trace")
def command() -> None:
    """Read recorded traces: tables, timelines, and the formats of others.

    FILES are ours (the recorder's) and the peer's, `.jsonl` or `.jsonl.gz`, or folders of them. A file that a crash
    damaged is read as far as it goes. What is wrong is said with file, line and rule.

    \b
    Examples:
      tidegate trace stats .tidegate/traces
      tidegate trace export .tidegate/traces --as perfetto -o run.json   open it in ui.perfetto.dev
      tidegate trace export .tidegate/traces --as agentic-mooncake -o run.jsonl
      tidegate trace export .tidegate/traces --as parquet --table tools -o tools.parquet
      tidegate trace export .tidegate/traces --as otlp --endpoint http://127.0.0.1:4318
      tidegate trace import theirs.jsonl.gz -o ours.jsonl.gz
      tidegate trace convert mooncake_trace.jsonl -o ours.jsonl.gz
    """


command.add_command(tail)


@command.command("stats")
@_files
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object.")
@click.option(
    "--sessions", type=click.IntRange(min=0), default=MOST_SESSIONS, show_default=True, help="Of those in the table."
)
def stats(files: Sequence[Path], as_json: bool, sessions: int) -> int:
    """Tables per session, tool, model and worker, and what the cache lost between turns."""
    found = trace_stats(_read(files))
    if as_json:
        with output(None) as file:
            file.write(msgspec.json.encode(found) + b"\n")
    else:
        click.echo(stats_text(found, sessions=sessions))
    return 0


@command.command("export")
@_files
@click.option("--as", "kind", type=click.Choice(get_args(Format)), required=True, help="The format to write.")
@_output
@click.option(
    "--model",
    metavar="NAME",
    default=UNKNOWN_MODEL,
    show_default=True,
    help="Of requests that name none (agentic-mooncake).",
)
@click.option("--open-loop", is_flag=True, help="Each request at its own time and of no session (mooncake).")
@click.option("--deltas", is_flag=True, help="Of a session's later turns only what is new (mooncake, for AIPerf).")
@click.option("--bare", is_flag=True, help='Rows without their envelope of "timestamp" and "event" (dynamo).')
@click.option(
    "--table", type=click.Choice(TABLES), default="requests", show_default=True, help="Which records (parquet)."
)
@click.option("--endpoint", metavar="URL", help="A collector to send the spans to, instead of a file (otlp).")
@click.option(
    "--timeout", "timeout_s", type=FiniteRange(0.1, 600), default=10.0, show_default=True, help="Of --endpoint, s."
)
@click.option("-q", "--quiet", is_flag=True, help="No progress on standard error.")
def export(
    files: Sequence[Path],
    kind: Format,
    path: Path | None,
    model: str,
    open_loop: bool,
    deltas: bool,
    bare: bool,
    table: Table,
    endpoint: str | None,
    timeout_s: float,
    quiet: bool,
) -> int:
    """Write a trace in a format of others.

    Formats that are played again (dynamo, mooncake, agentic-mooncake) hold the requests with their prompt's hashes; how
    many others were left out, and the size of a block, are said on standard error. perfetto, otlp and parquet hold all.

    \b
    Examples:
      tidegate trace export .tidegate/traces --as perfetto -o run.json
      tidegate trace export .tidegate/traces --as mooncake --deltas -o aiperf.jsonl
      tidegate trace export .tidegate/traces --as otlp -o spans.jsonl
      tidegate trace export .tidegate/traces --as otlp --endpoint http://127.0.0.1:4318
      tidegate trace export .tidegate/traces --as parquet -o requests.parquet
    """
    for option, given, of in (
        ("--open-loop", open_loop, "mooncake"),
        ("--deltas", deltas, "mooncake"),
        ("--bare", bare, "dynamo"),
        ("--table", table != TABLES[0], "parquet"),
    ):
        if given and kind != of:
            raise WrongUseError(f"{option} is for --as {of}")
    if endpoint is not None and (kind != "otlp" or path is not None):
        raise WrongUseError("--endpoint is for --as otlp, without --output")
    if kind == "parquet" and (path is None or path.suffix == ".gz"):
        raise WrongUseError("--as parquet needs a file to write, not gzipped: -o requests.parquet")
    if open_loop and deltas:
        raise WrongUseError("--open-loop makes no sessions, --deltas are turns of sessions: one of them")
    _keep_apart(files, path)
    trace = _read(files)
    if kind == "perfetto":
        count = write_timeline(perfetto_events(trace, _graph(trace)), path)
        _say(f"{count} events of {len(trace.requests)} requests")
    elif kind == "otlp":
        _export_spans(trace, path, endpoint, timeout_s, quiet)
    elif kind == "parquet":
        with output(path) as file, _Exporting(records_of(trace, table), quiet) as progress:
            count = write_parquet(trace, table, file, progress.done)
        _say(f"{count} {table}")
    else:
        _export_playable(playable(trace), kind, path, model=model, open_loop=open_loop, deltas=deltas, bare=bare)
    return 0


def _export_playable(
    source: Playable, kind: Format, path: Path | None, *, model: str, open_loop: bool, deltas: bool, bare: bool
) -> None:
    _say_left_out(source)
    if kind == "dynamo":
        count = write_lines(dynamo_lines(source, wrapped=not bare), path)
    elif kind == "mooncake" and deltas:
        count = write_lines(mooncake_deltas(source), path)
    elif kind == "mooncake":
        count = write_lines(mooncake_lines(source, open_loop=open_loop), path)
    else:
        count = write_lines(agentic_mooncake_lines(source, model=model), path)
    _say(f"{count} lines of {len(source.trace.requests)} requests; a block has {source.block_size} tokens")


def _export_spans(trace: Trace, path: Path | None, endpoint: str | None, timeout_s: float, quiet: bool) -> None:
    spans = otlp_spans(trace)
    if endpoint is None:
        write_lines(otlp_lines(spans), path)
        _say(f"{len(spans)} spans of {len(trace.requests)} requests")
        return
    with _Exporting(len(spans), quiet) as progress:
        refused = send_spans(spans, endpoint, timeout_s, progress.done)
    if refused:
        raise CollectorError(f"{endpoint} refused {refused} of {len(spans)} spans")
    _say(f"{len(spans)} spans of {len(trace.requests)} requests sent to {endpoint}")


class _Exporting(ProgressBar):
    """How far a long export is."""

    def __init__(self, total: int, quiet: bool) -> None:
        super().__init__(MofNCompleteColumn(), fields={}, quiet=quiet)
        self._progress.update(self._task, total=total, description="writing")

    def done(self, count: int) -> None:
        self._progress.update(self._task, completed=count)


@command.command("import")
@_files
@_output
def import_rows(files: Sequence[Path], path: Path | None) -> int:
    """Rows of ours from the peer's: wrapped or bare, of today or with trajectory_id or program_id."""
    _keep_apart(files, path)
    trace = _read(files)
    count = write_lines(our_rows(trace), path)
    skipped = sum(trace.skipped.values())
    _say(f"{count} rows" + (f", {skipped} of other kinds left out" if skipped else ""))
    return 0


@command.command("convert")
@_files
@_output
@click.option(
    "--block-size", type=click.IntRange(1, 1 << 20), default=DEFAULT_BLOCK, show_default=True, help="Of a hash id."
)
@click.option("--start-ms", type=click.IntRange(min=0), default=0, help="Unix ms of timestamp 0.")
@click.option("--model", metavar="NAME", help="Of lines that name none.")
def convert(files: Sequence[Path], path: Path | None, block_size: int, start_ms: int, model: str | None) -> int:
    """Rows of ours from Mooncake traces, one for each line."""
    _keep_apart(files, path)
    count = write_lines(rows_of_mooncake(files, block_size=block_size, start_ms=start_ms, model=model), path)
    _say(f"{count} rows")
    return 0


def _keep_apart(files: Sequence[Path], path: Path | None) -> None:
    """Raises `WrongUseError` where the output would take the place of what is read."""
    for file in files:
        if path is not None and path.is_file() and file.is_file() and path.samefile(file):
            raise WrongUseError(f"-o: {path} is what is read; name another file")


def _read(files: Sequence[Path]) -> Trace:
    trace = read_trace(files)
    for problem in trace.damaged:
        _say(f"{problem.place}: {problem.text}; read up to there")
    if not trace.requests and trace.skipped.get(NO_EVENT_TYPE):
        _say("no rows of requests in it; lines of Mooncake's formats become rows by `tidegate trace convert`")
    return trace


def _graph(trace: Trace) -> Sequence[Node]:
    """For the arrows only: a timeline of a trace that contradicts itself has none."""
    try:
        return dependency_graph(trace)
    except TraceFileError as error:
        _say(f"no arrows between agents, as the trace contradicts itself:\n{error}")
        return ()


def _say_left_out(source: Playable) -> None:
    for reason, count in source.left_out.most_common():
        _say(f"{count} requests left out: {reason}")


def _say(what: str) -> None:
    print(f"tidegate: {safe_lines(what)}", file=sys.stderr)
