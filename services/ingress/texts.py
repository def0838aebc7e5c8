"""A prompt as text, for a chain where there are no token ids: in the order in which a model sees it, piece by piece.

The text only has to be the same for what a model sees the same, and to grow at its end when the conversation does:
tools, system, then one message after the other. It is nobody's chat template. What the model does not see is left out
(spec: harness.md §6.3: cache marks, item ids, reasoning of earlier turns); an image or the like goes in as a typed key,
of its kind and a digest (engines key theirs so, spec: engine-events §2.4): its bytes are no text, and where it is found
again no more is claimed than its key is long; other things that are no text go in as JSON; nothing here refuses a
prompt. One message is decoded at a time, and none beyond the bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from kvcore.text_blocks import BYTES_PER_TOKEN, TextChain
from schemas.base import UNDECODABLE
from services.ingress.contents import BILLING_LINE, Dialect, type_of
from services.ingress.endpoints import ChatPrompt, ClientRequest, LargePrompt, TextPrompt
from services.ingress.modalities import KINDS

_ITEM, _PART = "\x1e", "\x1f"
"""Before an item (a tool, a message), and before each further thing in it."""

_HIDDEN = frozenset({"id", "status", "role", "content", "cache_control"})
"""Members of an item that say nothing, or are said in its text."""
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "summary_text", "reasoning_text"})
_NOT_SHOWN = frozenset({"reasoning", "thinking", "redacted_thinking"})
"""Types of items and parts that the model is not shown again."""

_any = msgspec.json.Decoder()


@dataclass(frozen=True, slots=True)
class TextBlocks:
    """``chain``: chain hashes of a prompt's full text blocks, u64 little-endian. ``block_size``: about how many tokens
    a block is."""

    block_size: int
    chain: bytes


def text_blocks(
    request: ClientRequest, *, adapter: str | None, block_bytes: int, max_bytes: int, dialect: Dialect = "vllm"
) -> TextBlocks | None:
    """The text chain of a request's prompt, of at most ``max_bytes`` of it; ``None`` where there is no text. Engines of
    the ``dialect`` vLLM leave Claude Code's attribution line out.

    A prompt that was let go because of its size (`LargePrompt`) is taken as the body that it came in: that begins
    alike from turn to turn as well; but not one with media in it, which would be taken for text.
    """
    chain = TextChain(block_bytes, max_bytes=max_bytes, adapter=adapter, salt=request.cache_salt)
    match request.prompt:
        case ChatPrompt() as prompt:
            for part in (part for item in items(prompt, strips=dialect == "vllm") for part in item.parts):
                chain.feed(part)
                if chain.full:
                    break
        case TextPrompt(text=text):
            chain.feed(text[:max_bytes].encode("utf-8", "surrogatepass"))
        case LargePrompt() if not request.media.parts:
            chain.feed(request.body)
        case _:
            return None
    return TextBlocks(max(1, block_bytes // BYTES_PER_TOKEN), chain.chain())


@dataclass(frozen=True, slots=True)
class Item:
    """One tool, the system prompt, one message or input item, as text in its ``parts``: the first begins with its role.
    ``role`` and ``type`` are empty where there is none."""

    role: str
    parts: list[bytes]
    is_tool: bool = False
    type: str = ""


def items(prompt: ChatPrompt, *, strips: bool = False) -> Iterator[Item]:
    """What the model sees, in that order, one item after the other; items that it does not see have no parts.
    ``strips``: without attribution lines in what the system says."""
    for tool in prompt.tools:
        yield _item(tool, is_tool=True)
    if prompt.system is not None:
        yield _system(prompt.system, strips)
    for message in prompt.messages:
        yield _item(message, strips=strips)


def _system(raw: msgspec.Raw, strips: bool) -> Item:
    try:
        content = _any.decode(raw)
        parts = _opened(f"{_ITEM}system", _content(_without_attribution(content) if strips else content))
    except UNDECODABLE:
        parts = [f"{_ITEM}system".encode() + bytes(raw)]
    return Item("system", parts)


def _item(raw: msgspec.Raw, *, is_tool: bool = False, strips: bool = False) -> Item:
    """One tool, message or input item."""
    try:
        item = _any.decode(raw)
    except UNDECODABLE:
        return Item("", [bytes(raw)], is_tool)
    if not isinstance(item, dict):
        text = _utf8(item) if isinstance(item, str) else _json(item)
        return Item("", [f"{_ITEM}{_PART}".encode() + text], is_tool)
    kind = type_of(item)
    if kind in _NOT_SHOWN:
        return Item("", [], is_tool)
    role, content = f"{item.get('role', '')}", item.get("content")
    parts = _content(_without_attribution(content) if strips and role == "system" else content)
    rest = {name: value for name, value in item.items() if name not in _HIDDEN}
    if rest.get("type") == "message":
        del rest["type"]
    if rest:
        parts.append(_json(rest))
    return Item(role, _opened(f"{_ITEM}{role}", parts), is_tool, kind)


def _opened(head: str, parts: list[bytes]) -> list[bytes]:
    """``parts``, each after its mark, the first after ``head``."""
    opening = _utf8(head)
    if not parts:
        return [opening]
    mark = _PART.encode()
    return [opening + mark + parts[0], *(mark + part for part in parts[1:])]


def _without_attribution(content: Any) -> Any:
    """What the system says without the line that differs from session to session (spec: user-cases C5)."""
    if isinstance(content, list):
        kept = (_without_attribution(part) for part in content)
        return [part for part in kept if part is not None]
    text = content.get("text") if isinstance(content, dict) else content
    if not isinstance(text, str) or not text.startswith(BILLING_LINE):
        return content
    return text.partition("\n")[2] or None


def _content(content: Any) -> list[bytes]:
    """A text and a list of one text are the same."""
    parts: list[bytes] = []
    for part in content if isinstance(content, list) else [content]:
        if part is None:
            continue
        kind = type_of(part)
        if kind in _NOT_SHOWN:
            continue
        if isinstance(part, str):
            parts.append(_utf8(part))
        elif kind in _TEXT_PARTS and isinstance(part.get("text"), str):
            parts.append(_utf8(part["text"]))
        else:
            parts.append(_json(part))
    return parts


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(_keyed(value))
    except (RecursionError, UnicodeEncodeError, msgspec.EncodeError):
        return b"?"


def _keyed(value: Any) -> Any:
    """With a key in place of each image and the like, and without cache marks, which wander from message to message
    (spec: user-cases C5)."""
    if isinstance(value, list):
        return [_keyed(item) for item in value]
    if not isinstance(value, dict):
        return value
    plain = {name: _keyed(item) for name, item in value.items() if name != "cache_control"}
    kind = KINDS.get(type_of(value))
    return plain if kind is None else {kind: f"{xxh3_64_intdigest(msgspec.json.encode(plain)):016x}"}
