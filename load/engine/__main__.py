"""``python -m load.engine``: run one simulated engine until SIGTERM.

Prints one JSON line on stdout when it listens: ``{"ready": true, "url": ..., "kv_events": [...], "replay": [...],
"model": ...}`` (one endpoint per rank). Exit codes: 0 stopped as asked, 1 failed, 2 a setting is wrong.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import uvloop

from bus.errors import SettingsError, cannot_listen
from bus.log import EventLog, set_up_logging
from bus.service import imports_of
from bus.settings import describe_settings, load_with_origins, parse_overrides, setting_values, show_settings
from bus.tasks import Tasks

with imports_of("engine"):
    from load.engine.config import EngineSettings
    from load.engine.engine import Engine
    from load.engine.server import EngineServer

SECTION = "engine"
UNUSED = frozenset({"nats_url"})
log = EventLog(__name__)


async def run_engine(settings: EngineSettings) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Raises `SettingsError` when a socket cannot be had."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    tasks = Tasks()
    engine = Engine(settings)
    server = EngineServer(engine)
    try:
        engine.start(tasks)
        try:
            await server.http.start(settings.http_host, settings.http_port)
        except OSError as error:
            raise cannot_listen("http_port", settings.http_host, settings.http_port, error) from error
        print(json.dumps(ready_line(settings, engine, server.http.port)), flush=True)
        stopping = tasks.start("stop", stop.wait())
        await asyncio.wait({stopping, tasks.failed}, return_when=asyncio.FIRST_COMPLETED)
        code = 1 if tasks.failed.done() else 0
        engine.stopping.set()
        await server.http.close(drain_s=settings.stop_timeout_s if code == 0 else 0.0)
        log.info("engine_stopped", **engine.ledger.counts)
        return code
    finally:
        await tasks.stop()
        engine.stop()


def ready_line(settings: EngineSettings, engine: Engine, port: int) -> dict[str, Any]:
    """Where it can be reached from this machine."""
    host = "127.0.0.1" if settings.http_host in ("", "0.0.0.0", "::") else settings.http_host  # noqa: S104
    return {
        "ready": True,
        "url": f"http://{host}:{port}",
        "kv_events": [_reachable(rank.publisher.endpoint) for rank in engine.ranks],
        "replay": [_reachable(rank.publisher.replay_endpoint) for rank in engine.ranks],
        "model": settings.model,
    }


def _reachable(endpoint: str) -> str:
    return endpoint.replace("tcp://*:", "tcp://127.0.0.1:")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code. ``argv``: arguments without the program."""
    try:
        return int(_command().main(args=None if argv is None else list(argv), standalone_mode=False) or 0)
    except SettingsError as error:
        print(f"{SECTION}: {error}", file=sys.stderr)
        return 2
    except click.ClickException as error:
        error.show()
        return 2
    except click.exceptions.Abort:
        return 1


def _command() -> click.Command:
    rows = [row for row in describe_settings(SECTION, EngineSettings) if row[0] not in UNUSED]
    options: list[click.Parameter] = [
        click.Option(
            ["--config"],
            type=click.Path(path_type=Path),
            envvar="TIDEGATE_CONFIG",
            help="TOML file with the tables [common] and [engine].",
        ),
        click.Option(["--set", "pairs"], multiple=True, metavar="KEY=VALUE", help="Set one setting; repeatable."),
        click.Option(["--print-config"], is_flag=True, help="Print the settings that would be used, and where from."),
    ]
    values = setting_values(EngineSettings)
    for key, default, variable in rows:
        options.append(_option(key, default, variable, values.get(key, ())))
    about = inspect.cleandoc(EngineSettings.__doc__ or "").replace("``", "").replace("`", "")
    return click.Command(
        "load.engine",
        callback=_run,
        params=options,
        help=f"{about}\n\nLater wins: defaults, --config, environment, options. Lists and tables are JSON.",
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
    )


def _option(key: str, default: str, variable: str, values: tuple[str, ...]) -> click.Option:
    """``values``: what may be chosen, or the keys of a table."""
    metavar, text = "VALUE", f"[{default}]  {variable}"
    if key == "misbehave":
        metavar, text = "JSON", f"[{{}}]  {variable}; a table with any of: {', '.join(values)}"
    elif values:
        metavar = "|".join(values)
    return click.Option([f"--{key.replace('_', '-')}", f"setting_{key}"], metavar=metavar, help=text)


def _run(config: Path | None, pairs: tuple[str, ...], print_config: bool, **given: str | None) -> int:
    overrides = parse_overrides(pairs)
    overrides |= {key.removeprefix("setting_"): text for key, text in given.items() if text is not None}
    loaded = load_with_origins(SECTION, EngineSettings, file=config, overrides=overrides)
    if print_config:
        click.echo(show_settings(loaded, SECTION), nl=False)
        return 0
    settings = loaded.settings
    set_up_logging(settings.log_level, settings.log_format, instance=settings.instance)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run_engine(settings))


if __name__ == "__main__":
    sys.exit(main())
