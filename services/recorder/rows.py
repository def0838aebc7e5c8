"""A row as it comes from the stream: checked, on one line, and known by its fingerprint."""

from __future__ import annotations

import msgspec
from xxhash import xxh3_128_digest

from schemas.base import UNDECODABLE
from services.recorder.errors import BadRowError


class _Object(msgspec.Struct):
    """Any JSON object: what is in it is checked to be JSON, and not kept."""


_object = msgspec.json.Decoder(_Object)


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


def fingerprint(row: bytes) -> bytes:
    """16 bytes (XXH3-128) that stand for a row's bytes, as `one_line` returns them. Every row holds an id that we drew,
    so that nobody else chooses which rows look alike."""
    return xxh3_128_digest(row)
