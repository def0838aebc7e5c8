"""Heads, header look-up and addresses: what the wire must never carry, and what a caller may write."""

from __future__ import annotations

import pytest

from web import headers as head_lines
from web.client import parse_url
from web.errors import BadHeaderError, BadUrlError
from web.limits import HeldBytes, Hold
from web.requests import Request


def test_a_head_keeps_order_and_spelling() -> None:
    """Headers are written as given, repeated ones included, and end with an empty line."""
    head = head_lines.lines(b"HTTP/1.1 200 OK", [(b"X-One", b"1"), (b"x-ONE", b"2"), (b"empty", b"")])
    assert head == b"HTTP/1.1 200 OK\r\nX-One: 1\r\nx-ONE: 2\r\nempty: \r\n\r\n"


@pytest.mark.parametrize("bad", [b"a\r\nx: y", b"a\nb", b"a\rb"])
def test_a_line_break_in_a_header_is_refused(bad: bytes) -> None:
    """A value that would forge another header never reaches the wire, nor does such a name."""
    with pytest.raises(BadHeaderError):
        head_lines.lines(b"HTTP/1.1 200 OK", [(b"x", bad)])
    with pytest.raises(BadHeaderError):
        head_lines.lines(b"HTTP/1.1 200 OK", [(bad, b"x")])


def test_find_is_case_insensitive_and_takes_the_first() -> None:
    """The first of several is the one, in whatever spelling it came."""
    headers = [(b"A", b"1"), (b"X-Request-ID", b"first"), (b"x-request-id", b"second")]
    assert head_lines.find(headers, b"x-request-id") == b"first"
    assert head_lines.find(headers, b"missing") is None


def test_unknown_statuses_have_a_status_line() -> None:
    """529 (overloaded) is used in the field although no registry lists it."""
    assert head_lines.status_line(529) == b"HTTP/1.1 529 Unknown"


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        ("/v1/models", "/v1/models", ""),
        ("/v1/models?limit=1&a=?", "/v1/models", "limit=1&a=?"),
        ("http://host:1/v1/models?x", "/v1/models", "x"),
        ("*", "*", ""),
        ("//evil/path", "//evil/path", ""),
    ],
)
def test_a_target_splits_into_path_and_query(target: str, path: str, query: str) -> None:
    """Origin form, absolute form and the asterisk; a double slash is a path, not a host."""
    request = Request("GET", target, [], "1.1", b"", "", Hold(HeldBytes(0)))
    assert (request.path, request.query) == (path, query)


@pytest.mark.parametrize(
    ("url", "host", "port", "authority", "target"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000, b"127.0.0.1:8000", b"/"),
        ("http://engine/v1?x=1", "engine", 80, b"engine", b"/v1?x=1"),
        ("http://[::1]:9/a", "::1", 9, b"[::1]:9", b"/a"),
        ("https://u:p@engine/v1", "engine", 443, b"engine", b"/v1"),
        ("https://engine:8443", "engine", 8443, b"engine:8443", b"/"),
    ],
)
def test_addresses(url: str, host: str, port: int, authority: bytes, target: bytes) -> None:
    """An address gives the host to connect to, the Host header and the request target, and whether it is by TLS."""
    address = parse_url(url)
    assert (address.host, address.port, address.authority, address.target) == (host, port, authority, target)
    assert address.secure == url.startswith("https")


@pytest.mark.parametrize("url", ["", "engine:8000", "ftp://x/", "http://", "http://x:99999/", "http://x/a b"])
def test_bad_addresses_are_named(url: str) -> None:
    """What we do not speak to is an error of its own, not a traceback from the network layer."""
    with pytest.raises(BadUrlError):
        parse_url(url)


def test_held_bytes_are_given_back_once() -> None:
    """What does not fit is not counted; releasing twice gives back nothing more."""
    held = HeldBytes(10)
    one, other = Hold(held), Hold(held)
    assert one.grow_to(6)
    assert not other.grow_to(5)
    assert one.grow_to(3), "a body that is smaller than declared still holds what was declared"
    assert other.grow_to(4)
    assert held.size == 10
    one.release()
    one.release()
    assert held.size == 4
    assert other.grow_to(10)
    other.release()
    assert held.size == 0
