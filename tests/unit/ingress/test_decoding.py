"""Bodies that clients compress, and what may be hidden in one."""

from __future__ import annotations

import contextlib
import gzip
import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.ingress.decoding import MOST_MEMBERS, encoding_of, no_json, unpacked
from services.ingress.errors import BadEncodingError, BodyTooLargeError, UnsupportedEncodingError

LIMIT = 3 << 20


@given(st.lists(st.binary(max_size=200), min_size=1, max_size=3))
def test_what_was_packed_comes_out(parts: list[bytes]) -> None:
    """Also of several members, which is the concatenation of them (RFC 1952 §2.2)."""
    assert unpacked(b"".join(gzip.compress(part) for part in parts), LIMIT) == b"".join(parts)


def test_up_to_the_limit_and_no_byte_more() -> None:
    body = gzip.compress(b"x" * LIMIT)
    assert len(unpacked(body, LIMIT)) == LIMIT
    with pytest.raises(BodyTooLargeError):
        unpacked(body, LIMIT - 1)
    with pytest.raises(BodyTooLargeError):
        unpacked(gzip.compress(b"") + gzip.compress(b"xx"), 1)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        gzip.compress(b"{}")[:-1],
        gzip.compress(b"{}")[:5],
        gzip.compress(b"{}") + b"{}",
        gzip.compress(b"x" * 100_000)[:50],
        zlib.compress(b"{}"),
        gzip.compress(b"{}")[:-8] + b"\0" * 8,
        gzip.compress(b"") * (MOST_MEMBERS + 1),
    ],
)
def test_what_is_no_gzip_is_a_clear_error(body: bytes) -> None:
    with pytest.raises(BadEncodingError):
        unpacked(body, LIMIT)


@given(st.binary(max_size=100), st.integers(0, 60), st.integers(0, 255))
def test_a_damaged_body_never_comes_out_otherwise(data: bytes, place: int, value: int) -> None:
    body = bytearray(gzip.compress(data, mtime=0))
    body[place % len(body)] = value
    with contextlib.suppress(BadEncodingError, BodyTooLargeError):
        assert unpacked(bytes(body), LIMIT) == data


@pytest.mark.parametrize(
    ("header", "coding"), [(None, None), ("", None), ("identity", None), (" GZip ", "gzip"), ("x-gzip", "gzip")]
)
def test_encodings(header: str | None, coding: str | None) -> None:
    assert encoding_of(header) == coding


@pytest.mark.parametrize("header", ["br", "zstd", "deflate", "gzip, gzip", "gzip, br"])
def test_other_encodings_are_refused(header: str) -> None:
    with pytest.raises(UnsupportedEncodingError):
        encoding_of(header)


class Read(msgspec.Struct):
    """A body of which one text is read, another skipped and a third kept as it came."""

    p: str = ""
    r: msgspec.Raw = msgspec.Raw()


def said_of(body: bytes) -> str:
    with pytest.raises(msgspec.DecodeError) as caught:
        msgspec.json.decode(body, type=Read)
    return no_json(body, caught.value)


@pytest.mark.parametrize("member", ["p", "q", "r"])
@pytest.mark.parametrize("before", ["", "cut ", "\\\\", "\\n"], ids=["first", "text", "backslash", "line"])
@pytest.mark.parametrize("after", ["", " ", "abcde", " and much more behind it", "\\n", "\\\\ude00", "\\u0041"])
@pytest.mark.parametrize("half", ["\\ud83d", "\\uD83D", "\\ude00", "\\ud83d\\ud83d"])
def test_half_a_character_is_named(member: str, before: str, after: str, half: str) -> None:
    """Wherever it stands, whoever would read it, and however near the body's end."""
    for end in ('"}', '"}\n', '","z":[1,2,3,4,5,6]}'):
        said = said_of(f'{{"{member}":"{before}{half}{after}{end}'.encode())
        assert said.startswith("The body has a lone surrogate (")


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b'{"p":"a', rb'{"p":"\\ud83d', rb'{"p":"\ud83d\ude00', rb'{"p":"\u12"}', b"{x}"],
)
def test_what_is_no_json_otherwise_is_told_in_the_decoders_words(body: bytes) -> None:
    assert said_of(body).startswith("The request body is not a JSON object: ")
