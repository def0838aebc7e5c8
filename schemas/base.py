"""The base of every message, and the two encodings: JSON for what people read, MessagePack where chains travel."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, TypeVar

import msgspec


class SchemaError(Exception):
    """Root of this package's errors. ``reason`` is stable and used as metric label, trace field and reply."""

    reason = "schema_error"


class BadMessageError(SchemaError):
    """The sender's bytes do not decode as the message that its subject promises (the peer's fault)."""

    reason = "bad_message"


class Message(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Base of everything that travels on the bus."""


class Fact(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happened, numbered by its source so that a receiver sees a gap.

    ``source`` is the publishing process (``ingress-1``); ``epoch`` grows with each of its incarnations (Unix ms at its
    start, or the leader's epoch); ``seq`` counts from 0 per (source, epoch, subject family); ``at_ms`` is Unix ms.
    """

    source: str
    epoch: Number
    seq: Count
    at_ms: Count


M = TypeVar("M")

Number = Annotated[int, msgspec.Meta(ge=-(1 << 53), le=1 << 53)]
"""A whole number that every reader of JSON can hold, and that can be said again: checked when a message is read."""

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Tokens = Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]
"""Few enough that the sum over all requests is still a number."""

BodyDigest = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{16})?$")]
"""XXH3-64 (hex) of a request's body as its client sent it; empty where nobody says."""

Sequence = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)]
"""A number of an engine's stream; -1: none yet."""

UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding a stranger's bytes raises: wrong syntax or types, wrong UTF-8, and nesting deeper than the stack."""

_json_encoder = msgspec.json.Encoder()
_msgpack_encoder = msgspec.msgpack.Encoder()


@cache
def _json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """Kept: to see through a union of structs takes many times what decoding does."""
    return msgspec.json.Decoder(kind)


@cache
def _msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def to_json(message: msgspec.Struct) -> bytes:
    """One message as compact JSON bytes."""
    return _json_encoder.encode(message)


def to_msgpack(message: msgspec.Struct) -> bytes:
    """One message as MessagePack bytes."""
    return _msgpack_encoder.encode(message)


def from_json(payload: bytes, kind: type[M]) -> M:
    """Decode JSON ``payload`` as ``kind`` (a struct or a union of tagged structs). Raises `BadMessageError`."""
    try:
        decoded: M = _json_decoder(kind).decode(payload)  # type: ignore[arg-type]  # a class is hashable
    except UNDECODABLE as error:
        raise BadMessageError(f"not a valid {getattr(kind, '__name__', kind)}: {error}") from error
    return decoded


def from_msgpack(payload: bytes, kind: type[M]) -> M:
    """Decode MessagePack ``payload`` as ``kind``. Raises `BadMessageError`."""
    try:
        decoded: M = _msgpack_decoder(kind).decode(payload)  # type: ignore[arg-type]
    except UNDECODABLE as error:
        raise BadMessageError(f"not a valid {getattr(kind, '__name__', kind)}: {error}") from error
    return decoded
