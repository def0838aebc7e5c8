"""Bytes in which pool indexes tell each other what they hold: dumps and deltas, one format. Version 1.

A dump is everything; a delta is what must change for an index to be as another (`kvcore.pool_index`). Numbers are
little-endian, a text is a u32 length and its UTF-8::

    4 bytes  TGPI (dump) or TGPD (delta)
    u8       version
    u8       media, 1..8:                          a text each
    u32      identities, each:
      texts  tenant, scheme, prefix
      u32    components:                           a text each
      u32    patterns, each:
        u16  objects, at least 1:                  u16 component, u8 media (bit = place of the medium in the table)
      u32    pages, each:                          16 bytes page, u32 pattern

and nothing after it. Most pages of a deployment have the same objects in the same media, hence patterns: a page takes
20 bytes, however many objects it has. No media, in a delta only: the object leaves every medium; otherwise it is added
in these. In a dump identities and pages stand in the order in which they were touched, the latest last.

What does not fit is refused before anything of it is applied: numbers out of range, what should stand once and stands
twice (medium, identity, component, page, a component in a pattern), unknown schemes, texts that are empty or too long.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvcore.dump import SLICE_BLOCKS, Steps
from kvcore.page_hash import PAGE_BYTES
from kvcore.pool_events import MAX_MEDIUM_BYTES
from kvcore.pool_keys import MAX_COMPONENT_BYTES, SCHEMES

DUMP = b"TGPI"
DELTA = b"TGPD"
MAX_MEDIA = 8
PAGE_ENTRY_BYTES = PAGE_BYTES + 4

Identity = tuple[str, str, str]
"""Tenant, scheme, prefix."""

Pattern = tuple[tuple[int, int], ...]
"""Objects of a page: (component, media bits)."""

_VERSION = 1
_U8, _U16, _U32 = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<I")
_OBJECT = struct.Struct("<HB")


class FormatError(ValueError):
    """The bytes are none of ours; the callers say which error that is."""


@dataclass(slots=True)
class Section:
    """One identity's part. ``pages``: entries of 20 bytes, page and pattern number."""

    identity: Identity
    components: list[str] = field(default_factory=list)
    patterns: list[Pattern] = field(default_factory=list)
    pages: bytearray = field(default_factory=bytearray)

    def entries(self) -> Iterator[tuple[bytes, int]]:
        """Page and pattern number of each."""
        data = bytes(self.pages)
        for at in range(0, len(data), PAGE_ENTRY_BYTES):
            yield data[at : at + PAGE_BYTES], _U32.unpack_from(data, at + PAGE_BYTES)[0]


class SectionWriter:
    """Collects one identity's pages. ``size``: bytes so far."""

    def __init__(self, identity: Identity) -> None:
        self.section = Section(identity)
        self.size = sum(map(len, map(_text, identity))) + 3 * _U32.size
        self._components: dict[str, int] = {}

    def pattern(self, objects: Sequence[tuple[str, int]]) -> int:
        """Number of a new pattern of (component, media bits); whoever calls knows which ones it has already."""
        section = self.section
        pattern: list[tuple[int, int]] = []
        for component, media in objects:
            number = self._components.setdefault(component, len(self._components))
            if number == len(section.components):
                section.components.append(component)
                self.size += len(_text(component))
            pattern.append((number, media))
        section.patterns.append(tuple(pattern))
        self.size += _U16.size + len(pattern) * _OBJECT.size
        return len(section.patterns) - 1

    def page(self, page: bytes, pattern: int) -> None:
        """One page and the number that `pattern` gave."""
        self.section.pages += page + _U32.pack(pattern)
        self.size += PAGE_ENTRY_BYTES


def encode(magic: bytes, media: Sequence[str], sections: Sequence[Section]) -> bytes:
    """The whole. Sections without pages are left out."""
    sections = [section for section in sections if section.pages]
    parts = [magic, _U8.pack(_VERSION), _U8.pack(len(media)), *map(_text, media), _U32.pack(len(sections))]
    for section in sections:
        parts += map(_text, section.identity)
        parts += (_U32.pack(len(section.components)), *map(_text, section.components))
        parts.append(_U32.pack(len(section.patterns)))
        for pattern in section.patterns:
            parts += (_U16.pack(len(pattern)), *(_OBJECT.pack(*entry) for entry in pattern))
        parts += (_U32.pack(len(section.pages) // PAGE_ENTRY_BYTES), bytes(section.pages))
    return b"".join(parts)


def decode(magic: bytes, data: bytes) -> Steps[tuple[list[str], list[Section]]]:
    """Media and sections, all checked. Raises `FormatError`."""
    reader = _Reader(data)
    if reader.take(len(magic)) != magic:
        raise FormatError(f"does not begin with {magic.decode()}")
    version = reader.number(_U8)
    if version != _VERSION:
        raise FormatError(f"version {version}, not {_VERSION}")
    media = [reader.text(MAX_MEDIUM_BYTES) for _ in range(reader.number(_U8))]
    if not 1 <= len(media) <= MAX_MEDIA or "" in media or len(set(media)) != len(media):
        raise FormatError("impossible media")
    sections: list[Section] = []
    for _ in range(reader.number(_U32)):
        section = _section(reader, range(int(magic == DUMP), 1 << len(media)))
        yield from _check_pages(section)
        sections.append(section)
    if len({section.identity for section in sections}) != len(sections):
        raise FormatError("an identity stands twice")
    if reader.at != len(data):
        raise FormatError("bytes after the end")
    return media, sections


def _section(reader: _Reader, media: range) -> Section:
    """One identity, its page entries not yet checked. ``media``: the media bits that an object may have."""
    identity = (reader.text(), reader.text(), reader.text())
    if not identity[0] or identity[1] not in SCHEMES:
        raise FormatError("an identity without a tenant or of an unknown scheme")
    section = Section(identity, [reader.text(MAX_COMPONENT_BYTES) for _ in range(reader.number(_U32))])
    known = len(section.components)
    if "" in section.components or len(set(section.components)) != known:
        raise FormatError("components without a name or named twice")
    for _ in range(reader.number(_U32)):
        count = reader.number(_U16)
        pattern = tuple(_OBJECT.iter_unpack(reader.take(count * _OBJECT.size)))
        numbers = {number for number, _ in pattern}
        if not pattern or len(numbers) != count or max(numbers) >= known:
            raise FormatError("a pattern without objects, or of impossible ones")
        if not all(bits in media for _, bits in pattern):
            raise FormatError("impossible media in a pattern")
        section.patterns.append(pattern)
    section.pages = bytearray(reader.take(reader.number(_U32) * PAGE_ENTRY_BYTES))
    return section


def _check_pages(section: Section) -> Steps[None]:
    seen: set[bytes] = set()
    patterns = len(section.patterns)
    for place, (page, pattern) in enumerate(section.entries()):
        if pattern >= patterns or page in seen:
            raise FormatError("a page twice, or of a pattern that is not there")
        seen.add(page)
        if place % SLICE_BLOCKS == 0:
            yield


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, size: int) -> bytes:
        taken = self.data[self.at : self.at + size]
        if len(taken) != size:
            raise FormatError("cut off")
        self.at += size
        return taken

    def number(self, form: struct.Struct) -> int:
        value: int = form.unpack(self.take(form.size))[0]
        return value

    def text(self, most: int | None = None) -> str:
        size = self.number(_U32)
        if most is not None and size > most:
            raise FormatError(f"a text of {size} bytes, more than {most}")
        try:
            return self.take(size).decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError("a text that is not UTF-8") from error


def _text(text: str) -> bytes:
    encoded = text.encode("utf-8")
    return _U32.pack(len(encoded)) + encoded
