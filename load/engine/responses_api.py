"""OpenAI's Responses API as vLLM serves it: read as a chat request, answered in items.

Nothing is stored, as in vLLM without ``VLLM_ENABLE_RESPONSES_API_STORE``: ``store`` is ignored, and a
``previous_response_id`` is never found. Items and tools become what vLLM makes of them
(`services.ingress.responses_items`, which is compared with vLLM's own code); hosted tools are accepted and not shown to
the model. A stream ends with ``response.completed`` whatever the status in it; there is no ``[DONE]``.
"""

from __future__ import annotations

from typing import Any

import msgspec

from load.engine.api import ApiError, ChatBody, CommonBody, common_fields
from load.engine.misbehave import UsageMode
from load.engine.outputs import PlannedOutput
from load.engine.responses import AnswerHead, UsageNumbers
from services.ingress.errors import TemplateError
from services.ingress.responses_items import from_responses, responses_functions

_encode = msgspec.json.encode


class ResponsesBody(CommonBody, kw_only=True):
    """``POST /v1/responses``."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    store: bool | None = None
    metadata: dict[str, Any] | None = None

    def as_chat(self) -> ChatBody:
        """The chat request that vLLM makes of it. Raises `ApiError`."""
        if self.previous_response_id is not None:
            raise ApiError(
                f"Response with id '{self.previous_response_id}' not found.",
                status=404,
                kind="invalid_request_error",
                param="response_id",
            )
        items: list[Any] = [self.input] if isinstance(self.input, str) else self.input
        _check(items, self.tools or [])
        try:
            messages = from_responses(self.instructions, items)
            functions = responses_functions(self.tools or [])
        except TemplateError as error:
            raise ApiError(f"input: {error}", param="input") from error
        fields = common_fields(self) | {"max_tokens": self.max_output_tokens, "n": None}
        return ChatBody(**fields, messages=messages, tools=functions or None, tool_choice=_choice(self.tool_choice))


def _check(items: list[Any], tools: list[dict[str, Any]]) -> None:
    """What vLLM's own types refuse. Raises `ApiError`."""
    contents = [item.get(name) for item in items if isinstance(item, dict) for name in ("content", "output")]
    if not all(isinstance(part, dict) for content in contents if isinstance(content, list) for part in content):
        raise ApiError("input: the parts of a content must be objects", param="input")
    if not all(isinstance(tool.get("name"), str) for tool in tools if tool.get("type", "function") == "function"):
        raise ApiError("tools: a function needs a name", param="tools")


def _choice(choice: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(choice, dict):
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _usage(usage: UsageNumbers) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.created_tokens or 0,
            "input_tokens_per_turn": [],
            "cached_tokens_per_turn": [],
        },
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {
            "reasoning_tokens": 0,
            "tool_output_tokens": 0,
            "output_tokens_per_turn": [],
            "tool_output_tokens_per_turn": [],
        },
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _response(
    head: AnswerHead, body: ResponsesBody, status: str, output: list[dict[str, Any]], usage: UsageNumbers | None
) -> dict[str, Any]:
    return {
        "id": head.answer_id,
        "created_at": head.created,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": body.instructions,
        "metadata": body.metadata,
        "model": head.model,
        "object": "response",
        "output": output,
        "parallel_tool_calls": True,
        "temperature": 1.0,
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": 1.0,
        "background": False,
        "max_output_tokens": body.max_output_tokens,
        "previous_response_id": None,
        "service_tier": "auto",
        "status": status,
        "truncation": "disabled",
        "usage": None if usage is None else _usage(usage),
        "user": None,
    }


def _message(item_id: str, text: str, status: str) -> dict[str, Any]:
    content: list[dict[str, Any]] = (
        [{"annotations": [], "text": text, "type": "output_text", "logprobs": None}] if text else []
    )
    return {"id": item_id, "content": content, "role": "assistant", "status": status, "type": "message"}


def _call(head: AnswerHead, name: str, arguments: str, status: str) -> dict[str, Any]:
    return {
        "arguments": arguments,
        "call_id": head.call_id,
        "name": name,
        "type": "function_call",
        "id": f"fc_{head.call_id}",
        "status": status,
    }


def whole_response(
    head: AnswerHead, body: ResponsesBody, plan: PlannedOutput, finish: str, usage: UsageNumbers | None
) -> bytes:
    """The body of an answer that is not streamed."""
    text = plan.text(0, len(plan.tokens))
    output = [_message(f"msg_{head.answer_id}", text, "completed")] if text else []
    if plan.call is not None and finish == "tool_calls":
        output.append(_call(head, plan.call.name, plan.call.arguments, "completed"))
    status = "incomplete" if finish == "length" else "completed"
    return _encode(_response(head, body, status, output, usage))


class ResponseStream:
    """The events of one streamed answer, numbered; ``usage_mode`` ``omit`` or ``null``: it has no usage."""

    def __init__(
        self, head: AnswerHead, body: ResponsesBody, plan: PlannedOutput, *, usage_mode: UsageMode = "normal"
    ) -> None:
        self._head = head
        self._body = body
        self._plan = plan
        self._usage_mode = usage_mode
        self._number = 0
        self._said: list[str] = []
        self._open: str | None = None
        self._done: list[dict[str, Any]] = []
        self._finish: str | None = None

    def opening(self, usage: UsageNumbers) -> list[bytes]:
        response = _response(self._head, self._body, "in_progress", [], None)
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def tokens(self, start: int, end: int, finish: str | None, usage: UsageNumbers) -> list[bytes]:
        """Events of the tokens ``start``..``end``-1; ``finish`` with the last of them."""
        self._finish = finish or self._finish
        events: list[bytes] = []
        text = self._plan.text(start, end)
        if text:
            events += self._begin("message")
            self._said.append(text)
            events.append(self._item_event("response.output_text.delta", content_index=0, delta=text, logprobs=[]))
        call, call_at, pieces = self._plan.call, self._plan.call_at, self._plan.arguments
        if call is None or call_at is None or pieces is None or end <= call_at:
            return events
        events += self._begin("function_call")
        arguments = "".join(pieces[start:end])
        if arguments:
            self._said.append(arguments)
            events.append(self._item_event("response.function_call_arguments.delta", delta=arguments))
        return events

    def closing(self, usage: UsageNumbers, *, include_usage: bool) -> list[bytes]:
        """The end; usage is always told here."""
        events = self._end()
        status = "incomplete" if self._finish == "length" else "completed"
        told = usage if self._usage_mode == "normal" else None
        response = _response(self._head, self._body, status, self._done, told)
        return [*events, self._event("response.completed", response=response)]

    @property
    def _item_id(self) -> str:
        return f"fc_{self._head.call_id}" if self._open == "function_call" else f"msg_{self._head.answer_id}"

    def _begin(self, kind: str) -> list[bytes]:
        if self._open == kind:
            return []
        events = self._end()
        self._open = kind
        return [*events, *self._begin_call()] if kind == "function_call" else [*events, *self._begin_message()]

    def _begin_message(self) -> list[bytes]:
        item = _message(self._item_id, "", "in_progress")
        part = {"annotations": [], "text": "", "type": "output_text", "logprobs": []}
        return [
            self._event("response.output_item.added", output_index=len(self._done), item=item),
            self._item_event("response.content_part.added", content_index=0, part=part),
        ]

    def _begin_call(self) -> list[bytes]:
        assert self._plan.call is not None
        item = _call(self._head, self._plan.call.name, "", "in_progress")
        return [self._event("response.output_item.added", output_index=len(self._done), item=item)]

    def _end(self) -> list[bytes]:
        """What closes the open item."""
        if self._open is None:
            return []
        whole = "".join(self._said)
        if self._open == "message":
            item = _message(self._item_id, whole, "completed")
            events = [
                self._item_event("response.output_text.done", content_index=0, logprobs=[], text=whole),
                self._item_event("response.content_part.done", content_index=0, part=item["content"][0]),
            ]
        else:
            assert self._plan.call is not None
            item = _call(self._head, self._plan.call.name, whole, "completed")
            done = {"arguments": whole, "name": self._plan.call.name}
            events = [self._item_event("response.function_call_arguments.done", **done)]
        events.append(self._event("response.output_item.done", output_index=len(self._done), item=item))
        self._done.append(item)
        self._said.clear()
        self._open = None
        return events

    def _item_event(self, kind: str, **members: Any) -> bytes:
        return self._event(kind, item_id=self._item_id, output_index=len(self._done), **members)

    def _event(self, kind: str, **members: Any) -> bytes:
        event = {**members, "sequence_number": self._number, "type": kind}
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(event))
