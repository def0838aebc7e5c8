"""Rows to a file: plain, gzipped by the file's name, or standard output. A file appears whole or not at all."""

from __future__ import annotations

import gzip
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from tidegate.errors import WrongUseError

_encoder = msgspec.json.Encoder()


@contextmanager
def output(path: Path | None) -> Iterator[BinaryIO]:
    """Where bytes go; ``None`` is standard output. Written beside the file and moved there when the block ends well;
    what is no file (a device, a pipe, a link) is written to as it is.

    Raises `WrongUseError` when the file cannot be written.
    """
    if path is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    beside = not path.is_symlink() and (path.is_file() or not path.exists())
    part = path.with_name(f".{path.name}.{os.getpid()}.part") if beside else path
    try:
        with part.open("wb") as raw:
            if path.suffix == ".gz":
                # No name and no time in it: the same rows are the same file.
                with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
                    yield cast(BinaryIO, packed)
            else:
                yield raw
        if beside:
            part.replace(path)
    except OSError as error:
        raise WrongUseError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        if beside:
            part.unlink(missing_ok=True)


def check_output(path: Path) -> None:
    """Before long work: whether its result can be written there. Raises `WrongUseError`."""
    folder = path.parent
    if not folder.is_dir():
        raise WrongUseError(f"{path} cannot be written: there is no folder {folder}")
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise WrongUseError(f"{path} cannot be written")


def write_lines(rows: Iterator[dict[str, Any]], path: Path | None) -> int:
    """One JSON object a line; returns how many."""
    count = 0
    with output(path) as file:
        for row in rows:
            file.write(_encoder.encode(row) + b"\n")
            count += 1
    return count


def write_timeline(events: Iterator[dict[str, Any]], path: Path | None) -> int:
    """A Chrome/Perfetto JSON object, one event a line; returns how many events."""
    count = 0
    with output(path) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        for event in events:
            file.write((b",\n" if count else b"") + _encoder.encode(event))
            count += 1
        file.write(b"\n]}\n")
    return count
