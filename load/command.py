"""The command line of a simulated process: every setting an option, a TOML file, ``--set`` and ``--print-config``."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import uvloop

from bus.errors import SettingsError
from bus.log import set_up_logging
from bus.settings import (
    CommonSettings,
    describe_settings,
    load_with_origins,
    parse_overrides,
    setting_values,
    show_settings,
)

UNUSED = frozenset(name for name in CommonSettings.__struct_fields__ if name.startswith("nats_"))
S = TypeVar("S", bound=CommonSettings)


def run_command(
    section: str,
    settings_type: type[S],
    run: Callable[[S], Coroutine[Any, Any, int]],
    argv: Sequence[str] | None,
) -> int:
    """Run ``python -m load.<section>``; returns the exit code. ``argv``: arguments without the program."""
    try:
        command = _command(section, settings_type, run)
        return int(command.main(args=None if argv is None else list(argv), standalone_mode=False) or 0)
    except SettingsError as error:
        print(f"{section}: {error}", file=sys.stderr)
        return 2
    except click.ClickException as error:
        error.show()
        return 2
    except click.exceptions.Abort:
        return 1


def _command(section: str, settings_type: type[S], run: Callable[[S], Coroutine[Any, Any, int]]) -> click.Command:
    rows = [row for row in describe_settings(section, settings_type) if row[0] not in UNUSED]
    options: list[click.Parameter] = [
        click.Option(
            ["--config"],
            type=click.Path(path_type=Path),
            envvar="TIDEGATE_CONFIG",
            help=f"TOML file with the tables [common] and [{section}].",
        ),
        click.Option(["--set", "pairs"], multiple=True, metavar="KEY=VALUE", help="Set one setting; repeatable."),
        click.Option(["--print-config"], is_flag=True, help="Print the settings that would be used, and where from."),
    ]
    values = setting_values(settings_type)
    for key, default, variable in rows:
        options.append(_option(key, default, variable, values.get(key, ())))

    def callback(config: Path | None, pairs: tuple[str, ...], print_config: bool, **given: str | None) -> int:
        overrides = parse_overrides(pairs)
        overrides |= {key.removeprefix("setting_"): text for key, text in given.items() if text is not None}
        loaded = load_with_origins(section, settings_type, file=config, overrides=overrides)
        if print_config:
            click.echo(show_settings(loaded, section), nl=False)
            return 0
        settings = loaded.settings
        set_up_logging(settings.log_level, settings.log_format, instance=settings.instance)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(run(settings))

    about = inspect.cleandoc(settings_type.__doc__ or "").replace("``", "").replace("`", "")
    return click.Command(
        f"load.{section}",
        callback=callback,
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
