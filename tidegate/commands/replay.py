"""``tidegate replay``"""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import click
import msgspec
import uvloop
from rich.console import Console
from rich.progress import TextColumn, TimeElapsedColumn
from rich.table import Table

from bus.interrupt import INTERRUPTED_EXIT, until_interrupted
from tidegate.commands.options import SPEED, FiniteRange, skip_unplayable_option
from tidegate.commands.progress import ProgressBar
from tidegate.errors import WrongUseError
from tidegate.replay.content import HIGHEST, LOWEST, Prompts
from tidegate.replay.endpoint import Api, Endpoint, EndpointError, Family, Manner
from tidegate.replay.player import Player
from tidegate.replay.report import ReplayReport, Settings, report
from tidegate.replay.run import Naming, Run, first_plays, raise_open_files
from tidegate.replay.table import lines_of, notes_of
from tidegate.safe_text import safe
from tidegate.trace.play_nodes import PlayNode, Plays
from tidegate.trace.plays import read_plays
from tidegate.trace.replayable import DEFAULT_BLOCK
from tidegate.trace.writing import check_output, output


def _vocabulary(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, int]:
    del context, parameter
    low, _, high = value.partition("..")
    if not (low.isdigit() and high.isdigit() and int(low) < int(high) < 1 << 31):
        raise click.BadParameter("write LOWEST..HIGHEST, two token ids, for example 1000..30000")
    return int(low), int(high)


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asked for."""

    files: tuple[Path, ...]
    url: str
    model: str | None
    speed: float
    lanes: int | None
    limit: int | None
    manner: Manner
    seed: int
    vocabulary: tuple[int, int]
    answers: bool
    keep_names: bool
    mooncake_block: int


@click.command("replay")
@click.argument("files", metavar="TRACE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--url", default="http://127.0.0.1:8080", show_default=True, help="The endpoint: a front door or engine.")
@click.option("--model", metavar="NAME", help="To ask for (default: the recorded one, else the only one served).")
@click.option(
    "--speed",
    type=SPEED,
    default=1.0,
    show_default=True,
    help="Divides start times and the delays between requests.",
)
@click.option("--lanes", type=click.IntRange(1), help="So many plays at a time, one after another, at no set time.")
@click.option("--limit", type=click.IntRange(1), help="Only the first so many plays (runs with their sub-agents).")
@click.option(
    "--api",
    type=click.Choice(get_args(Api)),
    default="completions",
    show_default=True,
    help="completions: prompts are token ids. chat: words, for endpoints that take no ids; counts differ.",
)
@click.option(
    "--headers", type=click.Choice(get_args(Family)), default="tidegate", show_default=True, help="Sessions' headers."
)
@click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), help="Of the prompts (default: a new one).")
@click.option(
    "--vocabulary",
    callback=_vocabulary,
    default=f"{LOWEST}..{HIGHEST}",
    show_default=True,
    metavar="LOW..HIGH",
    help="Token ids that prompts are made of.",
)
@click.option("--no-answers", "answers", is_flag=True, default=True, flag_value=False, help="Send no answers back.")
@click.option("--no-exact", "exact", is_flag=True, default=True, flag_value=False, help="Only max_tokens is sent.")
@click.option("--keep-names", is_flag=True, help="Session names as recorded, without the seed at their end.")
@click.option(
    "--block-size",
    type=click.IntRange(1, 1 << 20),
    default=DEFAULT_BLOCK,
    show_default=True,
    help="Tokens of one hash id of Mooncake lines.",
)
@skip_unplayable_option
@click.option("--timeout", type=FiniteRange(1, 86_400), default=600.0, show_default=True, help="Seconds a request.")
@click.option("--allow-failed", type=click.IntRange(0), default=0, show_default=True, help="More are exit code 1.")
@click.option(
    "--api-key",
    envvar="TIDEGATE_REPLAY_API_KEY",
    show_envvar=True,
    default="",
    metavar="KEY",
    help="Of the endpoint; better in the environment, where nobody else sees it.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object, and nothing else.")
@click.option("-o", "--output", "path", type=click.Path(path_type=Path, dir_okay=False), help="The report, as JSON.")
def command(
    files: tuple[Path, ...],
    url: str,
    model: str | None,
    speed: float,
    lanes: int | None,
    limit: int | None,
    api: Api,
    headers: Family,
    seed: int | None,
    vocabulary: tuple[int, int],
    answers: bool,
    exact: bool,
    keep_names: bool,
    block_size: int,
    skip_unplayable: bool,
    timeout: float,
    allow_failed: int,
    api_key: str,
    as_json: bool,
    path: Path | None,
) -> int:
    """Play recorded traffic again against an OpenAI endpoint: ours, a bare engine, or somebody else's.

    TRACE is what `tidegate trace` reads: rows of ours or the peer's, agentic-mooncake (version 2) or Mooncake lines;
    files or folders. Requests wait for each other as they did: for an answer or for a dispatch, with the same delays;
    sub-agents overlap their parents. Prompts are made up, as long as recorded, and share what was shared. The report
    sets what came of it beside what was recorded.

    Exit code 1: more failed than --allow-failed, or the trace or the endpoint is no good; 130: interrupted (the report
    is of what was played).

    \b
    Examples:
      tidegate replay .tidegate/traces
      tidegate replay run.jsonl.gz --url http://10.0.0.5:8000 --speed 5
      tidegate replay run.jsonl.gz --lanes 8 --limit 100 --json | jq .replayed.prefix_hit_ratio
      tidegate replay theirs.jsonl --api chat --headers none --no-exact
    """
    wishes = Wishes(
        files=files,
        url=url,
        model=model,
        speed=speed,
        lanes=lanes,
        limit=limit,
        manner=Manner(api=api, family=headers, api_key=api_key, exact=exact, first_byte_s=timeout, total_s=timeout),
        seed=secrets.randbits(48) if seed is None else seed,
        vocabulary=vocabulary,
        answers=answers and api == "completions",
        keep_names=keep_names,
        mooncake_block=block_size,
    )
    if path is not None:
        check_output(path)
    plays = read_plays(files, mooncake_block=block_size, skip_unplayable=skip_unplayable)
    for problem in plays.damaged:
        _say(f"{problem.place}: {problem.text}; read up to there")
    raise_open_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, Progressing(quiet=as_json) as listener:
        done = runner.run(_played(wishes, plays, listener))
    if done is None:
        return INTERRUPTED_EXIT
    if as_json:
        print(msgspec.json.encode(done).decode(), flush=True)
    else:
        print_report(done)
    if path is not None:
        with output(path) as file:
            file.write(msgspec.json.encode(done) + b"\n")
    if done.interrupted:
        return INTERRUPTED_EXIT
    return 0 if done.failed <= allow_failed else 1


async def _played(wishes: Wishes, plays: Plays, listener: Progressing) -> ReplayReport | None:
    """``None``: interrupted before anything was sent."""
    nodes = first_plays(plays.nodes, wishes.limit)
    endpoint = Endpoint(wishes.url, wishes.manner)
    try:
        checked = await until_interrupted(_check(endpoint, nodes, wishes, listener))
        if checked is None:
            return None
        run = _run(endpoint, nodes, plays.block_size, wishes, checked, listener)
        listener.planned(len(nodes), f"{len({node.play for node in nodes})} plays")
        finished = await until_interrupted(_whole(run))
    finally:
        await endpoint.close()
    asked = Settings(
        url=endpoint.url,
        model=", ".join(sorted(set(checked.models.values()))),
        api=wishes.manner.api,
        headers=wishes.manner.family,
        speed=wishes.speed,
        lanes=wishes.lanes,
        seed=wishes.seed,
        files=tuple(map(str, wishes.files)),
        block_size=plays.block_size,
    )
    return report(nodes, run.results, asked, plays.left_out, interrupted=finished is None)


async def _whole(run: Run) -> bool:
    await run.play()
    return True


async def _check(endpoint: Endpoint, nodes: Sequence[PlayNode], wishes: Wishes, listener: Progressing) -> Naming:
    """The models to ask for, and whether answers' tokens are told. Raises `EndpointError`."""
    listener.stage(f"asking {endpoint.url}")
    served = await endpoint.models()
    models = {name: choose_model(name, wishes.model, served, endpoint.url) for name in {node.model for node in nodes}}
    told = False
    for model in sorted(set(models.values())):
        told = await endpoint.probe(model)
    for recorded, model in models.items():
        if recorded is not None and recorded != model:
            listener.note(f"recorded with {recorded}, played with {model}")
    if wishes.manner.api == "chat":
        listener.note("prompts are words: token counts and cache hits differ from what was recorded")
    elif wishes.answers and not told:
        listener.note("the endpoint does not tell token ids, so that answers cannot be sent back")
    suffix = "" if wishes.keep_names else f"@{wishes.seed:x}"
    return Naming(models=models, suffix=suffix, wants_ids=wishes.answers and told)


def choose_model(recorded: str | None, wished: str | None, served: Sequence[str], url: str) -> str:
    """Raises `EndpointError` where it is not served, or which one is not clear."""
    name = wished or (recorded if recorded in served else None)
    if name is None and len(served) == 1:
        return served[0]
    if name is None or name not in served:
        asked = name or recorded
        what = f"no model {asked!r}" if asked else "several models, and the trace names none"
        raise EndpointError(f"{url} serves {what}; with --model name one of {', '.join(served[:10]) or 'none'}")
    return name


def _run(
    endpoint: Endpoint,
    nodes: Sequence[PlayNode],
    block_size: int,
    wishes: Wishes,
    naming: Naming,
    listener: Progressing,
) -> Run:
    prompts = Prompts(
        nodes,
        block_size,
        seed=wishes.seed,
        vocabulary=wishes.vocabulary,
        words=wishes.manner.api == "chat",
        answers=wishes.answers,
    )
    try:
        player = Player(nodes, speed=wishes.speed, lanes=wishes.lanes)
    except ValueError as error:
        raise WrongUseError(str(error)) from error
    return Run(nodes, player, prompts, endpoint, naming, listener)


def print_report(done: ReplayReport) -> None:
    """For people."""
    console = Console(highlight=False, soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("", style="bold", no_wrap=True)
    for head in ("replayed", "recorded", "change"):
        table.add_column(head, justify="right", no_wrap=True)
    for line in lines_of(done):
        table.add_row(*line)
    console.print(table)
    for note in notes_of(done):
        console.print(safe(note), markup=False, style="red" if " failed" in note else None)
    asked = done.settings
    what = f"seed {asked.seed}; speed {asked.speed:g}; model {asked.model} at {asked.url}"
    console.print(safe(what), markup=False)


def _say(what: str) -> None:
    print(f"tidegate: {what}", file=sys.stderr)


class Progressing(ProgressBar):
    """A progress bar on standard error; a few plain lines where that is no terminal."""

    def __init__(self, *, quiet: bool = False) -> None:
        super().__init__(
            TextColumn("{task.fields[count]}"),
            TextColumn("{task.fields[failed]}"),
            TimeElapsedColumn(),
            fields={"count": "", "failed": ""},
            soft_wrap=True,
            quiet=quiet,
        )
        self._requests = self._over = self._failed = self._running = 0

    def stage(self, what: str) -> None:
        self._progress.update(self._task, description=what)

    def note(self, sentence: str) -> None:
        self._console.print(f"tidegate: {safe(sentence)}", markup=False)

    def planned(self, requests: int, plays: str) -> None:
        self._requests = requests
        self._progress.update(self._task, description=plays, total=requests, completed=0)

    def sent(self) -> None:
        self._running += 1

    def ended(self, failed: bool, skipped: int) -> None:
        self._over += skipped or 1
        if not skipped:
            self._running -= 1
            self._failed += failed
        note = f"[red]{self._failed} failed[/]" if self._failed else ""
        count = f"{self._over}/{self._requests}, {self._running} under way"
        self._progress.update(self._task, completed=self._over, count=count, failed=note)
