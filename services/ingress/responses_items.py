"""Items of Responses as chat messages: messages, reasoning, calls of tools and their output."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from services.ingress.contents import is_object, texts_of, type_of
from services.ingress.errors import TemplateError

Message = dict[str, Any]

NAMESPACE = "__"
"""What vLLM puts between the name of a namespace of tools (Codex has some) and a function's own."""

_CUSTOM = {
    "type": "object",
    "properties": {"input": {"type": "string", "description": "The freeform text payload for this tool."}},
    "required": ["input"],
    "additionalProperties": False,
}
"""The schema under which vLLM shows a custom tool: a function of one text."""


def from_responses(instructions: Any, items: list[Any]) -> list[Message]:
    """The chat messages of ``instructions`` and ``input``. Raises `TemplateError` for items that no engine takes."""
    said: list[Message] = []
    if isinstance(instructions, str) and instructions:
        said.append({"role": "system", "content": instructions})
    first = len(said)
    for item in items:
        if isinstance(item, str):
            said.append({"role": "user", "content": item})
            continue
        if not is_object(item):
            raise TemplateError("an input item is not an object")
        kind = type_of(item) or "message"
        build = _ITEMS.get(kind)
        if build is None:
            raise TemplateError(f"input items of type {kind} cannot be counted here")
        before = said[-1] if len(said) > first and said[-1].get("role") == "assistant" else None
        said += build(item, before)
    return said


def is_continued(items: list[Any]) -> bool:
    """Whether the last item is unfinished, so that the model goes on with it."""
    last = items[-1] if items else None
    if not is_object(last) or last.get("type", "message") not in ("message", "reasoning"):
        return False
    return last.get("status") in ("in_progress", "incomplete")


def _message(item: Message, before: Message | None) -> list[Message]:
    """Of an assistant's message the first text; it joins a message that has none yet."""
    role, content = item.get("role"), item.get("content")
    if role != "assistant" or not content:
        return [{"role": role, "content": content, **({"name": item["name"]} if "name" in item else {})}]
    text = content if isinstance(content, str) else next(iter(texts_of(content)), "")
    return _joined(before, "content", text)


def _reasoning(item: Message, before: Message | None) -> list[Message]:
    """The first text of a thought, or of its summary; it joins a message that has none yet."""
    if item.get("encrypted_content"):
        raise TemplateError("encrypted reasoning cannot be counted here")
    texts = [part.get("text") for part in (item.get("content") or item.get("summary") or ()) if is_object(part)]
    return _joined(before, "reasoning", str(texts[0]) if texts else "")


def _joined(before: Message | None, member: str, text: str) -> list[Message]:
    """``text`` as ``member`` of the assistant's message before, where it has none, or of a new one."""
    if before is not None and before.get(member) is None:
        before[member] = text
        return []
    return [{"role": "assistant", member: text}]


def _call(item: Message, before: Message | None) -> list[Message]:
    """Calls that follow each other belong to one assistant message."""
    name, arguments = item.get("name"), item.get("arguments")
    if type_of(item) == "custom_tool_call":
        arguments = json.dumps({"input": item.get("input") or ""}, ensure_ascii=False)
    elif item.get("namespace"):
        name = f"{item['namespace']}{NAMESPACE}{name}"
    function = {"name": name, "arguments": arguments}
    call = {"id": item.get("call_id"), "function": function, "type": "function"}
    if before is None:
        return [{"role": "assistant", "tool_calls": [call]}]
    before.setdefault("tool_calls", []).append(call)
    return []


def _output(item: Message, before: Message | None) -> list[Message]:
    return [{"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}]


_ITEMS: dict[str, Callable[[Message, Message | None], list[Message]]] = {
    "message": _message,
    "function_call": _call,
    "custom_tool_call": _call,
    "function_call_output": _output,
    "custom_tool_call_output": _output,
    "reasoning": _reasoning,
}


def responses_functions(tools: list[Any]) -> list[Any]:
    """The functions that a model sees, in chat's shape: functions, those of namespaces, custom tools."""
    return [{"type": "function", "function": each} for tool in tools for each in _functions(tool)]


def _functions(tool: Any) -> list[dict[str, Any]]:
    if not is_object(tool):
        raise TemplateError("a tool is not an object")
    kind = tool.get("type", "function")
    if kind == "function":
        return [tool]
    if kind == "custom":
        return [{"name": tool.get("name"), "description": tool.get("description"), "parameters": _CUSTOM}]
    named = tool.get("tools") if kind == "namespace" else None
    return [
        each | {"name": f"{tool.get('name')}{NAMESPACE}{each.get('name')}"}
        for each in (named if isinstance(named, list) else ())
        if is_object(each) and each.get("type") == "function"
    ]
