"""Messages of any API as chat messages, in the order in which a model sees them: tools, system, messages.

What is not visible to the model is left out, so that two requests differ only where the model would see a difference
(spec: harness.md §6.3): cache marks, item ids, client metadata; a text and a list of one text are the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from schemas.base import UNDECODABLE
from services.ingress.endpoints import ChatPrompt
from services.ingress.errors import TemplateError

BILLING_LINE = "x-anthropic-billing-header:"
"""How Claude Code's attribution block begins; it differs from session to session (harness.md §2)."""

_any = msgspec.json.Decoder()
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text"})


@dataclass(frozen=True, slots=True)
class Conversation:
    """Chat messages and tools, decoded."""

    messages: list[dict[str, Any]]
    tools: list[Any]


def conversation_of(prompt: ChatPrompt, *, drop_billing_line: bool = False) -> Conversation:
    """``prompt`` in chat's shape. Raises `TemplateError` for what cannot be said in text."""
    try:
        messages = [_any.decode(message) for message in prompt.messages]
        tools = [_any.decode(tool) for tool in prompt.tools]
        system = None if prompt.system is None else _any.decode(prompt.system)
    except UNDECODABLE as error:
        raise TemplateError(f"the messages cannot be decoded: {error}") from error
    if prompt.api == "chat":
        if not all(isinstance(message, dict) for message in messages):
            raise TemplateError("a message is not an object")
        return Conversation(messages, tools)
    if prompt.api == "messages":
        return Conversation(_from_anthropic(system, messages, drop_billing_line), [_function(tool) for tool in tools])
    return Conversation(_from_responses(system, messages), [_function(tool) for tool in tools])


def _function(tool: Any) -> Any:
    """A tool in chat's shape: Anthropic and Responses have its members at the top."""
    if not isinstance(tool, dict) or "name" not in tool:
        return tool
    parameters = tool.get("input_schema", tool.get("parameters"))
    return {
        "type": "function",
        "function": {"name": tool["name"], "description": tool.get("description"), "parameters": parameters},
    }


def _text(content: Any) -> str:
    """All text of a content, parts joined by a line break."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise TemplateError("content is neither a text nor a list of parts")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise TemplateError(f"only text can be counted here, not {kind}")
    return "\n".join(texts)


# Anthropic


def _from_anthropic(system: Any, messages: list[Any], drop_billing_line: bool) -> list[dict[str, Any]]:
    blocks = [{"type": "text", "text": system}] if isinstance(system, str) else system or []
    if drop_billing_line:
        blocks = [block for block in blocks if not _is_billing(block)]
    said = [{"role": "system", "content": _text(blocks)}] if blocks else []
    for message in messages:
        if not isinstance(message, dict):
            raise TemplateError("a message is not an object")
        said += _anthropic_message(str(message.get("role")), message.get("content"))
    return said


def _is_billing(block: Any) -> bool:
    return isinstance(block, dict) and str(block.get("text", "")).startswith(BILLING_LINE)


def _anthropic_message(role: str, content: Any) -> list[dict[str, Any]]:
    """One message as one or several: each tool result is a message of its own, before the text beside it."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    results: list[dict[str, Any]] = []
    texts: list[Any] = []
    calls: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            results.append(
                {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _text(block.get("content"))}
            )
        elif kind in ("tool_use", "server_tool_use"):
            function = {"name": block.get("name"), "arguments": block.get("input") or {}}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind not in ("thinking", "redacted_thinking"):
            texts.append(block)
    message: dict[str, Any] = {"role": role, "content": _text(texts)}
    if calls:
        message["tool_calls"] = calls
    return [*results, message] if texts or calls or not results else results


# Responses


def _from_responses(instructions: Any, items: list[Any]) -> list[dict[str, Any]]:
    said: list[dict[str, Any]] = []
    if isinstance(instructions, str) and instructions:
        said.append({"role": "system", "content": instructions})
    for item in items:
        if isinstance(item, str):
            said.append({"role": "user", "content": item})
            continue
        if not isinstance(item, dict):
            raise TemplateError("an input item is not an object")
        kind = item.get("type") or "message"
        build = _ITEMS.get(kind)
        if build is None:
            raise TemplateError(f"input items of type {kind} cannot be counted here")
        build(item, said)
    return said


def _message_item(item: dict[str, Any], said: list[dict[str, Any]]) -> None:
    role = item.get("role")
    said.append({"role": "system" if role == "developer" else role, "content": _text(item.get("content"))})


def _call_item(item: dict[str, Any], said: list[dict[str, Any]]) -> None:
    """Calls that follow each other belong to one assistant message."""
    arguments = item.get("arguments", item.get("input"))
    call = {
        "id": item.get("call_id"),
        "type": "function",
        "function": {"name": item.get("name"), "arguments": arguments},
    }
    if said and said[-1].get("role") == "assistant":
        said[-1].setdefault("tool_calls", []).append(call)
    else:
        said.append({"role": "assistant", "content": "", "tool_calls": [call]})


def _output_item(item: dict[str, Any], said: list[dict[str, Any]]) -> None:
    said.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(item.get("output"))})


def _nothing(item: dict[str, Any], said: list[dict[str, Any]]) -> None:
    """Reasoning of earlier turns is not shown to the model again."""


_ITEMS: dict[str, Callable[[dict[str, Any], list[dict[str, Any]]], None]] = {
    "message": _message_item,
    "function_call": _call_item,
    "custom_tool_call": _call_item,
    "function_call_output": _output_item,
    "custom_tool_call_output": _output_item,
    "reasoning": _nothing,
}
