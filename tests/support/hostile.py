"""Requests that mean harm, as bytes on a wire, and what the front door answers: docs/security.md has the table.

Where nothing else is said the door's ``header_bytes`` is 4096 and its ``body_bytes`` 1000.
"""

from __future__ import annotations

import gzip
from dataclasses import dataclass

HEADER_BYTES = 4096
BODY_BYTES = 1000
MANY_READS = 600_000
"""Bytes that no server reads from its socket at once: what came with the head is bounded by that, and not counted."""
CHAT = b"/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Hostile:
    """One request: ``wire``, and the status and reason of its one answer. ``stays``: its connection stays open."""

    name: str
    wire: bytes
    status: int
    reason: str
    stays: bool = False


def post(*headers: bytes, body: bytes = b"", target: bytes = CHAT, host: bytes = b"host: x") -> bytes:
    """A POST with exactly these headers."""
    return b"\r\n".join((b"POST %b HTTP/1.1" % target, *filter(None, (host, *headers)), b"", body))


def get(target: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join((b"GET %b HTTP/1.1" % target, b"host: x", *headers, b"", b""))


def sized(body: bytes, *headers: bytes) -> bytes:
    return post(*headers, b"content-length: %d" % len(body), body=body)


CHUNKED = b"transfer-encoding: chunked"
END = b"0\r\n\r\n"
ABC = b"3\r\nabc\r\n"


def malformed(name: str, wire: bytes) -> Hostile:
    return Hostile(name, wire, 400, "malformed_request")


FRAMING = (
    malformed("length and chunks", post(b"content-length: 3", CHUNKED, body=END)),
    malformed("chunks and length", post(CHUNKED, b"content-length: 3", body=END)),
    malformed("two lengths", post(b"content-length: 3", b"content-length: 5", body=b"abcde")),
    malformed("two equal lengths", post(b"content-length: 3", b"content-length: 3", body=b"abc")),
    malformed("a list of lengths", post(b"content-length: 3, 3", body=b"abc")),
    malformed("a negative length", post(b"content-length: -1")),
    malformed("a length with a sign", post(b"content-length: +3", body=b"abc")),
    malformed("a length in hex", post(b"content-length: 0x3", body=b"abc")),
    malformed("a length with a space", post(b"content-length: 1 0", body=b"abc")),
    malformed("a length with an underscore", post(b"content-length: 1_0", body=b"abc")),
    malformed("a length in other digits", post("content-length: \u0663".encode(), body=b"abc")),
    malformed("an empty length", post(b"content-length:", body=b"abc")),
    malformed("a length that overflows", post(b"content-length: 18446744073709551619", body=b"abc")),
    malformed("an empty transfer encoding", post(b"transfer-encoding:", body=END)),
    Hostile("identity", post(b"transfer-encoding: identity", body=END), 501, "transfer_encoding"),
    malformed("chunked and then identity", post(b"transfer-encoding: chunked, identity", body=END)),
    malformed("chunked twice", post(b"transfer-encoding: chunked, chunked", body=END)),
    malformed("two transfer encodings", post(CHUNKED, b"transfer-encoding: identity", body=END)),
    malformed("a control character before chunked", post(b"transfer-encoding: \x0bchunked", body=END)),
    malformed("a space before the colon", post(b"transfer-encoding : chunked", body=END)),
    malformed("chunks in HTTP/1.0", post(CHUNKED, body=END).replace(b"HTTP/1.1", b"HTTP/1.0")),
    Hostile("packed chunks", post(b"transfer-encoding: gzip, chunked", body=END), 501, "transfer_encoding"),
    Hostile("another coding", post(b"transfer-encoding: xchunked", body=END), 501, "transfer_encoding"),
    malformed("a chunk that is longer than it says", post(CHUNKED, body=b"3\r\nabcX\r\n" + END)),
    malformed("a chunk size that overflows", post(CHUNKED, body=b"fffffffffffffffff\r\nabc\r\n" + END)),
    malformed("a negative chunk size", post(CHUNKED, body=b"-1\r\nabc\r\n" + END)),
    malformed("a chunk size with a sign", post(CHUNKED, body=b"+3\r\nabc\r\n" + END)),
    malformed("a chunk size with 0x", post(CHUNKED, body=b"0x3\r\nabc\r\n" + END)),
    malformed("a chunk size with a space", post(CHUNKED, body=b"3 \r\nabc\r\n" + END)),
    malformed("no chunk size", post(CHUNKED, body=b"\r\nabc\r\n" + END)),
    malformed("chunks with a bare line feed", post(CHUNKED, body=b"3\nabc\n0\n\n")),
    malformed("a line feed in a chunk extension", post(CHUNKED, body=b"3;a\n\r\nabc\r\n" + END)),
    malformed("a length among the trailers", post(CHUNKED, body=b"0\r\ncontent-length: 9\r\n\r\n")),
)

LINES = (
    malformed("no HTTP", b"NONSENSE\r\n\r\n"),
    malformed("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"),
    malformed("HTTP/2's preface", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x12\x04\x00\x00\x00\x00\x00"),
    malformed("an unknown method", b"BREW / HTTP/1.1\r\nhost: x\r\n\r\n"),
    malformed("a method in lower case", b"get / HTTP/1.1\r\nhost: x\r\n\r\n"),
    malformed("a version that is no number", b"GET / HTTP/1.x\r\nhost: x\r\n\r\n"),
    malformed("bare line feeds", b"GET / HTTP/1.1\nhost: x\n\n"),
    malformed("a bare line feed after a header", b"GET / HTTP/1.1\r\nhost: x\n\r\n"),
    malformed("a bare carriage return", b"GET / HTTP/1.1\r\nhost: x\ry: z\r\n\r\n"),
    malformed("a folded header", b"GET / HTTP/1.1\r\nhost: x\r\n folded: y\r\n\r\n"),
    malformed("a space before the first header", b"GET / HTTP/1.1\r\n host: x\r\n\r\n"),
    malformed("a header without a name", b"GET / HTTP/1.1\r\nhost: x\r\n: y\r\n\r\n"),
    malformed("a header without a colon", b"GET / HTTP/1.1\r\nhost: x\r\nno colon\r\n\r\n"),
    malformed("NUL in a header", b"GET / HTTP/1.1\r\nhost: x\r\ny: a\x00b\r\n\r\n"),
    malformed("NUL in a name", b"GET / HTTP/1.1\r\nhost: x\r\ny\x00: a\r\n\r\n"),
    malformed("NUL in the target", b"GET /\x00 HTTP/1.1\r\nhost: x\r\n\r\n"),
    malformed("a control character in a header", b"GET / HTTP/1.1\r\nhost: x\r\ny: a\x1bb\r\n\r\n"),
    malformed("a name outside ASCII", "GET / HTTP/1.1\r\nhost: x\r\nx-tidégate-worker: a\r\n\r\n".encode()),
    malformed("a target outside ASCII", b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n"),
    malformed("a space in the target", b"GET /a b HTTP/1.1\r\nhost: x\r\n\r\n"),
    malformed("a target that is no path", b"GET v1/models HTTP/1.1\r\nhost: x\r\n\r\n"),
    Hostile("no Host", b"GET / HTTP/1.1\r\n\r\n", 400, "host_header"),
    Hostile("two Hosts", b"GET / HTTP/1.1\r\nhost: x\r\nHost: y\r\n\r\n", 400, "host_header"),
    Hostile("two equal Hosts", b"GET / HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n", 400, "host_header"),
    Hostile("HTTP/0.9", b"GET /\r\n\r\n", 505, "http_version"),
    Hostile("HTTP/2.0 in words", b"GET / HTTP/2.0\r\nhost: x\r\n\r\n", 505, "http_version"),
    Hostile("HTTP/1.2", b"GET / HTTP/1.2\r\nhost: x\r\n\r\n", 505, "http_version"),
    Hostile("HTTP/3.0", b"GET / HTTP/3.0\r\nhost: x\r\n\r\n", 505, "http_version"),
    Hostile("HTTP/3.0 with a body", sized(b"{}").replace(b"HTTP/1.1", b"HTTP/3.0"), 505, "http_version"),
    Hostile("a tunnel", b"CONNECT 169.254.169.254:80 HTTP/1.1\r\nhost: x\r\n\r\nGET /", 405, "method_not_allowed"),
    Hostile("a tunnel with a body", b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc", 405,
            "method_not_allowed"),
    Hostile("TRACE", b"TRACE / HTTP/1.1\r\nhost: x\r\n\r\n", 405, "method_not_allowed", stays=True),
    Hostile("RTSP", b"DESCRIBE / RTSP/1.0\r\nhost: x\r\n\r\n", 405, "method_not_allowed"),
    Hostile("another expectation", sized(b"{}", b"expect: a-miracle"), 417, "expectation"),
    Hostile("another's address", get(b"http://169.254.169.254/latest/meta-data/"), 404, "unknown_url", stays=True),
    Hostile("a path that leads upwards", get(b"/v1/../metrics"), 404, "unknown_url", stays=True),
    Hostile("an escaped path", get(b"/v1/%2e%2e/metrics"), 404, "unknown_url", stays=True),
    Hostile("a page with a body", b"GET /metrics HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc", 400,
            "body_not_taken", stays=True),
    Hostile("no length", post(), 411, "length_required", stays=True),
)  # fmt: skip

BOMB = gzip.compress(b" " * 100_000)
LARGE = (
    Hostile("a long header", b"GET / HTTP/1.1\r\nhost: x\r\ny: %b\r\n\r\n" % (b"z" * 5000), 431, "headers_too_large"),
    Hostile("a long name", b"GET / HTTP/1.1\r\nhost: x\r\n%b: z\r\n\r\n" % (b"y" * 5000), 431, "headers_too_large"),
    Hostile("a header without an end", b"GET / HTTP/1.1\r\nhost: x\r\ny: %b" % (b"z" * 5000), 431, "headers_too_large"),
    Hostile("a long target", b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n" % (b"y" * 5000), 431, "headers_too_large"),
    Hostile("many headers", b"GET / HTTP/1.1\r\nhost: x\r\n%b\r\n" % (b"y:\r\n" * 300), 431, "headers_too_large"),
    Hostile("a long chunk extension", post(CHUNKED, body=b"3;%b" % (b"y" * MANY_READS)), 431, "headers_too_large"),
    Hostile("a long trailer", post(CHUNKED, body=ABC + b"0\r\ny: %b" % (b"z" * MANY_READS)), 431, "headers_too_large"),
    Hostile("many trailers", post(CHUNKED, body=ABC + b"0\r\n" + b"y: z\r\n" * MANY_READS), 431, "headers_too_large"),
    Hostile("a long body", post(b"content-length: 1001"), 413, "body_too_large"),
    Hostile("a longer body than there is", post(b"content-length: 9223372036854775807"), 413, "body_too_large"),
    Hostile("a long body in chunks", post(CHUNKED, body=b"3e9\r\n%b\r\n" % (b"y" * 1001) + END), 413, "body_too_large"),
    Hostile("a long body in small chunks", post(CHUNKED, body=b"2\r\nyy\r\n" * 501 + END), 413, "body_too_large"),
    Hostile("a bomb", sized(BOMB, b"content-encoding: gzip"), 413, "body_too_large", stays=True),
    Hostile("packed twice", sized(gzip.compress(BOMB), b"content-encoding: gzip, gzip"), 415, "content_encoding",
            stays=True),
    Hostile("another packing", sized(b"{}", b"content-encoding: br"), 415, "content_encoding", stays=True),
    Hostile("half a packed body", sized(gzip.compress(b"{}")[:-4], b"content-encoding: gzip"), 400, "bad_encoding",
            stays=True),
    Hostile("no packed body", sized(b"{}", b"content-encoding: gzip"), 400, "bad_encoding", stays=True),
)  # fmt: skip


def bad_json(name: str, body: bytes) -> Hostile:
    return Hostile(name, sized(body), 400, "bad_json", stays=True)


JSON = (
    bad_json("an empty body", b""),
    Hostile("no object", sized(b"[]"), 400, "bad_request", stays=True),
    bad_json("NUL", b'{"model":"m\x00"}'),
    bad_json("NUL after the object", b'{"model":"m","messages":[]}\x00'),
    bad_json("two objects", b'{"model":"m","messages":[]}{"model":"n"}'),
    bad_json("bad UTF-8", b'{"model":"\xff\xfe"}'),
    bad_json("bad UTF-8 in a name", b'{"model":"m","messages":[],"\xff":1}'),
    bad_json("bad UTF-8 where nobody reads", b'{"model":"m","messages":[],"a":{"b":"\xff"}}'),
    bad_json("a surrogate in UTF-8", b'{"model":"\xed\xa0\x80"}'),
    bad_json("half a character", rb'{"model":"m","messages":[{"role":"user","content":"\ud83d"}]}'),
    bad_json("half a character where nobody reads", rb'{"model":"m","messages":[],"a":"\ud83d"}'),
    bad_json("UTF-16", '{"model":"m"}'.encode("utf-16")),
    bad_json("NaN", b'{"model":NaN}'),
    bad_json("lists in lists", b'{"a":' + b"[" * 900),
    bad_json("objects in objects", b'{"a":' * 180),
    Hostile("a model that is none", sized(b'{"model":{"a":1},"messages":[]}'), 400, "bad_request", stays=True),
    Hostile("a model that names an address", sized(b'{"model":"http://169.254.169.254/","messages":[]}'), 404,
            "model_not_found", stays=True),
    Hostile("a model that names a subject", sized(b'{"model":"tg.v1.>","messages":[]}'), 404, "model_not_found",
            stays=True),
    Hostile("a model that names a file", sized(b'{"model":"../../etc/passwd","messages":[]}'), 404, "model_not_found",
            stays=True),
)  # fmt: skip

HOSTILE = (*FRAMING, *LINES, *LARGE, *JSON)
