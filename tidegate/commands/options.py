"""Options that several commands share."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from tidegate.supervisor.state import DEFAULT_WORKDIR

F = TypeVar("F", bound=Callable[..., Any])


class FiniteRange(click.FloatRange):
    """As its base, without ``nan``, which lies in every range, and without ``inf``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is no finite number.", param, ctx)
        return found


SPEED = FiniteRange(0.001, 10_000)
"""Of a trace that is played again."""


def skip_unplayable_option(function: F) -> F:
    return click.option(
        "--skip-unplayable",
        is_flag=True,
        help="Of rows: leave out, and count, sessions that contradict themselves (two parents).",
    )(function)


def nats_option(help_text: str) -> Callable[[F], F]:
    return click.option("--nats", "nats", metavar="URL", default=None, help=help_text)


def workdir_option(help_text: str) -> Callable[[F], F]:
    return click.option(
        "--workdir", type=click.Path(path_type=Path, file_okay=False), default=None, metavar="DIR", help=help_text
    )


def find_bus_options(function: F) -> F:
    """``--nats`` and ``--workdir`` of commands that look for a running system."""
    function = nats_option("The bus; default: that of --workdir, else TIDEGATE_NATS_URL.")(function)
    return workdir_option(f"Folder of a running `tidegate up` (default {DEFAULT_WORKDIR}).")(function)
