"""What a prompt holds besides text, in any API: kinds of media, and how many bytes of the body they are.

A body is searched for the types of such parts first; only one that has them is looked through, message by message. A
part counts where a model would see it: in a message's content, in a tool's result; not in a tool's arguments.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from schemas.base import UNDECODABLE
from services.ingress.members import is_few

KINDS = {
    "image": "image",
    "image_url": "image",
    "image_embeds": "image",
    "input_image": "image",
    "computer_screenshot": "image",
    "audio": "audio",
    "audio_url": "audio",
    "audio_embeds": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
    "input_video": "video",
    "document": "file",
    "file": "file",
    "input_file": "file",
    "prompt_embeds": "embeddings",
}
"""Type of a part to what it holds, in the words of OpenAI, vLLM and Anthropic."""

_TYPE = rb'"type"\s*:\s*"(' + b"|".join(sorted((name.encode() for name in KINDS), reverse=True)) + rb')"'
_MARK = re.compile(_TYPE)
_BEGINS = re.compile(rb"\s*\{\s*" + _TYPE)
"""A part as nearly all write it: its type first. It needs no decoding, and it is most of the body."""

MOST_DEPTH = 2
"""Contents inside contents: Anthropic's tool results hold parts."""


@dataclass(frozen=True, slots=True)
class Media:
    """``modalities`` in the order of their first appearance; ``parts`` and their ``bytes`` in the body."""

    modalities: tuple[str, ...] = ()
    parts: int = 0
    bytes: int = 0


TEXT_ONLY = Media()


class _Shown(msgspec.Struct):
    """A message, an input item or a part, as far as it may hold media."""

    type: str = ""
    content: msgspec.Raw = msgspec.Raw(b"")
    output: msgspec.Raw = msgspec.Raw(b"")


_shown = msgspec.json.Decoder(_Shown)
_parts = msgspec.json.Decoder(list[msgspec.Raw])


def media_of(body: bytes, messages: Sequence[msgspec.Raw]) -> Media:
    """The media in ``messages`` of ``body``. What cannot be decoded holds none: the engine will judge it."""
    if _MARK.search(body) is None:
        return TEXT_ONLY
    found: dict[str, None] = {}
    sizes: list[int] = []
    for message in messages:
        _look(message, found, sizes, MOST_DEPTH)
    return Media(tuple(found), len(sizes), sum(sizes)) if sizes else TEXT_ONLY


def _look(raw: msgspec.Raw, found: dict[str, None], sizes: list[int], depth: int) -> None:
    if _MARK.search(raw) is None:
        return
    begins = _BEGINS.match(raw)
    try:
        shown = _shown.decode(raw) if begins is None else _Shown(begins[1].decode())
    except UNDECODABLE:
        return
    kind = KINDS.get(shown.type)
    if kind is not None:
        found.setdefault(kind)
        sizes.append(memoryview(raw).nbytes)
        return
    for inner in (shown.content, shown.output):
        opening = bytes(memoryview(inner)[:1])
        if not depth or opening not in (b"[", b"{") or (opening == b"[" and not is_few(inner)):
            continue
        try:
            parts = _parts.decode(inner) if opening == b"[" else [inner]
        except UNDECODABLE:
            continue
        for part in parts:
            _look(part, found, sizes, depth - 1)
