"""An HTTP/1.1 client over httptools: one pool of kept connections per origin, streaming answers, separate time-outs.

    client = HttpClient()
    answer = await client.fetch("GET", "http://127.0.0.1:8000/v1/models", [], b"", Timeouts(total_s=5))
    stream = await client.open("POST", url, headers, body, Timeouts())
    try:
        while piece := await stream.read(): ...
    finally:
        stream.close()

A request written on a connection that had been kept and was closed by the server at once, before any byte of the
answer came, is sent once more, on a new connection.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import urlsplit

from web import headers as head_lines
from web.client_connection import AnswerStream, ClientConnection, Timeouts
from web.errors import (
    AnswerTooLargeError,
    BadUrlError,
    ClientClosedError,
    ConnectError,
    ConnectionLostError,
    ConnectTimeoutError,
)
from web.headers import Headers, find
from web.tls import client_tls

__all__ = ["Answer", "AnswerStream", "ClientLimits", "Headers", "HttpClient", "Timeouts"]

_Origin = tuple[bool, str, int]
"""Whether by TLS, host and port."""

_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """Bounds of one client.

    ``idle_per_origin``: connections kept per origin; ``keepalive_s``: for how long (below what servers keep: uvicorn
    5 s). ``answer_bytes``: the largest answer that `HttpClient.fetch` takes. ``high_bytes``: unread bytes of a
    streaming answer at which reading from the network stops. ``stale_s``: a kept connection that is lost later than
    this after a request was written on it was not stale: the server had begun to work.
    """

    idle_per_origin: int = 256
    keepalive_s: float = 4.0
    answer_bytes: int = 64 * 1024 * 1024
    high_bytes: int = 262_144
    stale_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    status: int
    headers: Headers
    body: bytes

    def header(self, name: str) -> bytes | None:
        """The first value of ``name``, in whatever case it came, or ``None``."""
        return find(self.headers, name.lower().encode("latin-1"))


@dataclass(frozen=True, slots=True)
class Address:
    """Where a URL points: ``authority`` as the Host header says it; ``secure``: by TLS."""

    host: str
    port: int
    secure: bool
    authority: bytes
    target: bytes


@lru_cache(maxsize=4096)
def parse_url(url: str) -> Address:
    """``http[s]://host[:port][/path][?query]``. Raises `BadUrlError`."""
    try:
        parts = urlsplit(url)
        secure = parts.scheme == "https"
        port = parts.port or (443 if secure else 80)
        target = parts.path or "/"
        if parts.query:
            target += f"?{parts.query}"
        if not (secure or parts.scheme == "http") or not parts.hostname or " " in target:
            raise BadUrlError(f"not an http:// or https:// address: {url!r}")
        authority = parts.netloc.rpartition("@")[2]
        return Address(parts.hostname, port, secure, authority.encode("ascii"), target.encode("ascii"))
    except ValueError as error:
        raise BadUrlError(f"not an http:// or https:// address: {url!r}") from error


_SLICES = 8
"""Of a time-out; one in which the loop was late is not counted."""

_MOST_SLICES = 4 * _SLICES


@asynccontextmanager
async def _within(timeout_s: float) -> AsyncIterator[None]:
    """`asyncio.timeout` that leaves out the time in which this loop did not look: what became ready meanwhile is seen
    first. At most four times as long in all. Raises `TimeoutError`."""
    loop = asyncio.get_running_loop()
    length = timeout_s / _SLICES
    counted = passed = 0
    timer: asyncio.TimerHandle | None = None

    def arm() -> None:
        nonlocal timer
        timer = loop.call_later(length, tick, loop.time() + length)

    def tick(due: float) -> None:
        nonlocal counted, passed
        passed += 1
        counted += loop.time() - due < length
        if counted < _SLICES and passed < _MOST_SLICES:
            arm()
        else:
            limit.reschedule(loop.time())

    async with asyncio.timeout(None) as limit:
        arm()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()


class HttpClient:
    """Connections are opened as needed and kept per origin (scheme, host, port); `close` cuts all of them.

    ``tls``: whom to trust at ``https://`` addresses; ``None``: the system's authorities, read at the first of them
    (which takes some 20 ms).
    """

    def __init__(self, limits: ClientLimits | None = None, *, tls: ssl.SSLContext | None = None) -> None:
        self.limits = limits or ClientLimits()
        self.tls = tls
        self.opened = 0
        self.reused = 0
        self.retried = 0
        self._idle: dict[_Origin, deque[ClientConnection]] = {}
        self._all: set[ClientConnection] = set()
        self._origins: dict[ClientConnection, _Origin] = {}
        self._closed = False

    @property
    def open_connections(self) -> int:
        """Connections that stand, idle ones included."""
        return len(self._all)

    @property
    def idle_connections(self) -> int:
        return sum(len(waiting) for waiting in self._idle.values())

    async def fetch(
        self, method: str, url: str, headers: Headers, body: bytes, timeouts: Timeouts | None = None
    ) -> Answer:
        """One whole answer. Raises `WebError`."""
        stream = await self.open(method, url, headers, body, timeouts)
        try:
            parts: list[bytes] = []
            size = 0
            while piece := await stream.read():
                size += len(piece)
                if size > self.limits.answer_bytes:
                    raise AnswerTooLargeError(f"the answer is larger than {self.limits.answer_bytes} bytes")
                parts.append(piece)
        finally:
            stream.close()
        return Answer(stream.status, stream.headers, b"".join(parts))

    async def open(
        self, method: str, url: str, headers: Headers, body: bytes, timeouts: Timeouts | None = None
    ) -> AnswerStream:
        """The answer's status and headers have come; read and close the stream. Raises `WebError`."""
        if self._closed:
            raise ClientClosedError("the client is closed")
        timeouts = timeouts or Timeouts()
        address = parse_url(url)
        head = self._head(method, address, headers, body)
        started_at = asyncio.get_running_loop().time()
        connection = self._take(address)
        if connection is not None:
            self.reused += 1
            loop = asyncio.get_running_loop()
            asked_at = loop.time()
            try:
                return await self._ask(connection, method, head, body, timeouts, started_at)
            except ConnectionLostError as error:
                if error.bytes_received or loop.time() - asked_at > self.limits.stale_s:
                    raise
                self.retried += 1
        connection = await self._connect(address, min(timeouts.connect_s, timeouts.total_s))
        return await self._ask(connection, method, head, body, timeouts, started_at)

    async def _ask(
        self,
        connection: ClientConnection,
        method: str,
        head: bytes,
        body: bytes,
        timeouts: Timeouts,
        started_at: float,
    ) -> AnswerStream:
        stream = AnswerStream(connection, timeouts, started_at, self.limits.high_bytes, method == "HEAD")
        connection.send(stream, head, body)
        try:
            await stream.head()
        except BaseException:
            stream.close()
            raise
        return stream

    def _head(self, method: str, address: Address, headers: Headers, body: bytes) -> bytes:
        names = {name.lower() for name, _ in headers}
        extra: Headers = []
        if b"host" not in names:
            extra.append((b"host", address.authority))
        if b"content-length" not in names and (body or method in _WITH_BODY):
            extra.append((b"content-length", b"%d" % len(body)))
        return head_lines.lines(b"%b %b HTTP/1.1" % (method.encode("ascii"), address.target), [*extra, *headers])

    def _take(self, address: Address) -> ClientConnection | None:
        """The connection used last, which is the least likely to have been closed meanwhile."""
        waiting = self._idle.get((address.secure, address.host, address.port))
        now = asyncio.get_running_loop().time()
        while waiting:
            connection = waiting.pop()
            if connection.usable and now - connection.idle_since < self.limits.keepalive_s:
                return connection
            connection.abort()
        return None

    async def _connect(self, address: Address, timeout_s: float) -> ClientConnection:
        loop = asyncio.get_running_loop()
        origin = (address.secure, address.host, address.port)
        tls = self._trust() if address.secure else None
        try:
            async with _within(timeout_s):
                _, connection = await loop.create_connection(
                    lambda: ClientConnection(self._became_idle, self._lost), address.host, address.port, ssl=tls
                )
        except TimeoutError as error:
            raise ConnectTimeoutError(f"no connection to {address.host}:{address.port} in {timeout_s:g} s") from error
        except OSError as error:  # and what TLS refuses: a certificate that is not trusted
            raise ConnectError(f"no connection to {address.host}:{address.port}: {error}") from error
        self.opened += 1
        self._all.add(connection)
        self._origins[connection] = origin
        if self._closed:
            connection.abort()
            raise ClientClosedError("the client was closed")
        return connection

    def _trust(self) -> ssl.SSLContext:
        if self.tls is None:
            self.tls = client_tls()
        return self.tls

    def _became_idle(self, connection: ClientConnection) -> None:
        origin = self._origins.get(connection)
        if origin is None or self._closed:
            connection.abort()
            return
        waiting = self._idle.setdefault(origin, deque())
        now = asyncio.get_running_loop().time()
        connection.idle_since = now
        waiting.append(connection)
        # The oldest are on the left: let go of what has expired or is too many.
        while waiting and (
            len(waiting) > self.limits.idle_per_origin or now - waiting[0].idle_since >= self.limits.keepalive_s
        ):
            waiting.popleft().abort()

    def _lost(self, connection: ClientConnection) -> None:
        self._all.discard(connection)
        origin = self._origins.pop(connection, None)
        if origin is None:
            return
        waiting = self._idle.get(origin)
        if waiting is not None:
            if connection in waiting:
                waiting.remove(connection)
            if not waiting:
                del self._idle[origin]

    async def close(self) -> None:
        """Cut every connection; streams still open fail."""
        self._closed = True
        for connection in list(self._all):
            connection.abort()
        self._idle.clear()
        for _ in range(3):
            # connection_lost is called on a later turn of the loop
            await asyncio.sleep(0)
