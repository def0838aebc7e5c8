"""One attempt on an engine: the client's bytes out, the engine's answer in, passed on as it comes.

Nothing is awaited per piece: the engine's connection calls `Attempt._take`, which scans the bytes and writes them to
the client's connection; a client that reads slowly stops the engine's connection, and it is started again when the
client has caught up.
"""

from __future__ import annotations

import msgspec

from services.ingress.answers import AnswerFacts, AnswerReader
from services.ingress.effects import Forward
from services.ingress.endpoints import ClientRequest
from services.ingress.shell.forwarding import downstream
from services.ingress.splice import set_member
from services.ingress.sse import EventStream
from web.client import AnswerStream, HttpClient, Timeouts
from web.headers import Headers, find
from web.server import Responder

SSE = b"text/event-stream"
USAGE_ENDPOINTS = frozenset({"chat_completions", "completions"})


class Splices(msgspec.Struct, frozen=True, kw_only=True):
    """Which members may be put into the client's body."""

    usage: bool = True
    priority: bool = True
    session_id: bool = False


def spliced_body(
    request: ClientRequest, splices: Splices, *, priority: int | None, session_id: str | None
) -> tuple[bytes, bool]:
    """The body for the engine, and whether usage was asked for in the client's place."""
    body = request.body
    asks_usage = splices.usage and request.endpoint in USAGE_ENDPOINTS and not request.usage_asked
    if asks_usage:
        body = set_member(body, ("stream_options", "include_usage"), b"true")
    if splices.priority and priority is not None:
        body = set_member(body, ("priority",), b"%d" % priority)
    if splices.session_id and session_id is not None:
        body = set_member(body, ("session_id",), msgspec.json.encode(session_id))
    return body, asks_usage


class Attempt:
    """``closed``: nobody wants its answer any more. ``chunks``: pieces passed on so far."""

    def __init__(self, forward: Forward, endpoint: str, *, event_limit: int, strip_usage: bool) -> None:
        self.forward = forward
        self.closed = False
        self.chunks = 0
        self._reader = AnswerReader(endpoint)
        self._events: EventStream | None = None
        self._event_limit = event_limit
        self._strip_usage = strip_usage
        self._whole: list[bytes] = []
        self._whole_bytes = 0
        self._stream: AnswerStream | None = None
        self._first = b""
        self._responder: Responder | None = None

    async def open(self, client: HttpClient, url: str, headers: Headers, body: bytes, timeouts: Timeouts) -> int:
        """Send the request, wait for the first byte of the answer's body, return its status. Raises `WebError`."""
        stream = await client.open("POST", url, headers, body, timeouts)
        self._stream = stream
        self._first = await stream.read()
        return stream.status

    async def relay(self, responder: Responder, request_id: str) -> None:
        """Pass the answer on, head first, to its end (the client's answer is left open). Raises `WebError`,
        `EventTooLargeError`."""
        stream = self._stream
        assert stream is not None
        self._responder = responder
        events = (find(stream.headers, b"content-type") or b"").lstrip().lower().startswith(SSE)
        if events:
            self._events = EventStream(self._reader, event_limit=self._event_limit, strip_usage=self._strip_usage)
        responder.start(stream.status, downstream(stream.headers, request_id, keep_length=not events))
        if self._first:
            self._take(self._first)
            self._first = b""
            await stream.pipe(self._take)
        if self._events is not None:
            responder.write(self._events.finish())
        elif self._whole_bytes <= self._event_limit:
            self._reader.read_body(b"".join(self._whole))

    def _take(self, data: bytes) -> None:
        """One piece of the answer, off the engine's socket."""
        responder = self._responder
        assert responder is not None
        self.chunks += 1
        if self._events is not None:
            data = self._events.feed(data)
        else:
            self._whole_bytes += len(data)
            if self._whole_bytes <= self._event_limit:
                self._whole.append(data)
            else:
                self._whole.clear()
        responder.write(data)
        if responder.congested and self._stream is not None:
            self._stream.pause()
            responder.when_drained(self._stream.resume)

    def facts(self) -> AnswerFacts | None:
        """What has been read of the answer; ``None`` before its first byte."""
        return self._reader.facts() if self._responder is not None else None

    def close(self) -> None:
        """Cut the connection to the engine, unless the answer is complete."""
        self.closed = True
        if self._stream is not None:
            self._stream.close()
