"""The file sink's format (spec: identity-and-traces.md, envelope on disk and durability semantics).

A segment is ``<prefix>.NNNNNN.jsonl.gz``: gzip members back to back, one member per flush, so that whatever a crash
leaves is readable up to its last whole member. A line is ``{"timestamp": <ms since the sink opened>, "event": <row>}``
with the publisher's bytes of the row untouched.
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from schemas.base import UNDECODABLE
from services.recorder.errors import BadRowError, SegmentError

_OPEN = b'{"timestamp":'
_EVENT = b',"event":'
_CLOSE = b"}"
_GZIP_WINDOW = 16 + zlib.MAX_WBITS
_READ_BYTES = 16_384
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


def segment_name(prefix: str, index: int) -> str:
    """File name of segment ``index`` (six digits, more when they are needed)."""
    return f"{prefix}.{index:06d}.jsonl.gz"


def segment_indices(prefix: str, names: Iterable[str]) -> list[int]:
    """Indices of the segments of ``prefix`` among ``names``, ascending. Other files are ignored."""
    pattern = re.compile(re.escape(prefix) + r"\.(\d{6,})\.jsonl\.gz")
    matches = (pattern.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in matches if match)


def one_line(row: bytes) -> bytes:
    """``row`` as a single line of JSON; its bytes are unchanged unless they hold a line break.

    Raises `BadRowError` when it is not a JSON object.
    """
    try:
        _object.decode(row)
        if b"\n" in row or b"\r" in row:
            return msgspec.json.format(row, indent=-1)
    except UNDECODABLE as error:
        raise BadRowError(f"not a JSON object: {error}") from error
    return row.strip()


def wrap(row: bytes, timestamp_ms: int) -> bytes:
    """One line of a segment, with its line end. ``row`` as `one_line` gives it; ``timestamp_ms`` since the opening."""
    return b"%s%d%s%s%s\n" % (_OPEN, timestamp_ms, _EVENT, row, _CLOSE)


def unwrap(line: bytes) -> bytes:
    """The row of a line, bare or in its envelope. Raises `SegmentError` for half an envelope."""
    line = line.strip()
    if not line.startswith(_OPEN):
        return line
    _, mark, rest = line.partition(_EVENT)
    if not mark or not rest.endswith(_CLOSE):
        raise SegmentError("a line starts an envelope and does not end it")
    return rest[:-1]


def member(lines: bytes) -> bytes:
    """``lines`` as one complete gzip member (no file name, no time: equal lines give equal bytes)."""
    return gzip.compress(lines, compresslevel=6, mtime=0)


@dataclass(frozen=True, slots=True)
class Member:
    """One whole gzip member: its lines, and the offset in the segment at which it ends (bytes)."""

    lines: tuple[bytes, ...]
    end: int


def members(data: bytes | memoryview) -> Iterator[Member]:
    """The whole members of a segment, in order. A torn or foreign tail ends the iteration: a crash may leave one.

    What follows the last yielded `Member.end` is that tail.
    """
    view = memoryview(data)
    end = 0
    while end < len(view):
        decompressor = zlib.decompressobj(_GZIP_WINDOW)
        parts: list[bytes] = []
        position = end
        try:
            while not decompressor.eof and position < len(view):
                chunk = view[position : position + _READ_BYTES]
                parts.append(decompressor.decompress(chunk))
                position += len(chunk)
        except zlib.error:
            return
        if not decompressor.eof:
            return
        end = position - len(decompressor.unused_data)
        yield Member(lines=tuple(line for line in b"".join(parts).split(b"\n") if line), end=end)
