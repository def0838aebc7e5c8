"""The pool's key events as a Mooncake master 0.3.14 publishes them (spec: pool-events §1).

A batch is MessagePack ``[timestamp_ms, [event_map, ...], dp_rank]``; events are maps with their keys in the order of a
captured master.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

Medium = Literal["cpu", "disk"]
EventType = Literal["stored", "removed", "cleared"]

MAX_BATCH_EVENTS = 64
"""Events of one message at most."""
_LEGACY_TYPES = {"stored": "BlockStored", "removed": "BlockRemoved", "cleared": "AllBlocksCleared"}


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """One object came into or left one medium; ``cleared``: all of its tenant's objects are gone."""

    event_type: EventType
    tenant: str
    object_key: str | None = None
    medium: Medium | None = None
    group_id: str | None = None
    session_id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventContext:
    """What a master stamps on every event, from its flags (``--kv_events_*``)."""

    backend_id: str = "pool-a"
    model_name: str | None = None
    block_size: int | None = None
    additional_salt: str | None = None
    lora_name: str | None = None
    dp_rank: int = 0
    legacy_compat: bool = True


class EventEncoder:
    """Encodes the events of one master process; ``event_id`` counts from 1 without a gap."""

    def __init__(self, context: EventContext) -> None:
        self._context = context
        self._next_id = 1
        self._encoder = msgspec.msgpack.Encoder()

    def batches(self, events: Sequence[PoolEvent], now_ms: int) -> Iterator[bytes]:
        """Payloads of as many messages as ``events`` need. ``now_ms``: Unix milliseconds."""
        for start in range(0, len(events), MAX_BATCH_EVENTS):
            maps = [self._map(event, now_ms) for event in events[start : start + MAX_BATCH_EVENTS]]
            yield self._encoder.encode([now_ms, maps, self._context.dp_rank])

    def _map(self, event: PoolEvent, now_ms: int) -> dict[str, Any]:
        context = self._context
        legacy = context.legacy_compat
        fields: dict[str, Any] = {"event_id": self._next_id, "timestamp": now_ms, "event_type": event.event_type}
        self._next_id += 1
        if legacy:
            fields["type"] = _LEGACY_TYPES[event.event_type]
        fields |= {
            "model_name": context.model_name,
            "block_size": context.block_size,
            "additional_salt": context.additional_salt,
            "lora_name": context.lora_name,
            "tenant_id": event.tenant,
            "backend_id": context.backend_id,
            "medium": event.medium,
            "dp_rank": context.dp_rank,
        }
        if event.event_type == "cleared":
            return fields
        fields |= {"group_id": event.group_id, "object_key": event.object_key, "seq_hashes": []}
        if legacy:
            fields["block_hashes"] = []
        if event.event_type == "removed":
            fields["base_block_idx"] = None
            return fields
        fields |= {"session_id": event.session_id, "base_block_idx": None, "parent_hash": None, "token_ids": None}
        if legacy:
            fields["parent_block_hash"] = None
        return fields
