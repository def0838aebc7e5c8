"""The server over real sockets: what HTTP/1.1 demands, every bound on a client, and the client that goes away."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import pytest

from tests.integration.web.support import raw_client, serving, until
from tests.support.pace import stands_still
from web.server import HttpServer, Request, Responder, ServerLimits


async def echo(request: Request, responder: Responder) -> None:
    """Answers with what it saw."""
    body = b"%b %b %b" % (request.method.encode(), request.target.encode("latin-1"), request.body)
    responder.send(200, [(b"X-Peer", request.peer.encode())], body)


async def test_keep_alive_serves_many_requests_on_one_connection() -> None:
    """HTTP/1.1 keeps the connection; each answer carries its length."""
    async with serving(echo) as server, raw_client(server.port) as client:
        for number in range(3):
            client.send(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % number)
            status, headers, body = await client.answer()
            assert (status, body) == (200, b"GET /%d " % number)
            assert headers[b"x-peer"] == b"127.0.0.1"
        assert server.open_connections == 1


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
async def test_a_request_cut_at_any_byte_is_read_whole(step: int) -> None:
    """Content-length and chunked bodies, dribbled in pieces of any size, reach the handler unchanged."""
    chunked = (
        b"POST /c?q=1 HTTP/1.1\r\nHost: x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n5;x=y\r\ndefgh\r\n0\r\n\r\n"
    )
    sized = b"POST /l HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nEmpty:\r\n\r\nhello"
    async with serving(echo) as server, raw_client(server.port) as client:
        for wire, expected in ((chunked, b"POST /c?q=1 abcdefgh"), (sized, b"POST /l hello")):
            for start in range(0, len(wire), step):
                client.send(wire[start : start + step])
                await client.writer.drain()
            assert (await client.answer())[2] == expected


async def test_pipelined_requests_are_answered_in_order() -> None:
    """Requests sent before the answer to the first are served one after the other, in order."""
    async with serving(echo) as server, raw_client(server.port) as client:
        client.send(b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % number for number in range(5)))
        assert [(await client.answer())[2] for _ in range(5)] == [b"GET /%d " % number for number in range(5)]


async def test_too_many_pipelined_requests_end_the_connection_cleanly() -> None:
    """What waits is bounded: the requests within the bound are answered, then the connection closes."""
    async with serving(echo, ServerLimits(pipelined=2)) as server, raw_client(server.port) as client:
        client.send(b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % number for number in range(50)))
        answers = (await client.rest()).count(b"HTTP/1.1 200 OK")
        assert 1 <= answers <= 3


async def test_expect_100_continue() -> None:
    """The client that asks first gets its 100, then sends the body."""
    async with serving(echo) as server, raw_client(server.port) as client:
        client.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n")
        assert (await client.head())[0] == 100
        client.send(b"ok")
        assert (await client.answer())[2] == b"POST / ok"


async def test_expect_100_continue_of_a_body_over_the_limit_is_refused_at_once() -> None:
    """A body that is too large is refused before it is sent."""
    async with serving(echo, ServerLimits(body_bytes=10)) as server, raw_client(server.port) as client:
        client.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 11\r\nexpect: 100-continue\r\n\r\n")
        assert (await client.answer())[0] == 413


async def test_expect_100_continue_of_http_1_0_is_ignored() -> None:
    """RFC 9110 §10.1.1: such a client would take the 100 for its answer."""
    async with serving(echo) as server, raw_client(server.port) as client:
        client.send(b"POST / HTTP/1.0\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n")
        client.send(b"ok")
        status, _, body = await client.answer()
        assert (status, body) == (200, b"POST / ok")


async def test_head_has_the_length_but_no_body() -> None:
    """HEAD is answered like GET without the body; the connection stays in step."""
    async with serving(echo) as server, raw_client(server.port) as client:
        client.send(b"HEAD /a HTTP/1.1\r\nhost: x\r\n\r\nGET /b HTTP/1.1\r\nhost: x\r\n\r\n")
        status, headers = await client.head()
        assert (status, headers[b"content-length"]) == (200, b"8")
        assert (await client.answer())[2] == b"GET /b "


async def test_options_asterisk() -> None:
    """OPTIONS * reaches the handler."""
    async with serving(echo) as server, raw_client(server.port) as client:
        client.send(b"OPTIONS * HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.answer())[2] == b"OPTIONS * "


async def stream_three(request: Request, responder: Responder) -> None:
    """Three pieces."""
    responder.start(200, [(b"content-type", b"text/plain")])
    for piece in (b"one", b"", b"two", b"three"):
        responder.write(piece)
    responder.finish()


async def test_streams_are_chunked_in_http_1_1_and_end_by_close_in_1_0() -> None:
    """HTTP/1.0 knows no chunks: its streaming answer ends with the connection."""
    async with serving(stream_three) as server:
        async with raw_client(server.port) as client:
            client.send(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            status, headers = await client.head()
            assert (status, headers[b"transfer-encoding"], headers[b"connection"]) == (200, b"chunked", b"close")
            assert await client.rest() == b"3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n"
        async with raw_client(server.port) as client:
            client.send(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
            status, headers = await client.head()
            assert b"transfer-encoding" not in headers
            assert await client.rest() == b"onetwothree"


async def begun_only(request: Request, responder: Responder) -> None:
    """A head, and then what the path says."""
    responder.start(200, [(b"content-type", b"text/plain")])
    if request.path == "/later":
        await responder.gone.wait()
    elif request.path == "/cut":
        responder.break_off()
    elif request.path == "/gone":
        responder.abort()
    else:
        responder.finish()


async def test_a_head_waits_for_nothing_but_this_turn() -> None:
    """It is sent with what is written at once, or by itself: also before a long silence, an end, or a cut."""
    async with serving(begun_only) as server:
        for path, rest in ((b"/empty", b"0\r\n\r\n"), (b"/cut", b"")):
            async with raw_client(server.port) as client:
                client.send(b"GET %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % path)
                assert (await client.head())[0] == 200
                assert await client.rest() == rest
        async with raw_client(server.port) as client:
            client.send(b"GET /later HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await client.head())[0] == 200
        async with raw_client(server.port) as client:
            client.send(b"GET /gone HTTP/1.1\r\nhost: x\r\n\r\n")
            with contextlib.suppress(ConnectionError):
                assert await client.rest() == b""
        await until(lambda: server.open_connections == 0)


async def test_http_1_0_keeps_alive_only_when_asked() -> None:
    """Without the header the connection closes after the answer; with it, it stays."""
    async with serving(echo) as server:
        async with raw_client(server.port) as client:
            client.send(b"GET / HTTP/1.0\r\n\r\n")
            assert (await client.rest()).endswith(b"\r\n\r\nGET / ")
        async with raw_client(server.port) as client:
            for _ in range(2):
                client.send(b"GET / HTTP/1.0\r\nconnection: keep-alive\r\n\r\n")
                status, headers, _ = await client.answer()
                assert (status, headers[b"connection"]) == (200, b"keep-alive")


@pytest.mark.parametrize(
    ("wire", "status"),
    [
        (b"NONSENSE\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon here\r\n\r\n", 400),
        (b"GET / HTTP/9.9\r\nhost: x\r\n\r\n", 505),
        (b"POST / HTTP/1.1\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 3\r\n\r\nabc", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: 3\r\ncontent-length: 5\r\n\r\nabcde", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: 3, 3\r\n\r\nabc", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: +3\r\n\r\nabc", 400),
        (b"POST / HTTP/1.1\r\ncontent-length: 99999999999999999999999\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ntransfer-encoding : chunked\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: xchunked\r\n\r\n0\r\n\r\n", 501),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n3\nabc\n0\n\n", 400),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nfffffffffffffffff\r\nabc", 400),
        (b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n0\r\ncontent-length: 9\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501),
        (b"GET / HTTP/1.1\r\nhost: x\r\n folded: y\r\n\r\n", 400),
        (b"GET / HTTP/1.1\nhost: x\n\n", 400),
        (b"GET / HTTP/1.1\r\nx: a\x00b\r\n\r\n", 400),
        (b"GET /a b HTTP/1.1\r\n\r\n", 400),
        (b"GET /\xff HTTP/1.1\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
        (b"GET / HTTP/1.1\r\nx: %b\r\n\r\n" % (b"y" * 5000), 431),
        (b"GET / HTTP/1.1\r\nx: %b" % (b"y" * 5000), 431),
        (b"GET /%b HTTP/1.1\r\n\r\n" % (b"y" * 5000), 431),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1001\r\n\r\n", 413),
        (
            b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n3e9\r\n%b\r\n0\r\n\r\n" % (b"y" * 1001),
            413,
        ),
    ],
)
async def test_what_cannot_be_served_is_refused_and_closed(wire: bytes, status: int) -> None:
    """Malformed 400, large head 431, large body 413: a JSON answer, then the end of the connection, counted."""
    limits = ServerLimits(header_bytes=4096, body_bytes=1000)
    async with serving(echo, limits) as server, raw_client(server.port) as client:
        client.send(wire)
        got, headers, body = await client.answer()
        assert (got, headers[b"connection"]) == (status, b"close")
        assert b'"error"' in body
        assert await client.rest() == b""
        assert sum(server.refusals.values()) == 1


async def test_trailers_and_chunk_extensions_are_read_over() -> None:
    """RFC 9112 §7.1: what comes after the last chunk is no header of the request, and the next request is whole."""
    wire = b"POST /1 HTTP/1.1\r\nhost: x\r\ntransfer-encoding: Chunked\r\nx: %b\r\n\r\n" % (b"m" * 900)
    wire += b'3;a="b"\r\nabc\r\n0\r\nx-trailer: y\r\nauthorization: no\r\n\r\n'
    seen: list[Request] = []

    async def keep(request: Request, responder: Responder) -> None:
        seen.append(request)
        responder.send(200, [], b"")

    async with serving(keep) as server, raw_client(server.port) as client:
        client.send(wire + b"\r\nGET /2 HTTP/1.1\r\nhost: x\r\n\r\n")
        assert [(await client.answer())[0] for _ in range(2)] == [200, 200]
    assert [(request.target, request.body) for request in seen] == [("/1", b"abc"), ("/2", b"")]
    assert [name for name, _ in seen[0].headers] == [b"host", b"transfer-encoding", b"x"]


async def test_a_client_that_sends_on_after_a_413_still_reads_it() -> None:
    """The rest of the upload is read and dropped for a moment, so that the answer is not lost to a reset."""
    async with serving(echo, ServerLimits(body_bytes=1000)) as server, raw_client(server.port) as client:
        client.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 8000000\r\n\r\n")
        for _ in range(80):
            client.send(b"x" * 100_000)
        await client.writer.drain()
        assert (await client.answer())[0] == 413


async def test_a_slow_head_is_answered_408() -> None:
    """Slow loris: a head that does not end in time costs one 408, however it dribbles."""
    async with serving(echo, ServerLimits(header_timeout_s=0.5)) as server, raw_client(server.port) as client:
        client.send(b"GET / HTTP/1.1\r\nhost:")
        assert (await client.answer())[0] == 408
        assert await client.rest() == b""


async def test_a_slow_body_is_answered_408() -> None:
    """A body that stops is not waited for."""
    async with serving(echo, ServerLimits(body_timeout_s=0.1)) as server, raw_client(server.port) as client:
        client.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nabc")
        assert (await client.answer())[0] == 408


async def test_a_body_has_the_time_again_in_which_nobody_read() -> None:
    """A loop that was away for longer than a body may take has not waited for it."""
    async with serving(echo, ServerLimits(body_timeout_s=0.5)) as server, raw_client(server.port) as client:
        client.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\no")
        await until(lambda: server.held_body_bytes == 2)
        time.sleep(1)  # noqa: ASYNC251 - the loop is busy
        await asyncio.sleep(0.15)  # longer than it is between two looks
        client.send(b"k")
        assert (await client.answer())[2] == b"POST / ok"


async def test_idle_connections_are_closed() -> None:
    """A kept connection closes after the keep-alive time, a silent new one after the header time."""
    limits = ServerLimits(
        keepalive_s=0.1, header_timeout_s=0.5
    )  # the first request must come in it, however busy we are
    async with serving(echo, limits) as server:
        async with raw_client(server.port) as client:
            client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await client.answer()
            assert await client.rest() == b""
        async with raw_client(server.port) as client:
            assert await client.rest() == b""


async def test_gone_is_set_when_the_client_goes() -> None:
    """The handler of an unanswered request learns at once that nobody waits for it."""
    seen: asyncio.Queue[str] = asyncio.Queue()

    async def wait_for_the_end(request: Request, responder: Responder) -> None:
        seen.put_nowait("started")
        await responder.gone.wait()
        responder.write(b"into the void")
        await responder.drain()
        seen.put_nowait("gone")

    async with serving(wait_for_the_end) as server, raw_client(server.port) as client:
        client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await asyncio.wait_for(seen.get(), 30) == "started"
        client.close()
        assert await asyncio.wait_for(seen.get(), 30) == "gone"
        await until(lambda: server.open_connections == 0)


async def test_drain_holds_the_writer_back_and_lets_go_when_the_client_leaves() -> None:
    """A client that does not read stops the writer at the high-water mark; when it goes, the writer goes on."""
    written = 0
    done = asyncio.Event()

    async def flood(request: Request, responder: Responder) -> None:
        nonlocal written
        responder.start(200, [])
        while not responder.gone.is_set():
            responder.write(b"x" * 65_536)
            written += 65_536
            await responder.drain()
            await asyncio.sleep(0)
        done.set()

    async with serving(flood) as server, raw_client(server.port) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await stands_still(lambda: written)
        assert 0 < written < 32 * 1024 * 1024
        client.writer.transport.abort()
        await asyncio.wait_for(done.wait(), 30)


async def test_when_drained_calls_back_once_the_client_caught_up() -> None:
    """Back-pressure for writers that are no task: called back when there is room again, at once when there is."""
    calls: asyncio.Queue[str] = asyncio.Queue()

    async def flood(request: Request, responder: Responder) -> None:
        responder.start(200, [])
        responder.when_drained(lambda: calls.put_nowait("free"))
        while not responder.congested:
            responder.write(b"x" * 65_536)
            await asyncio.sleep(0)
        calls.put_nowait("congested")
        responder.when_drained(lambda: calls.put_nowait("drained"))
        assert calls.qsize() == 2
        while calls.qsize() < 3:  # noqa: ASYNC110 - the callback under test is the event
            await asyncio.sleep(0.002)
        responder.break_off(b"last")

    async with serving(flood) as server, raw_client(server.port) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: calls.qsize() == 2)
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert (await client.rest()).endswith(b"4\r\nlast\r\n")
        assert [calls.get_nowait() for _ in range(3)] == ["free", "congested", "drained"]


async def test_a_client_that_never_reads_is_cut() -> None:
    """Nobody holds an answer open for ever by not reading it."""
    gone = asyncio.Event()

    async def flood(request: Request, responder: Responder) -> None:
        responder.start(200, [])
        while not responder.gone.is_set():
            responder.write(b"x" * 65_536)
            await responder.drain()
            await asyncio.sleep(0)
        gone.set()

    async with serving(flood, ServerLimits(stall_timeout_s=0.1)) as server, raw_client(server.port) as client:
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(gone.wait(), 30)


async def test_a_failing_handler_costs_its_own_request_only(caplog: pytest.LogCaptureFixture) -> None:
    """Before the head: 500 and the connection lives on. After it: the stream is cut, never ended as if complete."""

    async def fail(request: Request, responder: Responder) -> None:
        if request.path == "/late":
            responder.start(200, [])
            responder.write(b"half")
        if request.path != "/silent":
            raise ValueError("a bug")

    async with serving(fail) as server, raw_client(server.port) as client:
        for path, failures in ((b"/early", 1), (b"/silent", 1)):
            client.send(b"GET %b HTTP/1.1\r\nhost: x\r\n\r\n" % path)
            assert (await client.answer())[0] == 500
            assert server.failures == failures
        client.send(b"GET /late HTTP/1.1\r\nhost: x\r\n\r\n")
        await client.head()
        with contextlib.suppress(ConnectionResetError):
            assert b"0\r\n\r\n" not in await client.rest()
        assert server.failures == 2
    assert "a bug" in caplog.text


async def test_close_lets_running_requests_end() -> None:
    """Drain: no new connections, the running answer is completed with `connection: close`, idle ones end."""
    release = asyncio.Event()

    async def slow(request: Request, responder: Responder) -> None:
        await release.wait()
        responder.send(200, [], b"done")

    server = HttpServer(slow)
    await server.start("127.0.0.1", 0)
    async with raw_client(server.port) as busy, raw_client(server.port) as idle:
        busy.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: server.open_requests == 1 and server.open_connections == 2)
        port = server.port
        closing = asyncio.create_task(server.close(drain_s=5))
        assert await idle.rest() == b""
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)
        release.set()
        status, headers, body = await busy.answer()
        assert (status, headers[b"connection"], body) == (200, b"close", b"done")
        await closing
        assert server.open_connections == 0


async def test_who_asked_before_a_drain_is_answered() -> None:
    """A connection that the kernel took, and nobody has accepted yet, is not reset."""
    async with serving(echo) as server:
        with socket.create_connection(("127.0.0.1", server.port), timeout=30) as early:  # and the loop has not run
            early.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert await server.drain(5)
            assert (await asyncio.to_thread(early.recv, 65_536)).startswith(b"HTTP/1.1 200 OK\r\n")


async def test_close_cuts_what_does_not_end() -> None:
    """After the drain time the rest is cancelled and cut."""

    async def stuck(request: Request, responder: Responder) -> None:
        responder.start(200, [])
        await asyncio.Event().wait()

    server = HttpServer(stuck)
    await server.start("127.0.0.1", 0)
    async with raw_client(server.port) as client:
        client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await client.head()
        await asyncio.wait_for(server.close(drain_s=0.05), 30)
        assert server.open_connections == server.open_requests == 0


async def test_a_header_with_a_line_break_is_a_500_not_a_forged_header() -> None:
    """Whatever a handler echoes, it cannot split the answer."""

    async def forge(request: Request, responder: Responder) -> None:
        responder.send(200, [(b"x", b"a\r\nset-cookie: b")], b"")

    async with serving(forge) as server, raw_client(server.port) as client:
        client.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        status, headers, _ = await client.answer()
        assert status == 500
        assert b"set-cookie" not in headers


async def test_an_upgrade_is_ignored() -> None:
    """`Upgrade: h2c` (curl --http2) is served as plain HTTP/1.1."""
    async with serving(echo) as server, raw_client(server.port) as client:
        client.send(b"GET /u HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n")
        assert (await client.answer())[2] == b"GET /u "


async def test_connections_are_bounded() -> None:
    """One connection more than allowed is closed at once and counted."""
    async with serving(echo, ServerLimits(connections=1)) as server, raw_client(server.port):
        await until(lambda: server.open_connections == 1)
        async with raw_client(server.port) as second:
            with contextlib.suppress(ConnectionResetError):
                assert await second.rest() == b""
        assert server.refusals["too_many_connections"] == 1


async def test_an_upgrade_that_is_offered_with_a_body_loses_nothing() -> None:
    """Java's HTTP client offers `h2c` with its first POST: the body is read, and the connection goes on."""
    offer = b"host: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AA\r\n"
    async with serving(echo) as server, raw_client(server.port) as client:
        client.send(b"POST /u HTTP/1.1\r\n" + offer + b"content-length: 5\r\n\r\nhel")
        client.send(b"lo")
        assert (await client.answer())[2] == b"POST /u hello"
        client.send(b"POST /c HTTP/1.1\r\n" + offer + b"transfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n")
        client.send(b"GET /next HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.answer())[2] == b"POST /c ab"
        assert (await client.answer())[2] == b"GET /next "
