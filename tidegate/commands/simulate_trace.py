"""``tidegate simulate --trace`` with a recorded trace: its requests, as they waited for each other, under policies."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from load.sim.options import Options, with_options
from load.sim.parallel import WorkerLostError
from load.sim.plan import ExperimentError, Plan
from load.sim.replays import Figures, Replay, check, replays, run_replays
from load.sim.traces import TraceError
from tidegate.commands.simulate import REPORT_WIDTH, Progressing, terminated_like_interrupted, write_whole
from tidegate.errors import SimulationError, WrongUseError
from tidegate.safe_text import safe
from tidegate.trace.agentic_mooncake import laboratory_lines
from tidegate.trace.figures import recorded_figures
from tidegate.trace.plays import Plays, format_of, read_plays
from tidegate.trace.replayable import DEFAULT_BLOCK
from tidegate.trace.writing import write_lines

FORMAT = 1
USUAL = ("kv", "commit")
DOCUMENT, REPORT = "simulate.json", "report.md"
ONE_LOAD = "a recorded trace has one load, its own: --speed makes it denser, --lanes a closed loop of its plays"
HEADS = ("policy", "JCT s", "P95 s", "TTFT ms", "P95 ms", "hits", "computed", "recomp.", "held", "hold s")


def is_recorded(traces: Sequence[Path], *, as_recorded: bool) -> bool:
    """Whether the files say what waited for what; Mooncake lines are played so where that is asked for. Raises
    `TraceFileError` where a folder is empty or a file cannot be opened."""
    if as_recorded and not traces:
        raise WrongUseError("--speed and --lanes are of a recorded trace: give one with --trace")
    return as_recorded or (bool(traces) and format_of(traces) in ("rows", "agentic-mooncake"))


def simulate_trace(
    traces: Sequence[Path],
    options: Options,
    *,
    speed: float,
    lanes: int | None,
    block_size: int | None,
    skip_unplayable: bool,
    processes: int,
    out: Path | None,
    as_json: bool,
) -> int:
    """Play the files under every policy and fleet. Raises `TraceFileError`, `WrongUseError`, `SimulationError`."""
    _refuse_loads(options)
    plays = read_plays(traces, mooncake_block=block_size or DEFAULT_BLOCK, skip_unplayable=skip_unplayable)
    _say_left_out(plays)
    plan = _plan(plays, options)
    try:
        check(plan)
        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="tidegate-simulate-") as folder:
            path = Path(folder) / "plays.jsonl"
            write_lines(laboratory_lines(plays), path)
            jobs = replays(plan, path, speed=speed, lanes=lanes)
            with terminated_like_interrupted(), Progressing(quiet=as_json) as progress:
                progress.stage("simulations", len(jobs))
                results = run_replays(jobs, processes, progress.done)
    except (ExperimentError, TraceError) as error:
        raise WrongUseError(str(error)) from None
    except (WorkerLostError, OSError) as error:
        raise SimulationError(str(error)) from None
    document = _document(traces, plays, jobs, results)
    if as_json:
        print(json.dumps(document), flush=True)
    else:
        _print(document)
    if out is not None:
        _write(out, document)
    return _complain(document["runs"])


def _refuse_loads(options: Options) -> None:
    """What chooses loads, workloads or seeds has no meaning here. Raises `WrongUseError`."""
    given = {
        "--workloads": options.workloads,
        "--loads": options.loads,
        "--concurrency": options.concurrency,
        "--turn-multiplier": options.turn_multipliers,
        "--perturb": options.perturbations,
        "--seeds": options.seeds,
        "--programs": options.programs,
    }
    for name, value in given.items():
        if value is not None:
            raise WrongUseError(f"{name}: {ONE_LOAD}")


def _plan(plays: Plays, options: Options) -> Plan:
    """Of policies and fleets alone; the fleet is that which was recorded, as far as the trace says so."""
    known = (plays.kv_tokens or None,)  # `None`: as the engine has
    usual = Plan(name="trace", policies=USUAL, workers=(plays.workers or 1,), kv_tokens=known)
    return with_options(usual, replace(options, traces=()))


def _say_left_out(plays: Plays) -> None:
    for problem in plays.damaged:
        click.echo(f"tidegate: {problem}: read up to there", err=True)
    for reason, count in plays.left_out.most_common():
        click.echo(f"tidegate: {count} requests left out: {reason}", err=True)
    models = sorted({node.model for node in plays.nodes if node.model is not None})
    if len(models) > 1:
        text = f"requests of {len(models)} models ({', '.join(models[:5])}) are played on one fleet, as of one size"
        click.echo(f"tidegate: {safe(text)}", err=True)


def _document(
    traces: Sequence[Path], plays: Plays, jobs: Sequence[Replay], results: Sequence[Figures]
) -> dict[str, Any]:
    """Plain data without a clock in it: equal arguments give equal bytes."""
    first = jobs[0]
    return {
        "format": FORMAT,
        "trace": {
            "files": [str(path) for path in traces],
            "format": plays.format,
            "block_size": plays.block_size,
            "requests": len(plays.nodes),
            "sessions": len({node.session for node in plays.nodes}),
            "plays": len({node.play for node in plays.nodes}),
            "left_out": dict(sorted(plays.left_out.items())),
        },
        "speed": first.speed,
        "lanes": first.lanes,
        "recorded": msgspec.to_builtins(recorded_figures(plays.nodes)),
        "runs": [
            {
                "policy": job.policy,
                "workers": job.fleet.workers,
                "kv_tokens": job.fleet.kv_tokens,
                "fleet": job.fleet.name.removeprefix(", "),
                "parameters": dict(job.parameters),
                **found,
            }
            for job, found in zip(jobs, results, strict=True)
        ],
    }


def _complain(runs: Iterable[Mapping[str, Any]]) -> int:
    """The exit code: 1 where a policy did not serve or finish what was asked of it."""
    code = 0
    for run in runs:
        who = f"{run['policy']} on {run['workers']} x {run['kv_tokens']} tokens"
        if "error" in run:
            click.echo(f"not finished: {who}: {run['error']}", err=True)
            code = 1
            continue
        if run["failed"]:
            text = f"{run['failed']} requests could not be served, and {run['skipped']} waited for them"
            click.echo(f"tidegate: {who}: {text}; give more --kv-tokens", err=True)
            code = 1
        if run["unfinished"]:
            click.echo(f"not finished: {who}: {run['unfinished']} requests never finished", err=True)
            code = 1
    return code


def _write(out: Path, document: Mapping[str, Any]) -> None:
    """Raises `SimulationError`."""
    try:
        write_whole(out / DOCUMENT, (json.dumps(document, indent=1) + "\n").encode())
        write_whole(out / REPORT, "\n".join(_report(document)).encode())
    except OSError as error:
        raise SimulationError(f"--out {out}: {error.strerror or error}") from None


def _title(document: Mapping[str, Any]) -> str:
    trace = document["trace"]
    text = f"{trace['requests']} requests, {trace['sessions']} sessions, {trace['plays']} plays"
    text += f", at {document['speed']:g}x" if document["speed"] != 1 else ""
    return text + (f", {document['lanes']} plays at a time" if document["lanes"] else "")


def _fleets(document: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
    """Runs by fleet."""
    fleets: dict[str, list[Mapping[str, Any]]] = {}
    for run in document["runs"]:
        beyond = [each for each in run["fleet"].split(", ") if each and "worker" not in each and "KV" not in each]
        name = ", ".join([f"{run['workers']} x {run['kv_tokens']} KV tokens", *beyond])
        fleets.setdefault(name, []).append(run)
    return fleets


def _lines(document: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Of a table: what was recorded, then each run that has figures."""
    recorded = [{"policy": "recorded", **document["recorded"]}] if "wall_s" in document["recorded"] else []
    sides = [*recorded, *(run for run in runs if "error" not in run)]
    return [
        (
            str(side["policy"]),
            _of(side, "jct_ms", "mean", 1000, 1),
            _of(side, "jct_ms", "p95", 1000, 1),
            _of(side, "ttft_ms", "mean", 1, 0),
            _of(side, "ttft_ms", "p95", 1, 0),
            f"{100 * side['prefix_hit_ratio']:.1f} %" if "prefix_hit_ratio" in side else "",
            str(side.get("computed_tokens", "")),
            str(side.get("recomputed_tokens", "")),
            str(side.get("held", "")),
            _of(side, "hold_ms", "max", 1000, 1),
        )
        for side in sides
    ]


def _of(side: Mapping[str, Any], name: str, which: str, unit: float, digits: int) -> str:
    return f"{side[name][which] / unit:.{digits}f}" if name in side else ""


def _print(document: Mapping[str, Any]) -> None:
    """For people: a table for each fleet."""
    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = REPORT_WIDTH
    for fleet, runs in _fleets(document).items():
        console.print(f"[bold]{_title(document)}[/]  ({fleet})")
        table = Table(box=None, padding=(0, 1, 0, 0))
        for head in HEADS:
            table.add_column(head, justify="left" if head == "policy" else "right", no_wrap=True)
        for line in _lines(document, runs):
            table.add_row(*line)
        console.print(table)
        console.print()


def _report(document: Mapping[str, Any]) -> list[str]:
    """In Markdown."""
    lines = ["# A recorded trace under policies", "", f"{_title(document)}.", ""]
    for fleet, runs in _fleets(document).items():
        lines += [f"## {fleet}", "", "| " + " | ".join(HEADS) + " |", "|" + "---|" * len(HEADS)]
        lines += ["| " + " | ".join(line) + " |" for line in _lines(document, runs)]
        lines.append("")
    return lines
