"""What a request's body says of who sent it and why: weak identity, tells of side requests, what it answers.

Messages stay views of the client's own bytes; only their roles and types are read.
"""

from __future__ import annotations

import msgspec

from schemas.base import UNDECODABLE
from schemas.session import InputTrigger
from services.ingress.identity import BodyFacts, Signals
from services.ingress.members import NULL, USUAL_BYTES, member, text

ONE_SHOT_MESSAGES = 8
"""A side request has few messages; a longer list is never looked through for one."""

MAX_FIELD_CHARACTERS = 8192
"""A longer identity field counts as absent: it would be in every fact of its request. Harnesses send below 1,000."""

TITLE_TELL = b'"Generate a title for this conversation'
"""How OpenCode's title request begins (harness.md §4)."""

TOOL_RESULT = b'"tool_result"'
"""What a large content of a message is searched for, in place of its blocks; within a text the quotes are escaped."""


class Told(msgspec.Struct, kw_only=True):
    """The members of any API's body that are read for this."""

    tools: list[msgspec.Raw] | None = None
    metadata: msgspec.Raw = NULL
    client_metadata: msgspec.Raw = NULL
    prompt_cache_key: msgspec.Raw = NULL


class _Head(msgspec.Struct):
    """A message or input item, as far as its role and type."""

    role: str = ""
    type: str = ""
    content: msgspec.Raw = msgspec.Raw(b"null")


class _Block(msgspec.Struct):
    type: str = ""


_head = msgspec.json.Decoder(_Head)
_blocks = msgspec.json.Decoder(list[_Block])
_NO_HEAD = _Head()


def message_facts(
    body: Told, messages: list[msgspec.Raw], trigger: InputTrigger, output_format: str | None = None
) -> BodyFacts:
    """All that the members of ``body`` and its ``messages`` say; nothing in them makes a request bad."""
    one_shot = len(messages) <= ONE_SHOT_MESSAGES and all(_is_input(_read_head(message)) for message in messages)
    return BodyFacts(
        has_tools=bool(body.tools),
        one_shot=one_shot,
        title_asked=one_shot and not body.tools and any(TITLE_TELL in bytes(message) for message in messages),
        output_format=output_format,
        input_trigger=trigger,
        fields=identity_fields(body),
    )


def identity_fields(body: Told) -> Signals:
    """Weak identity: only texts, trimmed, that are printable and at most `MAX_FIELD_CHARACTERS` long."""
    found = {
        "codex_session": text(member(body.client_metadata, "session_id")),
        "codex_thread": text(member(body.client_metadata, "thread_id")),
        "codex_turn_metadata": text(member(body.client_metadata, "x-codex-turn-metadata")),
        "user_session": _user_session(text(member(body.metadata, "user_id"))),
        "prompt_cache_key": text(body.prompt_cache_key),
    }
    return {
        name: value.strip()
        for name, value in found.items()
        if value is not None and len(value) <= MAX_FIELD_CHARACTERS and value.strip() and value.isprintable()
    }


def _user_session(user_id: str | None) -> str | None:
    """Claude Code's ``metadata.user_id``: a JSON object with ``session_id``, or ``user_..._session_<id>``."""
    if user_id is None:
        return None
    if user_id.startswith("{"):
        return text(member(msgspec.Raw(user_id), "session_id"))
    return user_id.rpartition("_session_")[2] if "_session_" in user_id else None


def _read_head(message: msgspec.Raw) -> _Head:
    try:
        return _head.decode(message)
    except UNDECODABLE:
        return _NO_HEAD


def _is_input(head: _Head) -> bool:
    """Something that was said to the model, not by it or by its tools."""
    return head.type in ("", "message") and head.role in ("user", "system", "developer")


# What made the sender send it: the last item decides (spec: identity-and-traces §1.4)

_CHAT_TRIGGERS: dict[str, InputTrigger] = {
    "user": "user_message",
    "tool": "tool_result",
    "function": "tool_result",
}


def chat_trigger(messages: list[msgspec.Raw]) -> InputTrigger:
    return _CHAT_TRIGGERS.get(_read_head(messages[-1]).role, "other") if messages else "other"


def responses_trigger(items: list[msgspec.Raw]) -> InputTrigger:
    head = _read_head(items[-1]) if items else _NO_HEAD
    if head.type.endswith("_call_output"):  # of functions, of Codex's custom tools, of a shell
        return "tool_result"
    return "user_message" if head.type in ("", "message") and head.role == "user" else "other"


def anthropic_trigger(messages: list[msgspec.Raw]) -> InputTrigger:
    """Of the last message that is no word of the system: Claude Code has one after most of what it sends (harness.md
    §2), for which the peer says ``other``."""
    heads = map(_read_head, reversed(messages))
    head = next((head for head in heads if head.role != "system"), _NO_HEAD)
    if head.role != "user":
        return "other"
    if len(memoryview(head.content)) > USUAL_BYTES:
        content = bytes(head.content)
        return "tool_result" if content[:1] == b"[" and TOOL_RESULT in content else "user_message"
    try:
        blocks = _blocks.decode(head.content)
    except UNDECODABLE:
        return "user_message"
    return "tool_result" if any(block.type == "tool_result" for block in blocks) else "user_message"
