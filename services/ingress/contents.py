"""Parts of a message's content: what of them is text."""

from __future__ import annotations

from typing import Any, Literal, TypeGuard

from services.ingress.errors import TemplateError

Dialect = Literal["vllm", "sglang"]
"""Whose way of making a prompt of a request: vLLM's or SGLang's."""

BILLING_LINE = "x-anthropic-billing-header"
"""How Claude Code's attribution line begins; it differs from session to session (harness.md §2, user-cases C5)."""

TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Type of a part that is text to an engine, and the member that holds it."""

_MAY_BE_EMPTY = ("text", "refusal")
"""Parts that are passed over where they hold nothing."""


def is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def type_of(value: Any) -> str:
    """The ``type`` of a part or an item; empty where there is none that is a text."""
    kind = value.get("type") if isinstance(value, dict) else None
    return kind if isinstance(kind, str) else ""


def parts_of(content: Any) -> list[Any]:
    """A content as a list of parts. Raises `TemplateError`."""
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if isinstance(content, list):
        return content
    raise TemplateError("content is neither a text nor a list of parts")


def text_of(part: Any) -> str | None:
    """The text of a part, ``None`` for one to pass over. Raises `TemplateError` for what is no text."""
    if isinstance(part, str):
        return part
    kind = type_of(part)
    member = TEXT_PARTS.get(kind)
    text = part.get(member) if member is not None else None
    if isinstance(text, str):
        return text
    if text is None and kind in _MAY_BE_EMPTY:
        return None
    raise TemplateError(f"only text can be counted here, not {kind or type(part).__name__}")


def texts_of(content: Any) -> list[str]:
    """All texts of a content. Raises `TemplateError` for what is no text."""
    return [text for text in map(text_of, parts_of(content)) if text is not None]
