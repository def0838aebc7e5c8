"""``tidegate tail``"""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing
from pathlib import Path

import click

from bus import subjects
from bus.subjects import ROOT
from tidegate.commands.options import DEFAULT_WORKDIR, find_bus_options
from tidegate.interrupt import until_interrupted
from tidegate.locate import Located, locate, open_bus
from tidegate.rows import RowFilter, one_line, read_row


@click.command("tail")
@click.option("--session", metavar="ID", help="Only this session: the id as the harness sent it.")
@click.option("--model", metavar="NAME", help="Only this model.")
@click.option("--worker", metavar="ID", help="Only this worker.")
@click.option("--from-start", is_flag=True, help="Begin with the oldest row that the stream holds.")
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="End after N rows.")
@click.option("--json", "as_json", is_flag=True, help="Bare rows as they are in the stream, one JSON object a line.")
@find_bus_options
def command(
    session: str | None,
    model: str | None,
    worker: str | None,
    from_start: bool,
    count: int | None,
    as_json: bool,
    nats: str | None,
    workdir: Path | None,
) -> int:
    """Print finished requests (request_end rows) as they come.

    \b
    Examples:
      tidegate tail
      tidegate tail --session my-run --json | jq .request.cached_tokens
      tidegate tail --from-start --count 100 --worker engine-1
    """
    located = locate(nats, workdir or Path(DEFAULT_WORKDIR))
    wanted = RowFilter(session=session, model=model, worker=worker)
    work = _tail(located, wanted, from_start=from_start, count=count, as_json=as_json)
    asyncio.run(until_interrupted(work))
    return 0


async def _tail(located: Located, wanted: RowFilter, *, from_start: bool, count: int | None, as_json: bool) -> None:
    bus = await open_bus(located, "tidegate-tail")
    try:
        model = subjects.encode_id(wanted.model) if wanted.model is not None else "*"
        subject = f"{ROOT}.trace.request_end.{model}.>"
        shown = 0
        async with aclosing(bus.tail(subject, from_start=from_start)) as rows:
            async for stored in rows:
                row = read_row(stored.payload)
                if row is None or not wanted.passes(row):
                    continue
                line = stored.payload if as_json else one_line(row).encode()
                sys.stdout.buffer.write(line + b"\n")
                sys.stdout.buffer.flush()
                shown += 1
                if shown == count:
                    return
    finally:
        await bus.close()
