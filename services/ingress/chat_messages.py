"""Chat messages as a chat template gets them: what vLLM does to them before it renders (``renderers/chat_utils.py``).

Each message is made anew of the members that vLLM knows; content becomes one text, or parts where the template loops
over them; arguments of calls become objects; a developer is the system to a template that knows none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from services.ingress.contents import BILLING_LINE, Dialect, is_object, parts_of, text_of, texts_of, type_of
from services.ingress.errors import TemplateError

_PLAIN = ("user", "assistant")
_REFERENCE = "tool_reference"
_SAID_BESIDE = ("name", "task")


def prepared(
    messages: Sequence[Mapping[str, Any]], dialect: Dialect, *, loops_over_parts: bool, knows_developer: bool
) -> list[Mapping[str, Any]]:
    """``messages`` as the template gets them from an engine of this ``dialect``; SGLang leaves system messages and
    developers as they are. Raises `TemplateError` for what is no text."""
    made = [_prepared(message, dialect, loops_over_parts) for message in messages]
    if knows_developer or dialect == "sglang" or "developer" not in [message["role"] for message in made]:
        return made
    return _one_system([_as_system(message) for message in made])


def _prepared(message: Mapping[str, Any], dialect: Dialect, loops_over_parts: bool) -> Mapping[str, Any]:
    role, content = message.get("role"), message.get("content")
    if len(message) == 2 and role in _PLAIN and type(content) is str and not loops_over_parts:
        return message  # as nearly all are: nothing in it would change
    if role == "system" and dialect == "vllm":
        content = _without_billing_line(content)
    said: dict[str, Any] = {"role": role}
    if role == "tool":
        said |= {"content": _result(content, loops_over_parts), "tool_call_id": message.get("tool_call_id")}
    else:
        said["content"] = _parts(content) if loops_over_parts else "\n".join(texts_of(content))
    if role == "assistant":
        said |= _of_assistant(message)
    if role == "developer":
        said["tools"] = message.get("tools")
    for name in _SAID_BESIDE:
        if isinstance(message.get(name), str):
            said[name] = message[name]
    return said


def _parts(content: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts_of(content)]


def _result(content: Any, loops_over_parts: bool) -> Any:
    """A tool's result is one text, also to a template that loops over parts, but for names of tools: they stay parts
    there."""
    parts = parts_of(content)
    named = [str(part.get("name")) if type_of(part) == _REFERENCE else None for part in parts]
    if not any(named):
        return "\n".join(texts_of(content))
    shown = [(text_of(part) or "" if name is None else name, name) for part, name in zip(parts, named, strict=True)]
    if not loops_over_parts:
        return "\n".join(text for text, _ in shown)
    return [
        {"type": "text", "text": text} if name is None else {"type": _REFERENCE, "name": name} for text, name in shown
    ]


def _of_assistant(message: Mapping[str, Any]) -> dict[str, Any]:
    """Its thought, under both names by which templates know it, and its calls."""
    thought = message.get("reasoning")
    if thought is None:
        thought = message.get("reasoning_content")
    said = {} if thought is None else {"reasoning": thought, "reasoning_content": thought}
    calls = message.get("tool_calls")
    if not calls:
        return said
    if not isinstance(calls, list):
        raise TemplateError("tool_calls is not a list")
    return said | {"tool_calls": [_with_arguments(call) for call in calls]}


def _with_arguments(call: Any) -> Any:
    """A call whose arguments are an object: those that are none of JSON are taken for an empty one."""
    function = call.get("function") if is_object(call) else None
    if not is_object(function):
        raise TemplateError("a tool call is not of a function")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and arguments:
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = {}
    return call | {"function": function | {"arguments": arguments if is_object(arguments) else {}}}


def _without_billing_line(content: Any) -> list[Any]:
    """A system message without Claude Code's attribution line; what follows it in the same text stays."""
    kept = []
    for part in parts_of(content):
        text = part if isinstance(part, str) else part.get("text") if type_of(part) == "text" else None
        if not isinstance(text, str) or not text.startswith(BILLING_LINE):
            kept.append(part)
            continue
        rest = text.partition("\n")[2]
        if rest:
            kept.append(rest)
    return kept


def _as_system(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if message.get("role") != "developer":
        return message
    return {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}


def _one_system(messages: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """All system messages as one at the beginning, unless there is but one, and it is there."""
    system = [message for message in messages if message.get("role") == "system"]
    if len(system) == 1 and messages[0] is system[0]:
        return messages
    texts = ["\n".join(texts_of(message.get("content"))) for message in system]
    others = [message for message in messages if message.get("role") != "system"]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]
