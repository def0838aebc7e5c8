"""The server under TLS: streams, slow readers, slow and wrong handshakes, another certificate while streams run."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.integration.web.support import RawClient
from tests.support.certificates import Authority
from tests.support.pace import stands_still
from tests.support.processes import eventually
from web.server import Handler, HttpServer, Request, Responder, ServerLimits
from web.tls import Handshakes, TlsFiles, load_tls

GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


async def hello(request: Request, responder: Responder) -> None:
    responder.send(200, [], b"hello")


@asynccontextmanager
async def tls_server(
    handler: Handler, files: TlsFiles, limits: ServerLimits | None = None
) -> AsyncIterator[tuple[HttpServer, Handshakes]]:
    """On a free port."""
    handshakes = Handshakes()
    server = HttpServer(handler, limits, handshakes=handshakes)
    await server.start("127.0.0.1", 0, tls=load_tls(files, handshakes).context)
    try:
        yield server, handshakes
    finally:
        await server.close()


def files_of(authority: Authority, directory: Path, client_ca: str = "") -> TlsFiles:
    certificate, key = authority.pair(directory)
    return TlsFiles(str(certificate), str(key), client_ca)


@asynccontextmanager
async def client(port: int, context: ssl.SSLContext) -> AsyncIterator[RawClient]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
    try:
        yield RawClient(reader, writer)
    finally:
        writer.transport.abort()


async def status(port: int, context: ssl.SSLContext) -> int:
    """Of the answer to one request."""
    async with client(port, context) as secure:
        secure.send(GET)
        return (await secure.answer())[0]


async def test_only_tls_and_http_1(authority: Authority, tmp_path: Path) -> None:
    """ALPN says http/1.1 also to who would rather have HTTP/2; TLS 1.1 is refused, and plain HTTP; each is counted."""
    async with tls_server(hello, files_of(authority, tmp_path)) as (server, handshakes):
        context = authority.context()
        context.set_alpn_protocols(["h2", "http/1.1"])
        async with client(server.port, context) as secure:
            secure.send(GET)
            assert (await secure.answer())[2] == b"hello"
            told = secure.writer.get_extra_info("ssl_object")
            assert told.selected_alpn_protocol() == "http/1.1"
            assert told.version() == "TLSv1.3"
        old = authority.context()
        old.minimum_version = ssl.TLSVersion.TLSv1_2
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        assert await status(server.port, old) == 200
        plain = await RawClient.connect(server.port)
        plain.send(GET)
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await plain.head()
        plain.close()
        await eventually(lambda: handshakes.results["http_request"] == 1)
        assert handshakes.results["completed"] == 2
        assert handshakes.started == 3


async def test_who_does_not_shake_hands_is_cut(authority: Authority, tmp_path: Path) -> None:
    """A client that says nothing, or stops in the middle, does not keep its place; others are served meanwhile."""
    limits = ServerLimits(header_timeout_s=2.0)  # the others have no more, however busy the machine is
    async with tls_server(hello, files_of(authority, tmp_path), limits) as (server, handshakes):
        silent, stuck = await RawClient.connect(server.port), await RawClient.connect(server.port)
        stuck.send(b"\x16\x03\x01\x02\x00\x01")
        assert await status(server.port, authority.context()) == 200
        for each in (silent, stuck):
            with contextlib.suppress(ConnectionError):  # cut, all the same
                assert await each.rest() == b""
            each.close()
        assert handshakes.started - handshakes.results.total() == 2


async def test_handshakes_count_as_connections(authority: Authority, tmp_path: Path) -> None:
    """Who begins and says nothing takes a place, as long as he is waited for; whoever finds none is cut at once."""
    limits = ServerLimits(header_timeout_s=600, connections=2)
    async with tls_server(hello, files_of(authority, tmp_path), limits) as (server, handshakes):
        silent = [await RawClient.connect(server.port) for _ in range(2)]
        await eventually(lambda: handshakes.under_way == 2)
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            await status(server.port, authority.context())
        assert (handshakes.results["no_room"], server.refusals["too_many_connections"]) == (1, 1)
        for each in silent:
            each.close()

        def left() -> bool:
            gc.collect()  # asyncio's own loop leaves cycles behind; uvloop, which serves, does not
            return handshakes.under_way == 0

        await eventually(left)
        assert await status(server.port, authority.context()) == 200
        assert handshakes.under_way == 0


async def test_mutual_tls(authority: Authority, tmp_path: Path) -> None:
    """Without a certificate of the authority nobody comes in; with one, yes."""
    ca = authority.file(tmp_path / "ca.pem")
    async with tls_server(hello, files_of(authority, tmp_path, str(ca))) as (server, handshakes):
        with pytest.raises((ssl.SSLError, ConnectionError, asyncio.IncompleteReadError)):
            await status(server.port, authority.context())
        await eventually(lambda: handshakes.results["peer_did_not_return_a_certificate"] == 1)
        assert await status(server.port, authority.context(authority.pair(tmp_path, "client"))) == 200


async def test_a_slow_reader_costs_bounded_memory(authority: Authority, tmp_path: Path) -> None:
    """Who streams waits when the client does not read: what is written and not sent stays below the high-water mark
    and one piece, under TLS too; when it reads, all comes."""
    piece, pieces = b"x" * 65_536, 400
    written = 0
    congested = asyncio.Event()

    async def flood(request: Request, responder: Responder) -> None:
        nonlocal written
        responder.start(200, [(b"content-length", b"%d" % (len(piece) * pieces))])
        for _ in range(pieces):
            responder.write(piece)
            written += 1
            if responder.congested:
                congested.set()
            await responder.drain()
        responder.finish()

    limits = ServerLimits(write_high_bytes=131_072, stall_timeout_s=600)
    async with (
        tls_server(flood, files_of(authority, tmp_path), limits) as (server, _),
        client(server.port, authority.context()) as slow,
    ):
        slow.send(GET)
        await slow.head()
        await asyncio.wait_for(congested.wait(), 60)
        await stands_still(lambda: written)  # what kernels and the client's own buffers take is finite
        assert written < pieces
        got = 0
        while got < len(piece) * pieces:
            data = await asyncio.wait_for(slow.reader.read(1 << 20), 60)
            assert data
            got += len(data)
        assert written == pieces


async def test_another_certificate_while_a_stream_runs(authority: Authority, tmp_path: Path) -> None:
    """New connections get it, the stream goes on under the old one, and none is refused in between."""
    go_on = asyncio.Event()

    async def stream(request: Request, responder: Responder) -> None:
        responder.start(200, [])
        responder.write(b"first")
        await go_on.wait()
        responder.write(b"second")
        responder.finish()

    async with tls_server(stream, files_of(authority, tmp_path)) as (server, handshakes):
        async with client(server.port, authority.context()) as before:
            before.send(GET)
            await before.head()
            port, old = server.port, before.writer.get_extra_info("peercert")
            for _ in range(3):
                await server.use_tls(load_tls(files_of(authority, tmp_path), handshakes).context)
            assert server.port == port
            async with client(server.port, authority.context()) as after:
                assert after.writer.get_extra_info("peercert")["serialNumber"] != old["serialNumber"]
                after.send(GET)
                await after.head()
                go_on.set()
                for each in (before, after):
                    body = await asyncio.wait_for(each.reader.readuntil(b"0\r\n\r\n"), 30)
                    assert b"first" in body
                    assert b"second" in body
        await server.drain(30)
        with pytest.raises(ConnectionError):
            await status(port, authority.context())


async def test_a_certificate_that_comes_while_it_drains_lets_nobody_in(authority: Authority, tmp_path: Path) -> None:
    """Who drains while another certificate is taken listens nowhere afterwards."""
    async with tls_server(hello, files_of(authority, tmp_path)) as (server, handshakes):
        port = server.port
        tls = load_tls(files_of(authority, tmp_path), handshakes).context
        await asyncio.gather(server.use_tls(tls), server.drain(30))
        with pytest.raises(ConnectionError):
            await status(port, authority.context())
