"""Strangers' words on a terminal: ids are whatever a client sent, and must not drive it. Pure."""

from __future__ import annotations

import unicodedata

_UNSAFE = frozenset({"Zl", "Zp", "Mn", "Me", "Mc"})
"""Besides class C (controls, formats, surrogates, unassigned): line breaks, and marks that pile up in one cell."""


def safe(text: str) -> str:
    """``text`` with every character that a terminal could obey, or that has no place of its own, written as its number
    (``\\x1b``, ``\\u202e``)."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(character) for character in text)


def _escaped(character: str) -> str:
    category = unicodedata.category(character)
    if category[0] != "C" and category not in _UNSAFE:
        return character
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def safe_lines(text: str) -> str:
    """`safe`, but for the ends of its lines."""
    return "\n".join(map(safe, text.split("\n")))
