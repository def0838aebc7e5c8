"""``tidegate top``"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console

from bus.interrupt import INTERRUPTED_EXIT, until_interrupted
from tidegate.commands.options import FiniteRange, find_bus_options
from tidegate.errors import WrongUseError
from tidegate.locate import Located, locate
from tidegate.top.controls import SORTS, Controls, select
from tidegate.top.model import MAX_SESSIONS
from tidegate.top.run import Options, Top, clock_of, look_once
from tidegate.top.snapshot import Snapshot
from tidegate.top.view import frame


@click.command("top")
@click.option("--session", metavar="PATTERN", help="Only sessions whose id holds this, or is like it (run-*).")
@click.option("--tenant", metavar="NAME", help="Only this tenant.")
@click.option("--sort", type=click.Choice(list(SORTS)), default="state", show_default=True, help="Order of sessions.")
@click.option(
    "--interval",
    type=FiniteRange(0.1, 60.0),
    default=1.0,
    show_default=True,
    metavar="S",
    help="Seconds between frames.",
)
@click.option("--once", is_flag=True, help="One frame on standard output, then end.")
@click.option(
    "--after",
    type=FiniteRange(0.1, 3600.0),
    default=3.0,
    show_default=True,
    metavar="S",
    help="With --once: seconds to listen before.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a frame; implies --once.")
@click.option(
    "--max-sessions",
    type=click.IntRange(1, 100_000),
    default=MAX_SESSIONS,
    show_default=True,
    metavar="N",
    help="Sessions to remember: the ones heard of last.",
)
@find_bus_options
def command(
    session: str | None,
    tenant: str | None,
    sort: str,
    interval: float,
    once: bool,
    after: float,
    as_json: bool,
    max_sessions: int,
    nats: str | None,
    workdir: Path | None,
) -> int:
    """Watch sessions and workers live, from the bus alone.

    Keys: q quits, s sorts by the next column, r the other way round, / filters, p pauses the picture, w and t show or
    hide workers and sessions, arrows scroll. Ctrl-C ends it with exit code 130.

    \b
    Examples:
      tidegate top
      tidegate top --tenant research --sort context
      tidegate top --once --session 'run-*'
      tidegate top --json | jq '.sessions[] | select(.state == "held")'
    """
    located = locate(nats, workdir)
    options = Options(interval, max_sessions)
    controls = Controls(sort=sort, pattern=session, tenant=tenant)
    if once or as_json:
        if located.guess:
            click.echo(f"tidegate: {located.guess}", err=True)
        snapshot = asyncio.run(until_interrupted(look_once(located, options, after)))
        if snapshot is None:
            return INTERRUPTED_EXIT
        _print(snapshot, controls, located, as_json)
        return 0
    console = Console(highlight=False)
    if not console.is_terminal or not sys.stdout.isatty():
        raise WrongUseError("standard output is no terminal; take one frame with --once, or one object with --json")
    if os.environ.get("TERM", "") in ("dumb", ""):
        raise WrongUseError("this terminal (TERM) cannot be drawn on; take one frame with --once")
    keyboard = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
    ended = asyncio.run(until_interrupted(_live(located, options, controls, console, keyboard)))
    return INTERRUPTED_EXIT if ended is None else ended


async def _live(located: Located, options: Options, controls: Controls, console: Console, keyboard: int | None) -> int:
    await Top(located, options, controls, console, keyboard).run()
    return 0


def _print(snapshot: Snapshot, controls: Controls, located: Located, as_json: bool) -> None:
    if as_json:
        chosen = msgspec.structs.replace(snapshot, sessions=tuple(select(snapshot.sessions, controls)))
        # Escaped to ASCII: strangers' ids may hold what a terminal would obey.
        print(json.dumps(_without_nulls(msgspec.to_builtins(chosen)), ensure_ascii=True), flush=True)
        return
    console = Console(highlight=False, soft_wrap=True)
    where, clock = located.shown_url, clock_of(snapshot)
    for line in frame(snapshot, controls, console.width, None, where=where, clock=clock, keys=False):
        console.print(line, no_wrap=True, crop=False)


def _without_nulls(value: Any) -> Any:
    """What is not known is not there."""
    if isinstance(value, dict):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return [_without_nulls(one) for one in value] if isinstance(value, list | tuple) else value
