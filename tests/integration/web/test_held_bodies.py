"""Bodies in memory are bounded in all, and each in time: whatever way a request ends, its bytes are given back once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.integration.web.support import RawClient, raw_client, serving, until
from tests.support.pace import Stopwatch
from web.server import HttpServer, Request, Responder, ServerLimits

LIMITS = ServerLimits(body_bytes=1000, held_body_bytes=1500)


class Gate:
    """A handler that answers when it is told to."""

    def __init__(self) -> None:
        self.opened = asyncio.Event()

    async def __call__(self, request: Request, responder: Responder) -> None:
        await self.opened.wait()
        responder.send(200, [], b"%d" % len(request.body))


def post(size: int, sent: int | None = None) -> bytes:
    """A request with a body of ``size`` bytes, of which ``sent`` are sent."""
    return b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size + b"x" * (size if sent is None else sent)


def chunk(size: int) -> bytes:
    return b"%x\r\n%b\r\n" % (size, b"x" * size)


CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"


@asynccontextmanager
async def holding(server: HttpServer, size: int) -> AsyncIterator[RawClient]:
    """A client whose body of ``size`` bytes is held."""
    async with raw_client(server.port) as client:
        before = server.held_body_bytes
        client.send(post(size))
        await until(lambda: server.held_body_bytes == before + size)
        yield client


async def test_a_body_over_what_may_be_held_is_refused_before_it_is_sent() -> None:
    """Its declared length decides: 503 `busy` with Retry-After, no 100; room again when the first has ended."""
    gate = Gate()
    async with serving(gate, LIMITS) as server, holding(server, 800) as first:
        async with raw_client(server.port) as second:
            second.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 701\r\nexpect: 100-continue\r\n\r\n")
            status, headers, body = await second.answer()
            assert (status, headers[b"retry-after"]) == (503, b"1")
            assert b'"busy"' in body
            assert await second.rest() == b""
        assert server.refusals == {"busy": 1}
        assert server.held_body_bytes == 800
        async with holding(server, 700) as third:
            gate.opened.set()
            assert (await first.answer())[2] == b"800"
            assert (await third.answer())[2] == b"700"
        await until(lambda: server.held_body_bytes == 0)
        first.send(post(1000))
        assert (await first.answer())[2] == b"1000"


async def test_requests_without_a_body_are_served_when_nothing_more_may_be_held() -> None:
    """Health pages answer under full load."""
    gate = Gate()

    async def handle(request: Request, responder: Responder) -> None:
        if request.method == "GET":
            responder.send(200, [], b"ok")
        else:
            await gate(request, responder)

    async with (
        serving(handle, LIMITS) as server,
        holding(server, 1000),
        holding(server, 500),
        raw_client(server.port) as client,
    ):
        client.send(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.answer())[2] == b"ok"


async def test_a_chunked_body_counts_as_it_comes() -> None:
    """Without a length each piece is counted; the one over the bound ends the request, and frees the rest."""
    async with serving(Gate(), LIMITS) as server, holding(server, 800):
        async with raw_client(server.port) as client:
            client.send(CHUNKED + chunk(600))
            await until(lambda: server.held_body_bytes == 1400)
            client.send(chunk(101))
            assert (await client.answer())[0] == 503
        assert server.held_body_bytes == 800


@pytest.mark.parametrize(
    "wire",
    [
        post(600, sent=10),
        CHUNKED + chunk(300),
        post(600),
        post(200) + post(300) + post(100, sent=50),
    ],
    ids=["half-sent", "half-chunked", "served", "pipelined"],
)
async def test_a_client_that_goes_away_gives_back_what_it_held(wire: bytes) -> None:
    """Half sent, being served, or waiting behind another request: exactly nothing is left."""

    async def until_gone(request: Request, responder: Responder) -> None:
        await responder.gone.wait()

    async with serving(until_gone, LIMITS) as server:
        async with raw_client(server.port) as client:
            client.send(wire)
            await until(lambda: server.held_body_bytes in (600, 300))
            client.writer.transport.abort()
            await until(lambda: server.open_connections == server.open_requests == 0)
        assert server.held_body_bytes == 0


@pytest.mark.parametrize(
    ("wire", "status"),
    [
        (post(600), 500),
        (CHUNKED + chunk(100) + b"zz\r\n", 400),
        (CHUNKED + chunk(900) + chunk(101), 413),
        (post(600, sent=10), 408),
        (CHUNKED + chunk(100), 408),
    ],
)
async def test_a_request_that_fails_gives_back_what_it_held(wire: bytes, status: int) -> None:
    """A failing handler, a malformed body, one that grows too large or does not end."""

    async def fail(request: Request, responder: Responder) -> None:
        raise ValueError("a bug")

    limits = ServerLimits(body_bytes=1000, held_body_bytes=1500, body_timeout_s=0.2)
    async with serving(fail, limits) as server, raw_client(server.port) as client:
        client.send(wire)
        assert (await client.answer())[0] == status
        await until(lambda: server.open_requests == 0)
        assert server.held_body_bytes == 0


async def test_pipelined_requests_over_their_bound_give_back_what_they_held() -> None:
    """What is not answered is not held either; closing the server frees what is being served."""
    limits = ServerLimits(body_bytes=1000, held_body_bytes=1500, pipelined=1)
    async with serving(Gate(), limits) as server, raw_client(server.port) as client:
        client.send(post(100) * 10)
        await until(lambda: server.held_body_bytes == 200)
        await server.close()
        assert server.held_body_bytes == 0


async def test_keep_alive_does_not_add_up() -> None:
    """Two hundred bodies one after the other hold one at a time."""
    gate = Gate()
    gate.opened.set()
    async with serving(gate, LIMITS) as server, raw_client(server.port) as client:
        for _ in range(100):
            client.send(post(900) + CHUNKED + chunk(500) + b"0\r\n\r\n")
            assert [(await client.answer())[2] for _ in range(2)] == [b"900", b"500"]
        await until(lambda: server.held_body_bytes == 0)


async def test_a_body_that_dribbles_is_answered_408() -> None:
    """The time is the body's in all: a byte now and then does not buy more of it."""
    async with serving(Gate(), ServerLimits(body_timeout_s=0.3)) as server, raw_client(server.port) as client:
        client.send(post(1000, sent=0))
        answer = asyncio.ensure_future(client.answer())
        since = Stopwatch()
        while not answer.done() and since.took_s < 30:
            client.send(b"x")
            await asyncio.wait((answer,), timeout=0.05)
        assert (await answer)[0] == 408
        await since.within(2)
        assert server.held_body_bytes == 0


async def test_a_dribbling_body_behind_another_request_gains_no_time() -> None:
    """The answer to the request before it starts no new clock."""
    gate = Gate()
    async with serving(gate, ServerLimits(body_timeout_s=1.5)) as server, raw_client(server.port) as client:
        client.send(post(5) + post(1000, sent=1))
        await until(lambda: server.held_body_bytes == 1005)
        await until(lambda: server.held_body_bytes == 5)
        gate.opened.set()
        assert (await client.answer())[0] == 200
        assert (await client.answer())[0] == 408
