"""What an engine is asked for a prompt's tokens: a body of its ``/tokenize``, which shall make of a prompt what the
engine makes of the request itself.

Their ``/tokenize`` is not quite their chat (vLLM 0.32, SGLang 0.5.23, as read): vLLM renames a message's
``reasoning_content`` in a chat and passes over it here; SGLang prepares messages as for a chat only where nobody says
``add_generation_prompt``, and refuses that member for templates of its own.
"""

from __future__ import annotations

from typing import Any

import msgspec

from schemas.base import UNDECODABLE
from services.ingress.canonical import conversation_of, template_options
from services.ingress.contents import Dialect, is_object
from services.ingress.endpoints import ChatPrompt, TextPrompt

OLD_THOUGHT, THOUGHT = "reasoning_content", "reasoning"
"""The name under which a message brings its thought back, and the one that vLLM has for it now."""

_any = msgspec.json.Decoder()


def goes_as_it_came(prompt: ChatPrompt | TextPrompt, dialect: Dialect) -> bool:
    """Whether `tokenize_body` has nothing to decode, and is done at once."""
    if isinstance(prompt, TextPrompt):
        return True
    return prompt.api == "chat" and not (dialect == "vllm" and any(map(_has_old_thought, prompt.messages)))


def tokenize_body(model: str, prompt: ChatPrompt | TextPrompt, dialect: Dialect) -> bytes:
    """The body, around the client's own bytes where they can stay. Raises `TemplateError` for messages of another API
    than chat that cannot be said in its shape."""
    encoded_model = msgspec.json.encode(model)
    if isinstance(prompt, TextPrompt):
        special = b"true" if prompt.add_special_tokens else b"false"
        text = msgspec.json.encode(prompt.text)
        return b'{"model":%b,"prompt":%b,"add_special_tokens":%b}' % (encoded_model, text, special)
    if prompt.api == "chat":
        messages, tools, continues = _messages(prompt, dialect), _joined(prompt.tools), prompt.continue_final_message
    else:
        conversation = conversation_of(prompt, dialect)
        messages = msgspec.json.encode(conversation.messages)
        tools = msgspec.json.encode(conversation.tools) if conversation.tools else b""
        continues = conversation.continues
    members = [b'"model":' + encoded_model, b'"messages":' + messages]
    if tools:
        members.append(b'"tools":' + tools)
    members += [b'"%b":%b' % (name.encode(), msgspec.json.encode(value)) for name, value in _options(prompt, dialect)]
    if continues:
        members.append(b'"continue_final_message":true')
    if dialect == "vllm":
        goes_on = prompt.add_generation_prompt and not continues
        members.append(b'"add_generation_prompt":%b' % (b"true" if goes_on else b"false"))
    return b"{%b}" % b",".join(members)


def _options(prompt: ChatPrompt, dialect: Dialect) -> list[tuple[str, Any]]:
    """What the template is told. SGLang knows itself what an effort means to its model's template."""
    if dialect == "sglang" and prompt.api == "chat":
        given = [("chat_template_kwargs", prompt.template_kwargs), ("reasoning_effort", prompt.effort)]
        return [(name, value) for name, value in given if value is not None]
    options = template_options(prompt)
    return [("chat_template_kwargs", options)] if options else []


def _messages(prompt: ChatPrompt, dialect: Dialect) -> bytes:
    if goes_as_it_came(prompt, dialect):
        return _joined(prompt.messages) or b"[]"
    return b"[%b]" % b",".join(map(_renamed, prompt.messages))


def _joined(items: tuple[msgspec.Raw, ...]) -> bytes:
    return b"[%b]" % b",".join(map(bytes, items)) if items else b""


def _has_old_thought(message: msgspec.Raw) -> bool:
    return OLD_THOUGHT.encode() in bytes(message)


def _renamed(message: msgspec.Raw) -> bytes:
    """A message as vLLM's chat reads it: the new name where only the old one says something."""
    raw = bytes(message)
    if not _has_old_thought(message):
        return raw
    try:
        said = _any.decode(raw)
    except UNDECODABLE:
        return raw
    if not is_object(said):
        return raw
    thought = said.pop(OLD_THOUGHT, None)
    if thought is not None and said.get(THOUGHT) is None:
        said[THOUGHT] = thought
    return msgspec.json.encode(said)
