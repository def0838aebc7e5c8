"""Messages of any API as chat messages, in the order in which a model sees them: tools, system, messages.

What is not visible to the model is left out, so that two requests differ only where the model would see a difference
(spec: harness.md §6.3): cache marks, item ids, client metadata; a text and a list of one text are the same. The
reference is the engine's own code (vLLM 0.32: ``entrypoints/anthropic/serving.py``,
``entrypoints/openai/responses/utils.py``, ``renderers/online_renderer.py``); tests/real compares with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from schemas.base import UNDECODABLE
from services.ingress.anthropic_messages import anthropic_functions, from_anthropic
from services.ingress.contents import Dialect, is_object
from services.ingress.decoded import Decode, decode_all
from services.ingress.endpoints import ChatPrompt
from services.ingress.errors import TemplateError
from services.ingress.responses_items import from_responses, is_continued, responses_functions

_any = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True)
class Conversation:
    """Chat messages and tools, decoded. ``continues``: the last message is unfinished, the model goes on with it."""

    messages: list[dict[str, Any]]
    tools: list[Any]
    continues: bool = False


def conversation_of(
    prompt: ChatPrompt, dialect: Dialect = "vllm", *, system_first: bool = False, decode: Decode = decode_all
) -> Conversation:
    """``prompt`` in chat's shape, as an engine of this ``dialect`` makes it. ``system_first``: the model's template
    takes no system message but the first. What ``decode`` gives is not changed. Raises `TemplateError` for what cannot
    be said in text."""
    try:
        messages = decode(prompt.messages)
        tools = decode(prompt.tools)
        system = None if prompt.system is None else _any.decode(prompt.system)
    except UNDECODABLE as error:
        raise TemplateError(f"the messages cannot be decoded: {error}") from error
    if prompt.api == "responses":
        shown = [shown_tool(tool) for tool in responses_functions(tools)]
        return Conversation(from_responses(system, messages), shown, is_continued(messages))
    if not all(isinstance(message, dict) for message in messages):
        raise TemplateError("a message is not an object")
    if prompt.api == "chat":
        shown = [shown_tool(tool) for tool in tools] if dialect == "vllm" else tools
        said = messages
        if dialect == "vllm":
            said = [_with_known_calls(message) if "tool_calls" in message else message for message in messages]
        return Conversation(said, shown, prompt.continue_final_message)
    functions = [shown_tool(tool) for tool in anthropic_functions(tools, messages, dialect)]
    return Conversation(from_anthropic(system, messages, dialect, system_first=system_first), functions)


def _with_known_calls(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose calls have their members in vLLM's order: those that it knows first."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not all(is_object(call) and is_object(call.get("function")) for call in calls):
        return message
    known = [_in_order(call, "id", "function", "type") for call in calls]
    for call in known:
        call["function"] = _in_order(call["function"], "arguments", "name")
    return message | {"tool_calls": known}


def _in_order(value: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value[name] for name in names if name in value} | value


def shown_tool(tool: Any) -> Any:
    """A tool as templates get it: the members that engines know, in their order (vLLM's ``FunctionDefinition``)."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        return tool  # the engine will refuse it
    deferred = tool.get("defer_loading")
    shown = {name: function.get(name) for name in ("name", "description", "parameters")}
    beside = {"strict": function.get("strict"), "defer_loading": function.get("defer_loading")}
    if beside["defer_loading"] is None:
        beside["defer_loading"] = deferred
    shown |= {name: value for name, value in beside.items() if value is not None}
    said: dict[str, Any] = {"type": "function", "function": shown}
    return said if deferred is None else said | {"defer_loading": deferred}


def template_options(prompt: ChatPrompt, effort_of_none: str = "none") -> dict[str, Any]:
    """What the chat template is told beside messages and tools: ``chat_template_kwargs``, and the effort that was asked
    for. ``effort_of_none``: what the engine takes for "do not think". Raises `TemplateError`."""
    options = _decoded(prompt.template_kwargs)
    effort = prompt.effort if prompt.thinks else effort_of_none
    if effort is None:
        return options
    return {"enable_thinking": effort != "none"} | options | {"reasoning_effort": effort}


def _decoded(raw: msgspec.Raw | None) -> dict[str, Any]:
    if raw is None:
        return {}
    try:
        decoded = _any.decode(raw)
    except UNDECODABLE as error:
        raise TemplateError(f"chat_template_kwargs cannot be decoded: {error}") from error
    if not is_object(decoded):
        raise TemplateError("chat_template_kwargs is not an object")
    return dict(decoded)
