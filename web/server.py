"""An HTTP/1.1 server over httptools: one handler per request, streaming answers, bounds on everything a client sends.

server = HttpServer(handler)          # async def handler(request: Request, responder: Responder) -> None
await server.start("127.0.0.1", 0)
...
await server.close(drain_s=10)
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from web.headers import Headers
from web.limits import HeldBytes, ServerLimits
from web.requests import Answer, Head, Refusal, Request
from web.responder import Responder
from web.server_connection import ErrorAnswer, ServerConnection
from web.tls import Handshakes

__all__ = [
    "Answer", "ErrorAnswer", "Handler", "Head", "Headers", "HttpServer", "Request", "Responder", "Screen",
    "ServerLimits",
]  # fmt: skip

log = logging.getLogger(__name__)

BACKLOG = 2048
LOOK_S = 0.01
"""In which the loop looks at its sockets at least once."""
LATE_S = 0.1
"""A loop that is later than this was away: the time is not counted as its clients'."""
RETRY_AFTER_S = 1
"""When a client that was refused for want of room may ask again."""

Handler = Callable[[Request, Responder], Awaitable[None]]
Screen = Callable[[Head], Answer | None]
"""Answers a request by its head, before any of its body is taken; ``None``: it may come in. Asked only about requests
that have a body; what it refuses reaches no handler."""


def json_error(status: int, reason: str, target: str) -> tuple[Headers, bytes]:
    """The answer to what never reaches a handler, unless the server was given another."""
    body = json.dumps({"error": {"message": reason.replace("_", " "), "type": reason, "code": status}})
    return [(b"content-type", b"application/json")], body.encode()


def _close(listeners: list[asyncio.Server]) -> None:
    for listener in listeners:
        listener.close()


class HttpServer:
    """Serves ``handler``. ``handshakes``: where those of its TLS are counted; they count as connections.

    What a handler raises is logged, counted in `failures` and answered with 500 (or a cut stream).
    """

    def __init__(
        self,
        handler: Handler,
        limits: ServerLimits | None = None,
        error_answer: ErrorAnswer = json_error,
        screen: Screen = lambda head: None,
        handshakes: Handshakes | None = None,
    ) -> None:
        self._handshakes = handshakes
        if handshakes is not None:
            handshakes.may_begin = self._has_place
        self.limits = limits or ServerLimits()
        self.held = HeldBytes(self.limits.held_body_bytes)
        self.draining = False
        self._lets_nobody_in = False
        self.failures = 0
        self.refusals: dict[str, int] = {}
        self._handler = handler
        self._error_answer = error_answer
        self._screen = screen
        self._connections: set[ServerConnection] = set()
        self._tasks: dict[asyncio.Task[None], ServerConnection] = {}
        self._listeners: list[asyncio.Server] = []
        self._tls = False
        self._sweep: asyncio.TimerHandle | None = None
        self._emptied = asyncio.Event()

    async def start(self, host: str, port: int, reuse_port: bool = False, tls: ssl.SSLContext | None = None) -> None:
        """Listen; with ``tls`` for nothing else. ``port`` 0 picks one (see `port`). Raises `OSError` when the address
        is taken."""
        self._tls = tls is not None
        self._listeners.append(
            await asyncio.get_running_loop().create_server(
                lambda: ServerConnection(self),
                host,
                port,
                backlog=BACKLOG,
                reuse_port=reuse_port or None,
                **self._tls_options(tls),
            )
        )
        self._sweep_later()

    async def use_tls(self, tls: ssl.SSLContext) -> None:
        """From now on new connections begin with ``tls``; those that are open stay. Only where `start` had one. Raises
        `OSError`; then all is as it was."""
        assert self._tls, "started without TLS"
        before, listening = self._listeners, []
        try:
            for listener in before:
                for sock in listener.sockets:
                    listening.append(await self._listen_beside(sock, tls))  # noqa: PERF401 - those made must be closed
        except BaseException:
            _close(listening)
            raise
        if self.draining:  # meanwhile: nobody listens any more
            _close(listening)
            return
        self._listeners = listening
        _close(before)

    async def _listen_beside(self, sock: socket.socket, tls: ssl.SSLContext) -> asyncio.Server:
        """On the same socket under another number: who is in its queue stays there. Raises `OSError`."""
        ours = socket.socket(fileno=os.dup(sock.fileno()))
        try:
            return await asyncio.get_running_loop().create_server(
                lambda: ServerConnection(self), sock=ours, backlog=BACKLOG, **self._tls_options(tls)
            )
        except BaseException:
            ours.close()
            raise

    def _tls_options(self, tls: ssl.SSLContext | None) -> dict[str, Any]:
        if tls is None:
            return {}
        return {
            "ssl": tls,
            "ssl_handshake_timeout": self.limits.header_timeout_s,
            "ssl_shutdown_timeout": self.limits.linger_s,
        }

    @property
    def port(self) -> int:
        """The port that is listened on."""
        assert self._listeners, "not started"
        return int(self._listeners[0].sockets[0].getsockname()[1])

    @property
    def open_connections(self) -> int:
        return len(self._connections)

    @property
    def open_requests(self) -> int:
        """Requests whose handler runs."""
        return len(self._tasks)

    @property
    def held_body_bytes(self) -> int:
        """Bytes of bodies that are being read, or whose requests are not over."""
        return self.held.size

    async def drain(self, timeout_s: float) -> bool:
        """Stop accepting, close what is idle, wait until every handler has ended; whether all did in time. Who asked
        before is let in first: a listener that is closed resets those in its queue."""
        if not self.draining:
            await asyncio.sleep(LOOK_S)  # to accept them
        self.draining = True
        _close(self._listeners)
        if not self._lets_nobody_in:
            await asyncio.sleep(LOOK_S)  # to read what they sent
        self._lets_nobody_in = True
        for connection in list(self._connections):
            if connection.idle:
                connection.close()
        if self._tasks and timeout_s > 0:
            await asyncio.wait(list(self._tasks), timeout=timeout_s)
        return not self._tasks

    async def close(self, drain_s: float = 0.0) -> None:
        """`drain`, then cut what is left."""
        await self.drain(drain_s)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=5.0)
        await self._let_go(0.5)
        for connection in list(self._connections):
            connection.abort()
        await self._let_go(1.0)
        if self._sweep is not None:
            self._sweep.cancel()
        for listener in self._listeners:
            await listener.wait_closed()

    async def _let_go(self, timeout_s: float) -> None:
        """Wait until every connection is closed, at most ``timeout_s``; finished answers are still being sent."""
        if not self._connections:
            return
        for connection in list(self._connections):
            if connection.idle:
                connection.close()
        self._emptied.clear()
        try:
            await asyncio.wait_for(self._emptied.wait(), timeout_s)
        except TimeoutError:
            return

    # What a connection asks

    def opened(self, connection: ServerConnection) -> None:
        self._connections.add(connection)
        if self._lets_nobody_in:
            connection.close()
        elif len(self._connections) > self.limits.connections:
            self._refuse_connection()
            connection.abort()

    def _has_place(self) -> bool:
        """For a connection that begins with a handshake; those that are under way have theirs."""
        under_way = self._handshakes.under_way if self._handshakes is not None else 0
        if self.draining:
            return False
        if len(self._connections) + under_way < self.limits.connections:
            return True
        self._refuse_connection()
        return False

    def _refuse_connection(self) -> None:
        self.refusals["too_many_connections"] = self.refusals.get("too_many_connections", 0) + 1

    def closed(self, connection: ServerConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._emptied.set()

    def screened(self, head: Head) -> Answer | None:
        return self._screen(head)

    def refusal(self, refusal: Refusal) -> tuple[Headers, bytes]:
        self.refusals[refusal.reason] = self.refusals.get(refusal.reason, 0) + 1
        headers, body = self._error_answer(refusal.status, refusal.reason, refusal.target)
        if refusal.status == 503:
            headers = [*headers, (b"retry-after", b"%d" % RETRY_AFTER_S)]
        return headers, body

    def serve(self, connection: ServerConnection, request: Request, responder: Responder) -> None:
        task = asyncio.get_running_loop().create_task(self._run(request, responder))
        self._tasks[task] = connection
        task.add_done_callback(lambda done: self._over(done, request))

    def _over(self, task: asyncio.Task[None], request: Request) -> None:
        self._tasks.pop(task, None)
        request.hold.release()

    async def _run(self, request: Request, responder: Responder) -> None:
        try:
            await self._handler(request, responder)
        except asyncio.CancelledError:
            responder.abort()
            raise
        except Exception:
            # The border of the program: a handler's bug ends this request, is counted, and ends nothing else.
            self.failures += 1
            log.exception("the handler of %s %s failed", request.method, request.path)
        if responder.finished:
            return
        if responder.started or responder.gone.is_set():
            responder.abort()
            return
        headers, body = self._error_answer(500, "internal_error", request.target)
        responder.send(500, headers, body)

    # Deadlines: one timer for all connections

    def _sweep_later(self) -> None:
        limits = self.limits
        shortest = min(
            limits.header_timeout_s, limits.body_timeout_s, limits.keepalive_s, limits.stall_timeout_s, limits.linger_s
        )
        loop, pause_s = asyncio.get_running_loop(), min(1.0, shortest / 4)
        self._sweep = loop.call_later(pause_s, self._sweep_now, loop.time() + pause_s)

    def _sweep_now(self, due: float) -> None:
        now = asyncio.get_running_loop().time()
        for connection in list(self._connections):
            if now - due > LATE_S:
                connection.forgive(now - due)
            connection.check(now)
        self._sweep_later()
