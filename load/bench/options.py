"""What the command line chooses for every benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

RUNS = 5


class BenchError(Exception):
    """A benchmark cannot be run; the text says why."""


class InterruptedByUser(Exception):  # noqa: N818 - nothing went wrong
    """A signal ended a benchmark, after its clean-up."""


class Progress(Protocol):
    """Is told every stage that begins, and how much of it is done, where that is known."""

    def __call__(self, stage: str, done: int = 0, total: int | None = None) -> None: ...


def no_progress(stage: str, done: int = 0, total: int | None = None) -> None:
    """Nobody watches."""


@dataclass(frozen=True, slots=True)
class Options:
    """``workers``: sizes of fleet; the keys of the first have no suffix, those of the others ``_<workers>``. ``runs``:
    how often everything is measured; medians are reported. ``quick``: small, to see that it works; its figures say
    nothing. ``variant``: of the fleet's prefixes. ``progress`` is told how it goes on.

    Of ``agents`` only (``None``: its own choice): ``policies`` in turn, ``sessions`` in all of which ``concurrency``
    run at a time, ``scale`` by which all is smaller and faster, ``seed``. Of ``streams`` only: ``seconds``."""

    workers: tuple[int, ...] = (64, 256)
    runs: int = RUNS
    quick: bool = False
    variant: str = "shared"
    progress: Progress = no_progress
    policies: tuple[str, ...] | None = None
    sessions: int | None = None
    concurrency: int | None = None
    scale: float | None = None
    seed: int = 1
    seconds: float | None = None
