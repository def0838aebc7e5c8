"""``tidegate tail``"""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from pathlib import Path
from typing import Literal

import click

from bus import subjects
from bus.interface import Bus
from bus.interrupt import INTERRUPTED_EXIT, until_interrupted
from bus.subjects import ROOT
from tidegate.commands.options import find_bus_options
from tidegate.locate import Located, locate, open_bus
from tidegate.rows import RowFilter, one_line, read_row
from tidegate.watch import watch


@click.command("tail")
@click.option("--session", metavar="ID", help="Only this session: the id as the harness sent it.")
@click.option("--model", metavar="NAME", help="Only this model.")
@click.option("--worker", metavar="ID", help="Only this worker.")
@click.option("--decisions", is_flag=True, help="Also where each request was placed, and at what cost elsewhere.")
@click.option("--from-start", is_flag=True, help="Begin with the oldest row that the stream holds.")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="End after N rows.")
@click.option("--json", "as_json", is_flag=True, help="Bare rows as they are in the stream, one JSON object a line.")
@find_bus_options
def command(
    session: str | None,
    model: str | None,
    worker: str | None,
    decisions: bool,
    from_start: bool,
    count: int | None,
    as_json: bool,
    nats: str | None,
    workdir: Path | None,
) -> int:
    """Print finished requests (request_end rows) as they come.

    What happens to the bus is said on standard error. It is waited for; only when the system found in --workdir was
    stopped, and is not started again soon, the command ends, with exit code 1. Ctrl-C ends it with 130, so that who
    waits for --count rows can tell.

    \b
    Examples:
      tidegate tail
      tidegate tail --session my-run --json | jq .request.cached_tokens
      tidegate tail --decisions --session my-run
      tidegate tail --from-start --count 100 --worker engine-1
    """
    located = locate(nats, workdir)
    if located.guess:
        _say(located.guess)
    elif nats is None:
        _say(f"rows of {located.shown_url} (from {located.source})")
    wanted = RowFilter(session=session, model=model, worker=worker)
    printed = asyncio.run(until_interrupted(_tail(located, Printer(wanted, count, as_json, decisions), from_start)))
    return INTERRUPTED_EXIT if printed is None else 0


def _say(what: str) -> None:
    click.echo(f"tidegate: {what}", err=True)


class Printer:
    """Writes the wanted rows to standard output, ``count`` at most (``None``: all): of finished requests, and where
    ``decisions`` are wanted, of those too."""

    def __init__(self, wanted: RowFilter, count: int | None, as_json: bool, decisions: bool = False) -> None:
        self._wanted = wanted
        self._left = count
        self._as_json = as_json
        model = subjects.encode_id(wanted.model) if wanted.model is not None else "*"
        self._types = {"request_end", "decision"} if decisions else {"request_end"}
        self._subject = f"{ROOT}.trace.{'*' if decisions else 'request_end'}.{model}.>"

    async def run(self, bus: Bus, from_start: bool) -> None:
        """Ends after ``count`` rows."""
        async with aclosing(bus.tail(self._subject, from_start=from_start)) as rows:
            async for stored in rows:
                self._print(stored.payload)
                if self._left == 0:
                    return

    def _print(self, payload: bytes) -> None:
        row = read_row(payload)
        if row is None or row.event_type not in self._types or not self._wanted.passes(row):
            return
        sys.stdout.buffer.write((payload if self._as_json else one_line(row).encode()) + b"\n")
        sys.stdout.buffer.flush()
        if self._left is not None:
            self._left -= 1


async def _tail(located: Located, printer: Printer, from_start: bool) -> Literal[True]:
    """All rows that were wanted are printed. Raises `NoBusError` when there is no bus, or no longer."""
    while True:
        bus = await open_bus(located, "tidegate-tail")
        printing = asyncio.ensure_future(printer.run(bus, from_start))
        watching = asyncio.ensure_future(watch(bus, located, _say))
        try:
            await asyncio.wait({printing, watching}, return_when=asyncio.FIRST_COMPLETED)
            if printing.done():
                printing.result()
                return True
            located, from_start = watching.result(), False  # what its stream holds may have been printed already
        finally:
            for task in (printing, watching):
                task.cancel()
            await asyncio.gather(printing, watching, return_exceptions=True)
            await bus.close()
