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
from schemas.trace import ChoiceFinish, ToolCall
from services.ingress.contents import Dialect
from services.ingress.identity import PASSED_APIS

DONE = b"[DONE]"
NO_USAGE = Usage()


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerFacts:
    """``usage`` has ``None`` for what the engine did not say. ``data_lines``: content-bearing lines of a stream, about
    one a token, from which output is estimated where usage is missing. ``complete``: it was said how the answer ended;
    ``last_event``: the event was seen after which its API says no more. ``error``: the engine's in-band error, as it
    names its type. ``unreadable``: events that did not decode. ``backend_finish_reason``: the engine's own word where
    it is another. ``choices``: each choice's end, where there were several. ``prompt_token_ids``, ``token_ids``: what
    the engine said of them to a client that asked, of one choice. ``next_number``: of an event after those that were
    passed on, where an API numbers them (Responses)."""

    usage: Usage = NO_USAGE
    response_id: str | None = None
    finish_reason: str | None = None
    backend_finish_reason: str | None = None
    stop_reason: str | None = None
    choices: tuple[ChoiceFinish, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    error: str | None = None
    data_lines: int = 0
    complete: bool = False
    last_event: bool = False
    unreadable: int = 0
    next_number: int = 0


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

    id: str | None = None
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Any = None


class _TokenChoice(_Choice):
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _TokenChat(_Chat):
    """The same for a client that asked for token ids (vLLM's ``return_token_ids``): of the prompt once, chat says them
    beside the choices and completions in each."""

    choices: list[_TokenChoice] | None = None  # type: ignore[assignment]
    prompt_token_ids: list[int] | None = None


class _Block(msgspec.Struct):
    """An Anthropic content block, or a Responses output item."""

    type: str = ""
    id: str | None = None
    call_id: str | None = None
    name: str | None = None


class _MessageDelta(msgspec.Struct):
    stop_reason: str | None = None
    stop_sequence: str | None = None


class _Message(msgspec.Struct):
    id: str | None = None
    usage: _Usage | None = None


class _Anthropic(msgspec.Struct):
    """An event or a whole message."""

    type: str = ""
    id: str | None = None
    index: int = 0
    message: _Message | None = None
    content_block: _Block | None = None
    content: list[_Block] | None = None
    delta: _MessageDelta | None = None
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: _Usage | None = None
    error: Any = None


class _Whole(msgspec.Struct):
    """An answer of an API that is passed on: its usage, if it has one."""

    usage: _Usage | None = None


class _Counted(msgspec.Struct):
    """The whole answer of ``count_tokens``."""

    input_tokens: int | None = None
    error: Any = None


class _Incomplete(msgspec.Struct):
    reason: str | None = None


class _Response(msgspec.Struct):
    id: str | None = None
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
MAX_CHOICES = 256
"""Bounds on an engine's words (reasons, ids and names of tools), its tool calls, its choices and their places, for they
go into facts and rows."""

MAX_TOKEN_IDS = 1 << 18
"""Of a prompt, and of an answer; of a longer one nothing is said."""

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
    """Facts of one answer, gathered event by event or from a whole body. ``unread``: nothing was read yet; the first
    event is read whatever it says, for it names the answer. ``token_ids``: the client asked for them. ``dialect``: the
    engine's; Messages of SGLang count cached tokens in ``input_tokens`` (its ``entrypoints/anthropic/serving.py``),
    those of vLLM and Anthropic beside it."""

    def __init__(self, endpoint: str, *, token_ids: bool = False, dialect: Dialect = "vllm") -> None:
        self._form = _FORMS.get(endpoint, _CHAT)
        if token_ids and self._form is _CHAT:
            self._form = _CHAT_TOKENS
        self._cached_beside = dialect == "vllm"
        self.marks = self._form.marks.search
        self.data_lines = 0
        self.unread = True
        self._id: str | None = None
        self._usage: dict[str, int] = {}
        self._finish: str | None = None
        self._backend: str | None = None
        self._stop: str | None = None
        self._choices: dict[int, ChoiceFinish] = {}
        self._prompt_ids: list[int] = []
        self._token_ids: list[int] = []
        self._has_all_ids = True
        self._tools: dict[tuple[int, int], tuple[str | None, str | None]] = {}
        self._error: str | None = None
        self._complete = False
        self._last_event = False
        self._unreadable = 0

    def read_event(self, data: bytes) -> bool:
        """One event's data. Returns whether it is a chunk that carries usage and nothing else."""
        if data.strip() == DONE:
            self._complete = self._last_event = True
            return False
        return self._read(data)

    def read_body(self, body: bytes) -> None:
        """A whole answer that is not a stream."""
        if self._form is not _PASSED or _PASSED.marks.search(body):
            self._read(body)
        self._complete = True

    def facts(self) -> AnswerFacts:
        """What is known so far."""
        return AnswerFacts(
            usage=msgspec.convert(self._usage, Usage),
            response_id=self._id,
            finish_reason=_cut(self._finish),
            backend_finish_reason=_cut(self._backend) if self._backend != self._finish else None,
            stop_reason=_cut(self._stop),
            choices=tuple(self._choices[index] for index in sorted(self._choices)) if len(self._choices) > 1 else (),
            prompt_token_ids=tuple(self._prompt_ids),
            token_ids=tuple(self._token_ids) if self._has_all_ids else (),
            tool_calls=tuple(
                ToolCall(choice_index=choice, tool_call_index=index, id=call_id, name=name)
                for (choice, index), (call_id, name) in self._tools.items()
            ),
            error=self._error,
            data_lines=self.data_lines,
            complete=self._complete,
            last_event=self._last_event,
            unreadable=self._unreadable,
        )

    def _read(self, data: bytes) -> bool:
        self.unread = False
        try:
            decoded = self._form.decoder.decode(data)
        except UNDECODABLE:
            self._unreadable += 1
            return False
        return self._form.read(self, decoded)

    # What the three families of answers say

    def read_chat(self, chunk: _Chat) -> bool:
        self._take_id(chunk.id)
        self._take_usage(chunk.usage)
        self._take_error(chunk.error)
        if isinstance(chunk, _TokenChat):
            self._take_token_ids(chunk)
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
            if choice.finish_reason is not None or choice.stop_reason is not None:
                self._take_choice(choice)
        return chunk.usage is not None and chunk.choices == []

    def _take_choice(self, choice: _Choice) -> None:
        if choice.index not in self._choices and len(self._choices) >= MAX_CHOICES:
            return
        if 0 <= choice.index < MAX_PLACE:
            stop = None if choice.stop_reason is None else str(choice.stop_reason)
            self._choices[choice.index] = ChoiceFinish(
                choice_index=choice.index, finish_reason=_cut(choice.finish_reason), stop_reason=_cut(stop)
            )

    def _take_token_ids(self, chunk: _TokenChat) -> None:
        """Of one choice: the ids of several answers are no chain. A list over the bound, or of no ids, says nothing."""
        for choice in chunk.choices or ():
            prompt = chunk.prompt_token_ids or choice.prompt_token_ids
            if prompt and not self._prompt_ids and _are_ids(prompt):
                self._prompt_ids = prompt
            if not choice.token_ids:
                continue
            fits = len(self._token_ids) + len(choice.token_ids) <= MAX_TOKEN_IDS
            if fits and choice.index == 0 and _are_ids(choice.token_ids):
                self._token_ids += choice.token_ids
            else:
                self._has_all_ids = False

    def read_anthropic(self, event: _Anthropic) -> bool:
        self._take_id(event.message.id if event.message else event.id)
        usage = event.usage
        if event.message and event.message.usage:  # of the prompt only: nothing was generated yet, whatever it says
            told = event.message.usage.input_tokens or event.message.usage.cache_read_input_tokens
            usage = msgspec.structs.replace(event.message.usage, output_tokens=None) if told else None  # SGLang: zeros
        self._take_usage(usage)
        self._take_error(event.error)
        blocks = [(event.index, event.content_block)] if event.content_block else enumerate(event.content or ())
        for index, block in blocks:
            if block.type in _TOOL_ITEMS:
                self._take_tool(0, index, block.id, block.name)
        stop = event.stop_reason or (event.delta.stop_reason if event.delta else None)
        if stop is not None:
            self._backend = stop
            self._finish = _ANTHROPIC_STOPS.get(stop, stop)
        sequence = event.stop_sequence or (event.delta.stop_sequence if event.delta else None)
        if sequence is not None:
            self._stop = sequence
        if event.type == "message_stop":
            self._complete = self._last_event = True
        return False

    def read_count(self, counted: _Counted) -> bool:
        if counted.input_tokens is not None:
            self._take_usage(_Usage(input_tokens=counted.input_tokens, output_tokens=0))
        self._take_error(counted.error)
        return False

    def read_passed(self, whole: _Whole) -> bool:
        self._take_usage(whole.usage)
        return False

    def read_responses(self, event: _ResponsesEvent) -> bool:
        if event.item and event.item.type in _TOOL_ITEMS:
            self._take_tool(0, event.output_index, event.item.call_id or event.item.id, event.item.name)
        if event.type == "error":
            self._take_error(event.code or event.error or "error")
        whole = event.response or event
        if whole is not event or not event.type:
            self._take_id(whole.id)
        if event.response and event.type not in _RESPONSES_LAST:
            return False
        for index, item in enumerate(whole.output or ()):
            if item.type in _TOOL_ITEMS:
                self._take_tool(0, index, item.call_id or item.id, item.name)
        self._take_usage(whole.usage)
        self._take_error(whole.error or ("failed" if whole.status == "failed" else None))
        if whole.status is not None:
            reason = whole.incomplete_details.reason if whole.incomplete_details else None
            if whole.status == "completed":
                self._finish = "tool_calls" if self._tools else "stop"
            elif whole.status == "incomplete":
                self._finish = _INCOMPLETE.get(reason or "", reason)
            self._backend = reason or whole.status
            self._complete = True
        self._last_event = self._last_event or event.type in _RESPONSES_LAST
        return False

    def _take_id(self, response_id: str | None) -> None:
        """The first one; each chunk repeats it."""
        if self._id is None and response_id:
            self._id = _cut(response_id)

    def _take_usage(self, usage: _Usage | None) -> None:
        """Later numbers win, one by one; ``null`` says nothing (spec: user-cases C3)."""
        if usage is None:
            return
        inputs = usage.input_tokens
        if inputs is not None and self._cached_beside:
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
        """``false`` and empty texts are how some say that there is none."""
        if error is None or error is False or error == "" or self._error is not None:
            return
        if isinstance(error, dict):
            error = error.get("type") or error.get("code") or "error"
        self._error = str(error)[:100]


def _cut(text: str | None) -> str | None:
    return text if text is None else text[:MAX_CHARACTERS]


def _are_ids(ids: list[int]) -> bool:
    return len(ids) <= MAX_TOKEN_IDS and min(ids) >= 0 and max(ids) < 1 << 32


_CHAT_MARKS = (
    rb'"(?:finish_reason"\s*:\s*"|usage"\s*:\s*\{|name"\s*:\s*"|error"\s*:\s*[^n\s]'
    rb'|tool_calls"\s*:\s*\[\s*\{\s*(?:"index"\s*:\s*\d+\s*,\s*)?"id"\s*:\s*"'
)
_CHAT = _Form(
    re.compile(_CHAT_MARKS + rb")"),
    msgspec.json.Decoder(_Chat),
    AnswerReader.read_chat,
)
_CHAT_TOKENS = _Form(
    re.compile(_CHAT_MARKS + rb'|token_ids"\s*:\s*\[|prompt_token_ids"\s*:\s*\[)'),
    msgspec.json.Decoder(_TokenChat),
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
_COUNT = _Form(re.compile(rb'"input_tokens"'), msgspec.json.Decoder(_Counted), AnswerReader.read_count)
_PASSED = _Form(re.compile(rb'"usage"\s*:\s*\{'), msgspec.json.Decoder(_Whole), AnswerReader.read_passed)
_FORMS = {
    "chat_completions": _CHAT,
    "completions": _CHAT,
    "responses": _RESPONSES,
    "messages": _ANTHROPIC,
    "count_tokens": _COUNT,
    **dict.fromkeys(PASSED_APIS, _PASSED),
}
