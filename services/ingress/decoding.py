"""Bodies that a client has compressed (``content-encoding: gzip``): read whole, bounded, and sent on as they are then.

An engine gets the plain body: few engines take another. Work and memory are bounded whatever was sent: no more than
the limit is ever unpacked, and a body of very many empty members, each of which costs a copy, is refused.
"""

from __future__ import annotations

import zlib

from services.ingress.errors import BadEncodingError, BodyTooLargeError, UnsupportedEncodingError

SMALL_BYTES = 4096
"""A body up to this size is unpacked at once: the most it can hold (a thousand times as much) takes milliseconds."""

MOST_MEMBERS = 16
_STEP = 1 << 20
_GZIP = 31


def encoding_of(header: str | None) -> str | None:
    """The encoding of a body, ``None`` for a plain one. Raises `UnsupportedEncodingError`."""
    codings = [coding for part in (header or "").split(",") if (coding := part.strip().lower()) not in ("", "identity")]
    if not codings:
        return None
    if codings not in (["gzip"], ["x-gzip"]):
        raise UnsupportedEncodingError(", ".join(codings))
    return "gzip"


def unpacked(body: bytes, limit: int) -> bytes:
    """A gzip body of ``limit`` bytes at most. Raises `BadEncodingError`, `BodyTooLargeError`."""
    pieces: list[bytes] = []
    size, rest = 0, body
    for _ in range(MOST_MEMBERS):
        stream = zlib.decompressobj(_GZIP)
        while not stream.eof:
            try:
                piece = stream.decompress(rest, min(_STEP, limit - size + 1))
            except zlib.error as error:
                raise BadEncodingError("it is not gzip") from error
            size += len(piece)
            if size > limit:
                raise BodyTooLargeError(limit)
            pieces.append(piece)
            rest = stream.unconsumed_tail
            if not piece and not rest and not stream.eof:
                raise BadEncodingError("it ends too early")
        rest = stream.unused_data
        if not rest:
            return b"".join(pieces)
    raise BadEncodingError(f"it has more than {MOST_MEMBERS} members")
