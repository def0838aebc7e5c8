"""Messages of any API as chat messages, in the order in which a model sees them: tools, system, messages.

What is not visible to the model is left out, so that two requests differ only where the model would see a difference
(spec: harness.md §6.3): cache marks, item ids, client metadata; a text and a list of one text are the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from schemas.base import UNDECODABLE
from services.ingress.endpoints import ChatPrompt
from services.ingress.errors import TemplateError

BILLING_LINE = "x-anthropic-billing-header:"
"""How Claude Code's attribution block begins; it differs from session to session (harness.md §2, user-cases C5)."""

Dialect = Literal["vllm", "sglang"]
"""Whose way of making chat messages of Anthropic's: vLLM's or SGLang's (their ``entrypoints/anthropic/serving.py``)."""

NAMESPACE = "__"
"""What vLLM puts between the name of a namespace of tools (Codex has some) and a function's own."""

_ROLES = {"ctx": "user", "msg": "user"}
"""Roles of some of Claude Code's messages."""

_any = msgspec.json.Decoder()
TEXT_PARTS = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text"})


@dataclass(frozen=True, slots=True)
class Conversation:
    """Chat messages and tools, decoded."""

    messages: list[dict[str, Any]]
    tools: list[Any]


def type_of(value: Any) -> str:
    """The ``type`` of a part or an item; empty where there is none that is a text."""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else ""


def conversation_of(prompt: ChatPrompt, dialect: Dialect = "vllm") -> Conversation:
    """``prompt`` in chat's shape, as an engine of this ``dialect`` makes it. Raises `TemplateError` for what cannot be
    said in text."""
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
        missing = "" if dialect == "sglang" else None
        functions = [_function(tool, "input_schema", missing) for tool in tools]
        return Conversation(_from_anthropic(system, messages, dialect), functions)
    shown = [_function(each, "parameters", None) for tool in tools for each in _functions(tool)]
    return Conversation(_from_responses(system, messages), shown)


def _functions(tool: Any) -> list[Any]:
    """The functions in a tool of Responses: itself, those of a namespace, or none (a model sees no others)."""
    if not isinstance(tool, dict) or tool.get("type", "function") == "function":
        return [tool]
    named = tool.get("tools") if tool.get("type") == "namespace" else None
    if not isinstance(named, list):
        return []
    return [
        {**each, "name": f"{tool.get('name')}{NAMESPACE}{each.get('name')}"}
        for each in named
        if isinstance(each, dict) and each.get("type") == "function"
    ]


def _function(tool: Any, schema: str, missing: str | None) -> Any:
    """A tool in chat's shape: Anthropic and Responses have its members at the top. ``missing``: a description that is
    not there."""
    if not isinstance(tool, dict) or "name" not in tool:
        return tool
    description = tool.get("description", missing)
    return {
        "type": "function",
        "function": {"name": tool["name"], "description": description, "parameters": tool.get(schema)},
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
        elif type_of(part) in TEXT_PARTS and isinstance(part.get("text"), str):
            texts.append(part["text"])
        else:
            raise TemplateError(f"only text can be counted here, not {type_of(part) or type(part).__name__}")
    return "\n".join(texts)


# Anthropic


def _from_anthropic(system: Any, messages: list[Any], dialect: Dialect) -> list[dict[str, Any]]:
    text = _system(system, dialect)
    said = [{"role": "system", "content": text}] if text else []
    for message in messages:
        if not isinstance(message, dict):
            raise TemplateError("a message is not an object")
        said += _anthropic_message(str(message.get("role")), message.get("content"), dialect)
    return said


def _system(system: Any, dialect: Dialect) -> str:
    """vLLM runs the texts together and leaves Claude Code's attribution line out; SGLang keeps it, and lines apart."""
    if not isinstance(system, list):
        return _text(system)
    texts = [_text([block]) for block in system]
    if dialect == "sglang":
        return "\n".join(text for text in texts if text)
    return "".join(text for text in texts if not text.startswith(BILLING_LINE))


def _anthropic_message(role: str, content: Any, dialect: Dialect) -> list[dict[str, Any]]:
    """One message as one or several: each tool result is a message of its own, before the text beside it."""
    role = _ROLES.get(role, role)
    if not isinstance(content, list):
        return [{"role": role, "content": _text(content)}]
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in content:
        kind = type_of(block)
        if kind == "tool_result":
            results.append(
                {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": _text(block.get("content"))}
            )
        elif kind in ("tool_use", "server_tool_use"):
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":
            texts += filter(None, [_text([block])])
    message: dict[str, Any] = {"role": role, "content": _parts(texts)}
    thought = "".join(thoughts)
    if thought and dialect == "vllm":  # under both names by which templates know it
        message |= {"reasoning": thought, "reasoning_content": thought}
    if calls:
        message["tool_calls"] = calls
    is_seen = bool(texts or calls) or (role != "user" and dialect == "vllm")
    return [*results, message] if is_seen else results


def _parts(texts: list[str]) -> Any:
    """One text as it is, several as parts: how they are joined is the template's."""
    if len(texts) > 1:
        return [{"type": "text", "text": text} for text in texts]
    return texts[0] if texts else ""


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
        kind = type_of(item) or "message"
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
    name = item.get("name")
    if item.get("namespace"):
        name = f"{item['namespace']}{NAMESPACE}{name}"
    call = {
        "id": item.get("call_id"),
        "type": "function",
        "function": {"name": name, "arguments": arguments},
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
