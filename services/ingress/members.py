"""Members of a body from their bytes: nothing is built but what is asked for.

A body has room for millions of numbers and lists, and to build them takes seconds of the event loop. So a value's kind
is told by its first byte, an object is looked into for one member at a time, and of a large body the lists are built
only where they are known to hold few items.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from schemas.base import UNDECODABLE
from services.ingress.errors import BadRequestError

USUAL_BYTES = 1 << 20
"""In a body up to this size all lists are built: what it holds takes some 70 ms at most."""

MOST_ITEMS = 1 << 16
"""A longer list of messages, tools or items in a larger body is not built."""

MOST_BRACES = 1 << 19
"""With more of them nobody counts the objects in a list."""

SMALL_BYTES = 4096
"""A value up to this size may be built, whatever it is."""

NULL = msgspec.Raw(b"null")
UNBUILT = msgspec.Raw(b"[null]")
"""In place of a list that is not built: one item of which nothing is known."""


class _Object(msgspec.Struct, gc=False):
    """Any object: its members are passed over."""


class Decoders:
    """What builds something of a large body's lists."""

    def __init__(self) -> None:
        self.objects = msgspec.json.Decoder(list[_Object])
        self.items = msgspec.json.Decoder(list[msgspec.Raw])
        self.items_or_null = msgspec.json.Decoder(list[msgspec.Raw] | None)


_decoders = Decoders()
_texts = msgspec.json.Decoder(str)
_any = msgspec.json.Decoder()


def is_few(raw: msgspec.Raw, *, by: Decoders = _decoders) -> bool:
    """Whether it is safe to build a list's items as views: by its commas, or by its objects where it has no others
    (texts are full of commas)."""
    if len(memoryview(raw)) <= USUAL_BYTES:
        return True
    given = bytes(raw)
    if given.count(b",") < MOST_ITEMS:
        return True
    if given.count(b"{") > MOST_BRACES:
        return False
    try:
        return len(by.objects.decode(given)) <= MOST_ITEMS
    except UNDECODABLE:
        return False


def read_list(
    raw: msgspec.Raw, name: str, *, or_null: bool = False, by: Decoders = _decoders
) -> tuple[list[msgspec.Raw], bool]:
    """A list's items, and whether they are built; where not, the one of `UNBUILT`. Raises `BadRequestError` with the
    ``name`` where it is no list."""
    if _first(raw) == b"[" and not is_few(raw, by=by):
        return [NULL], False
    try:
        return (by.items_or_null if or_null else by.items).decode(raw) or [], True
    except msgspec.ValidationError as error:
        raise BadRequestError(f"{name}: {error}", param=name) from error


def given(raw: msgspec.Raw | msgspec.UnsetType) -> msgspec.Raw | None:
    """``None`` for a member that is absent or null."""
    return None if isinstance(raw, msgspec.UnsetType) or raw == NULL else raw


def is_true(raw: msgspec.Raw) -> bool:
    """Only ``true`` itself."""
    return raw is not NULL and _first(raw) == b"t"


def is_set(raw: msgspec.Raw) -> bool:
    """As Python takes a value for true: not null, false, zero, nor anything empty."""
    if raw is NULL:
        return False
    first = _first(raw)
    if first in (b"n", b"f"):
        return False
    if first in (b"[", b"{", b'"'):
        return len(bytes(raw)[1:].lstrip()) > 1
    return bool(value(raw)) if len(memoryview(raw)) <= SMALL_BYTES else True


def text(raw: msgspec.Raw | msgspec.UnsetType) -> str | None:
    """A text; anything else, and the empty text, is for the engine to refuse."""
    if raw is NULL or isinstance(raw, msgspec.UnsetType) or _first(raw) != b'"':
        return None
    try:
        return _texts.decode(raw) or None
    except UNDECODABLE:
        return None


def value(raw: msgspec.Raw) -> Any:
    """What it is; a large one, and a number that nobody holds, as the text that it is in the body."""
    if _first(raw) == b'"' or len(memoryview(raw)) <= SMALL_BYTES:
        try:
            return _any.decode(raw)
        except UNDECODABLE:
            pass
    return bytes(raw).decode("utf-8", "replace")


def member(raw: msgspec.Raw, *path: str) -> msgspec.Raw:
    """A nested member of an object; null where there is no such thing."""
    for name in path:
        if raw is NULL or _first(raw) != b"{":
            return NULL
        try:
            raw = _looking_for(name).decode(raw).found
        except UNDECODABLE:
            return NULL
    return raw


@cache
def _looking_for(name: str) -> msgspec.json.Decoder[Any]:
    """Reads objects for one member; ``name`` is one of ours."""
    fields: list[Any] = [("found", msgspec.Raw, msgspec.field(default=NULL, name=name))]
    return msgspec.json.Decoder(msgspec.defstruct("Found", fields))


def _first(raw: msgspec.Raw) -> bytes:
    return bytes(memoryview(raw)[:1])
