"""One connection of the server without a socket: what clients send in any pieces, and what memory it takes."""

from __future__ import annotations

import asyncio
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.hostile import BODY_BYTES, CHUNKED, FRAMING, HEADER_BYTES, HOSTILE, Hostile, get, post, sized
from web.limits import HeldBytes
from web.requests import Answer, Head, Pieces, Refusal, Request
from web.server import Headers, Responder, ServerLimits
from web.server_connection import ServerConnection

LIMITS = ServerLimits(header_bytes=HEADER_BYTES, body_bytes=BODY_BYTES, read_over_bytes=100)


class Wire(asyncio.Transport):
    """What was written, and whether it is over."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.writes = 0
        self.closed = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Everything is read at once."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data
        self.writes += 1

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.closed = True

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


class Served:
    """A server that answers at once with what it saw; targets that begin with ``/no`` are refused by their head."""

    def __init__(self, limits: ServerLimits = LIMITS) -> None:
        self.limits = limits
        self.held = HeldBytes(limits.held_body_bytes)
        self.draining = False
        self.screened_heads: list[Head] = []

    def serve(self, connection: ServerConnection, request: Request, responder: Responder) -> None:
        request.hold.release()
        responder.send(200, [(b"x-seen", b"%d" % len(request.headers))], request.target.encode() + request.body)

    def opened(self, connection: ServerConnection) -> None:
        """Nobody counts."""

    def closed(self, connection: ServerConnection) -> None:
        """Nobody counts."""

    def screened(self, head: Head) -> Answer | None:
        self.screened_heads.append(head)
        return Answer(status=401, headers=[], body=b"no") if head.target.startswith("/no") else None

    def refusal(self, refusal: Refusal) -> tuple[Headers, bytes]:
        return [], refusal.reason.encode()


async def fed(pieces: list[bytes], server: Served | None = None) -> tuple[bytes, bool]:
    """All that a connection answers to these pieces, and whether it ends."""
    server, wire = server or Served(), Wire()
    connection = ServerConnection(server)
    connection.connection_made(wire)
    for piece in pieces:
        connection.data_received(piece)
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0)
    outcome = wire.written, wire.closed
    connection.connection_lost(None)
    assert server.held.size == 0
    return outcome


SERVED = (
    get(b"/a", b"x: y"),
    sized(b'{"a":1}'),
    post(CHUNKED, body=b'2;a="b"\r\nab\r\n3\r\ncde\r\n0\r\nx: y\r\n\r\n'),
    post(b"content-length: 5", body=b"12345", target=b"/no"),
    post(b"content-length: 2", b"upgrade: h2c", b"connection: upgrade", body=b"ok"),
    b"\r\nOPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n",
)
SMALL = [hostile.wire for hostile in HOSTILE if len(hostile.wire) < 2000]


@given(st.lists(st.sampled_from(SERVED), max_size=3), st.sampled_from([*SERVED, *SMALL]), st.lists(st.integers(0, 700)))
def test_any_pieces_are_answered_alike(first: list[bytes], last: bytes, cuts: list[int]) -> None:
    """Good requests, then one of any kind: the same answers however they were cut."""
    wire = b"".join((*first, last))
    places = sorted({cut for cut in cuts if 0 < cut < len(wire)})
    pieces = [wire[start:end] for start, end in zip([0, *places], [*places, len(wire)], strict=True)]
    assert asyncio.run(fed(pieces)) == asyncio.run(fed([wire]))


@pytest.mark.long
@given(st.binary(max_size=300), st.lists(st.sampled_from(SERVED), max_size=2), st.integers(0, 400))
def test_no_bytes_are_more_than_a_refusal(junk: bytes, around: list[bytes], at: int) -> None:
    """Whatever is put into whatever place: answers, at most one refusal, and nothing raised."""
    wire = b"".join(around)
    wire = wire[: at % (len(wire) + 1)] + junk + wire[at % (len(wire) + 1) :]
    asyncio.run(fed([wire]))
    asyncio.run(fed([wire[index : index + 1] for index in range(len(wire))]))


@pytest.mark.parametrize("hostile", FRAMING, ids=lambda hostile: hostile.name)
def test_nothing_after_a_refused_frame_is_a_request(hostile: Hostile) -> None:
    """What cannot be framed ends the connection: a request that is hidden behind it is never answered."""
    written, closed = asyncio.run(fed([hostile.wire + get(b"/hidden")]))
    assert closed
    assert written.count(b"HTTP/1.1 ") == 1
    assert b"/hidden" not in written


def test_a_screened_body_is_read_over_or_not_at_all() -> None:
    """A small one keeps the connection, a large one, one of unknown length and one that waits for a 100 end it; for
    none is memory held."""
    for headers, body, stays in (
        ([b"content-length: 100"], b"x" * 100, True),
        ([b"content-length: 101"], b"x" * 101, False),
        ([CHUNKED], b"", False),
        ([b"content-length: 1", b"expect: 100-continue"], b"", False),
    ):
        server = Served(ServerLimits(read_over_bytes=100, held_body_bytes=0))
        wire = post(*headers, body=body, target=b"/no")
        written, closed = asyncio.run(fed([wire[:-5], wire[-5:]], server))
        assert written.startswith(b"HTTP/1.1 401 ")
        assert (b"connection: close" not in written, closed) == (stays, not stays)
        assert len(server.screened_heads) == 1
    assert asyncio.run(fed([get(b"/no")]))[0].startswith(b"HTTP/1.1 200 "), "without a body there is nothing to save"


@given(st.lists(st.binary(min_size=1, max_size=6000)))
def test_pieces_are_the_body(pieces: list[bytes]) -> None:
    """In order, and each byte once."""
    gathered = Pieces()
    for piece in pieces:
        gathered.add(piece)
    assert gathered.whole() == b"".join(pieces)
    assert gathered.size == len(gathered.whole())


@pytest.mark.long
def test_many_small_pieces_take_no_more_than_their_size() -> None:
    """A body of two-byte chunks would take twenty times its size as objects."""
    gathered = Pieces()
    for number in range(200_000):
        gathered.add(b"%02d" % (number % 100))
    assert sum(sys.getsizeof(piece) for piece in gathered._pieces) < 2 * gathered.size


class Streaming(Served):
    """A server that begins a stream, writes two pieces, and leaves it open."""

    def serve(self, connection: ServerConnection, request: Request, responder: Responder) -> None:
        request.hold.release()
        responder.start(200, [])
        for piece in (b"one", b"two") if request.target == "/pieces" else ():
            responder.write(piece)


async def test_a_head_goes_with_its_first_piece() -> None:
    """One write for both; for a head alone too, at the end of the turn."""
    for target, pieces in ((b"/pieces", b"3\r\none\r\n3\r\ntwo\r\n"), (b"/none", b"")):
        wire = Wire()
        connection = ServerConnection(Streaming())
        connection.connection_made(wire)
        connection.data_received(get(target))
        await asyncio.sleep(0)
        head, _, body = wire.written.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK\r\n")
        assert (body, wire.writes) == (pieces, 2 if pieces else 1)
        connection.connection_lost(None)
