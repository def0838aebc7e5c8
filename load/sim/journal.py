"""Results of jobs as they come, in a file: an interrupted experiment goes on with what it had.

A line is one job's key and its result, as JSON. The first line says of which code and traces the results are: those of
others are not taken, and the file begins anew. A last line that was cut off is nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Protocol, Self, TypeVar

import msgspec

from bus.service import package_version
from load.sim.parallel import Runs

T = TypeVar("T")

SOURCES = ("load/sim", "load/engine", "services/admission", "services/hints")
"""Packages on which results depend."""


class Job(Runs[T], Protocol[T]):
    """A job whose result can be written down."""

    @property
    def key(self) -> str: ...

    def plain(self, result: T) -> object: ...

    def restored(self, plain: object) -> T: ...


class Line(msgspec.Struct, frozen=True):
    """One result."""

    job: str
    result: msgspec.Raw


class First(msgspec.Struct, frozen=True):
    """The first line."""

    code: str


def code_digest(traces: Iterable[Path] = ()) -> str:
    """Of the sources on which results depend, of the version, and of what stands in ``traces``. Raises `OSError`."""
    root = Path(__file__).parent.parent.parent
    digest = hashlib.sha256(package_version().encode())
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    for path in traces:
        digest.update(f"{path}\0".encode() + path.read_bytes())
    return digest.hexdigest()


class Journal:
    """Results by job; new ones are appended to ``path`` (``None``: to nothing) while it is open. ``traces``: files that
    they depend on.

    with Journal(path) as journal:
        result = journal.known(job)
    """

    def __init__(self, path: Path | None, traces: Iterable[Path] = ()) -> None:
        self._path = path
        self._traces = tuple(traces)
        self._known: dict[str, msgspec.Raw] = {}
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        """Raises `OSError`."""
        if self._path is not None:
            first = msgspec.json.encode(First(code_digest(self._traces)))
            lines = self._path.read_bytes().split(b"\n") if self._path.exists() else []
            if lines and lines[0] == first:
                self._known = {line.job: line.result for line in _lines(lines[1:-1])}
            kept = [first, *(msgspec.json.encode(Line(job, raw)) for job, raw in self._known.items())]
            self._path.write_bytes(b"".join(line + b"\n" for line in kept))
            self._file = self._path.open("ab")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def __len__(self) -> int:
        return len(self._known)

    def knows(self, job: Job[T]) -> bool:
        return job.key in self._known

    def known(self, job: Job[T]) -> T:
        """Raises `KeyError`."""
        return job.restored(msgspec.json.decode(self._known[job.key]))

    def add(self, job: Job[T], result: T) -> None:
        """Raises `OSError`."""
        if self._file is not None:
            raw = msgspec.Raw(msgspec.json.encode(job.plain(result)))
            self._file.write(msgspec.json.encode(Line(job.key, raw)) + b"\n")
            self._file.flush()

    def remove(self) -> None:
        """Its file is not needed any more."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _lines(lines: Iterable[bytes]) -> Iterable[Line]:
    for line in lines:
        try:
            yield msgspec.json.decode(line, type=Line)
        except msgspec.DecodeError:
            return
