"""``tidegate doctor``"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bus.interrupt import INTERRUPTED_EXIT, until_interrupted
from tidegate.commands.options import find_bus_options
from tidegate.doctor.checks import Check, failed
from tidegate.doctor.examine import examine
from tidegate.locate import locate

_STYLES = {"ok": "green", "warning": "yellow", "failed": "bold red"}


@click.command("doctor")
@click.option("--url", metavar="URL", help="The front door (default: that of the system running in --workdir).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with all checks.")
@find_bus_options
def command(url: str | None, as_json: bool, nats: str | None, workdir: Path | None) -> int:
    """Check a system, and say what to fix: bus, trace stream, services, engines, event sources, index, pools,
    tokenizer, front door. Exit code 1 when something failed; warnings do not count.

    \b
    Examples:
      tidegate doctor
      tidegate doctor --nats nats://10.0.0.5:4222 --url http://10.0.0.5:8080
      tidegate doctor --json | jq '.checks[] | select(.verdict != "ok")'
    """
    located = locate(nats, workdir)
    if located.guess:
        click.echo(f"tidegate: {located.guess}", err=True)
    found = asyncio.run(until_interrupted(examine(located, url)))
    if found is None:
        return INTERRUPTED_EXIT
    bad = failed(found)
    if as_json:
        print(json.dumps({"ok": not bad, "checks": msgspec.to_builtins(found)}))
    else:
        print_checks(found)
    return 1 if bad else 0


def print_checks(found: list[Check]) -> None:
    """For people: a table on a terminal, with what to do under those that are not ok; else one line a finding."""
    console = Console(highlight=False, soft_wrap=True)
    if console.is_terminal:
        console.print(_table(found), soft_wrap=False)
    else:
        width = max((len(check.name) for check in found), default=0)
        for check in found:
            fix = f" -> {check.fix}" if check.fix else ""
            print(f"{check.name:<{width}}  {check.verdict:<7}  {check.found}{fix}")
    worst = "failed" if failed(found) else "warning" if any(check.verdict != "ok" for check in found) else "ok"
    words = {"ok": "everything is well", "warning": "it works, with warnings", "failed": "something must be fixed"}
    console.print(f"[{_STYLES[worst]}]{words[worst]}[/]")


def _table(found: list[Check]) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    table.add_column(overflow="fold")
    for check in found:
        text = f"{check.found}\n-> {check.fix}" if check.fix else check.found
        table.add_row(escape(check.name), f"[{_STYLES[check.verdict]}]{check.verdict}[/]", escape(text))
    return table
