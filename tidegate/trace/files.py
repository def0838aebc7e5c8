"""Lines of trace files: plain or gzipped, of many gzip members, readable up to where a crash damaged them.

A recorder appends whole gzip members (spec identity-and-traces §2.10): what was flushed before a crash is whole, what
came after may be cut in the middle of a member or of a line.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tidegate.trace.errors import Place, Problem, TraceFileError

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz")
"""Of the files that are taken from a folder."""

MAX_LINE_BYTES = 64 << 20
_CHUNK = 1 << 18
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP = zlib.MAX_WBITS | 16


class Line(NamedTuple):
    """One line without its end. ``ended`` is false for a last line that no line end follows: it may be half a line."""

    number: int
    data: bytes
    ended: bool


def find_files(paths: Sequence[Path]) -> list[Path]:
    """The files themselves, and of each folder those named like traces, by name. Raises `TraceFileError`."""
    found: list[Path] = []
    for path in paths:
        try:
            found += _inside(path) if path.is_dir() else [path]
            said = None if path.exists() else "there is no such file"
        except OSError as error:
            said = error.strerror or str(error)
        if said is not None:
            raise TraceFileError([Problem(Place(str(path), 0), "file", said)])
    return list(dict.fromkeys(found))


def _inside(folder: Path) -> list[Path]:
    inside = sorted(each for each in folder.iterdir() if each.name.endswith(SUFFIXES) and each.is_file())
    if not inside:
        raise TraceFileError([Problem(Place(str(folder), 0), "file", "no .jsonl or .jsonl.gz file in it")])
    return inside


def read_lines(path: Path, on_damage: Callable[[Place, str], None]) -> Iterator[Line]:
    """Lines, numbered from 1, empty ones left out.

    ``on_damage`` is told once where a file stops being readable; what comes before it has been given. The last line of
    a damaged file is left out, as it may be half a line. Raises `TraceFileError` when the file cannot be opened, or a
    line is longer than `MAX_LINE_BYTES`.
    """
    try:
        with path.open("rb") as file:
            yield from _lines(path, file, on_damage)
    except OSError as error:
        raise TraceFileError([Problem(Place(str(path), 0), "file", error.strerror or str(error))]) from error


def _lines(path: Path, file: BinaryIO, on_damage: Callable[[Place, str], None]) -> Iterator[Line]:
    damage: list[str] = []
    begun: list[bytes] = []  # pieces of a line whose end has not come; put together once, however many they are
    number = length = 0
    for chunk in _chunks(file, damage):
        if b"\n" in chunk:
            *whole, rest = b"".join((*begun, chunk)).split(b"\n")
            begun, length = [rest], len(rest)
            for line in whole:
                number += 1
                if line.strip():
                    yield Line(number, line, True)
        else:
            begun.append(chunk)
            length += len(chunk)
        if length > MAX_LINE_BYTES:
            text = f"the line is longer than {MAX_LINE_BYTES} bytes"
            raise TraceFileError([Problem(Place(str(path), number + 1), "file", text)])
    if damage:
        on_damage(Place(str(path), number + 1), damage[0])
    elif (rest := b"".join(begun)).strip():
        yield Line(number + 1, rest, False)


def _chunks(file: BinaryIO, damage: list[str]) -> Iterator[bytes]:
    """The text's bytes in pieces; appends to ``damage`` what stopped it early."""
    first = file.read(_CHUNK)
    if not first.startswith(_GZIP_MAGIC):
        while first:
            yield first
            first = file.read(_CHUNK)
        return
    member = zlib.decompressobj(_GZIP)
    data = first
    while data or (data := file.read(_CHUNK)):
        if member.eof:
            if not data.strip(b"\0"):  # padding behind the last member, as gzip allows it
                data = b""
                continue
            member = zlib.decompressobj(_GZIP)
        try:
            text = member.decompress(data, _CHUNK * 8)
        except zlib.error as error:
            damage.append(f"the gzip data is damaged ({error})")
            return
        data = member.unused_data if member.eof else member.unconsumed_tail
        yield text
    if not member.eof:
        with suppress(zlib.error):
            yield member.flush()
    if not member.eof:
        damage.append("the gzip data ends in the middle of a member")
