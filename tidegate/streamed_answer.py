"""Reads the streamed answer to a completion: when tokens came, how many, which, and how it ended. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from schemas.base import UNDECODABLE

MAX_UNREAD = 1 << 24
"""Bytes of one event: the first one may repeat the prompt's token ids."""


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decoder = msgspec.json.Decoder(_Event)


class AnswerReader:
    """Fed with the body as it comes; times in ms of the caller's clock.

    ``first_ms``, ``last_ms``: of the first and last event with a choice. ``events``: how many of those. ``token_ids``:
    of the answer, as far as the endpoint told them. Token counts are ``None`` where no usage came. ``problem``: why the
    answer is none, in a stable word (``bad_answer``, ``error_event``, ``no_end``), and ``detail``.
    """

    def __init__(self) -> None:
        self.first_ms: float | None = None
        self.last_ms: float | None = None
        self.events = 0
        self.token_ids: list[int] = []
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.problem: str | None = None
        self.detail = ""
        self._ended = False
        self._unread = b""

    def feed(self, piece: bytes, now_ms: float) -> None:
        """More of the body; after a problem, nothing."""
        if self.problem is not None:
            return
        *lines, self._unread = (self._unread + piece).split(b"\n")
        if len(self._unread) > MAX_UNREAD:
            self._fail("bad_answer", "it is no stream of events")
        for line in lines:
            if line.startswith(b"data:"):
                self._take(line[5:].strip(), now_ms)

    def close(self) -> None:
        """The body is over: without a finish reason or ``[DONE]`` it was cut."""
        if self.problem is None and not self._ended:
            self._fail("no_end", "the stream ended without a finish reason")

    def _take(self, data: bytes, now_ms: float) -> None:
        if data == b"[DONE]":
            self._ended = True
            return
        try:
            event = _decoder.decode(data)
        except UNDECODABLE as error:
            self._fail("bad_answer", f"an event is no completion: {error}")
            return
        if event.error is not None:
            self._fail("error_event", short_error(data))
            return
        if event.choices:
            self.first_ms = now_ms if self.first_ms is None else self.first_ms
            self.last_ms = now_ms
            self.events += 1
            choice = event.choices[0]
            self._ended = self._ended or choice.finish_reason is not None
            if choice.token_ids:
                self.token_ids += choice.token_ids
        if event.usage is not None:
            self.input_tokens = event.usage.prompt_tokens
            self.output_tokens = event.usage.completion_tokens
            details = event.usage.prompt_tokens_details
            self.cached_tokens = None if details is None else details.cached_tokens

    def _fail(self, problem: str, detail: str) -> None:
        if self.problem is None:
            self.problem, self.detail = problem, detail


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
