"""What accounting needs of an engine's answer: usage, how it ended, which tools it called, an error in the stream.

One `AnswerReader` per attempt. Events are decoded only where a cheap test of their bytes (`AnswerReader.marks`) says
that there is something to read; contents and tool arguments are never kept (spec: identity-and-traces §2.6). What
cannot be decoded is counted and changes nothing. Finish reasons are reported in OpenAI's words, the engine's own word
beside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from schemas.base import UNDECODABLE
from schemas.request import Usage
from schemas.trace import ToolCall

DONE = b"[DONE]"
NO_USAGE = Usage()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFacts:
    """``usage`` has ``None`` for what the engine did not say. ``data_lines``: content-bearing lines of a stream, about
    one a token, from which output is estimated where usage is missing. ``complete``: the API's own last word was
    seen. ``error``: the engine's in-band error, as it names its type. ``unreadable``: events that did not decode."""

    usage: Usage = NO_USAGE
    finish_reason: str | None = None
    stop_reason: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    error: str | None = None
    data_lines: int = 0
    complete: bool = False
    unreadable: int = 0


# The few members we read. Types are loose where engines differ; a wrong type makes the one event unreadable.


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _Details | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: _Details | None = None
    output_tokens_details: _Details | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Function(msgspec.Struct):
    name: str | None = None


class _Tool(msgspec.Struct):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Delta(msgspec.Struct):
    tool_calls: list[_Tool] | None = None
    function_call: _Function | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    delta: _Delta | None = None
    message: _Delta | None = None


class _Chat(msgspec.Struct):
    """A chunk or a whole answer of chat or completions."""

    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class _Block(msgspec.Struct):
    """An Anthropic content block, or a Responses output item."""

    type: str = ""
    id: str | None = None
    call_id: str | None = None
    name: str | None = None


class _MessageDelta(msgspec.Struct):
    stop_reason: str | None = None


class _Message(msgspec.Struct):
    usage: _Usage | None = None


class _Anthropic(msgspec.Struct):
    """An event or a whole message."""

    type: str = ""
    index: int = 0
    message: _Message | None = None
    content_block: _Block | None = None
    content: list[_Block] | None = None
    delta: _MessageDelta | None = None
    stop_reason: str | None = None
    usage: _Usage | None = None
    error: Any = None


class _Incomplete(msgspec.Struct):
    reason: str | None = None


class _Response(msgspec.Struct):
    status: str | None = None
    usage: _Usage | None = None
    incomplete_details: _Incomplete | None = None
    error: Any = None
    output: list[_Block] | None = None


class _ResponsesEvent(_Response):
    type: str = ""
    code: str | None = None
    output_index: int = 0
    item: _Block | None = None
    response: _Response | None = None


MAX_CHARACTERS = 256
MAX_TOOLS = 256
MAX_PLACE = 1 << 31
"""Bounds on an engine's words (reasons, ids and names of tools), its tool calls and their places, for they go into
facts and rows."""

MAX_TOKENS = 1 << 40
"""An engine that reports more, or less than none, reports nothing."""


@dataclass(frozen=True, slots=True)
class _Form:
    """One API's answers: which bytes make an event worth decoding, how to decode it, how to read it."""

    marks: re.Pattern[bytes]
    decoder: msgspec.json.Decoder[Any]
    read: Callable[[AnswerReader, Any], bool]


_ANTHROPIC_STOPS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "pause_turn": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
_RESPONSES_LAST = frozenset({"response.completed", "response.incomplete", "response.failed"})
_TOOL_ITEMS = frozenset({"function_call", "custom_tool_call", "tool_use", "server_tool_use"})
_INCOMPLETE = {"max_output_tokens": "length", "content_filter": "content_filter"}


class AnswerReader:
    """Facts of one answer, gathered event by event or from a whole body."""

    def __init__(self, endpoint: str) -> None:
        self._form = _FORMS.get(endpoint, _CHAT)
        self.marks = self._form.marks.search
        self.data_lines = 0
        self._usage: dict[str, int] = {}
        self._finish: str | None = None
        self._stop: str | None = None
        self._tools: dict[tuple[int, int], tuple[str | None, str | None]] = {}
        self._error: str | None = None
        self._complete = False
        self._unreadable = 0

    def read_event(self, data: bytes) -> bool:
        """One event's data. Returns whether it is a chunk that carries usage and nothing else."""
        if data.strip() == DONE:
            self._complete = True
            return False
        return self._read(data)

    def read_body(self, body: bytes) -> None:
        """A whole answer that is not a stream."""
        self._read(body)
        self._complete = True

    def facts(self) -> AnswerFacts:
        """What is known so far."""
        return AnswerFacts(
            usage=msgspec.convert(self._usage, Usage),
            finish_reason=_cut(self._finish),
            stop_reason=_cut(self._stop),
            tool_calls=tuple(
                ToolCall(choice_index=choice, tool_call_index=index, id=call_id, name=name)
                for (choice, index), (call_id, name) in self._tools.items()
            ),
            error=self._error,
            data_lines=self.data_lines,
            complete=self._complete,
            unreadable=self._unreadable,
        )

    def _read(self, data: bytes) -> bool:
        try:
            decoded = self._form.decoder.decode(data)
        except UNDECODABLE:
            self._unreadable += 1
            return False
        return self._form.read(self, decoded)

    # What the three families of answers say

    def read_chat(self, chunk: _Chat) -> bool:
        self._take_usage(chunk.usage)
        self._take_error(chunk.error)
        for choice in chunk.choices or ():
            said = choice.delta or choice.message
            for position, tool in enumerate((said.tool_calls or ()) if said else ()):
                name = tool.function.name if tool.function else None
                self._take_tool(choice.index, position if tool.index is None else tool.index, tool.id, name)
            if said and said.function_call:
                self._take_tool(choice.index, 0, None, said.function_call.name)
            if choice.finish_reason is not None:
                self._finish = choice.finish_reason
                self._complete = True
            if choice.stop_reason is not None:
                self._stop = str(choice.stop_reason)
        return chunk.usage is not None and chunk.choices == []

    def read_anthropic(self, event: _Anthropic) -> bool:
        self._take_usage(event.usage or (event.message.usage if event.message else None))
        self._take_error(event.error)
        blocks = [(event.index, event.content_block)] if event.content_block else enumerate(event.content or ())
        for index, block in blocks:
            if block.type in _TOOL_ITEMS:
                self._take_tool(0, index, block.id, block.name)
        stop = event.stop_reason or (event.delta.stop_reason if event.delta else None)
        if stop is not None:
            self._stop = stop
            self._finish = _ANTHROPIC_STOPS.get(stop, stop)
        self._complete = self._complete or event.type == "message_stop"
        return False

    def read_responses(self, event: _ResponsesEvent) -> bool:
        if event.item and event.item.type in _TOOL_ITEMS:
            self._take_tool(0, event.output_index, event.item.call_id or event.item.id, event.item.name)
        if event.type == "error":
            self._take_error(event.code or event.error or "error")
        whole = event.response or event
        if event.response and event.type not in _RESPONSES_LAST:
            return False
        for index, item in enumerate(whole.output or ()):
            if item.type in _TOOL_ITEMS:
                self._take_tool(0, index, item.call_id or item.id, item.name)
        self._take_usage(whole.usage)
        self._take_error(whole.error)
        if whole.status is not None:
            self._stop = whole.status
            reason = whole.incomplete_details.reason if whole.incomplete_details else None
            if whole.status == "completed":
                self._finish = "tool_calls" if self._tools else "stop"
            elif whole.status == "incomplete":
                self._finish = _INCOMPLETE.get(reason or "", reason)
            self._complete = True
        return False

    def _take_usage(self, usage: _Usage | None) -> None:
        """Later numbers win, one by one; ``null`` says nothing (spec: user-cases C3)."""
        if usage is None:
            return
        inputs = usage.input_tokens
        if inputs is not None:  # Anthropic counts what came from the cache beside the rest
            inputs += (usage.cache_read_input_tokens or 0) + (usage.cache_creation_input_tokens or 0)
        of_input = usage.prompt_tokens_details or usage.input_tokens_details
        of_output = usage.completion_tokens_details or usage.output_tokens_details
        cached = of_input.cached_tokens if of_input else None
        said = {
            "input_tokens": usage.prompt_tokens if usage.prompt_tokens is not None else inputs,
            "output_tokens": usage.completion_tokens if usage.completion_tokens is not None else usage.output_tokens,
            "cached_tokens": cached if cached is not None else usage.cache_read_input_tokens,
            "reasoning_tokens": of_output.reasoning_tokens if of_output else None,
        }
        self._usage.update(
            {name: number for name, number in said.items() if number is not None and 0 <= number < MAX_TOKENS}
        )

    def _take_tool(self, choice: int, index: int, call_id: str | None, name: str | None) -> None:
        """An entry starts with the first chunk that has an id or a name; the first one of each is kept."""
        if call_id is None and name is None:
            return
        if not (0 <= choice < MAX_PLACE and 0 <= index < MAX_PLACE):
            return
        if (choice, index) not in self._tools and len(self._tools) >= MAX_TOOLS:
            return
        known_id, known_name = self._tools.get((choice, index), (None, None))
        self._tools[choice, index] = (known_id or _cut(call_id), known_name or _cut(name))

    def _take_error(self, error: Any) -> None:
        if error is None or self._error is not None:
            return
        if isinstance(error, dict):
            error = error.get("type") or error.get("code") or "error"
        self._error = str(error)[:100]


def _cut(text: str | None) -> str | None:
    return text if text is None else text[:MAX_CHARACTERS]


_CHAT = _Form(
    re.compile(
        rb'"(?:finish_reason"\s*:\s*"|usage"\s*:\s*\{|name"\s*:\s*"|error"\s*:\s*[^n\s]'
        rb'|tool_calls"\s*:\s*\[\s*\{\s*(?:"index"\s*:\s*\d+\s*,\s*)?"id"\s*:\s*")'
    ),
    msgspec.json.Decoder(_Chat),
    AnswerReader.read_chat,
)
_ANTHROPIC = _Form(
    re.compile(
        rb'"(?:usage"\s*:\s*\{|tool_use"|server_tool_use"|stop_reason"\s*:\s*"|error"\s*:\s*[^n\s]|message_stop")'
    ),
    msgspec.json.Decoder(_Anthropic),
    AnswerReader.read_anthropic,
)
_RESPONSES = _Form(
    re.compile(
        rb'"(?:type"\s*:\s*"(?:response\.(?:completed|incomplete|failed)"|error")|usage"\s*:\s*\{'
        rb'|function_call"|custom_tool_call")'
    ),
    msgspec.json.Decoder(_ResponsesEvent),
    AnswerReader.read_responses,
)
_FORMS = {
    "chat_completions": _CHAT,
    "completions": _CHAT,
    "responses": _RESPONSES,
    "messages": _ANTHROPIC,
    "count_tokens": _ANTHROPIC,
}
