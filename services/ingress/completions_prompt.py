"""The ``prompt`` of a completions body, from its bytes: a text, token ids, or a batch of either.

A body has room for millions of numbers and lists, and to build them takes seconds of the event loop. So what the prompt
is, its first bytes say; how many there are is counted in its bytes; and only the one prompt that is kept is built.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from services.ingress.errors import BadRequestError

MOST_TOKENS = 1 << 20
"""A prompt of more token ids is not kept; 4 MiB hold 600,000 of six digits."""

MOST_TEXTS = 1 << 16
"""Of a batch with more texts no type is looked at: the engine's answer is the client's."""

NAMED_BYTES = 1 << 16
"""In a wrong prompt up to this size the item that is wrong is named."""

_BETWEEN_BRACKETS = b"-0123456789 \t\r\n"
_TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class _Member(msgspec.Struct):
    prompt: str | list[int | str | list[int]] | None


class Decoders:
    """What builds a prompt, one for each kind; ``member`` names what is wrong, whatever it is."""

    def __init__(self) -> None:
        self.text = msgspec.json.Decoder(str)
        self.texts = msgspec.json.Decoder(list[str])
        self.tokens = msgspec.json.Decoder(list[_TokenId])
        self.token_lists = msgspec.json.Decoder(list[list[_TokenId]])
        self.member = msgspec.json.Decoder(_Member)


_decoders = Decoders()

Given = str | tuple[int, ...] | None


def read_prompt(raw: bytes, *, keep: bool = True, by: Decoders = _decoders) -> tuple[Given, int]:
    """The prompt, and how many there are: ``None`` for a batch, and for one that is too large or not to be kept (of
    those nothing is built, and of large batches of texts the number may be too low). ``raw`` is known to
    be JSON in UTF-8. Raises `msgspec.ValidationError` with the place, or `BadRequestError`."""
    first = raw[:1] if raw[:1] != b"[" else b"[" + (raw[1:64].lstrip() or raw[1:].lstrip())[:1]
    try:
        if first == b'"':
            return (by.text.decode(raw) if keep else None), 1
        if first == b'["':
            return _texts(raw, keep, by)
        if first == b"[[":
            return _token_lists(raw, keep, by)
        if first[:1] == b"[" and first[1:] in b"-0123456789":
            return (_kept(by.tokens.decode(raw)) if keep and raw.count(b",") < MOST_TOKENS else None), 1
    except msgspec.ValidationError as error:
        raise _wrong(raw, by, f"prompt: {error}") from error
    raise _wrong(raw, by, named=True)


def is_empty(raw: bytes) -> bool:
    """The empty text, or the empty list."""
    return raw[:1] + raw[1:].strip() in (b'""', b"[]")


def count_texts(raw: bytes) -> int:
    """How many texts are in a list of them, at least: the quotes that end one behind a backslash are not seen."""
    return (raw.count(b'"') - raw.count(b'\\"') + 1) // 2


def _texts(raw: bytes, keep: bool, by: Decoders) -> tuple[Given, int]:
    count = count_texts(raw)
    if not keep or count > MOST_TEXTS:
        return None, max(1, count)
    texts = by.texts.decode(raw)
    return (texts[0] if len(texts) == 1 else None), len(texts)


def _token_lists(raw: bytes, keep: bool, by: Decoders) -> tuple[Given, int]:
    """Lists of numbers and nothing else: every bracket but the first two opens behind one that closes."""
    count = raw.count(b"[") - 1
    if not keep:
        return None, count
    bare = raw.translate(None, _BETWEEN_BRACKETS)
    only_lists = bare.endswith(b"]]") and bare.count(b"],[") == count - 1 and not bare.strip(b"[],")
    if not only_lists or bare.translate(None, b"[],"):
        raise _wrong(raw, by)
    if count > 1 or raw.count(b",") >= MOST_TOKENS:
        return None, count
    return _kept(by.token_lists.decode(raw)[0]), 1


def _kept(tokens: list[int]) -> tuple[int, ...]:
    if not tokens:
        raise BadRequestError("prompt: token ids must be unsigned 32-bit numbers", param="prompt")
    return tuple(tokens)


def _wrong(raw: bytes, by: Decoders, problem: str | None = None, *, named: bool = False) -> BadRequestError:
    """What is wrong with it. Raises `msgspec.ValidationError` where that says it; ``named``: it says so at once."""
    mixed = "prompt: must hold texts, or tokens, and at least one"
    if not named and len(raw) > NAMED_BYTES:
        return BadRequestError(problem or mixed, param="prompt")
    given: Any = by.member.decode(b'{"prompt":' + raw + b"}").prompt
    if given is None:
        return BadRequestError("prompt: is missing", param="prompt")
    if len(given) == 1 or {type(item) for item in given} == {int}:
        return BadRequestError("prompt: token ids must be unsigned 32-bit numbers", param="prompt")
    return BadRequestError(mixed, param="prompt")
