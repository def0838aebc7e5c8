"""One attempt on an engine: the client's bytes out, the engine's answer in, passed on as it comes.

Nothing is awaited per piece: the engine's connection calls `Attempt._take`, which scans the bytes and writes them to
the client's connection; a client that reads slowly stops the engine's connection, and it is started again when the
client has caught up.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import msgspec

from services.ingress.answers import AnswerFacts, AnswerReader
from services.ingress.effects import Forward
from services.ingress.endpoints import ClientRequest
from services.ingress.replies import relayed_error_event, says_no_such_api
from services.ingress.shell.capture import Answer
from services.ingress.shell.forwarding import downstream
from services.ingress.splice import set_all, set_member, set_members, without_members
from services.ingress.sse import EventStream
from web.client import AnswerStream, HttpClient, Timeouts
from web.errors import BadAnswerError
from web.headers import Headers, find
from web.server import Responder

SSE = b"text/event-stream"
OPTIONAL_APIS = frozenset({"responses", "messages", "count_tokens"})
"""What not every engine serves."""

MISSING_STATUSES = frozenset({404, 405, 501})
LARGEST_ERROR = 64 * 1024
"""Bytes of an error that are read before it is passed on."""

USAGE_ENDPOINTS = frozenset({"chat_completions", "completions"})

_NUMBER = re.compile(rb'"sequence_number"\s*:\s*([0-9]{1,15})')
"""Of an event of Responses; in a text its quotes would be escaped."""


class Splices(msgspec.Struct, frozen=True, kw_only=True):
    """Which members may be put into the client's body."""

    usage: bool = True
    priority: bool = True
    session_id: bool = False
    stripped: tuple[str, ...] = ()
    """Members that are taken out first."""


def spliced_body(request: ClientRequest, splices: Splices, step: Forward) -> tuple[bytes, bool]:
    """The body for the engine, and whether usage was asked for in the client's place."""
    body = request.body
    if request.passed:
        return body, False
    if splices.stripped:
        body = without_members(body, splices.stripped)
    changes: list[tuple[tuple[str, ...], bytes]] = []
    if request.tenant_salt is not None:
        salt = msgspec.json.encode(request.tenant_salt)
        changes.append((("cache_salt",), salt))
        if request.nvext_salt is not None and "nvext" not in splices.stripped:
            changes.append((("nvext", "cache_salt"), salt))
    asks_usage = splices.usage and request.endpoint in USAGE_ENDPOINTS and not request.usage_asked
    if asks_usage:
        changes.append((("stream_options", "include_usage"), b"true"))
    if splices.priority and step.priority is not None:
        changes.append((("priority",), b"%d" % step.priority))
    session_id = step.session_id if splices.session_id else step.fields.session_id
    if session_id:
        changes.append((("session_id",), msgspec.json.encode(session_id)))
    body = set_all(body, changes, request.absent)
    if step.fields.xargs:
        body = set_members(body, "vllm_xargs", step.fields.xargs)
    if step.fields.kv_hints is not None:
        body = set_member(body, ("kv_hints",), step.fields.kv_hints)
    return body, asks_usage


class Attempt:
    """``closed``: nobody wants its answer any more. ``chunks``: pieces passed on so far. ``kept``: where what goes to
    the client is gathered, if it is captured. ``more_headers``: of the answer, where the engine sends none so named."""

    def __init__(
        self,
        forward: Forward,
        endpoint: str,
        *,
        event_limit: int,
        strip_usage: bool,
        token_ids: bool = False,
        kept: Answer | None = None,
        more_headers: Headers | None = None,
    ) -> None:
        self.forward = forward
        self.closed = False
        self.chunks = 0
        self._endpoint = endpoint
        self._reader = AnswerReader(endpoint, token_ids=token_ids, dialect=forward.dialect)
        self._events: EventStream | None = None
        self._event_limit = event_limit
        self._strip_usage = strip_usage
        self._whole: list[bytes] = []
        self._whole_bytes = 0
        self._stream: AnswerStream | None = None
        self._first = b""
        self._responder: Responder | None = None
        self._write: Callable[[bytes], None]
        self._kept = kept
        self._more_headers = more_headers or []
        self._is_shown = True
        self._last = b""

    @property
    def is_stream(self) -> bool:
        """Whether the engine's answer, which has begun, is a stream of events."""
        assert self._stream is not None
        return (find(self._stream.headers, b"content-type") or b"").lstrip().lower().startswith(SSE)

    async def open(
        self, client: HttpClient, url: str, headers: Headers, body: bytes, timeouts: Timeouts, method: str = "POST"
    ) -> int:
        """Send the request, wait for the first byte of the answer's body, return its status. Raises `WebError`: of an
        API that we know a redirect is none of its answers, and would lead clients, prompts and all, past us."""
        stream = await client.open(method, url, headers, body, timeouts)
        self._stream = stream
        if 300 <= stream.status < 400 and self._endpoint != "passthrough":
            raise BadAnswerError(f"the engine redirects (status {stream.status})")
        self._first = await stream.read()
        return stream.status

    async def lacks_api(self) -> bool:
        """Whether this answer means that the engine has no such API; what is read of it for that is kept. Raises
        `WebError`."""
        stream = self._stream
        assert stream is not None
        if self._endpoint not in OPTIONAL_APIS or stream.status not in MISSING_STATUSES:
            return False
        while self._first and len(self._first) < LARGEST_ERROR and (more := await stream.read()):
            self._first += more
        return len(self._first) < LARGEST_ERROR and says_no_such_api(stream.status, self._first)

    async def relay(self, responder: Responder, request_id: str) -> None:
        """Pass the answer on, head first, to its end (the client's answer is left open). Where comments went before it
        the client has a head, and an answer that is no stream becomes an error event. Raises `WebError`,
        `EventTooLargeError`."""
        stream = self._stream
        assert stream is not None
        self._responder = responder
        self._write = responder.write if self._kept is None else self._kept.beside(responder.write)
        if self.is_stream:
            self._events = EventStream(self._reader, event_limit=self._event_limit, strip_usage=self._strip_usage)
        self._is_shown = self._events is not None or not responder.started
        if self._kept is not None:
            self._kept.is_stream = self._events is not None or not self._is_shown
        if not responder.started:
            head = downstream(stream.headers, request_id, keep_length=self._events is None)
            told = {name.lower() for name, _ in head}
            head += [(name, value) for name, value in self._more_headers if name not in told]
            responder.start(stream.status, head)
        if self._first:
            self._take(self._first)
            self._first = b""
            await stream.pipe(self._take)
        if self._events is not None:
            self._write(self._events.finish())
        elif self._whole_bytes <= self._event_limit:
            self._reader.read_body(b"".join(self._whole))
        if not self._is_shown:
            self._write(relayed_error_event(self._endpoint, stream.status, b"".join(self._whole)))

    def _take(self, data: bytes) -> None:
        """One piece of the answer, off the engine's socket."""
        responder = self._responder
        assert responder is not None
        self.chunks += 1
        if self._events is not None:
            data = self._events.feed(data)
            if data:
                self._last = data
        else:
            self._whole_bytes += len(data)
            if self._whole_bytes <= self._event_limit:
                self._whole.append(data)
            else:
                self._whole.clear()
        if self._is_shown:
            self._write(data)
        if responder.congested and self._stream is not None:
            self._stream.pause()
            responder.when_drained(self._stream.resume)

    def facts(self) -> AnswerFacts | None:
        """What has been read of the answer; ``None`` before its first byte."""
        if self._responder is None:
            return None
        return self._numbered(self._reader.facts())

    def _numbered(self, facts: AnswerFacts) -> AnswerFacts:
        """With the number of an event after the last one that was passed on."""
        numbers = _NUMBER.findall(self._last) if self._endpoint == "responses" else []
        return replace(facts, next_number=int(numbers[-1]) + 1) if numbers else facts

    def close(self) -> None:
        """Cut the connection to the engine, unless the answer is complete."""
        self.closed = True
        if self._stream is not None:
            self._stream.close()
