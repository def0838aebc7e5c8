"""How many lines of one kind a process writes: what strangers' messages cause shall not fill the disk."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_S = 60.0
KINDS = 256
"""Kinds that are told apart at a time; all further ones together are one kind."""

Kind = tuple[str, ...]
"""Logger, event, and what tells kinds of one event apart (reason, family of the subject)."""

OTHERS: Kind = ("", "others")


@dataclass(slots=True)
class _Window:
    began: float
    lines: int = 0
    left_out: int = 0


class LineLimit:
    """At most so many lines of one kind in ``window_s``. Times are seconds of one clock that never goes back.

    Whoever asks `due` writes one line for each kind that it names.
    """

    def __init__(self, window_s: float = WINDOW_S, kinds: int = KINDS) -> None:
        self._window_s = window_s
        self._kinds = kinds
        self._windows: dict[Kind, _Window] = {}

    def take(self, kind: Kind, lines: int, now: float) -> bool:
        """Whether a line of this kind may be written now: it is one of the first ``lines`` of its window. The others
        are counted. Ask for what is `due` before."""
        if kind not in self._windows and len(self._windows) >= self._kinds:
            kind = OTHERS
        window = self._windows.setdefault(kind, _Window(now))
        window.lines += 1
        allowed = window.lines <= lines
        window.left_out += not allowed
        return allowed

    def due(self, now: float) -> list[tuple[Kind, int]]:
        """Kinds whose window has ended, each with the number of its lines that were left out (at least one)."""
        told: list[tuple[Kind, int]] = []
        while self._windows:
            kind, window = next(iter(self._windows.items()))  # the oldest: they are in order of their beginning
            if now - window.began < self._window_s:
                break
            del self._windows[kind]
            if window.left_out:
                told.append((kind, window.left_out))
        return told

    def rest(self) -> list[tuple[Kind, int]]:
        """As `due`, for all windows: the process ends."""
        return self.due(float("inf"))
