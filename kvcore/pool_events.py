"""One message of a Mooncake master decoded: ``[timestamp ms, [event, ...], dp rank]``, events are maps.

Fields are read by name, so that one decoder takes every dialect (spec: pool-events §1): what is missing is nil, what is
unknown is skipped, of a name that stands twice the last counts. Only these are read: ``event_type`` (without one
``type``), ``object_key``, ``tenant_id``, ``medium``, ``backend_id``.

A bad event is left out and counted by reason, the rest stands: ``bad_field`` (no map with text keys, or a field of
another type, not UTF-8, or too long), ``unknown_type``, ``no_key`` (a master that is told not to send keys says only
that something happened). Untrusted bytes are safe; only `BadBatchError` leaves `decode_pool_batch`.
"""

from __future__ import annotations

from collections import Counter
from typing import Literal

import msgspec

from kvcore.errors import BadBatchError
from kvcore.events import MAX_PAYLOAD_BYTES
from kvcore.pool_keys import MAX_KEY_BYTES

DEFAULT_TENANT = "default"
"""Whose objects these are when nobody says: what the master itself puts (spec: pool-events §1)."""
MAX_MEDIUM_BYTES = 64

Kind = Literal["stored", "removed", "cleared"]
_KINDS: dict[str, Kind] = {"stored": "stored", "removed": "removed", "cleared": "cleared"}
_TYPES: dict[str, Kind] = {"BlockStored": "stored", "BlockRemoved": "removed", "AllBlocksCleared": "cleared"}


class PoolEvent(msgspec.Struct, frozen=True, gc=False):
    """One event. ``medium``: lower case; ``None``: not said (of a removal: gone from everywhere). ``object_key``: empty
    for ``cleared``."""

    kind: Kind
    tenant: str
    object_key: str = ""
    medium: str | None = None


class PoolBatch(msgspec.Struct, frozen=True):
    """One message. ``rejected``: events left out, by reason. ``backend_id``: the last one that was said."""

    events: tuple[PoolEvent, ...]
    rejected: dict[str, int] = {}
    backend_id: str | None = None


class _Envelope(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]


class _Wire(msgspec.Struct, gc=False):
    event_type: str | None = None
    type: str | None = None
    tenant_id: str | None = None
    medium: str | None = None
    object_key: str | None = None
    backend_id: str | None = None


_envelope = msgspec.msgpack.Decoder(_Envelope)
_event = msgspec.msgpack.Decoder(_Wire)
# As in `kvcore.events`: all that msgspec raises for hostile bytes.
_DECODE_ERRORS = (msgspec.MsgspecError, RecursionError, TypeError, ValueError, OverflowError)


def decode_pool_batch(payload: bytes, max_key_bytes: int = MAX_KEY_BYTES) -> PoolBatch:
    """Decode one message's last frame. Raises `BadBatchError` when it is no batch at all."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise BadBatchError(f"a payload of {len(payload)} bytes exceeds the limit of {MAX_PAYLOAD_BYTES} bytes")
    try:
        envelope = _envelope.decode(payload)
    except _DECODE_ERRORS as error:
        raise BadBatchError(f"not a batch of pool events: {error}") from error
    events: list[PoolEvent] = []
    rejected: Counter[str] = Counter()
    backend_id: str | None = None
    for raw in envelope.events:
        try:
            wire = _event.decode(raw)
        except _DECODE_ERRORS:
            rejected["bad_field"] += 1
            continue
        event = _event_of(wire, max_key_bytes)
        if isinstance(event, str):
            rejected[event] += 1
        else:
            events.append(event)
            backend_id = wire.backend_id or backend_id
    return PoolBatch(tuple(events), dict(rejected), backend_id)


def _event_of(wire: _Wire, max_key_bytes: int) -> PoolEvent | str:
    """The event, or why it is none."""
    kind = _TYPES.get(wire.type or "") if wire.event_type is None else _KINDS.get(wire.event_type)
    if kind is None:
        return "unknown_type"
    tenant = wire.tenant_id or DEFAULT_TENANT
    medium = wire.medium or ""
    names = (tenant, wire.backend_id or "")
    if any(_longer(name, max_key_bytes) for name in names) or _longer(medium, MAX_MEDIUM_BYTES):
        return "bad_field"
    if kind == "cleared":
        return PoolEvent(kind, tenant)
    if not wire.object_key:
        return "no_key"
    return PoolEvent(kind, tenant, wire.object_key, _lower(medium) or None)


def _longer(text: str, limit: int) -> bool:
    return len(text) > limit or (not text.isascii() and len(text.encode("utf-8")) > limit)


_CAPITALS = str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz")


def _lower(medium: str) -> str:
    """ASCII letters in lower case, the rest as it is: what both twins can do alike."""
    return medium.lower() if medium.isascii() else medium.translate(_CAPITALS)
