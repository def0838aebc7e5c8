"""Reads the streamed answer to one measured prompt. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from schemas.base import UNDECODABLE
from tidegate.errors import CalibrationError

MAX_UNREAD = 1 << 20
"""Bytes of one event; one token's is under a kilobyte."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[Any] = []
    usage: _Usage | None = None
    error: Any = None


class StreamedAnswer:
    """Fed with the body as it comes. ``begun``: the first token is here; ``prompt_tokens``, ``cached_tokens``: as the
    engine counted them (None: it did not say)."""

    def __init__(self) -> None:
        self.begun = False
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self._unread = b""

    def feed(self, piece: bytes) -> None:
        """More of the body. Raises `CalibrationError` for what is no stream of completions, or says an error."""
        *lines, self._unread = (self._unread + piece).split(b"\n")
        if len(self._unread) > MAX_UNREAD:
            raise CalibrationError("the engine's answer is no stream of events")
        for line in lines:
            if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
                self._take(data)

    def _take(self, data: bytes) -> None:
        try:
            event = msgspec.json.decode(data, type=_Event)
        except UNDECODABLE as error:
            raise CalibrationError(f"the engine's answer is no completion: {error}") from error
        if event.error is not None:
            raise CalibrationError(f"the engine broke off: {short_error(data)}")
        self.begun = self.begun or bool(event.choices)
        if event.usage is not None:
            self.prompt_tokens = event.usage.prompt_tokens
            details = event.usage.prompt_tokens_details
            self.cached_tokens = details.cached_tokens if details is not None else None


def short_error(body: bytes) -> str:
    """What an error answer says, in one line of at most 300 characters."""
    text = body.decode("utf-8", "replace")
    try:
        told = msgspec.json.decode(body)
    except UNDECODABLE:
        told = None
    if isinstance(told, dict):
        inner = told.get("error", told)
        message = inner.get("message") if isinstance(inner, dict) else inner
        text = message if isinstance(message, str) else text
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return line[:300] or "no reason given"
