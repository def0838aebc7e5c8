"""The answer to one request on a connection of `web.server.HttpServer`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from web import headers as head_lines
from web.headers import BODILESS, Headers, find
from web.requests import Request

if TYPE_CHECKING:
    from web.server_connection import ServerConnection


class Responder:
    """The answer to one request: `send` it whole, or `start`, `write` and `finish` it.

    ``started``: its head is on the way. ``finished``: complete or cut. ``gone``: set when the client went away, and
    ``on_gone`` is called then: a task that waits for it costs as much as a small answer.
    Calls after the client went away do nothing.
    """

    __slots__ = (
        "_chunked",
        "_connection",
        "_keep_alive",
        "_silent",
        "finished",
        "gone",
        "on_gone",
        "request",
        "started",
    )

    def __init__(self, connection: ServerConnection, request: Request) -> None:
        self._connection = connection
        self.request = request
        self._keep_alive = request.keep_alive
        self._chunked = False
        self._silent = request.method == "HEAD"
        self.started = False
        self.finished = False
        self.gone = asyncio.Event()
        self.on_gone: Callable[[], None] | None = None

    def _head(self, status: int, headers: Headers) -> bytes:
        if self.started:
            raise RuntimeError("the answer has already begun")
        if self._connection.server.draining:
            self._keep_alive = False
        if not self._keep_alive:
            headers = [*headers, (b"connection", b"close")]
        elif self.request.http_version == "1.0":
            headers = [*headers, (b"connection", b"keep-alive")]
        return head_lines.lines(head_lines.status_line(status), headers)

    def send(self, status: int, headers: Headers, body: bytes) -> None:
        """A complete answer; the content length is added. Raises `BadHeaderError`."""
        if status in BODILESS:
            body = b""
        elif find(headers, b"content-length") is None:
            headers = [*headers, (b"content-length", b"%d" % len(body))]
        head = self._head(status, headers)
        self.started = True
        self._connection.write(head if self._silent else head + body)
        self._end()

    def start(self, status: int, headers: Headers) -> None:
        """The head of a streaming answer: chunked, unless ``headers`` name a content length."""
        chunked = False
        if find(headers, b"content-length") is None and status not in BODILESS:
            if self.request.http_version == "1.1":
                headers = [*headers, (b"transfer-encoding", b"chunked")]
                chunked = True
            else:
                self._keep_alive = False
        head = self._head(status, headers)
        self._chunked = chunked
        self.started = True
        self._connection.begin(head)

    def write(self, data: bytes) -> None:
        """A piece of the body. Never blocks; see `drain`."""
        if not data or self._silent or self.finished:
            return
        self._connection.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    async def drain(self) -> None:
        """Wait while the client reads slower than we write; returns at once when it is gone."""
        await self._connection.drain()

    @property
    def congested(self) -> bool:
        """More is waiting to be sent than the high-water mark."""
        return self._connection.congested

    def when_drained(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once, when the client has caught up or is gone: `drain` without a task."""
        self._connection.when_drained(callback)

    def finish(self) -> None:
        """The body is complete."""
        if self.finished:
            return
        if self._chunked and not self._silent:
            self._connection.write(b"0\r\n\r\n")
        self._end()

    def break_off(self, last: bytes = b"") -> None:
        """Send what was written, and ``last``, then close without ending the body: the client sees that it is cut."""
        if self.finished:
            return
        self.write(last)
        self.finished = True
        self._connection.close()

    def abort(self) -> None:
        """Cut the connection now; what was written and not yet sent is lost."""
        self.finished = True
        self._connection.abort()

    def _end(self) -> None:
        self.finished = True
        self._connection.answered(self._keep_alive)
