"""What the progress bars of long commands share."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn


class ProgressBar:
    """A bar on standard error, where that is a terminal and nobody wants it ``quiet``; gone when its block ends.

    Description and bar, then ``columns``. ``fields``: what those columns read, at first. What is said elsewhere than on
    a terminal is the command's own.
    """

    def __init__(
        self, *columns: ProgressColumn, fields: dict[str, Any], soft_wrap: bool = False, quiet: bool = False
    ) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=soft_wrap)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            *columns,
            console=self._console,
            disable=quiet or not self._console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("", total=None, **fields)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()
