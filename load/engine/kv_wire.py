"""How KV events look on the wire: the encodings of vLLM 0.23 (arrays), vLLM 0.32 (maps) and SGLang 0.5.23.

A batch is MessagePack ``[ts, [events], rank]`` in every form (spec: engine-events §2.1, §4).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from load.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, TierName

EventForm = Literal["vllm-map", "vllm-array", "sglang"]
HashForm = Literal["int", "bytes"]

MEDIA: dict[str, dict[TierName, str]] = {
    "vllm": {"device": "GPU", "host": "CPU", "disk": "STORAGE"},
    "sglang": {"device": "GPU", "host": "CPU_PINNED", "disk": "DISK"},
}
"""What each engine calls its tiers (spec: engine-events §2.7, §4)."""
GROUP_KIND = "full_attention"
JUNK_EVENTS: tuple[Any, ...] = (["BlockStored", "not-a-list"], {"type": "BlockTeleported", "block_hashes": [1]}, 7)
"""Malformed and unknown events, for consumers that must skip them one by one."""


class KvEncoder:
    """Encodes batches of one rank. ``adapters``: LoRA names in order of their ids (1-based, as in vLLM).

    ``describe_tiers`` off: what lies below vLLM's device is told by placeholders, a hash without tokens, as its
    OffloadingConnector does unless ``self_describing_kv_events`` is set. SGLang always tells all.
    """

    def __init__(
        self,
        form: EventForm,
        hash_form: HashForm,
        block_size: int,
        rank: int,
        adapters: Sequence[str] = (),
        *,
        describe_tiers: bool = False,
    ) -> None:
        self.form = form
        self.hash_form = hash_form
        self._block_size = block_size
        self._rank = rank
        self._describe_tiers = describe_tiers
        self._media = MEDIA["sglang" if form == "sglang" else "vllm"]
        self._lora_ids = {name: number for number, name in enumerate(adapters, 1)}
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, events: Sequence[KvEvent], ts: float, *, junk: bool = False) -> bytes:
        """One batch. ``ts``: Unix seconds. ``junk`` puts malformed events between the good ones."""
        encoded = [self.event(part) for event in events for part in self._parts(event)]
        if junk:
            encoded = [*JUNK_EVENTS[:1], *encoded, *JUNK_EVENTS[1:]]
        return self._encoder.encode([ts, encoded, self._rank])

    def hash(self, digest: bytes) -> int | bytes:
        """vLLM publishes the last 8 bytes unsigned, SGLang the first 8 signed, or the digest itself."""
        if self.form == "sglang":
            return int.from_bytes(digest[:8], "big", signed=True)
        return digest if self.hash_form == "bytes" else int.from_bytes(digest[-8:], "big")

    def event(self, event: KvEvent) -> Any:
        """One event as builtins, ready for MessagePack."""
        if self.form == "vllm-array":
            return self._as_array(event)
        return self._as_map(event) if self.form == "vllm-map" else self._as_sglang(event)

    def _parts(self, event: KvEvent) -> list[KvEvent]:
        """A connector's placeholders hold one hash each."""
        if not self._is_placeholder(event):
            return [event]
        assert isinstance(event, BlockStored)
        empty = event.token_ids[:0]
        return [
            BlockStored((digest,), None, empty, event.first_index + place, event.extra, event.session_id, event.tier)
            for place, digest in enumerate(event.digests)
        ]

    def _is_placeholder(self, event: KvEvent) -> bool:
        below = isinstance(event, BlockStored) and event.tier != "device"
        return below and self.form != "sglang" and not self._describe_tiers

    def _common(self, event: BlockStored) -> tuple[list[int | bytes], int | bytes | None, list[int], int | None]:
        hashes = [self.hash(digest) for digest in event.digests]
        parent = None if event.parent is None else self.hash(event.parent)
        name = event.extra.lora_name
        return hashes, parent, event.token_ids.tolist(), None if name is None else self._lora_ids.get(name, 1)

    def _size_of(self, event: BlockStored) -> int:
        return 0 if self._is_placeholder(event) else self._block_size

    def _as_array(self, event: KvEvent) -> list[Any]:
        if isinstance(event, BlockStored):
            hashes, parent, tokens, lora_id = self._common(event)
            keys = _extra_keys(event)
            return [
                *("BlockStored", hashes, parent, tokens, self._size_of(event), lora_id),
                *(self._media[event.tier], event.extra.lora_name, keys, 0, GROUP_KIND, None),
            ]
        if isinstance(event, BlockRemoved):
            return ["BlockRemoved", [self.hash(event.digest)], self._media[event.tier], 0]
        return ["AllBlocksCleared"]

    def _as_map(self, event: KvEvent) -> dict[str, Any]:
        if isinstance(event, BlockStored):
            hashes, parent, tokens, lora_id = self._common(event)
            stored: dict[str, Any] = {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": parent,
                "token_ids": tokens,
                "block_size": self._size_of(event),
                "lora_id": lora_id,
                "medium": self._media[event.tier],
                "lora_name": event.extra.lora_name,
                "extra_keys": _extra_keys(event),
                "group_idx": 0,
                "kv_cache_spec_kind": GROUP_KIND,
            }
            if event.session_id is not None:
                stored["session_id"] = event.session_id
            return stored
        if isinstance(event, BlockRemoved):
            return {
                "type": "BlockRemoved",
                "block_hashes": [self.hash(event.digest)],
                "medium": self._media[event.tier],
                "group_idx": 0,
            }
        return {"type": "AllBlocksCleared"}

    def _as_sglang(self, event: KvEvent) -> dict[str, Any]:
        if isinstance(event, BlockStored):
            hashes, parent, tokens, _ = self._common(event)
            stored: dict[str, Any] = {
                "type": "BlockStored",
                "block_hashes": hashes,
                "parent_block_hash": parent,
                "token_ids": tokens,
                "block_size": self._size_of(event),
                "lora_id": None,
                "medium": self._media[event.tier],
            }
            optional = (
                ("cache_salt", event.extra.cache_salt),
                ("session_id", event.session_id),
                ("lora_name", event.extra.lora_name),
            )
            stored.update((key, value) for key, value in optional if value is not None)
            return stored
        if isinstance(event, BlockRemoved):
            return {
                "type": "BlockRemoved",
                "block_hashes": [self.hash(event.digest)],
                "medium": self._media[event.tier],
            }
        assert isinstance(event, AllBlocksCleared)
        return {"type": "AllBlocksCleared"}


def _extra_keys(event: BlockStored) -> list[list[str] | None]:
    return [event.extra.published(event.first_index + offset) for offset in range(len(event.digests))]
