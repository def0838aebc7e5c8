"""Anthropic's Messages API as vLLM serves it: read as a chat request, answered in Anthropic's words.

The request becomes the chat messages that vLLM makes of it (`services.ingress.anthropic_messages`, which is compared
with vLLM's own code), so that one conversation has the same tokens in each API. Usage follows Anthropic's contract
(vllm-project/vllm #40912): what came from the cache is not in ``input_tokens``.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from load.engine.api import ApiError, ChatBody, CommonBody, StreamOptions, common_fields
from load.engine.misbehave import UsageMode
from load.engine.outputs import PlannedOutput
from load.engine.responses import AnswerHead, UsageNumbers
from services.ingress.anthropic_messages import anthropic_functions, from_anthropic
from services.ingress.errors import TemplateError

STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
ROLES = {"ctx": "user", "msg": "user"}
"""Roles of some of Claude Code's messages, and what vLLM takes them for."""

_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_encode = msgspec.json.encode

Content = str | list[dict[str, Any]]


class Message(msgspec.Struct):
    role: str
    content: Content


class CountTokensBody(CommonBody, kw_only=True):
    """``POST /v1/messages/count_tokens``."""

    messages: list[Message]
    system: Content | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None

    def as_chat(self) -> ChatBody:
        """The chat request that vLLM makes of it. Raises `ApiError`."""
        fields = common_fields(self) | {"cache_salt": None, "n": None}
        if self.stream:
            fields["stream_options"] = StreamOptions(include_usage=True, continuous_usage_stats=True)
        given = [{"role": ROLES.get(each.role, each.role), "content": each.content} for each in self.messages]
        _check(given, self.tools or [])
        try:
            messages = from_anthropic(self.system, given)
            tools = None if self.tools is None else anthropic_functions(self.tools, given)
        except TemplateError as error:
            raise ApiError(f"messages: {error}", param="messages") from error
        return ChatBody(**fields, messages=messages, tools=tools, tool_choice=_choice(self.tool_choice))


class MessagesBody(CountTokensBody, kw_only=True):
    """``POST /v1/messages``. Unlike chat's, ``max_tokens`` must be given."""

    max_tokens: int


def error_body(message: str, kind: str) -> bytes:
    """Anthropic's error shape, with vLLM's own names of kinds."""
    return _encode({"type": "error", "error": {"type": kind, "message": message}})


def count_answer(tokens: int) -> bytes:
    """The answer of ``count_tokens``."""
    return _encode({"input_tokens": tokens, "context_management": {"original_input_tokens": tokens}})


# The request


def _check(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> None:
    """What vLLM's own types refuse. Raises `ApiError`."""
    for message in messages:
        if message["role"] not in ("user", "assistant", "system"):
            raise ApiError(
                f"messages: role must be user, assistant or system, not {message['role']!r}", param="messages"
            )
        blocks = message["content"] if isinstance(message["content"], list) else []
        results = [block.get("content") for block in blocks if block.get("type") == "tool_result"]
        if not all(isinstance(item, dict) for result in results if isinstance(result, list) for item in result):
            raise ApiError("messages: the parts of a tool_result must be objects", param="messages")
    for tool in tools:
        if not isinstance(tool.get("name"), str) or not isinstance(tool.get("input_schema"), dict):
            raise ApiError("tools: each needs a name and an input_schema", param="tools")


def _choice(choice: dict[str, Any] | None) -> str | dict[str, Any] | None:
    kind = None if choice is None else choice.get("type")
    if choice is not None and kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return _TOOL_CHOICES.get(str(kind), "auto") if choice is not None else None


# The answer


def _usage(usage: UsageNumbers) -> dict[str, int]:
    """What came from the cache and what went into it stand beside ``input_tokens``: the three are the prompt."""
    created = usage.created_tokens or 0
    return {
        "input_tokens": max(0, usage.prompt_tokens - usage.cached_tokens - created),
        "output_tokens": usage.completion_tokens,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": usage.cached_tokens,
    }


def whole_message(head: AnswerHead, plan: PlannedOutput, finish: str, usage: UsageNumbers | None) -> bytes:
    """The body of an answer that is not streamed."""
    text = plan.text(0, len(plan.tokens))
    content: list[dict[str, Any]] = [{"type": "text", "text": text}] if text else []
    if plan.call is not None and finish == "tool_calls":
        called = {"type": "tool_use", "id": head.call_id, "name": plan.call.name}
        content.append(called | {"input": json.loads(plan.call.arguments)})
    body: dict[str, Any] = {
        "id": head.answer_id,
        "type": "message",
        "role": "assistant",
        "content": content,
        "model": head.model,
        "stop_reason": STOP_REASONS.get(finish),
    }
    if usage is not None:
        body["usage"] = _usage(usage)
    return _encode(body)


class MessageStream:
    """The events of one streamed answer. As in vLLM the first event has the prompt's tokens, cached or not, and the
    last but one has them as Anthropic counts them; ``usage_mode`` ``omit`` or ``null`` leaves the latter out."""

    def __init__(self, head: AnswerHead, plan: PlannedOutput, *, usage_mode: UsageMode = "normal") -> None:
        self._head = head
        self._plan = plan
        self._usage_mode = usage_mode
        self._open: str | None = None
        self._index = 0
        self._finish: str | None = None

    def opening(self, usage: UsageNumbers) -> list[bytes]:
        message: dict[str, Any] = {
            "id": self._head.answer_id,
            "type": "message",
            "role": "assistant",
            "content": [],
            "model": self._head.model,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": usage.prompt_tokens, "output_tokens": 0},
        }
        return [_event("message_start", message=message)]

    def tokens(self, start: int, end: int, finish: str | None, usage: UsageNumbers) -> list[bytes]:
        """Events of the tokens ``start``..``end``-1; ``finish`` with the last of them."""
        self._finish = finish or self._finish
        events: list[bytes] = []
        text = self._plan.text(start, end)
        if text:
            events += self._begin("text", {"type": "text", "text": ""})
            events.append(self._delta({"type": "text_delta", "text": text}))
        call, call_at, pieces = self._plan.call, self._plan.call_at, self._plan.arguments
        if call is None or call_at is None or pieces is None or end <= call_at:
            return events
        block = {"type": "tool_use", "id": self._head.call_id, "name": call.name, "input": {}}
        events += self._begin("tool_use", block)
        arguments = "".join(pieces[start:end])
        if arguments:
            events.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
        return events

    def closing(self, usage: UsageNumbers, *, include_usage: bool) -> list[bytes]:
        """The end; usage is always told here."""
        said = {"usage": _usage(usage)} if self._usage_mode == "normal" else {}
        stop = {"stop_reason": STOP_REASONS.get(self._finish or "stop")}
        return [*self._end(), _event("message_delta", delta=stop, **said), _event("message_stop")]

    def _begin(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        if self._open == kind:
            return []
        ended = self._end()
        self._open = kind
        return [*ended, _event("content_block_start", index=self._index, content_block=block)]

    def _end(self) -> list[bytes]:
        if self._open is None:
            return []
        self._open = None
        self._index += 1
        return [_event("content_block_stop", index=self._index - 1)]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(kind: str, **members: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode({"type": kind, **members}))
