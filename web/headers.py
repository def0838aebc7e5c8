"""Header lists and message heads: names and values as bytes, in wire order and spelling."""

from __future__ import annotations

from http import HTTPStatus

from web.errors import BadHeaderError

Headers = list[tuple[bytes, bytes]]

_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}
BODILESS = frozenset({204, 304})
"""Statuses whose answers never have a body."""


def find(headers: Headers, name: bytes) -> bytes | None:
    """The first value of ``name`` (lower case), or ``None``."""
    for key, value in headers:
        if key.lower() == name:
            return value
    return None


def only(headers: Headers, name: bytes, *, needed: bool) -> bool:
    """Whether ``name`` (lower case) is there once; where it is not ``needed``, once at most."""
    found = sum(key.lower() == name for key, _ in headers)
    return found == 1 or (found == 0 and not needed)


def lines(first: bytes, headers: Headers) -> bytes:
    """A message's head, empty line included. Raises `BadHeaderError` for a line break inside a header."""
    parts = [first]
    parts += [b"%b: %b" % header for header in headers]
    head = b"\r\n".join(parts)
    if head.count(b"\n") != len(headers) or head.count(b"\r") != len(headers):
        raise BadHeaderError("a header holds a line break")
    return head + b"\r\n\r\n"


def status_line(status: int) -> bytes:
    """``HTTP/1.1 200 OK``."""
    return b"HTTP/1.1 %d %b" % (status, _PHRASES.get(status, b"Unknown"))
