"""Bytes of a terminal in raw mode as keys. Pure.

A key is its character, or one of ``up``, ``down``, ``page_up``, ``page_down``, ``home``, ``end``, ``enter``,
``backspace``, ``escape``. Other sequences are nothing.
"""

from __future__ import annotations

import codecs
import re

_SEQUENCE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|O[@-~])")
_BEGINNING = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*|O)?\Z")
_NAMES = {
    "\x1b[A": "up",
    "\x1b[B": "down",
    "\x1bOA": "up",
    "\x1bOB": "down",
    "\x1b[5~": "page_up",
    "\x1b[6~": "page_down",
    "\x1b[H": "home",
    "\x1bOH": "home",
    "\x1b[1~": "home",
    "\x1b[F": "end",
    "\x1bOF": "end",
    "\x1b[4~": "end",
    "\r": "enter",
    "\n": "enter",
    "\x7f": "backspace",
    "\x08": "backspace",
}
_MAX_SEQUENCE = 16


class KeyReader:
    """A sequence may come in pieces; what looks like its beginning waits for `feed`, or for `flush`."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""

    @property
    def waiting(self) -> bool:
        """Whether an escape has come, and not what it means."""
        return bool(self._rest)

    def feed(self, data: bytes) -> list[str]:
        """The keys that are complete now."""
        text, self._rest = self._rest + self._decoder.decode(data), ""
        keys: list[str] = []
        place = 0
        while place < len(text):
            if text[place] != "\x1b":
                keys += self._plain(text[place])
                place += 1
                continue
            found = _SEQUENCE.match(text, place)
            if found is not None:
                keys += [_NAMES[found[0]]] if found[0] in _NAMES else []
                place = found.end()
            elif _BEGINNING.match(text, place) and len(text) - place <= _MAX_SEQUENCE:
                self._rest = text[place:]
                break
            else:
                keys.append("escape")
                place += 1
        return keys

    def flush(self) -> list[str]:
        """Nothing followed: the escape was the key."""
        rest, self._rest = self._rest, ""
        return ["escape"] if rest else []

    @staticmethod
    def _plain(character: str) -> list[str]:
        if character in _NAMES:
            return [_NAMES[character]]
        return [character] if character.isprintable() else []
