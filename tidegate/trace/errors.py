"""What a trace file can be wrong in. Every problem names file, line and rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tidegate.errors import TidegateError

Rule = Literal[
    "file",
    "json",
    "fields",
    "duplicate_request_id",
    "hash_count",
    "hash_range",
    "block_size",
    "mixed_block_sizes",
    "times",
    "conflicting_parents",
    "unknown_request",
    "wrong_session",
    "execution_mode",
    "child_named_twice",
    "cycle",
    "nothing_to_write",
]
"""``file``: cannot be opened. ``fields``: a field is missing or of another type. The others are named after what is
wrong. Stable: scripts may compare them."""

MOST_PROBLEMS = 20
"""Of one file set that are told; the rest is only counted."""


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file, counted from 1; line 0 is the whole file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong."""

    place: Place
    rule: Rule
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.text} [{self.rule}]"


class TraceFileError(TidegateError):
    """A trace is not what it should be (the file's fault); ``problems`` are the first of them, ``more`` their rest.
    ``advice``: what to do about them."""

    reason = "bad_trace"

    def __init__(self, problems: Sequence[Problem], more: int = 0, advice: str = "") -> None:
        lines = [str(problem) for problem in problems]
        if more:
            lines.append(f"and {more} more")
        if advice:
            lines.append(advice)
        super().__init__("\n".join(lines))
        self.problems = tuple(problems)
        self.more = more


class Problems:
    """Collects what is wrong, `MOST_PROBLEMS` at most."""

    def __init__(self) -> None:
        self._first: list[Problem] = []
        self._more = 0

    def add(self, place: Place, rule: Rule, text: str) -> None:
        if len(self._first) < MOST_PROBLEMS:
            self._first.append(Problem(place, rule, text))
        else:
            self._more += 1

    def raise_any(self) -> None:
        """Raises `TraceFileError` if there is any."""
        if self._first:
            raise TraceFileError(self._first, self._more)
