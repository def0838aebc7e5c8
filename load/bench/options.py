"""What the command line chooses for every benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

RUNS = 5


def no_progress(stage: str) -> None:
    """Nobody watches."""


@dataclass(frozen=True, slots=True)
class Options:
    """``workers``: sizes of fleet; the keys of the first have no suffix, those of the others ``_<workers>``. ``runs``:
    how often everything is measured; medians are reported. ``quick``: small, to see that it works; its figures say
    nothing. ``variant``: of the fleet's prefixes. ``progress`` is told every stage that begins."""

    workers: tuple[int, ...] = (64, 256)
    runs: int = RUNS
    quick: bool = False
    variant: str = "shared"
    progress: Callable[[str], None] = no_progress
