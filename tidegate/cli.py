"""The command ``tidegate``. What a command needs is imported when it is called, so that ``--help`` is quick and an
interruption meanwhile ends it as one while it works does."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

INTERRUPTED_EXIT = 130
"""As `bus.interrupt` has it."""

try:
    import click
except KeyboardInterrupt:
    raise SystemExit(INTERRUPTED_EXIT) from None

COMMANDS = {
    "up": "Run a whole system on this machine and keep it running.",
    "demo": "Show agent sessions served through a whole system, and check the figures.",
    "tail": "Print finished requests as they come.",
    "top": "Watch sessions and workers live.",
    "trace": "Read recorded traces: tables, timelines, the formats of others.",
    "replay": "Play recorded traffic again against an OpenAI endpoint, and compare.",
    "keys": "Make, list and revoke the API keys of the front door.",
    "doctor": "Check a system, and say what to fix.",
    "calibrate": "Measure what it costs an engine to compute a prompt anew.",
    "policy": "Check a policy of your own on the bus, or list who answers.",
    "simulate": "Compare scheduling policies in virtual time; no system is needed.",
}


class CommandGroup(click.Group):
    """Commands by name in `COMMANDS`, each in its module of `tidegate.commands`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"tidegate.commands.{cmd_name}")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _version(context: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted and not context.resilient_parsing:
        from bus.service import package_version

        click.echo(f"tidegate, version {package_version()}")
        context.exit()


@click.group(cls=CommandGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
def cli() -> None:
    """Tidegate: session-aware routing, admission and cache hints for agentic LLM inference.

    \b
    Examples:
      tidegate up                      a system with two simulated engines on port 8080
      tidegate up --engine http://127.0.0.1:8000=tcp://127.0.0.1:5557
      tidegate tail --session my-run   its finished requests, live
      tidegate top                     sessions and workers, live
      tidegate trace stats .tidegate/traces  tables of what happened
      tidegate replay .tidegate/traces --speed 5  the same traffic again
      tidegate keys add --tenant me    an API key for the front door
      tidegate doctor                  is everything well?
      tidegate demo                    sessions through a whole system, in under a minute
      tidegate calibrate --worker engine-1  what a lost cache costs on that engine
      tidegate policy check my-policy  does it answer as it should?
      tidegate simulate --quick        scheduling policies side by side, in virtual time
    """


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. 0 well, 1 not well, 2 wrong use, 130 interrupted."""
    try:
        return _run(arguments)
    except (click.exceptions.Abort, KeyboardInterrupt):
        return INTERRUPTED_EXIT


def _run(arguments: Sequence[str] | None) -> int:
    from bus.errors import BusError, SettingsError
    from bus.log import set_up_logging
    from bus.service import says_why
    from tidegate.errors import TidegateError

    set_up_logging("error")
    try:
        return int(cli.main(args=arguments, prog_name="tidegate", standalone_mode=False) or 0)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except SettingsError as error:
        return _fail(str(error), 2)
    except TidegateError as error:
        return _fail(str(error), error.exit_code)
    except BusError as error:
        return _fail(f"{error} ({error.reason})", 1)
    except ImportError as error:
        if not says_why(error):
            raise
        return _fail(str(error), 2)
    except BrokenPipeError:
        # The reader of our output has gone (`tidegate tail | head`); what is still buffered goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _fail(message: str, code: int) -> int:
    from tidegate.safe_text import safe_lines

    click.echo(f"tidegate: {safe_lines(message)}", err=True)
    return code
