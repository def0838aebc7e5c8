"""``POST /v1/tool_events``: one event, or an array of them, as JSON; ``GET`` says how. With a token only those who know
it may post."""

from __future__ import annotations

import hmac
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from bus.errors import cannot_listen
from schemas.base import UNDECODABLE
from services.recorder.errors import BadToolEventError
from services.recorder.tool_messages import ToolReport, read_json
from web.server import HttpServer, Request, Responder, ServerLimits

PATH = "/v1/tool_events"
MAX_EVENTS = 1_000
_LIMITS = ServerLimits(body_bytes=4 * 1024 * 1024, held_body_bytes=64 * 1024 * 1024, connections=1_024)
_JSON = [(b"content-type", b"application/json")]
_TEXT = [(b"content-type", b"text/plain; charset=utf-8")]
_USE = """\
Tool events of agent harnesses: POST one event, or an array of up to {most}, as JSON.

curl {url} -H 'content-type: application/json'{authorization} -d '{{
  "schema": "dynamo.request.trace.v1", "event_type": "tool_end", "event_time_unix_ms": 1795975336151,
  "session_id": "run-1",
  "tool": {{"tool_call_id": "call_0", "tool_class": "bash", "status": "ok", "duration_ms": 150.0}}}}'

event_type: tool_start, tool_end or tool_error. session_id: as in the session header of its requests.
202: taken, or had been before; "rejected" says what was not, and why. 400: nothing was. 503: come again.
"""

_array = msgspec.json.Decoder(list[msgspec.Raw])

Outcome = Literal["accepted", "duplicate"]


class Taker(Protocol):
    """Who takes the events."""

    def came(self, events: int) -> None:
        """So many have arrived, good or not."""

    def room(self) -> int:
        """How many may be taken now."""

    def take(self, report: ToolReport) -> Outcome: ...

    def reject(self, reason: str, events: int) -> None:
        """So many are not taken."""


@dataclass(frozen=True, slots=True)
class Rejected:
    """An event that was not taken: its place in the array, and why."""

    index: int
    reason: str
    message: str


@dataclass(slots=True)
class Answer:
    """What became of one request's events."""

    accepted: int = 0
    duplicates: int = 0
    rejected: list[Rejected] = field(default_factory=list)


class ToolEventServer:
    """Reads events, hands them on all at once, and says what became of each."""

    def __init__(self, taker: Taker, token: str = "") -> None:
        self._taker = taker
        self._expected = f"Bearer {token}".encode() if token else b""
        self._url = PATH
        self._server = HttpServer(self._handle, _LIMITS)

    async def start(self, host: str, port: int) -> str:
        """Listen; returns where. Raises `SettingsError` when the address cannot be had."""
        try:
            await self._server.start(host, port)
        except OSError as error:
            raise cannot_listen("tool_events_http_port", host, port, error) from error
        self._url = f"http://{host}:{self._server.port}{PATH}"
        return self._url

    async def close(self, drain_s: float) -> None:
        await self._server.close(drain_s)

    async def _handle(self, request: Request, responder: Responder) -> None:
        if request.path != PATH:
            _refuse(responder, 404, "not_found", f"there is {PATH}")
        elif request.method == "GET":
            responder.send(200, _TEXT, self._use())
        elif request.method != "POST":
            _refuse(responder, 405, "method_not_allowed", "POST, or GET for how", (b"allow", b"GET, POST"))
        elif not self._may(request):
            self._taker.reject("unauthorized", 1)
            text = "this address takes tool events with its bearer token only"
            _refuse(responder, 401, "unauthorized", text, (b"www-authenticate", b"Bearer"))
        else:
            self._post(request.body, responder)

    def _use(self) -> bytes:
        authorization = " -H 'authorization: Bearer TOKEN'" if self._expected else ""
        return _USE.format(most=MAX_EVENTS, url=self._url, authorization=authorization).encode()

    def _may(self, request: Request) -> bool:
        """In the same time whatever is wrong with a token."""
        said = request.header("authorization") or b""
        scheme, _, token = said.partition(b" ")
        given = scheme.capitalize() + b" " + token.strip()
        return not self._expected or hmac.compare_digest(given, self._expected)

    def _post(self, body: bytes, responder: Responder) -> None:
        taker = self._taker
        try:
            events = events_of(body)
        except BadToolEventError as error:
            taker.reject(error.reason, 1)
            _refuse(responder, 400, error.reason, str(error))
            return
        taker.came(len(events))
        if len(events) > MAX_EVENTS:
            taker.reject("too_large", len(events))
            _refuse(responder, 413, "too_many_events", f"{len(events)} events, over {MAX_EVENTS}")
        elif len(events) > taker.room():
            taker.reject("queue_full", len(events))
            _refuse(responder, 503, "queue_full", "too many rows wait for the stream", (b"retry-after", b"1"))
        else:
            answer = self._take(events)
            taken = answer.accepted + answer.duplicates > 0 or not events
            responder.send(202 if taken else 400, _JSON, msgspec.json.encode(answer))

    def _take(self, events: list[bytes | msgspec.Raw]) -> Answer:
        """One bad event costs the others nothing."""
        answer = Answer()
        for index, event in enumerate(events):
            try:
                outcome = self._taker.take(read_json(event))
            except BadToolEventError as error:
                self._taker.reject(error.reason, 1)
                answer.rejected.append(Rejected(index, error.reason, str(error)))
            else:
                answer.accepted += outcome == "accepted"
                answer.duplicates += outcome == "duplicate"
        return answer


def events_of(body: bytes) -> list[bytes | msgspec.Raw]:
    """The events of a body, not looked into: one object is one event. Raises `BadToolEventError` (``undecodable``)."""
    if body.lstrip()[:1] != b"[":
        return [body]
    try:
        return list(_array.decode(body))
    except UNDECODABLE as error:
        raise BadToolEventError("undecodable", f"no array of events: {error}") from error


def _refuse(responder: Responder, status: int, reason: str, text: str, *more: tuple[bytes, bytes]) -> None:
    error = {"error": {"message": text, "type": reason, "code": status}}
    responder.send(status, [*_JSON, *more], msgspec.json.encode(error))
