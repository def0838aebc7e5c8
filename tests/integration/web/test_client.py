"""The client over real sockets: pooling, three kinds of body, every time-out by its name, loss, back-pressure."""

from __future__ import annotations

import asyncio
import socket
import time

import pytest

from tests.integration.web.support import read_request, scripted, serving, until
from tests.support.pace import stands_still
from web.client import AnswerStream, ClientLimits, HttpClient, Timeouts
from web.errors import (
    AnswerTooLargeError,
    BadAnswerError,
    BadHeaderError,
    ClientClosedError,
    ConnectError,
    ConnectionLostError,
    ConnectTimeoutError,
    FirstByteTimeoutError,
    IdleTimeoutError,
    TotalTimeoutError,
)
from web.server import Request, Responder

OK = b"HTTP/1.1 200 OK\r\n"


async def echo(request: Request, responder: Responder) -> None:
    """Streams the body back for /stream, whole otherwise."""
    if request.path == "/stream":
        responder.start(201, [(b"X-Kind", b"stream")])
        responder.write(request.body[:3])
        responder.write(request.body[3:])
        responder.finish()
    else:
        responder.send(200, [(b"x-host", request.header("host") or b"")], request.body or b"empty")


async def test_requests_of_every_shape_share_one_connection() -> None:
    """GET, POST, chunked answers and bodies of a megabyte, all on the connection that is kept."""
    async with serving(echo) as server:
        client = HttpClient()
        base = f"http://127.0.0.1:{server.port}"
        first = await client.fetch("GET", base, [], b"")
        assert (first.status, first.body, first.header("X-HOST")) == (200, b"empty", base[7:].encode())
        assert (await client.fetch("POST", base, [], b"x" * 1_000_000)).body == b"x" * 1_000_000
        streamed = await client.fetch("POST", base + "/stream", [], b"abcdef")
        assert (streamed.status, streamed.body, streamed.header("x-kind")) == (201, b"abcdef", b"stream")
        assert (client.opened, client.reused, client.idle_connections) == (1, 2, 1)
        await client.close()
        assert client.open_connections == 0
        with pytest.raises(ClientClosedError):
            await client.fetch("GET", base, [], b"")


async def test_two_at_once_use_two_connections() -> None:
    """A connection carries one request at a time."""
    both = asyncio.Barrier(2)

    async def meet(request: Request, responder: Responder) -> None:
        await both.wait()
        responder.send(200, [], b"")

    async with serving(meet) as server:
        client = HttpClient()
        url = f"http://127.0.0.1:{server.port}/"
        async with asyncio.timeout(30):
            await asyncio.gather(*(client.fetch("GET", url, [], b"") for _ in range(2)))
        assert (client.opened, client.idle_connections) == (2, 2)
        await client.close()


@pytest.mark.parametrize(
    ("wire", "body", "kept"),
    [
        (OK + b"content-length: 5\r\n\r\nhello", b"hello", True),
        (
            OK + b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=1\r\nllo\r\n0\r\nx-trailer: 1\r\n\r\n",
            b"hello",
            True,
        ),
        (OK + b"\r\nhello", b"hello", False),
        (OK + b"connection: close\r\ncontent-length: 5\r\n\r\nhello", b"hello", False),
        (b"HTTP/1.0 200 OK\r\ncontent-length: 5\r\n\r\nhello", b"hello", False),
        (
            b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early\r\nlink: x\r\n\r\n" + OK + b"content-length: 0\r\n\r\n",
            b"",
            True,
        ),
        (b"HTTP/1.1 204 No Content\r\n\r\n", b"", True),
    ],
)
@pytest.mark.parametrize("step", [1, 4, 10_000])
async def test_bodies_by_length_by_chunks_and_by_close(wire: bytes, body: bytes, kept: bool, step: int) -> None:
    """The answer is the same wherever the network cuts it; only what HTTP allows to be kept is kept."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for start in range(0, len(wire), step):
            writer.write(wire[start : start + step])
            await writer.drain()
            await asyncio.sleep(0)
        if kept:
            await reader.read()

    async with scripted(script) as base:
        client = HttpClient()
        answer = await client.fetch("GET", base, [], b"", Timeouts(total_s=5))
        assert answer.body == body
        assert client.idle_connections == int(kept)
        await client.close()


async def test_a_head_answer_has_no_body() -> None:
    """HEAD's content length announces nothing."""
    async with serving(echo) as server:
        client = HttpClient()
        for _ in range(2):
            answer = await client.fetch("HEAD", f"http://127.0.0.1:{server.port}", [], b"", Timeouts(total_s=5))
            assert (answer.body, answer.header("content-length")) == (b"", b"5")
        await client.close()


async def test_a_stale_kept_connection_is_retried_once_on_a_new_one() -> None:
    """The server closed the kept connection as we wrote: sent again, because no byte of an answer had come."""
    connections = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await read_request(reader)
        writer.write(OK + b"content-length: 1\r\n\r\n%d" % connections)
        if connections == 1:
            await read_request(reader)  # and hang up without a word

    async with scripted(script) as base:
        client = HttpClient()
        assert (await client.fetch("POST", base, [], b"a")).body == b"1"
        assert (await client.fetch("POST", base, [], b"b")).body == b"2"
        assert (client.retried, connections) == (1, 2)
        await client.close()


async def test_a_new_connection_that_is_lost_is_not_retried() -> None:
    """Nobody knows what the server did with it: the caller decides."""
    requests = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        await read_request(reader)
        requests += 1

    async with scripted(script) as base:
        client = HttpClient()
        with pytest.raises(ConnectionLostError) as caught:
            await client.fetch("POST", base, [], b"a")
        assert (caught.value.bytes_received, caught.value.reason, requests) == (0, "connection_lost", 1)
        await client.close()


async def test_a_kept_connection_that_is_lost_late_was_not_stale() -> None:
    """A server that worked on the request for a while and then hung up is not asked again by the client itself."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK + b"content-length: 1\r\n\r\n1")
        await read_request(reader)
        await asyncio.sleep(0.1)

    async with scripted(script) as base:
        client = HttpClient(ClientLimits(stale_s=0.05))
        await client.fetch("POST", base, [], b"a")
        with pytest.raises(ConnectionLostError):
            await client.fetch("POST", base, [], b"b")
        assert client.retried == 0
        await client.close()


async def test_a_kept_connection_lost_inside_an_answer_is_not_retried() -> None:
    """One byte of an answer is enough to make a second request a second piece of work."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK + b"content-length: 1\r\n\r\n1")
        await read_request(reader)
        writer.write(b"H")
        await writer.drain()

    async with scripted(script) as base:
        client = HttpClient()
        await client.fetch("POST", base, [], b"a")
        with pytest.raises(ConnectionLostError) as caught:
            await client.fetch("POST", base, [], b"b")
        assert (caught.value.bytes_received, client.retried) == (1, 0)
        await client.close()


@pytest.mark.parametrize("head", [b"content-length: 50\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n5\r\n"])
async def test_what_came_before_the_loss_is_read_first(head: bytes) -> None:
    """A stream that breaks delivers its bytes, then the loss with their count."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK + head + b"hello")
        await writer.drain()

    async with scripted(script) as base:
        client = HttpClient()
        stream = await client.open("GET", base, [], b"")
        assert await stream.read() == b"hello"
        with pytest.raises(ConnectionLostError) as caught:
            await stream.read()
        assert caught.value.bytes_received == len(OK + head + b"hello")
        await client.close()


async def test_nobody_listens() -> None:
    """A closed port is a connect error, not a bare OSError."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        client = HttpClient()
        with pytest.raises(ConnectError) as caught:
            await client.fetch("GET", f"http://127.0.0.1:{free.getsockname()[1]}", [], b"")
        assert caught.value.reason == "connect_error"
        await client.close()


async def test_a_full_backlog_is_a_connect_timeout() -> None:
    """A host that does not complete the handshake blames the connect time-out, not another."""
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        waiting = []
        for _ in range(4):  # Linux completes a handshake or two more than the backlog says
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
            waiting.append(filler)
        client = HttpClient()
        with pytest.raises(ConnectTimeoutError) as caught:
            await client.fetch("GET", f"http://127.0.0.1:{full.getsockname()[1]}", [], b"", Timeouts(connect_s=0.1))
        assert caught.value.reason == "connect_timeout"
        for filler in waiting:
            filler.close()
        await client.close()


async def test_a_connection_that_was_ready_before_we_looked_is_no_timeout() -> None:
    """A loop that was busy for longer than the connect time-out blames nobody: the handshake was long complete."""
    async with serving(echo) as server:
        client = HttpClient()
        asking = asyncio.create_task(
            client.fetch("GET", f"http://127.0.0.1:{server.port}", [], b"", Timeouts(connect_s=0.2))
        )
        await asyncio.sleep(0)  # it has asked for its connection
        time.sleep(0.5)  # noqa: ASYNC251 - the loop is busy
        assert (await asking).status == 200
        await client.close()


@pytest.mark.parametrize(
    ("sent", "timeouts", "error"),
    [
        (b"", Timeouts(first_byte_s=0.05), FirstByteTimeoutError),
        (OK + b"transfer-encoding: chunked\r\n\r\n", Timeouts(first_byte_s=0.05), FirstByteTimeoutError),
        (OK + b"content-length: 9\r\n\r\nabc", Timeouts(idle_s=0.05), IdleTimeoutError),
        (OK + b"content-length: 9\r\n\r\nabc", Timeouts(total_s=0.05), TotalTimeoutError),
        (b"", Timeouts(total_s=0.05), TotalTimeoutError),
    ],
)
async def test_each_silence_has_its_name(sent: bytes, timeouts: Timeouts, error: type[Exception]) -> None:
    """First byte, idle and total are separate times with separate errors; the connection is cut."""
    hung_up = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(sent)
        try:
            await reader.read()
        finally:
            hung_up.set()

    async with scripted(script) as base:
        client = HttpClient()
        with pytest.raises(error):
            await client.fetch("GET", base, [], b"", timeouts)
        await asyncio.wait_for(hung_up.wait(), 30)
        assert client.open_connections == 0
        await client.close()


@pytest.mark.parametrize(
    ("begun", "timeouts"),
    [
        (b"", Timeouts(first_byte_s=0.3)),
        (OK + b"content-length: 5\r\n\r\nt", Timeouts(idle_s=0.3)),
        (OK + b"content-length: 5\r\n\r\nt", Timeouts(total_s=0.3)),
    ],
)
async def test_what_came_while_we_were_away_is_read_before_anybody_is_blamed(begun: bytes, timeouts: Timeouts) -> None:
    """An answer that was there before its time ran out is no silence, though our loop read another one for longer."""
    whole = OK + b"content-length: 5\r\n\r\ntimes"
    with socket.create_server(("127.0.0.1", 0)) as long, socket.create_server(("127.0.0.1", 0)) as prompt:
        client = HttpClient()

        async def asked(
            listener: socket.socket, timeouts: Timeouts
        ) -> tuple[asyncio.Task[AnswerStream], socket.socket]:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            asking = asyncio.create_task(client.open("GET", url, [], b"", timeouts))
            return asking, (await asyncio.to_thread(listener.accept))[0]

        asking, reader = await asked(long, Timeouts())
        reader.sendall(OK + b"content-length: 3\r\n\r\n")
        slow = await asking
        asking, writer = await asked(prompt, timeouts)
        writer.sendall(begun)

        def read(data: bytes) -> None:
            writer.sendall(whole.removeprefix(begun))
            time.sleep(0.6)

        with reader, writer:
            reading = asyncio.create_task(slow.pipe(read))
            await asyncio.sleep(0)  # it waits for them
            reader.sendall(b"abc")
            try:
                stream = await asking
                answer = b""
                while piece := await stream.read():
                    answer += piece
                assert answer == b"times"
                await reading
            finally:
                await client.close()


async def test_the_idle_time_starts_again_with_each_piece() -> None:
    """A long answer whose pauses are all short enough is not cut."""

    async def drip(request: Request, responder: Responder) -> None:
        responder.start(200, [])
        for _ in range(10):
            responder.write(b"x")
            await asyncio.sleep(0.12)
        responder.finish()

    async with serving(drip) as server:
        client = HttpClient()
        answer = await client.fetch("GET", f"http://127.0.0.1:{server.port}", [], b"", Timeouts(idle_s=1.0))
        assert answer.body == b"x" * 10
        await client.close()


@pytest.mark.parametrize(
    "wire", [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n", OK + b"content-length: x\r\n\r\n"]
)
async def test_what_is_not_http_is_the_servers_fault(wire: bytes) -> None:
    """Another protocol on that port is a bad answer."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(wire)
        await reader.read()

    async with scripted(script) as base:
        client = HttpClient()
        with pytest.raises(BadAnswerError):
            await client.fetch("GET", base, [], b"", Timeouts(total_s=5))
        await client.close()


async def test_closing_a_stream_cuts_the_connection() -> None:
    """The server must notice at once that nobody wants the rest."""
    gone = asyncio.Event()

    async def endless(request: Request, responder: Responder) -> None:
        responder.start(200, [])
        responder.write(b"x")
        await responder.gone.wait()
        gone.set()

    async with serving(endless) as server:
        client = HttpClient()
        stream = await client.open("GET", f"http://127.0.0.1:{server.port}", [], b"")
        assert await stream.read() == b"x"
        stream.close()
        await asyncio.wait_for(gone.wait(), 30)
        with pytest.raises(ClientClosedError):
            await stream.read()
        await client.close()


async def test_cancelling_open_cuts_the_connection() -> None:
    """A caller that stops waiting for the head leaves nothing behind."""
    asked, gone = asyncio.Event(), asyncio.Event()

    async def silent(request: Request, responder: Responder) -> None:
        asked.set()
        await responder.gone.wait()
        gone.set()

    async with serving(silent) as server:
        client = HttpClient()
        asking = asyncio.create_task(client.open("GET", f"http://127.0.0.1:{server.port}", [], b""))
        await asyncio.wait_for(asked.wait(), 30)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await asyncio.wait_for(gone.wait(), 30)
        await until(lambda: client.open_connections == 0)
        await client.close()


async def test_an_unread_stream_stops_the_server() -> None:
    """Back-pressure: what nobody reads is not read from the network, so that memory stays bounded; then it goes on."""
    size = 40 * 1024 * 1024
    sent = 0

    async def flood(request: Request, responder: Responder) -> None:
        nonlocal sent
        responder.start(200, [(b"content-length", b"%d" % size)])
        while sent < size and not responder.gone.is_set():
            responder.write(b"x" * 65_536)
            sent += 65_536
            await responder.drain()
            await asyncio.sleep(0)
        responder.finish()

    async with serving(flood) as server:
        client = HttpClient(ClientLimits(high_bytes=65_536))
        stream = await client.open("GET", f"http://127.0.0.1:{server.port}", [], b"", Timeouts(idle_s=1.0))
        await stands_still(lambda: sent)
        assert 0 < sent < size
        await asyncio.sleep(1.2)  # longer than the idle time: our own pause is not the server's silence
        received = 0
        while piece := await stream.read():
            received += len(piece)
        assert received == size
        await client.close()


async def test_pipe_calls_back_with_every_byte() -> None:
    """`pipe` hands the body over in order, without a task switch for each piece, and returns at the end."""
    async with serving(echo) as server:
        client = HttpClient()
        url = f"http://127.0.0.1:{server.port}/stream"
        pieces: list[bytes] = []
        stream = await client.open("POST", url, [], b"abcdef" * 50_000)
        await stream.pipe(pieces.append)
        assert b"".join(pieces) == b"abcdef" * 50_000
        assert client.idle_connections == 1
        await client.close()


async def test_a_failing_sink_is_not_blamed_on_the_server() -> None:
    """What the sink of `pipe` raises comes out of `pipe`."""

    def sink(piece: bytes) -> None:
        raise ValueError("a bug of ours")

    async def late(request: Request, responder: Responder) -> None:
        responder.start(200, [])
        await asyncio.sleep(0.02)
        responder.write(b"x")
        await responder.gone.wait()

    async with serving(late) as server:
        client = HttpClient()
        stream = await client.open("GET", f"http://127.0.0.1:{server.port}", [], b"")
        with pytest.raises(ValueError, match="a bug of ours"):
            await stream.pipe(sink)
        await client.close()


async def test_fetch_is_bounded() -> None:
    """An answer larger than the limit is refused and the connection cut."""
    async with serving(echo) as server:
        client = HttpClient(ClientLimits(answer_bytes=10))
        with pytest.raises(AnswerTooLargeError):
            await client.fetch("POST", f"http://127.0.0.1:{server.port}", [], b"x" * 20_000_000)
        await until(lambda: client.open_connections == 0)
        await client.close()


async def test_expired_connections_are_not_used() -> None:
    """A connection kept longer than the limit is closed, not tried."""
    async with serving(echo) as server:
        client = HttpClient(ClientLimits(keepalive_s=0.0))
        for _ in range(2):
            await client.fetch("GET", f"http://127.0.0.1:{server.port}", [], b"")
        assert (client.opened, client.reused) == (2, 0)
        await client.close()


async def test_a_forged_header_is_refused_before_anything_is_sent() -> None:
    """A line break in a header never reaches the wire."""
    async with serving(echo) as server:
        client = HttpClient()
        with pytest.raises(BadHeaderError):
            await client.fetch("GET", f"http://127.0.0.1:{server.port}", [(b"x", b"a\r\nb: c")], b"")
        assert client.opened == 0
        await client.close()


async def test_headers_without_end_are_bounded() -> None:
    """A server that sends header after header is given up long before the time-out."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)
        while True:
            writer.write(b"x-more: " + b"m" * 8000 + b"\r\n")
            await writer.drain()

    async with scripted(script) as base:
        client = HttpClient()
        with pytest.raises(BadAnswerError, match="headers"):
            await client.fetch("GET", base, [], b"", Timeouts(total_s=5))
        await until(lambda: client.open_connections == 0)
        await client.close()


CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("begin", "again"),
    [
        (CHUNKED + b"5;", b"e" * 8000),
        (CHUNKED + b"3\r\nabc\r\n5;", b"e" * 8000),
        (CHUNKED + b"3\r\nabc\r\n0\r\n", b"x-more: " + b"m" * 8000 + b"\r\n"),
        (CHUNKED + b"3\r\nabc\r\n0\r\nx-more: ", b"m" * 8000),
    ],
    ids=["an extension of the first chunk", "an extension of a later one", "trailers", "one trailer"],
)
async def test_what_surrounds_a_body_without_end_is_bounded(begin: bytes, again: bytes) -> None:
    """Chunk extensions and trailers are nobody's answer: who sends them without end is given up, not read for ever."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(begin)
        while True:
            writer.write(again)
            await writer.drain()

    async with scripted(script) as base:
        client = HttpClient()
        with pytest.raises(BadAnswerError, match="around"):
            await client.fetch("GET", base, [], b"", Timeouts(first_byte_s=30, idle_s=30, total_s=60))
        await until(lambda: client.open_connections == 0)
        await client.close()


async def test_small_chunks_are_no_extensions() -> None:
    """A body of a million bytes in pieces of one byte has five bytes around each."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(CHUNKED)
        for _ in range(100):
            writer.write(b"1\r\na\r\n" * 10_000)
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await reader.read()

    async with scripted(script) as base:
        client = HttpClient()
        assert (await client.fetch("GET", base, [], b"")).body == b"a" * 1_000_000
        await client.close()


async def test_an_answer_that_is_packed_for_the_way_is_a_bad_answer() -> None:
    """``gzip, chunked`` would reach the client as its body, without a word that it is packed."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK + b"transfer-encoding: gzip, chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n")

    async with scripted(script) as base:
        client = HttpClient()
        with pytest.raises(BadAnswerError, match="encoding"):
            await client.fetch("GET", base, [], b"")
        await client.close()


@pytest.mark.parametrize("status", ["000", "999", "600"])
async def test_a_status_that_is_none_is_a_bad_answer(status: str) -> None:
    """What is passed on to a client must be a status: 200 to 599."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: 0\r\n\r\n".encode())
        await writer.drain()

    async with scripted(script) as base:
        client = HttpClient()
        with pytest.raises(BadAnswerError, match="status"):
            await client.fetch("GET", base, [], b"", Timeouts(total_s=5))
        await client.close()
