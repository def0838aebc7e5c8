"""The format (spec: identity-and-traces.md, envelope on disk and durability semantics).

A segment is ``<prefix>.NNNNNN.jsonl.gz``: gzip members back to back, one member per flush, so that whatever a crash
leaves is readable up to its last whole member. A line is JSON, bare or in the envelope
``{"timestamp": <ms since the writer opened>, "event": <row>}`` with the row's bytes untouched.

isal compresses at zlib's level 6 eleven times as fast as zlib (rows with 64 hashes: 8 us instead of 85).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from isal import igzip_lib, isal_zlib

from segments.errors import BadLineError

_OPEN = b'{"timestamp":'
_EVENT = b',"event":'
_CLOSE = b"}"
_LEVEL = 2
_GZIP_WINDOW = 16 + isal_zlib.MAX_WBITS
_MAGIC = b"\x1f\x8b\x08"
_READ_BYTES, _READ_MOST = 2_048, 65_536
"""What of a member is looked at first, and at most at once: what lies behind its end is copied and given back, and of a
quiet house a member holds a row."""
_CORRUPT: type[Exception] = igzip_lib.IsalError  # type: ignore[assignment]  # its stub says instance


def segment_name(prefix: str, index: int) -> str:
    """File name of segment ``index`` (six digits, more when they are needed)."""
    return f"{prefix}.{index:06d}.jsonl.gz"


def segment_indices(prefix: str, names: Iterable[str]) -> list[int]:
    """Indices of the segments of ``prefix`` among ``names``, ascending. Other files are ignored."""
    pattern = re.compile(re.escape(prefix) + r"\.([0-9]{6,18})\.jsonl\.gz")
    matches = (pattern.fullmatch(name) for name in names)
    return sorted(int(match[1]) for match in matches if match and match[0] == segment_name(prefix, int(match[1])))


def wrap(row: bytes, timestamp_ms: int) -> bytes:
    """``row``, JSON of one line, as a line in its envelope, without line end; ``timestamp_ms`` since the opening."""
    return b"%s%d%s%s%s" % (_OPEN, timestamp_ms, _EVENT, row, _CLOSE)


def unwrap(line: bytes) -> bytes:
    """The row of a line, bare or in its envelope. Raises `BadLineError` for half an envelope."""
    line = line.strip()
    if not line.startswith(_OPEN):
        return line
    _, mark, rest = line.partition(_EVENT)
    if not mark or not rest.endswith(_CLOSE):
        raise BadLineError("a line starts an envelope and does not end it")
    return rest[:-1]


def member(lines: bytes) -> bytes:
    """``lines``, each with its end, as one complete gzip member (no file name, no time: equal lines, equal bytes)."""
    return isal_zlib.compress(lines, _LEVEL, _GZIP_WINDOW)


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
    while (found := _member_at(view, end)) is not None:
        yield found
        end = found.end


def holds_member(data: bytes | memoryview, start: int) -> bool:
    """Whether a whole member stands anywhere after ``start``: then what begins there is damage, not the torn write of
    a crash, behind which nothing stands."""
    view = memoryview(data)
    tail = bytes(view[start:])
    position = tail.find(_MAGIC, 1)
    while position >= 0:
        if _member_at(view, start + position) is not None:
            return True
        position = tail.find(_MAGIC, position + 1)
    return False


def _member_at(view: memoryview, start: int) -> Member | None:
    decompressor = isal_zlib.decompressobj(_GZIP_WINDOW)
    parts: list[bytes] = []
    position, size = start, _READ_BYTES
    try:
        while not decompressor.eof and position < len(view):
            chunk = view[position : position + size]
            parts.append(decompressor.decompress(chunk))
            position += len(chunk)
            size = min(2 * size, _READ_MOST)
    except _CORRUPT:
        return None
    if not decompressor.eof:
        return None
    lines = tuple(line for line in b"".join(parts).split(b"\n") if line)
    return Member(lines, position - len(decompressor.unused_data))
