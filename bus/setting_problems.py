"""What is wrong with a setting's value, in words for people: msgspec's messages without its types and paths. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, get_args

import msgspec
from msgspec import inspect

_PATH = re.compile(r" - at `\$(?P<path>[^`]*)`$")
_EXPECTED = re.compile(r"Expected `(?P<types>[^`]+)`(?P<got>, got `[^`]+`)?(?P<rule>.*)")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(?P<field>[^`]+)`")
_MISSING_FIELD = re.compile(r"Object missing required field `(?P<field>[^`]+)`")

_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
}


def in_words(problem: str, kind: Any) -> str:
    """Half a sentence for ``problem``, msgspec's message about a value that is no ``kind``: ``must be a whole number``,
    ``must be one of debug, info``; what is inside a list or table is named first (``stall: must be ...``)."""
    path = ""
    if (at := _PATH.search(problem)) is not None:
        path, problem = at["path"], problem[: at.start()]
    inside = f"{path.replace('[...]', '').lstrip('.')}: " if path.replace("[...]", "") else ""
    return inside + _in_words(problem, _inside(kind, path))


def choices(kind: Any) -> tuple[str, ...]:
    """The values that ``kind`` allows, in the order of its definition, where it is a choice; else empty."""
    if isinstance(inspect.type_info(kind), inspect.LiteralType):
        return tuple(str(value) for value in get_args(kind))
    return ()


def table_keys(kind: Any) -> tuple[str, ...]:
    """The keys of a table setting with fixed keys; else empty."""
    info = inspect.type_info(kind)
    return tuple(field.encode_name for field in info.fields) if isinstance(info, inspect.StructType) else ()


def _in_words(problem: str, kind: Any) -> str:
    if problem.startswith("Invalid enum value") and (known := choices(kind) or _choices_among(kind)):
        return f"must be {'one of ' if choices(kind) else 'a number, or '}{', '.join(known)}"
    if (found := _EXPECTED.fullmatch(problem)) is not None:
        types = [name for name in found["types"].split(" | ") if name != "null"]
        return f"must be {_or(_WORDS.get(name, name) for name in types)}{found['rule']}"
    if (found := _UNKNOWN_FIELD.fullmatch(problem)) is not None:
        known = table_keys(kind)
        return f"has no key {found['field']!r}" + (f" (there are {', '.join(known)})" if known else "")
    if (found := _MISSING_FIELD.fullmatch(problem)) is not None:
        return f"lacks the key {found['field']!r}"
    return f"{problem[:1].lower()}{problem[1:]}"


def _choices_among(kind: Any) -> tuple[str, ...]:
    """Words that may stand instead of a number."""
    info = inspect.type_info(kind)
    if not isinstance(info, inspect.UnionType) or not any(
        isinstance(each, inspect.FloatType | inspect.IntType) for each in info.types
    ):
        return ()
    return tuple(str(value) for each in info.types if isinstance(each, inspect.LiteralType) for value in each.values)


def _or(words: Iterable[str]) -> str:
    return " or ".join(dict.fromkeys(words))


def _inside(kind: Any, path: str) -> Any:
    """The type of what ``path`` (``.key[0]``) names in a value of ``kind``; ``None`` where that is not followed."""
    for step in re.findall(r"\.\w+|\[[^\]]*\]", path):
        info = inspect.type_info(kind)
        if step.startswith(".") and isinstance(info, inspect.StructType):
            fields = {field.encode_name: field.type for field in msgspec.structs.fields(info.cls)}
            kind = fields.get(step[1:])
        elif step.startswith("[") and isinstance(info, inspect.ListType | inspect.VarTupleType):
            kind = get_args(kind)[0]
        else:
            return None
    return kind
