"""Errors in each API's own shape: as a whole answer before the first byte, as an event inside a stream after it.

OpenAI: ``{"error": {message, type, param, code}}``. Anthropic: ``{"type": "error", "error": {type, message}}``.
``code`` carries our stable reason (Anthropic has no such member; the header `REASON_HEADER` always does). Load is never
shed in-band with Codex's ``server_is_overloaded``, which ends the turn at once (spec: harness.md §6.5).
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from schemas.base import UNDECODABLE
from services.ingress.errors import BadRequestError, IngressError

REASON_HEADER = b"x-tidegate-reason"
NOT_SERVED = 501
"""Another try would find the same engines."""

MESSAGES = {
    "no_worker": "No worker can serve this model at the moment.",
    "admission_unavailable": "The admission service does not answer.",
    "hold_timeout": "No worker had room for this request in time.",
    "hold_deadline": "No worker had room for this request in time.",
    "hold_queue_full": "Too many requests wait for a worker already.",
    "stopping": "This process is stopping.",
}
"""What a refused client reads, by reason, where it deserves more than the reason's own words."""

_OPENAI_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply:
    """An answer that the front door gives by itself; ``reason`` is also in its headers."""

    status: int
    reason: str
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


def _openai(status: int, reason: str, message: str, param: str | None) -> dict[str, object]:
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": reason}}


def _anthropic(status: int, reason: str, message: str, param: str | None) -> dict[str, object]:
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _openai_event(status: int, reason: str, message: str, sequence_number: int) -> bytes:
    return b"data: " + msgspec.json.encode(_openai(status, reason, message, None)) + b"\n\n"


def _responses_event(status: int, reason: str, message: str, sequence_number: int) -> bytes:
    event = {"type": "error", "sequence_number": sequence_number, "code": reason, "message": message, "param": None}
    return b"event: error\ndata: " + msgspec.json.encode(event) + b"\n\n"


def _anthropic_event(status: int, reason: str, message: str, sequence_number: int) -> bytes:
    return b"event: error\ndata: " + msgspec.json.encode(_anthropic(status, reason, message, None)) + b"\n\n"


class _Words(msgspec.Struct):
    message: str | None = None


class _Said(_Words):
    """An error's body as engines send it: the message in ``error``, or by itself."""

    error: _Words | None = None


_Body = Callable[[int, str, str, str | None], dict[str, object]]
_Event = Callable[[int, str, str, int], bytes]
_SHAPES: dict[str, tuple[_Body, _Event]] = {
    "chat_completions": (_openai, _openai_event),
    "completions": (_openai, _openai_event),
    "responses": (_openai, _responses_event),
    "messages": (_anthropic, _anthropic_event),
    "count_tokens": (_anthropic, _anthropic_event),
}
_DEFAULT = _SHAPES["chat_completions"]


def error_reply(
    endpoint: str | None,
    status: int,
    reason: str,
    message: str,
    *,
    param: str | None = None,
    retry_after_s: int | None = None,
) -> ErrorReply:
    """The whole answer. ``endpoint`` ``None`` (no API of ours): OpenAI's shape."""
    shape, _ = _SHAPES.get(endpoint or "", _DEFAULT)
    headers = [(b"content-type", b"application/json"), (REASON_HEADER, reason.encode("ascii", "replace"))]
    if retry_after_s is not None:
        headers.append((b"retry-after", str(retry_after_s).encode()))
    if status == NOT_SERVED:
        headers.append((b"x-should-retry", b"false"))  # official clients send every 5xx again
    body = msgspec.json.encode(shape(status, reason, message, param))
    return ErrorReply(status=status, reason=reason, headers=tuple(headers), body=body)


def reply_to(endpoint: str | None, error: IngressError) -> ErrorReply:
    """The answer that an error of ours means."""
    return error_reply(
        endpoint,
        error.status,
        error.reason,
        str(error),
        param=error.param if isinstance(error, BadRequestError) else None,
        retry_after_s=error.retry_after_s,
    )


def error_event(endpoint: str, status: int, reason: str, message: str, sequence_number: int = 0) -> bytes:
    """One SSE event that ends a stream which broke after its first byte. ``sequence_number``: of Responses, whose
    events are numbered."""
    _, event = _SHAPES.get(endpoint, _DEFAULT)
    return event(status, reason, message, sequence_number)


def relayed_error_event(endpoint: str, status: int, body: bytes) -> bytes:
    """An engine's own error, which came as a whole answer, inside a stream that has begun: with its words where it has
    any (harnesses read them, for example that a prompt is too long)."""
    message = f"The engine answered with status {status}."
    with contextlib.suppress(*UNDECODABLE):
        said = msgspec.json.decode(body, type=_Said)
        message = said.message or (said.error.message if said.error is not None else None) or message
    return error_event(endpoint, status, "engine_status", message)


class _Unknown(msgspec.Struct):
    """The members in which servers say that they know no such path."""

    error: Any = None
    message: Any = None
    detail: Any = None


_NO_PATH = re.compile(r"(?:404 )?(?:(?:file|page) )?not found\.?", re.IGNORECASE)
_NO_API = re.compile(r"(?:the model )?does not support .*\bapi\.?|not implemented\.?", re.IGNORECASE)
"""All that vLLM says for a model without Messages or Responses, and others for a method that they have not."""


def says_no_such_api(status: int, body: bytes) -> bool:
    """Whether an engine's error says that it has no such API, and not that something in the request was not found (a
    model, an earlier response) or cannot be done, which is said with more words."""
    if status == 405:
        return True
    try:
        said = msgspec.json.decode(body, type=_Unknown)
    except UNDECODABLE:
        return status in (404, 501)
    words = said.error.get("message") if isinstance(said.error, dict) else said.error
    words = words or said.message or said.detail
    known = {404: _NO_PATH, 501: _NO_API}.get(status)
    return known is not None and (not isinstance(words, str) or known.fullmatch(words.strip()) is not None)


def refusal_message(reason: str, policy: str | None = None, detail: str | None = None) -> str:
    """One sentence about a refusal; ``policy``: the user's policy that refused, and ``detail`` its own words."""
    if policy is not None:
        return f"Policy {policy} refused the request{f': {detail}' if detail else ''}."
    return MESSAGES.get(reason, f"The request was refused: {reason.replace('_', ' ')}.")
