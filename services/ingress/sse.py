"""The engine's event stream on its way to the client: whole events pass as the bytes they came in.

Only CR, LF and CRLF end a line (never U+2028 inside JSON), an empty line ends an event (spec: WHATWG HTML §9.2,
user-cases C1). The client gets whole events: when the engine dies inside one, its half is dropped and a clean error
event can follow. Comments and empty lines, the keep-alives of engines, pass at once. A piece that ends with an event
is passed on without a copy and without being cut up, unless its bytes say that accounting wants to read it. Most
pieces are the one before with other words in one text: those are known by their ends and their quotes.
"""

from __future__ import annotations

import re

from services.ingress.answers import DONE, AnswerReader
from services.ingress.errors import EventTooLargeError

# A CR at the end of what is there may be half a CRLF: it ends a line only when the next byte is known.
_EVENT_END = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r(?!\Z))")
_BETWEEN = re.compile(rb"(?:\xef\xbb\xbf|[\r\n]|:[^\r\n]*(?:\r\n|\n|\r(?!\Z)))+")
_LINE_END = re.compile(rb"\r\n|\n|\r")
_TEXT = re.compile(
    rb'"(?:content|text|reasoning|reasoning_content|thinking|delta|partial_json|arguments)"\s*:\s*"(?=[^"\\]*")'
)
"""The beginning of a value that is text of the model, and has no escapes."""

_WORDS = re.compile(rb'[^"\[\r\n]*')
"""Of one text, without a quote, an end of a line, or what could be `DONE`."""

_MOST_LESSONS = 16
"""Events that are not like the ones before them, until no more are learned."""

_LONGEST_END = 4
"""Bytes of the longest empty line, CRLF CRLF: what is searched again when more comes."""


class _Alike:
    """Events that are one known event but for a text. What is between ``head`` and ``tail`` there is a text as long as
    no quote is in it; so an event like it says nothing that the known one does not say."""

    __slots__ = ("_ends", "_head", "_joint", "_quotes", "_tail")

    def __init__(self, head: bytes, tail: bytes) -> None:
        self._head = head
        self._tail = tail
        self._joint = tail + head
        self._quotes = self._joint.count(b'"')
        self._ends = self._joint.count(b"\n")

    def events(self, data: bytes) -> int:
        """How many such events ``data`` is; 0 if it is something else."""
        if not (data.startswith(self._head) and data.endswith(self._tail)):
            return 0
        words = _WORDS.match(data, len(self._head))
        if words and words.end() == len(data) - len(self._tail):
            return 1
        count = data.count(self._joint) + 1
        if data.count(b'"') != count * self._quotes or data.count(b"\n") != count * self._ends:
            return 0
        return 0 if b"\r" in data or DONE in data else count


class EventStream:
    """One attempt's stream. ``event_limit`` in bytes; ``strip_usage``: keep the usage-only chunk from the client, who
    did not ask for it (spec: user-cases C3)."""

    def __init__(self, reader: AnswerReader, *, event_limit: int, strip_usage: bool = False) -> None:
        self._reader = reader
        self._limit = event_limit
        self._strip = strip_usage
        self._rest = bytearray()
        self._searched = 0
        self._alike: _Alike | None = None
        self._lessons = 0

    @property
    def waiting_bytes(self) -> int:
        """Bytes of an event that is not complete yet."""
        return len(self._rest)

    def feed(self, data: bytes) -> bytes:
        """What may go to the client now; empty when no event is complete. Raises `EventTooLargeError`."""
        if not self._rest:
            if self._plain(data):
                return data
            return self._cut(data)
        self._rest += data
        if not self._may_pass(data):
            self._keep(len(self._rest))
            return b""
        whole = bytes(self._rest)
        self._rest.clear()
        return self._cut(whole)

    def finish(self) -> bytes:
        """The engine's stream is complete: what is left of it, an event without its empty line included."""
        rest = bytes(self._rest)
        self._rest.clear()
        self._searched = 0
        return b"" if rest and self._read(rest) else rest

    def _may_pass(self, data: bytes) -> bool:
        """Whether ``data``, at the end of the rest, completed an event or a comment; the search goes on where it
        stopped, so that a large event in many small pieces costs its size once."""
        held = self._rest[self._searched - 1 : self._searched] == b"\r"
        if not held and b"\n" not in data and b"\r" not in data:
            return False
        if self._rest[:1] in b":\r\n\xef":
            return True
        return _EVENT_END.search(self._rest, max(0, self._searched - _LONGEST_END)) is not None

    def _plain(self, data: bytes) -> bool:
        """Whole events of one data line each, and nothing in them to read: counted, not cut up."""
        reader = self._reader
        count = self._alike.events(data) if self._alike is not None else 0
        if count and len(data) <= self._limit:
            reader.data_lines += count
            return True
        if reader.unread or not data.endswith(b"\n\n") or b"\r" in data or DONE in data or reader.marks(data):
            return False
        lines = data.count(b"\ndata:") + data.startswith(b"data:")
        if lines != data.count(b"\n\n") or len(data) > self._limit:
            return False
        reader.data_lines += lines
        if lines == 1 and self._lessons < _MOST_LESSONS:
            self._learn(data)
        return True

    def _learn(self, event: bytes) -> None:
        """The next event may be this one with another text."""
        self._lessons += 1
        text = _TEXT.search(event)
        if text:
            at = text.end()
            self._alike = _Alike(event[:at], event[event.index(b'"', at) :])

    def _cut(self, data: bytes) -> bytes:
        """Pass whole events, keep the rest."""
        dropped: list[tuple[int, int]] = []
        at = 0
        while True:
            between = _BETWEEN.match(data, at)
            if between:
                at = between.end()
            end = _EVENT_END.search(data, at)
            if end is None:
                break
            if end.end() - at > self._limit:
                raise EventTooLargeError(self._limit)
            if self._read(data[at : end.end()]):
                dropped.append((at, end.end()))
            at = end.end()
        if at < len(data):
            self._rest += memoryview(data)[at:]
        self._keep(len(data) - at)
        return _without(data, at, dropped)

    def _keep(self, size: int) -> None:
        if size > self._limit:
            raise EventTooLargeError(self._limit)
        self._searched = size

    def _read(self, event: bytes) -> bool:
        """Account for one event; whether it is to be kept from the client."""
        reader = self._reader
        if b"\r" in event:
            lines = _LINE_END.split(event)
            count = sum(line.startswith(b"data:") for line in lines)
        else:
            lines = []
            count = event.count(b"\ndata:") + event.startswith(b"data:")
        reader.data_lines += count
        if not count:
            return False
        is_marked = count > 1 or DONE in event or reader.marks(event) is not None
        if not is_marked and not reader.unread:
            return False
        data = _data_of(lines or event.split(b"\n"))
        if is_marked:
            reader.data_lines -= count
        return reader.read_event(data) and self._strip


def _data_of(lines: list[bytes]) -> bytes:
    """The event's data: its data lines, joined; one space after the colon belongs to the field."""
    values = (line[5:] for line in lines if line.startswith(b"data:"))
    return b"\n".join(value[1:] if value.startswith(b" ") else value for value in values)


def _without(data: bytes, end: int, dropped: list[tuple[int, int]]) -> bytes:
    """``data[:end]`` less the dropped ranges; ``data`` itself where that is all of it."""
    if not dropped:
        return data if end == len(data) else data[:end]
    kept: list[bytes] = []
    at = 0
    for start, stop in dropped:
        kept.append(data[at:start])
        at = stop
    kept.append(data[at:end])
    return b"".join(kept)
