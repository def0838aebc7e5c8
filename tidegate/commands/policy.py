"""``tidegate policy``: ``check`` and ``list``"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import TaskProgressColumn, TextColumn
from rich.table import Table

from bus.interrupt import INTERRUPTED_EXIT, until_interrupted
from schemas.decision import PolicyAsk
from schemas.policy import POLICY_ASKS
from tidegate.commands.doctor import print_checks
from tidegate.commands.options import find_bus_options
from tidegate.commands.progress import ProgressBar
from tidegate.locate import Located, locate, open_bus
from tidegate.policy.conformance import TIMED, Report, Wishes, check_policy
from tidegate.policy.listing import Listed, list_policies


@click.group("policy")
def command() -> None:
    """Your policies on the bus: does one behave (check), and who answers (list)?

    \b
    Examples:
      tidegate policy check tenant-fairness
      tidegate policy list
    """


def _asks(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[PolicyAsk, ...]:
    del context, parameter
    wanted = [part.strip() for part in value.split(",")] if value else []
    if any(part not in POLICY_ASKS for part in wanted):
        raise click.BadParameter("write some of route, admit, lease, hint, with commas between them")
    return tuple(ask for ask in POLICY_ASKS if ask in wanted)


@command.command("check")
@click.argument("name")
@click.option("--ask", "asks", callback=_asks, metavar="route,admit,lease,hint", help="Default: whatever it answers.")
@click.option(
    "--deadline-ms",
    type=click.IntRange(1, 1000),
    help="Default: as the settings of who asks it have it; else 50.",
)
@click.option(
    "--questions", type=click.IntRange(1, 100_000), default=TIMED, show_default=True, help="So many are timed."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with all checks and times.")
@find_bus_options
def check(
    name: str,
    asks: tuple[PolicyAsk, ...],
    deadline_ms: int | None,
    questions: int,
    as_json: bool,
    nats: str | None,
    workdir: Path | None,
) -> int:
    """Ask policy NAME all that admission and hints may ask it, and what nobody should, and say what it gets wrong.

    Small and large questions, fields of later versions, nothing to choose from, a deadline that has passed, bytes that
    are no question; then how fast it is, one by one and many at once. The questions look like real ones: a policy that
    counts them counts these too (model "conformance/model").

    Exit code 1 when something failed or nobody answers (warnings do not count), 2: wrong use, 130: interrupted.

    \b
    Examples:
      tidegate policy check tenant-fairness
      tidegate policy check prefer-big-worker --ask route --deadline-ms 20
      tidegate policy check mine --json | jq '.checks[] | select(.verdict != "ok")'
    """
    located = _located(nats, workdir)
    wishes = Wishes(name, asks, deadline_ms, questions)
    with Progressing() as progress:
        report = asyncio.run(until_interrupted(_check(located, wishes, progress)))
    if report is None:
        return INTERRUPTED_EXIT
    if as_json:
        print(json.dumps(as_object(report)), flush=True)
    else:
        print_checks(report.checks)
    return 0 if report.ok else 1


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with all policies.")
@find_bus_options
def list_command(as_json: bool, nats: str | None, workdir: Path | None) -> int:
    """Which policies answer on the bus, and which of them admission and hints ask.

    Exit code 1 when one is asked that nobody answers for.

    \b
    Examples:
      tidegate policy list
      tidegate policy list --json | jq '.policies[].name'
    """
    found = asyncio.run(until_interrupted(_list(_located(nats, workdir))))
    if found is None:
        return INTERRUPTED_EXIT
    if as_json:
        print(json.dumps({"policies": [_listed(one) for one in found]}), flush=True)
    else:
        print_policies(found)
    return 1 if any(one.missing for one in found) else 0


def as_object(report: Report) -> dict[str, Any]:
    """For scripts."""
    return {
        "policy": report.name,
        "deadline_ms": report.deadline_ms,
        "ok": report.ok,
        "checks": msgspec.to_builtins(report.checks),
        "latency": msgspec.to_builtins(report.latency),
    }


def print_policies(found: list[Listed]) -> None:
    """For people: one line a policy."""
    console = Console(highlight=False, soft_wrap=True)
    if not found:
        console.print("no policy names itself on this bus ($SRV), and none is asked")
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for head in ("policy", "answers", "asked"):
        table.add_column(head)
    for one in found:
        answers = ", ".join(ask if count == 1 else f"{ask} ({count})" for ask, count in one.answers.items())
        asked = ", ".join(f"{ask} (nobody answers)" if ask in one.missing else ask for ask in one.asked)
        table.add_row(escape(one.name), answers or "-", asked or "-")
    console.print(table)


def _listed(one: Listed) -> dict[str, Any]:
    return {
        "name": one.name,
        "answers": one.answers,
        "asked": list(one.asked),
        "deadline_ms": one.deadline_ms,
        "missing": list(one.missing),
    }


def _located(nats: str | None, workdir: Path | None) -> Located:
    located = locate(nats, workdir)
    if located.guess:
        click.echo(f"tidegate: {located.guess}", err=True)
    return located


async def _check(located: Located, wishes: Wishes, progress: Progressing) -> Report:
    bus = await open_bus(located, "tidegate-policy-check")
    try:
        return await check_policy(bus, wishes, progress.planned, progress.step)
    finally:
        await bus.close()


async def _list(located: Located) -> list[Listed]:
    bus = await open_bus(located, "tidegate-policy-list")
    try:
        return await list_policies(bus)
    finally:
        await bus.close()


class Progressing(ProgressBar):
    """A bar on standard error, by questions; nothing where that is no terminal."""

    def __init__(self) -> None:
        super().__init__(TaskProgressColumn(), TextColumn("{task.fields[what]}"), fields={"what": ""})
        self._progress.update(self._task, description="asking")

    def planned(self, steps: int) -> None:
        self._progress.update(self._task, total=steps, completed=0)

    def step(self, what: str) -> None:
        self._progress.update(self._task, advance=1, what=what)
