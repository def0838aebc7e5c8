"""Anthropic's Messages as chat messages: system blocks, thinking, tools, their calls and results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from services.ingress.contents import BILLING_LINE, Dialect, is_object, text_of, texts_of, type_of
from services.ingress.errors import TemplateError

Message = dict[str, Any]

_ROLES = {"ctx": "user", "msg": "user"}
"""Roles of some of Claude Code's messages."""

_UNSEEN = frozenset({"redacted_thinking", "tool_reference", "tool_addition", "tool_removal"})
"""Blocks that no engine shows to the model as part of a message."""


def from_anthropic(
    system: Any, messages: list[Any], dialect: Dialect = "vllm", *, system_first: bool = False
) -> list[Message]:
    """The chat messages of a request. ``system_first``: vLLM moves all system messages into the first, for a template
    that takes no other. Raises `TemplateError` for what is no text."""
    inline = [message for message in messages if message.get("role") == "system"] if dialect == "vllm" else []
    texts = [_system(system, dialect)]
    if system_first:
        texts += [_said_by_system(message.get("content")) for message in inline]
    text = "".join(texts)
    said: list[Message] = [{"role": "system", "content": text}] if text else []
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if role == "system" and dialect == "vllm":
            text = "" if system_first else _said_by_system(content)
            said += [{"role": "system", "content": text}] if text else []
        else:
            said += _message(_ROLES.get(str(role), str(role)), content, dialect)
    return said


def _system(system: Any, dialect: Dialect) -> str:
    """vLLM runs the texts together and leaves Claude Code's attribution line out; SGLang keeps it, and lines apart."""
    if not isinstance(system, list):
        return "".join(texts_of(system))
    if dialect == "sglang":
        return "\n".join(filter(None, texts_of(system)))
    return _said_by_system(system)


def _said_by_system(content: Any) -> str:
    """The texts without Claude Code's attribution line; no other block of the system is shown."""
    texts = texts_of([block for block in content if type_of(block) == "text"] if isinstance(content, list) else content)
    return "".join(text for text in texts if not text.startswith(BILLING_LINE))


def _message(role: str, content: Any, dialect: Dialect) -> list[Message]:
    """One message as one or several: each tool result is a message of its own, before the text beside it."""
    if not isinstance(content, list):
        return [{"role": role, "content": "".join(texts_of(content))}]
    results: list[Message] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in content:
        kind = type_of(block)
        if kind == "tool_result" and role == "user":
            results += _results(block, dialect)
        elif kind == "tool_result":
            texts.append(f"Tool result: {block.get('content') or ''}")
        elif kind in ("tool_use", "server_tool_use"):
            function = {"arguments": json.dumps(block.get("input") or {}), "name": block.get("name") or ""}
            calls.append({"id": block.get("id"), "function": function, "type": "function"})
        elif kind == "thinking":
            thoughts += [block["thinking"]] if isinstance(block.get("thinking"), str) else []
        elif kind not in _UNSEEN:
            texts += filter(None, [text_of(block)])
    message: Message = {"role": role}
    if thoughts and dialect == "vllm":
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    if texts:
        message["content"] = texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]
    is_seen = bool(texts) or (role != "user" and (bool(calls) or dialect == "vllm"))
    return [*results, message] if is_seen else results


def _results(block: dict[str, Any], dialect: Dialect) -> Iterator[Message]:
    """A tool's result as its texts, and in vLLM the tools that it names as a message after them."""
    content, call = block.get("content"), block.get("tool_use_id")
    if not isinstance(content, list):
        yield {"role": "tool", "tool_call_id": call, "content": "".join(texts_of(content))}
        return
    names: list[str] = []
    texts: list[str] = []
    for item in content:
        kind = type_of(item)
        if kind == "tool_reference":
            names += filter(None, [item.get("tool_name") or item.get("name")])
        elif kind == "text":
            texts.append(str(item.get("text") or ""))
        else:
            raise TemplateError(f"only text can be counted here, not {kind or type(item).__name__}")
    yield {"role": "tool", "tool_call_id": call, "content": "\n".join(texts)}
    if names and dialect == "vllm":
        named = [{"type": "tool_reference", "name": name} for name in names]
        yield {"role": "tool", "tool_call_id": call, "content": named}


def anthropic_functions(tools: list[Any], messages: list[Any], dialect: Dialect = "vllm") -> list[Any]:
    """The tools in chat's shape: those that are in effect at the end of the conversation."""
    if dialect == "vllm":
        tools = _in_effect(tools, messages)
    missing = "" if dialect == "sglang" else None
    return [_function(tool, missing) for tool in tools]


def _function(tool: Any, missing: str | None) -> Any:
    """``missing``: a description that is not there."""
    if not is_object(tool) or "name" not in tool:
        return tool
    schema = tool.get("input_schema")
    if is_object(schema) and "type" not in schema and missing is None:
        schema = schema | {"type": "object"}
    function = {
        "name": tool["name"],
        "description": tool.get("description", missing),
        "parameters": schema,
        "strict": tool.get("strict"),
        "defer_loading": tool.get("defer_loading"),
    }
    return {"type": "function", "function": function}


def _in_effect(tools: list[Any], messages: list[Any]) -> list[Any]:
    """``tools`` after what the system's messages add and take away."""
    changes = [
        block
        for message in messages
        if message.get("role") == "system" and isinstance(message.get("content"), list)
        for block in message["content"]
        if type_of(block) in ("tool_addition", "tool_removal") and is_object(block.get("tool"))
    ]
    if not changes:
        return tools
    known = {str(tool.get("name")): tool for tool in tools if is_object(tool)}
    removed: set[str] = set()
    for block in changes:
        change = block["tool"]
        definition = change.get("definition")
        name = str((definition if is_object(definition) else change).get("name"))
        if is_object(definition):
            known[name] = definition
        elif name not in known:
            raise TemplateError(f"{type_of(block)} names the tool {name}, which is not there")
        elif type_of(block) == "tool_addition":
            known[name] = known[name] | {"defer_loading": None}
        if type_of(block) == "tool_removal":
            removed.add(name)
        else:
            removed.discard(name)
    return [tool for name, tool in known.items() if name not in removed]
