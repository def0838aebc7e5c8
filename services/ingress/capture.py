"""What is written of a request whose prompt and answer are captured (spec: identity-and-traces §2.8).

One row ``request_payload`` for each captured request, in the envelope of trace files, with the ``agent_context`` and
the time of its row ``request_end``; `request_id` joins the two. It is made in a process of its own
(docs/adr/0023), which gets `CapturedRequest` and the two bodies in a frame:

    length of each of the three parts (unsigned 32 bits, little-endian), head as JSON, request, response
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator
from typing import Literal

import msgspec

from schemas.base import UNDECODABLE
from schemas.request import Outcome
from schemas.trace import TRACE_SCHEMA, AgentContext, TraceRow
from services.ingress.errors import BadFrameError
from services.ingress.redaction import Redaction
from web.headers import Headers

ResponseKind = Literal["none", "document", "stream"]
DropReason = Literal["too_large", "over_bound", "no_whole_answer", "unreadable"]
"""Why a member is missing: larger than ``capture_bytes``; it would have taken what is held over
``capture_held_bytes``; the engine's answer did not come, or broke off; it is not JSON."""

WHOLE_ANSWERS = frozenset({"engine_status", "in_band_error"})
"""Reasons of failures that the engine told in an answer, which is whole."""

_NEVER = ("auth", "bearer", "cookie", "credential", "jwt", "passw", "secret", "token")
_NEVER_WORDS = frozenset({"key", "keys", "apikey", "pwd", "sig", "signature"})
_LENGTHS = struct.Struct("<III")
_encoder = msgspec.json.Encoder()


def is_secret_header(name: str) -> bool:
    """Whether a header may hold a credential, by its name: it is never written."""
    plain = name.strip().lower().replace("_", "-")
    return any(part in plain for part in _NEVER) or not _NEVER_WORDS.isdisjoint(plain.split("-"))


class HeaderList:
    """Names of headers that are written; a trailing ``*`` stands for any ending, never for those of a secret one.

    Raises `ValueError` for a name that may hold a credential.
    """

    def __init__(self, names: Iterable[str]) -> None:
        listed = [name.strip().lower() for name in names]
        secret = sorted(name for name in listed if is_secret_header(name.removesuffix("*")))
        if secret:
            raise ValueError(f"{', '.join(secret)} may hold credentials, which are never written")
        self._names = frozenset(name.encode("latin-1", "replace") for name in listed if not name.endswith("*"))
        self._beginnings = tuple(name[:-1].encode("latin-1", "replace") for name in listed if name.endswith("*"))

    def of(self, headers: Headers) -> dict[str, str]:
        """Those of ``headers``, their names in lower case; the values of one that came repeatedly with commas."""
        if not self._names and not self._beginnings:
            return {}
        found: dict[str, str] = {}
        for name, value in headers:
            lower = name.lower()
            if lower not in self._names and not lower.startswith(self._beginnings):
                continue
            text = lower.decode("latin-1")
            if not is_secret_header(text):
                said = value.decode("latin-1")
                found[text] = f"{found[text]}, {said}" if text in found else said
        return found


class Selection:
    """Which requests are captured: of these models, of these sessions and their children; empty: all."""

    def __init__(self, models: Collection[str] = (), sessions: Collection[str] = ()) -> None:
        self._models = frozenset(models)
        self._sessions = frozenset(sessions)

    def takes(self, model: str, *sessions: str | None) -> bool:
        """``sessions``: the request's own, its parent's."""
        if self._models and model not in self._models:
            return False
        return not self._sessions or not self._sessions.isdisjoint(sessions)


class CapturedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request as the writing process gets it, beside its bodies. ``dropped``: why a body is missing already."""

    request_id: str
    endpoint: str
    model: str
    outcome: Outcome
    at_ms: int
    agent_context: AgentContext | None = None
    headers: dict[str, str] = {}
    response: ResponseKind = "none"
    dropped: DropReason | None = None


class _Payload(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    request_id: str
    endpoint: str
    model: str
    outcome: Outcome
    request: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    response: msgspec.Raw | str | msgspec.UnsetType = msgspec.UNSET
    http_request_headers: dict[str, str] = {}
    # Always written: false is what it is for.
    payload_complete: bool = msgspec.field(default_factory=lambda: True)
    payload_drop_reason: DropReason | None = None


class _Row(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    # Always written, although constant; first, so that a reader who looks for others need not read on.
    schema: str = msgspec.field(default_factory=lambda: TRACE_SCHEMA)
    event_type: str = msgspec.field(default_factory=lambda: "request_payload")
    event_source: str = msgspec.field(default_factory=lambda: "tidegate")
    event_time_unix_ms: int
    agent_context: AgentContext | None = None
    payload: _Payload


def has_whole_answer(row: TraceRow) -> bool:
    """Whether the client got a whole answer of an engine, by the request's row."""
    request = row.request
    return request is not None and (request.outcome == "completed" or request.reason in WHOLE_ANSWERS)


def captured(
    row: TraceRow, headers: dict[str, str], response: ResponseKind, dropped: DropReason | None
) -> CapturedRequest:
    """From the request's row ``request_end``."""
    request = row.request
    assert request is not None
    return CapturedRequest(
        request_id=request.request_id,
        endpoint=request.endpoint or "",
        model=request.model or "",
        outcome=request.outcome or "internal_error",
        at_ms=row.event_time_unix_ms,
        agent_context=row.agent_context,
        headers=headers,
        response=response,
        dropped=dropped,
    )


def payload_row(head: CapturedRequest, request: bytes, response: bytes, redaction: Redaction) -> bytes:
    """The row, JSON of one line. ``request`` is empty where it was dropped. Bodies stand in it as they came, unless
    something in them is hidden; a stream, and an answer that is no JSON, as a text."""
    asked = _document(request, redaction) if request else None
    answer: msgspec.Raw | str | None = None
    if head.response == "document":
        document = _document(response, redaction)
        answer = redaction.text(response.decode("utf-8", "replace")) if document is None else document
    elif head.response == "stream":
        answer = redaction.stream(response).decode("utf-8", "replace")
    dropped = head.dropped or ("unreadable" if request and asked is None else None)
    row = _Row(
        event_time_unix_ms=head.at_ms,
        agent_context=head.agent_context,
        payload=_Payload(
            request_id=head.request_id,
            endpoint=head.endpoint,
            model=head.model,
            outcome=head.outcome,
            request=msgspec.UNSET if asked is None else asked,
            response=msgspec.UNSET if answer is None else answer,
            http_request_headers={name: redaction.text(value) for name, value in head.headers.items()},
            payload_complete=dropped is None,
            payload_drop_reason=dropped,
        ),
    )
    return _encoder.encode(row)


def _document(body: bytes, redaction: Redaction) -> msgspec.Raw | None:
    """A JSON document on one line; ``None`` where it is none. Line ends are blanks there, never part of a text."""
    try:
        kept = redaction.document(body)
    except UNDECODABLE:
        return None
    if b"\n" in kept or b"\r" in kept:
        kept = kept.replace(b"\r", b" ").replace(b"\n", b" ")
    return msgspec.Raw(kept)


# Frames


def frame(head: CapturedRequest, request: bytes, response: list[bytes]) -> list[bytes]:
    """The pieces of one frame, in order."""
    encoded, answer = _encoder.encode(head), b"".join(response)
    return [_LENGTHS.pack(len(encoded), len(request), len(answer)) + encoded, request, answer]


class Frames:
    """Frames out of a stream of bytes."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._decoder = msgspec.json.Decoder(CapturedRequest)

    def feed(self, data: bytes) -> Iterator[tuple[CapturedRequest, bytes, bytes]]:
        """Each whole frame: head, request, response. Raises `BadFrameError`."""
        self._rest += data
        while len(self._rest) >= _LENGTHS.size:
            head, request, response = _LENGTHS.unpack_from(self._rest)
            at = _LENGTHS.size
            end = at + head + request + response
            if len(self._rest) < end:
                return
            whole = bytes(memoryview(self._rest)[at:end])
            del self._rest[:end]
            try:
                decoded = self._decoder.decode(whole[:head])
            except UNDECODABLE as error:
                raise BadFrameError(f"a captured request cannot be read: {error}") from error
            yield decoded, whole[head : head + request], whole[head + request :]
