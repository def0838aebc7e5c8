"""One client connection of `web.server.HttpServer`: bytes in, requests out, answers back, in order."""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

import httptools

from web import headers as head_lines
from web.headers import Headers, find, only
from web.limits import HeldBytes, Hold, ServerLimits
from web.requests import Answer, Head, Pieces, Refusal, Request
from web.responder import Responder

ErrorAnswer = Callable[[int, str, str], tuple[Headers, bytes]]
"""(status, reason, target) to the headers and body of an answer that the server gives by itself."""

CHUNK_FRAMING = 16
"""Bytes around a chunk that are nobody's fault; what is over it, chunk extensions and trailers, counts as headers."""


WRONG_VERSION = "Invalid HTTP version"
"""What the parser says of a version that it can read and does not speak; those that it lets pass are `_fault`'s."""


class ServerSide(Protocol):
    """What a connection asks of its server."""

    limits: ServerLimits
    held: HeldBytes
    draining: bool

    def serve(self, connection: ServerConnection, request: Request, responder: Responder) -> None: ...
    def opened(self, connection: ServerConnection) -> None: ...
    def closed(self, connection: ServerConnection) -> None: ...
    def screened(self, head: Head) -> Answer | None: ...
    def refusal(self, refusal: Refusal) -> tuple[Headers, bytes]: ...


class ServerConnection(asyncio.Protocol):
    """Parses with httptools; one request is served at a time, a few more may wait behind it."""

    def __init__(self, server: ServerSide) -> None:
        self.server = server
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._peer = ""
        self._queue: deque[Request | Refusal] = deque()
        self._serving: Responder | None = None
        self._deaf = False
        self._head_bytes = 0
        self._in_head = True
        self._upgrade_with_body = False
        self._target = b""
        self._headers: Headers = []
        self._body = Pieces()
        self._framing_bytes = 0
        self._answer: Answer | None = None
        self._hold = Hold(server.held)
        self._queued_bytes = 0
        self._drained: asyncio.Future[None] | None = None
        self._on_drained: Callable[[], None] | None = None
        self.congested = False
        self._deadline: float | None = None
        self._body_deadline: float | None = None
        self._stall_deadline: float | None = None
        self._waiting_for = "header"
        self._begun = b""

    # The transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast and no check: uvloop's transports are no subclasses of asyncio's.
        self._transport = transport = cast(asyncio.Transport, transport)
        transport.set_write_buffer_limits(high=self.server.limits.write_high_bytes)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = transport.get_extra_info("peername")
        self._peer = str(peer[0]) if isinstance(peer, tuple) and peer else ""
        self._expect("header", self.server.limits.header_timeout_s)
        self.server.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        if self._waiting_for == "keepalive":
            self._expect("header", self.server.limits.header_timeout_s)
        if self._in_head:
            self._head_bytes += len(data)
        else:
            self._framing_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if self._upgrade_with_body:
                self._parse_again(data[upgrade.args[0] :])
            else:
                # Served as plain HTTP/1.1 (the upgrade is ours to ignore); what follows on the wire is not for us.
                self._deaf = True
        except httptools.HttpParserError as error:
            if not self._deaf:
                of_version = str(error) == WRONG_VERSION
                self._refuse(*((505, "http_version") if of_version else (400, "malformed_request")))
        self._framing_bytes = max(0, self._framing_bytes)
        beside_bodies = self._head_bytes if self._in_head else self._framing_bytes
        if not self._deaf and beside_bodies > self.server.limits.header_bytes:
            self._refuse(431, "headers_too_large")

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._deaf = True
        self._transport = None
        self._begun = b""
        self._reset()
        self._deadline = self._stall_deadline = None
        self._drop_queue()
        self._wake()
        if self._serving is not None:
            self._serving.gone.set()
            if self._serving.on_gone is not None:
                self._serving.on_gone()
        self.server.closed(self)

    def pause_writing(self) -> None:
        self.congested = True
        self._stall_deadline = asyncio.get_running_loop().time() + self.server.limits.stall_timeout_s

    def resume_writing(self) -> None:
        self.congested = False
        self._stall_deadline = None
        self._wake()

    # The parser's side

    def on_url(self, url: bytes) -> None:
        self._target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head and not self._deaf:
            self._headers.append((name, value))
            if len(self._headers) > self.server.limits.headers:
                self._refuse(431, "headers_too_large")

    def on_headers_complete(self) -> None:
        if self._parser.should_upgrade() and self._parser.get_method() != b"CONNECT":
            length = find(self._headers, b"content-length")
            self._upgrade_with_body = (
                length not in (None, b"0") or find(self._headers, b"transfer-encoding") is not None
            )
            if self._upgrade_with_body:
                return
        self._in_head = False
        if self._deaf:
            return
        fault = self._fault()
        if fault is not None:
            self._refuse(*fault)
            return
        self._expect("body", None)
        length = find(self._headers, b"content-length")
        if length == b"0" or (length is None and find(self._headers, b"transfer-encoding") is None):
            return
        if not self._screen(int(length) if length is not None else None):
            return
        if self._answer is None and length is not None and not self._hold.grow_to(int(length)):
            self._refuse(503, "busy")
            return
        self._body_deadline = asyncio.get_running_loop().time() + self.server.limits.body_timeout_s
        awaited = find(self._headers, b"expect") is not None and self._parser.get_http_version() != "1.0"
        if awaited and self._serving is None:  # of 1.0 it must be ignored: such a client takes the 100 for its answer
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _fault(self) -> tuple[int, str] | None:
        """Status and reason when the head is complete and cannot be served, whatever its body (RFC 9110, 9112)."""
        headers, limits, version = self._headers, self.server.limits, self._parser.get_http_version()
        if len(self._target) + sum(len(name) + len(value) + 4 for name, value in headers) > limits.header_bytes:
            return 431, "headers_too_large"
        if version not in ("1.1", "1.0"):
            return 505, "http_version"
        if self._parser.get_method() == b"CONNECT":
            return 405, "method_not_allowed"
        if not only(headers, b"host", needed=version == "1.1"):
            return 400, "host_header"
        coding = find(headers, b"transfer-encoding")
        if coding is not None and version == "1.0":
            return 400, "malformed_request"  # whoever passed it on did not understand where it ends
        if coding is not None and coding.strip().lower() != b"chunked":
            return 501, "transfer_encoding"  # what is packed besides would be taken for the body
        expect = find(headers, b"expect")
        if expect is not None and expect.strip().lower() != b"100-continue":
            return 417, "expectation"
        length = find(headers, b"content-length")
        if length is not None and int(length) > limits.body_bytes:
            return 413, "body_too_large"
        return None

    def _screen(self, length: int | None) -> bool:
        """Ask the server's screen; whether the body is to be read. A refused one that is small is read over and the
        connection goes on. Others are not waited for; nor are those of clients that expect a 100, who may send their
        body after the refusal, or not: what comes next on such a connection is anybody's guess."""
        method, target = self._parser.get_method().decode("ascii"), self._target.decode("latin-1")
        answer = self.server.screened(Head(method=method, target=target, headers=self._headers, sized=True))
        small = length is not None and length <= self.server.limits.read_over_bytes
        if answer is not None and (not small or find(self._headers, b"expect") is not None):
            self._refuse(answer.status, "screened", answer)
            return False
        self._answer = answer
        return True

    def on_body(self, body: bytes) -> None:
        if self._deaf:
            return
        self._framing_bytes -= len(body) + CHUNK_FRAMING
        if self._answer is not None:
            return
        if self._body.size + len(body) + self._queued_bytes > self.server.limits.body_bytes:
            self._refuse(413, "body_too_large")
        elif not self._hold.grow_to(self._body.size + len(body)):
            self._refuse(503, "busy")
        else:
            self._body.add(body)

    def on_message_complete(self) -> None:
        if self._deaf or self._upgrade_with_body:
            return
        if len(self._queue) >= self.server.limits.pipelined:
            self._deaf = True
            self._reset()
            return
        body = self._body.whole()
        request = Request(
            self._parser.get_method().decode("ascii"),
            self._target.decode("latin-1"),
            self._headers,
            self._parser.get_http_version(),
            body,
            self._peer,
            self._hold,
        )
        self._hold = Hold(self.server.held)
        request.answer = self._answer
        request.keep_alive = self._parser.should_keep_alive()
        if not request.keep_alive:
            self._deaf = True
        self._reset()
        self._queued_bytes += len(body)
        self._queue.append(request)
        self._next()

    def _parse_again(self, rest: bytes) -> None:
        """A request that offers an upgrade and has a body (Java's HTTP client does: ``h2c``), as if it offered none.

        The parser takes what follows such a head for the other protocol; ``rest`` is what came of it so far.
        """
        method, version = self._parser.get_method(), self._parser.get_http_version().encode()
        head = head_lines.lines(
            b"%b %b HTTP/%b" % (method, self._target, version),
            [(name, value) for name, value in self._headers if name.lower() != b"upgrade"],
        )
        self._upgrade_with_body = False
        self._reset()
        self._parser = httptools.HttpRequestParser(self)
        self.data_received(head + rest)

    # Our side

    def _reset(self) -> None:
        """Nothing of a request is read, and nothing held for it."""
        self._hold.release()
        self._body_deadline = None
        self._in_head = True
        self._head_bytes = 0
        self._target = b""
        self._headers = []
        self._body = Pieces()
        self._framing_bytes = 0
        self._answer = None

    def _refuse(self, status: int, reason: str, answer: Answer | None = None) -> None:
        self._deaf = True
        self._queue.append(Refusal(status, reason, self._target.decode("latin-1"), answer))
        self._reset()
        self._next()

    def _drop_queue(self) -> None:
        for waiting in self._queue:
            if isinstance(waiting, Request):
                waiting.hold.release()
        self._queue.clear()

    def _next(self) -> None:
        """Serve what waits, when nothing is being served."""
        if self._serving is not None or not self._queue or self._transport is None:
            return
        waiting = self._queue.popleft()
        if isinstance(waiting, Refusal):
            self._send_refusal(waiting)
            return
        self._queued_bytes -= len(waiting.body)
        self._expect("", None)
        self._serving = responder = Responder(self, waiting)
        if waiting.answer is not None:
            responder.send(waiting.answer.status, waiting.answer.headers, waiting.answer.body)
            waiting.hold.release()
        else:
            self.server.serve(self, waiting, responder)

    def _send_refusal(self, refusal: Refusal) -> None:
        if refusal.answer is not None:
            headers, body = refusal.answer.headers, refusal.answer.body
        else:
            headers, body = self.server.refusal(refusal)
        headers = [*headers, (b"content-length", b"%d" % len(body)), (b"connection", b"close")]
        self.write(head_lines.lines(head_lines.status_line(refusal.status), headers) + body)
        self._linger()

    def _linger(self) -> None:
        """Say that we are done and read the client out, so that it sees our answer and not a reset."""
        if self._transport is None:
            return
        if self._transport.can_write_eof():
            self._transport.write_eof()
        self._expect("linger", self.server.limits.linger_s)

    def _expect(self, what: str, within_s: float | None) -> None:
        self._waiting_for = what
        self._deadline = None if within_s is None else asyncio.get_running_loop().time() + within_s

    def forgive(self, away_s: float) -> None:
        """Nobody read or wrote here for so long: what waits for the client has as much time more."""
        if self._deadline is not None:
            self._deadline += away_s
        if self._body_deadline is not None:
            self._body_deadline += away_s
        if self._stall_deadline is not None:
            self._stall_deadline += away_s

    def check(self, now: float) -> None:
        """Act on what is overdue: refuse a slow request, cut a client that does not read, close the rest."""
        if self._stall_deadline is not None and self._stall_deadline <= now:
            self.abort()
            return
        if self._body_deadline is not None and self._body_deadline <= now:
            self._refuse(408, "request_timeout")
            return
        if self._deadline is None or self._deadline > now:
            return
        self._deadline = None
        if self._waiting_for == "header" and self._head_bytes == 0:
            self.close()
        elif self._waiting_for == "header":
            self._refuse(408, "request_timeout")
        elif self._waiting_for == "keepalive":
            self.close()
        else:
            self.abort()

    @property
    def idle(self) -> bool:
        """Nothing is being read, answered or waiting."""
        return self._serving is None and not self._queue and self._head_bytes == 0 and self._in_head

    def write(self, data: bytes) -> None:
        if self._transport is None:
            return
        if self._begun:
            self._transport.writelines((self._begun, data))
            self._begun = b""
        else:
            self._transport.write(data)

    def begin(self, head: bytes) -> None:
        """Write it together with what follows in this turn of the loop: every write is a system call at once, and the
        client is woken by each."""
        self._begun = head
        asyncio.get_running_loop().call_soon(self._send_begun)

    def _send_begun(self) -> None:
        if self._begun:
            self.write(b"")

    async def drain(self) -> None:
        if not self.congested or self._transport is None:
            return
        if self._drained is None:
            self._drained = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._drained)

    def when_drained(self, callback: Callable[[], None]) -> None:
        if self.congested and self._transport is not None:
            self._on_drained = callback
        else:
            callback()

    def _wake(self) -> None:
        if self._drained is not None and not self._drained.done():
            self._drained.set_result(None)
        self._drained = None
        callback, self._on_drained = self._on_drained, None
        if callback is not None:
            callback()

    def answered(self, keep_alive: bool) -> None:
        """The answer being served is complete."""
        self._serving = None
        if self._transport is None:
            return
        if not keep_alive or (self._deaf and not self._queue):
            self._deaf = True
            self._drop_queue()
            self.close()
            return
        if self._head_bytes == 0 and self._in_head:
            self._expect("keepalive", self.server.limits.keepalive_s)
        elif self._in_head:
            self._expect("header", self.server.limits.header_timeout_s)
        if self._queue:
            # Not from inside the handler of the answer before: a long pipeline must not deepen the stack.
            asyncio.get_running_loop().call_soon(self._next)

    def close(self) -> None:
        """Close once everything written has been sent."""
        self._send_begun()
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        self._begun = b""
        if self._transport is not None:
            self._transport.abort()
