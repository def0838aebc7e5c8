"""Bodies that a client has compressed (``content-encoding: gzip``): read whole, bounded, and sent on as they are then;
and what is said of one that is no JSON.

An engine gets the plain body: few engines take another. Work and memory are bounded whatever was sent: no more than
the limit is ever unpacked, and a body of very many empty members, each of which costs a copy, is refused.
"""

from __future__ import annotations

import re
import zlib

from services.ingress.errors import BadEncodingError, BodyTooLargeError, UnsupportedEncodingError

SMALL_BYTES = 4096
"""A body up to this size is unpacked at once: the most it can hold (a thousand times as much) takes milliseconds."""

MOST_MEMBERS = 16
_STEP = 1 << 20
_GZIP = 31

_SURROGATE_FAULTS = ("surrogate pair", "unexpected end of hex escape")
"""Of msgspec's sentences those about the escape of half a character: in a text that it reads, in one that it skips."""

_CUT_AT_THE_END = re.compile(rb"(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}.{0,5}\Z", re.DOTALL)
"""msgspec looks six bytes beyond the first half for the second, and calls a body truncated that has fewer."""
_TAIL = 64


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


def no_json(body: bytes, error: Exception) -> str:
    """What a client reads of a body whose decoding failed. Half a character is named: JavaScript writes it where a text
    was cut within one, other languages read it, and the decoder's own words do not lead there."""
    problem = str(error)
    place = problem.rpartition(" (")[2].rstrip(")") if problem.endswith(")") else "at its end"
    cut = "truncated" in problem and _CUT_AT_THE_END.search(body[-_TAIL:]) is not None
    if cut or any(fault in problem for fault in _SURROGATE_FAULTS):
        return f"The body has a lone surrogate ({place}): an escape of half a character, as where a text was cut."
    return f"The request body is not a JSON object: {problem}"
