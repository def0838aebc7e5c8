"""One connection to a server: a request out, an answer in, with time-outs and back-pressure, over httptools."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import httptools

from web.errors import (
    BadAnswerError,
    ClientClosedError,
    ConnectionLostError,
    FirstByteTimeoutError,
    IdleTimeoutError,
    TotalTimeoutError,
    WebError,
)
from web.headers import BODILESS, Headers, find

LARGE_READ = 131_072
"""Bytes of one read after which a connection's turn is over."""

MAX_HEAD_BYTES = 262_144
"""Headers of an answer that are still coming; interim (1xx) answers count with them. Behind them the same bound is for
what surrounds the pieces of its body: chunk extensions, trailers."""

CHUNK_FRAMING = 16
"""Bytes around a chunk that do not count."""

LOOK_S = 0.01
"""Between the moment at which an answer seems to be late and the judgement: in it the loop reads its sockets once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Seconds; each is named separately because each blames somebody else.

    ``connect_s``: until the connection stands. ``first_byte_s``: from the request sent to the first byte of the
    answer's body (or its end). ``idle_s``: between two pieces of the body. ``total_s``: from the call to the end.
    """

    connect_s: float = 5.0
    first_byte_s: float = 600.0
    idle_s: float = 120.0
    total_s: float = 3600.0


class ClientConnection(asyncio.Protocol):
    """A connection, idle in a pool or carrying one `AnswerStream`."""

    def __init__(
        self, on_idle: Callable[[ClientConnection], None], on_lost: Callable[[ClientConnection], None]
    ) -> None:
        self._on_idle = on_idle
        self._on_lost = on_lost
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._stream: AnswerStream | None = None
        self._status = 0
        self._headers: Headers = []
        self._until_close = False
        self._head_bytes = 0
        self._surrounding_bytes = 0
        self._pieces: list[bytes] = []
        self._paused = False
        self.idle_since = 0.0
        self.answers = 0

    @property
    def usable(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast and no check: uvloop's transports are no subclasses of asyncio's.
        self._transport = transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, stream: AnswerStream, head: bytes, body: bytes) -> None:
        """Write one request; its answer goes to ``stream``."""
        assert self._transport is not None
        self._stream = stream
        self._headers = []
        self._head_bytes = 0
        self._surrounding_bytes = 0
        self._until_close = False
        if body:
            self._transport.writelines((head, body))
        else:
            self._transport.write(head)

    def data_received(self, data: bytes) -> None:
        stream = self._stream
        if stream is None:
            # An idle server has nothing to say; whatever it is, it is not an answer to a question of ours.
            self.abort()
            return
        stream.bytes_received += len(data)
        problem: BadAnswerError | None = None
        waiting_for_head = not stream.begun
        self._surrounding_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            problem = BadAnswerError("the server switched protocols unasked")
        except httptools.HttpParserError as error:
            found = error.__context__
            problem = found if isinstance(found, BadAnswerError) else BadAnswerError(f"not an HTTP answer: {error}")
        if waiting_for_head and not stream.begun:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES and problem is None:
                problem = BadAnswerError(f"the answer's headers are larger than {MAX_HEAD_BYTES} bytes")
        self._hand_over()
        if waiting_for_head or self._surrounding_bytes < 0:
            self._surrounding_bytes = 0
        elif self._surrounding_bytes > MAX_HEAD_BYTES and problem is None:
            problem = BadAnswerError(f"more than {MAX_HEAD_BYTES} bytes around the pieces of the answer's body")
        if len(data) >= LARGE_READ:
            self._let_others()
        if problem is not None:
            if self._stream is not None:
                self._stream = None
                stream.fail(problem)
            self.abort()

    def _let_others(self) -> None:
        """Stop reading until the next turn of the loop: libuv reads a full socket 32 times over before it looks at
        another one, and all who are served here would wait for it."""
        if self._transport is not None and self.usable and not self._paused:
            self._transport.pause_reading()
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._transport is not None and self.usable and not self._paused:
            self._transport.resume_reading()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        stream, self._stream = self._stream, None
        if stream is not None:
            if self._until_close and error is None:
                stream.end()
            else:
                stream.fail(ConnectionLostError(stream.bytes_received))
        self._on_lost(self)

    # The parser's side

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._stream is not None and not self._stream.begun:
            self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        stream = self._stream
        if stream is None:
            return
        status = int(self._parser.get_status_code())
        if 100 <= status < 200:
            self._headers = []
            return
        if not 200 <= status <= 599:
            raise BadAnswerError(f"the answer's status is {status}")
        coding = find(self._headers, b"transfer-encoding")
        if coding is not None and coding.strip().lower() not in (b"chunked", b"identity"):
            # What is packed besides would be passed on as the body, without its label.
            raise BadAnswerError(f"the answer's transfer encoding is {coding.decode('latin-1')[:40]}")
        self._status = status
        headers, self._headers = self._headers, []
        self._until_close = (
            find(headers, b"content-length") is None
            and find(headers, b"transfer-encoding") is None
            and status not in BODILESS
        )
        stream.begin(status, headers)
        if stream.bodiless:
            # The parser cannot know that a HEAD's answer has no body: this connection cannot be used again.
            self._stream = None
            stream.end()
            self.abort()

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)

    def _hand_over(self) -> None:
        """Give the stream what one read brought, in one piece however many chunks it was sent in."""
        pieces = self._pieces
        if not pieces:
            return
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._surrounding_bytes -= len(data) + CHUNK_FRAMING * len(pieces)
        pieces.clear()
        stream = self._stream
        if stream is None:
            return
        try:
            stream.push(data)
        except Exception as error:  # noqa: BLE001 - the sink's own fault: whoever pipes shall see it
            self._stream = None
            stream.fail(error)
            self.abort()

    def on_message_complete(self) -> None:
        self._hand_over()
        stream = self._stream
        if stream is None or not stream.begun:
            return
        self._stream = None
        self.answers += 1
        transport = self._transport
        self._paused = False
        if transport is not None:
            transport.resume_reading()
            if self._parser.should_keep_alive() and transport.get_write_buffer_size() == 0:
                self._on_idle(self)
            else:
                transport.close()
        stream.end()

    # The stream's side

    def pause(self) -> None:
        self._paused = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume(self) -> None:
        self._paused = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def abort(self) -> None:
        """Cut the connection now; what it carried fails."""
        if self._transport is not None:
            self._transport.abort()


class AnswerStream:
    """An answer whose body is still coming: `read` pieces until ``b""``, or let `pipe` call back; `close` in any case.

    Reading from the network stops while more than ``high_bytes`` wait to be read.
    """

    def __init__(
        self, connection: ClientConnection, timeouts: Timeouts, started_at: float, high_bytes: int, head_only: bool
    ) -> None:
        self.status = 0
        self.headers: Headers = []
        self.begun = False
        self.bytes_received = 0
        self.bodiless = head_only
        self._connection: ClientConnection | None = connection
        self._timeouts = timeouts
        self._high_bytes = high_bytes
        self._chunks: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._paused = False
        self._ended = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[bytes], None] | None = None
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._total_deadline = started_at + timeouts.total_s
        self._asked_at = self._last_at = loop.time()
        self._body_begun = False
        self._timer: asyncio.TimerHandle | None = None
        self._doubted: float | None = None
        self._arm()

    # Called by the connection

    def begin(self, status: int, headers: Headers) -> None:
        self.status = status
        self.headers = headers
        self.begun = True
        self._wake()

    def push(self, data: bytes) -> None:
        self._last_at = self._loop.time()
        if not self._body_begun:
            self._body_begun = True
            self._arm()
        if self._sink is not None:
            self._sink(data)
            return
        self._chunks.append(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes > self._high_bytes:
            self.pause()
        if self._waiter is not None:
            self._wake()

    def end(self) -> None:
        self._ended = True
        self._settle()

    def fail(self, error: Exception) -> None:
        if not self._ended and self._error is None:
            self._error = error
        self._settle()

    def _settle(self) -> None:
        self._connection = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # Time-outs: one timer, re-armed when it fires, so that a piece of the body costs one clock reading

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(min(self._phase_deadline(), self._total_deadline), self._fire)

    def _phase_deadline(self) -> float:
        if not self._body_begun:
            return self._asked_at + self._timeouts.first_byte_s
        return self._last_at + self._timeouts.idle_s

    def _fire(self) -> None:
        self._timer = None
        now = self._loop.time()
        if self._paused:
            # We are the ones who do not read; the server is not to blame for the silence.
            self._last_at = now
        error: WebError | None = None
        if now >= self._total_deadline:
            error = TotalTimeoutError(f"the answer did not end within {self._timeouts.total_s:g} s")
        elif now >= self._phase_deadline():
            if self._body_begun:
                error = IdleTimeoutError(f"the answer stopped for {self._timeouts.idle_s:g} s")
            else:
                error = FirstByteTimeoutError(f"no byte of the answer within {self._timeouts.first_byte_s:g} s")
        if error is None:
            self._arm()
            return
        deadline = min(self._phase_deadline(), self._total_deadline)
        if self._doubted != deadline:
            # A loop that was away may have the answer unread in its sockets: libuv runs timers before it looks again.
            self._doubted = deadline
            self._timer = self._loop.call_later(LOOK_S, self._fire)
            return
        connection = self._connection
        self.fail(error)
        if connection is not None:
            connection.abort()

    # Called by the reader

    async def head(self) -> None:
        """Wait for the answer's status and headers. Raises `WebError`."""
        while not self.begun and self._error is None:
            await self._wait()
        if not self.begun and self._error is not None:
            raise self._error

    async def read(self) -> bytes:
        """All that has come since the last call, at least one byte; ``b""`` at the end. Raises `WebError`."""
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self._ended:
                return b""
            await self._wait()
        data = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        self._waiting_bytes = 0
        if self._paused:
            self.resume()
        return data

    async def pipe(self, sink: Callable[[bytes], None]) -> None:
        """Call ``sink`` with each piece as it comes off the socket, without waking a task for it; return at the end.

        Use `pause` and `resume` for back-pressure. Raises `WebError`.
        """
        if self._chunks:
            sink(await self.read())
        self._sink = sink
        while not self._ended and self._error is None:
            await self._wait()
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        """Stop reading from the network (the server feels it)."""
        if not self._paused:
            self._paused = True
            if self._connection is not None:
                self._connection.pause()

    def resume(self) -> None:
        if self._paused:
            self._paused = False
            self._last_at = self._loop.time()
            if self._connection is not None:
                self._connection.resume()

    def close(self) -> None:
        """Done with it. Before the end of the answer this cuts the connection, so that the server stops working."""
        connection = self._connection
        self._sink = None
        self._chunks.clear()
        if connection is not None:
            self.fail(ClientClosedError("the stream was closed"))
            connection.abort()

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
