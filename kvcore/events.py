"""One engine payload decoded: what vLLM (0.9-0.33) and SGLang (0.4.7-0.5.23) publish, in one neutral shape.

An event is an array with its tag first or a map with its tag under ``type``; both may stand in one batch, fields may be
missing or unknown (spec: engine-events §2.1, §4, §6). A bad event is left out and counted by reason, the rest stands.
Untrusted bytes are safe: sizes and depths are bounded by the payload, and only `BadBatchError` leaves `decode_batch`.
"""

from __future__ import annotations

from collections import Counter
from enum import IntEnum
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from kvcore.errors import BadBatchError, TokensError
from kvcore.hashing import multimodal_hash, pack_tokens

MAX_PAYLOAD_BYTES = 32 * 1024 * 1024
_MASK64 = (1 << 64) - 1
_U32 = 1 << 32


class Tier(IntEnum):
    """Where a block lies, best first."""

    DEVICE = 0
    HOST = 1
    DISK = 2
    EXTERNAL = 3


MEDIUM_TIERS: dict[str, Tier] = {
    "GPU": Tier.DEVICE,
    "DEVICE": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "CPU_TIER1": Tier.HOST,
    "HOST": Tier.HOST,
    "HOST_PINNED": Tier.HOST,
    "CPU_TIER2": Tier.DISK,
    "DISK": Tier.DISK,
    "NVME": Tier.DISK,
    "STORAGE": Tier.DISK,
    "FS": Tier.DISK,
    "EXTERNAL": Tier.EXTERNAL,
    "NETWORK": Tier.EXTERNAL,
    "REMOTE": Tier.EXTERNAL,
    "SHARED": Tier.EXTERNAL,
    "OBJ": Tier.EXTERNAL,
}
"""Upper-case medium to tier (spec: index-and-routing §2.2, engine-events §2.7). No medium: the device. Any other: the
lowest tier, counted in `Batch.unknown_media`."""

CONNECTOR_MEDIA = frozenset({"CPU", "STORAGE", "FS", "OBJ"})
"""Media of vLLM's connectors. They hold their blocks apart from the engine's own pool, so that AllBlocksCleared
leaves them alone (spec: engine-events §2.7, §6 rule 7)."""

MAIN_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of KV-cache group whose blocks form the reusable prefix; the others keep a tail or a state."""


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks became resident in ``tier``, in chain order.

    ``hashes``: the engine's own, as u64 (a negative int is reinterpreted, of a digest the last 8 bytes count, as in
    vLLM). ``parent``: hash before the first one, ``None`` at the root. ``tokens``: u32 little-endian, empty for an
    offload placeholder. ``block_size``: the event's own statement in tokens, 0 if absent. ``adapter`` and ``salt``
    are its namespace: the salt is stated at the root only, children inherit. ``mm``: position in ``hashes`` to u64
    hashes of multimodal objects and other extra keys. ``eagle``: ``tokens`` holds one more, the window of the last
    block. ``misaligned``: tokens or extra keys do not line up with the hashes (sliding-window groups).
    """

    hashes: tuple[int, ...]
    parent: int | None = None
    tokens: bytes = b""
    block_size: int = 0
    tier: Tier = Tier.DEVICE
    connector: bool = False
    adapter: str | None = None
    salt: str | None = None
    mm: dict[int, tuple[int, ...]] = {}
    group: int | None = None
    group_kind: str | None = None
    session_id: str | None = None
    eagle: bool = False
    misaligned: bool = False

    @property
    def tokens_per_block(self) -> int:
        """Tokens over hashes: the block size that was really used; 0 without tokens."""
        return (len(self.tokens) // 4 - self.eagle) // len(self.hashes) if self.tokens and self.hashes else 0


class Removed(msgspec.Struct, frozen=True, kw_only=True):
    """One copy of each of these blocks left ``tier``. ``group`` ``None``: every main group."""

    hashes: tuple[int, ...]
    tier: Tier = Tier.DEVICE
    group: int | None = None


class Cleared(msgspec.Struct, frozen=True, kw_only=True):
    """The engine emptied its pool: every group and every tier of it; connectors keep theirs."""


Event = Stored | Removed | Cleared


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """One payload. ``rank`` ``None``: not stated, the socket's counts. ``rejected``: events left out, by reason
    (``unknown_tag``, ``bad_field``, ``bad_token``, ``bad_hash``). ``unknown_media``: events applied to the lowest
    tier because their medium has no alias."""

    ts: float
    rank: int | None
    events: tuple[Event, ...]
    rejected: dict[str, int] = {}
    unknown_media: int = 0

    @property
    def cleared(self) -> bool:
        """Whether the engine emptied its pool in it."""
        return any(isinstance(event, Cleared) for event in self.events)


class _Envelope(msgspec.Struct, array_like=True):
    ts: float
    events: list[msgspec.Raw]
    data_parallel_rank: int | None = None


class _EnvelopeMap(msgspec.Struct):
    events: list[msgspec.Raw]
    ts: float = 0.0
    data_parallel_rank: int | None = None


_Hashes = list[int | bytes]
_TokenIds = list[int | tuple[int, int]]


class _StoredArray(msgspec.Struct, array_like=True, tag="BlockStored"):
    block_hashes: _Hashes
    parent_block_hash: int | bytes | None = None
    token_ids: _TokenIds | None = None
    block_size: int | None = None
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    # group_idx and kv_cache_spec_kind, recognised by type: a block_mm_infos may stand before them.
    tail_0: Any = None
    tail_1: Any = None
    tail_2: Any = None


class _RemovedArray(msgspec.Struct, array_like=True, tag="BlockRemoved"):
    block_hashes: _Hashes
    medium: str | None = None
    group_idx: int | None = None


class _ClearedArray(msgspec.Struct, array_like=True, tag="AllBlocksCleared"):
    pass


class _StoredMap(msgspec.Struct, tag="BlockStored"):
    block_hashes: _Hashes
    parent_block_hash: int | bytes | None = None
    token_ids: _TokenIds | None = None
    block_size: int | None = None
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None


class _RemovedMap(msgspec.Struct, tag="BlockRemoved"):
    block_hashes: _Hashes
    medium: str | None = None
    group_idx: int | None = None


class _ClearedMap(msgspec.Struct, tag="AllBlocksCleared"):
    pass


class _TagArray(msgspec.Struct, array_like=True):
    type: str


class _TagMap(msgspec.Struct):
    type: str


_envelope = msgspec.msgpack.Decoder(_Envelope)
_envelope_map = msgspec.msgpack.Decoder(_EnvelopeMap)
_array_event = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_map_event = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | _ClearedMap)
_array_tag = msgspec.msgpack.Decoder(_TagArray)
_map_tag = msgspec.msgpack.Decoder(_TagMap)
_encoder = msgspec.msgpack.Encoder()
_TAGS = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})
# What msgspec raises for hostile bytes: DecodeError and its subclasses, RecursionError for depth, TypeError for an
# unhashable map key, UnicodeDecodeError and OverflowError for values.
_DECODE_ERRORS = (msgspec.MsgspecError, RecursionError, TypeError, ValueError, OverflowError)


class _RejectedError(Exception):
    """This one event cannot be used."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def decode_batch(payload: bytes) -> Batch:
    """Decode one engine payload (MessagePack). Raises `BadBatchError` when it is not a batch at all."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise BadBatchError(f"a payload of {len(payload)} bytes exceeds the limit of {MAX_PAYLOAD_BYTES} bytes")
    try:
        envelope = _envelope_map.decode(payload) if _is_map(payload) else _envelope.decode(payload)
    except _DECODE_ERRORS as error:
        raise BadBatchError(f"not a batch of KV events: {error}") from error
    rank = envelope.data_parallel_rank
    if rank is not None and not 0 <= rank < _U32:
        raise BadBatchError(f"data_parallel_rank {rank} is not a rank")
    events: list[Event] = []
    rejected: Counter[str] = Counter()
    unknown_media = 0
    for raw in envelope.events:
        try:
            event, known_medium = _decode_event(raw)
        except _RejectedError as error:
            rejected[error.reason] += 1
        else:
            events.append(event)
            unknown_media += not known_medium
    return Batch(ts=envelope.ts, rank=rank, events=tuple(events), rejected=dict(rejected), unknown_media=unknown_media)


def _is_map(raw: bytes | msgspec.Raw) -> bool:
    first = bytes(memoryview(raw)[:1])
    return bool(first) and (0x80 <= first[0] <= 0x8F or first[0] in (0xDE, 0xDF))


def _decode_event(raw: msgspec.Raw) -> tuple[Event, bool]:
    """The event, and whether its medium is known."""
    is_map = _is_map(raw)
    try:
        wire = _map_event.decode(raw) if is_map else _array_event.decode(raw)
    except _DECODE_ERRORS as error:
        raise _RejectedError(_reason_of(raw, is_map=is_map)) from error
    if isinstance(wire, _ClearedArray | _ClearedMap):
        return Cleared(), True
    tier, connector, known = _place(wire.medium)
    if isinstance(wire, _RemovedArray | _RemovedMap):
        return Removed(hashes=_hashes(wire.block_hashes), tier=tier, group=wire.group_idx), known
    return _stored(wire, tier, connector), known


def _reason_of(raw: msgspec.Raw, *, is_map: bool) -> str:
    try:
        tag = (_map_tag if is_map else _array_tag).decode(raw).type
    except _DECODE_ERRORS:
        return "bad_field"
    return "bad_field" if tag in _TAGS else "unknown_tag"


def _place(medium: str | None) -> tuple[Tier, bool, bool]:
    """Tier, whether a connector holds it, and whether the medium is known."""
    if not medium:
        return Tier.DEVICE, False, True
    name = medium.strip().upper()
    tier = MEDIUM_TIERS.get(name)
    if tier is None:
        return Tier.EXTERNAL, True, False
    return tier, name in CONNECTOR_MEDIA, True


def _stored(wire: _StoredArray | _StoredMap, tier: Tier, connector: bool) -> Stored:
    hashes = _hashes(wire.block_hashes)
    parent = None if wire.parent_block_hash is None else _hash(wire.parent_block_hash)
    tokens, eagle = _tokens(wire.token_ids or [])
    block_size = wire.block_size or 0
    adapter = wire.lora_name
    if not adapter and wire.lora_id:
        # Releases before 0.14 give the slot only: a name that no request can have keeps it apart from the base model.
        adapter = f"\0lora_id={wire.lora_id}"
    if isinstance(wire, _StoredMap):
        group, kind, salt, session_id = wire.group_idx, wire.kv_cache_spec_kind, wire.cache_salt, wire.session_id
    else:
        group, kind = _typed_tail(wire)
        salt = session_id = None
    keys = wire.extra_keys or []
    mm, root_salt = _extra_keys(keys, adapter=wire.lora_name, at_root=parent is None)
    count = len(tokens) // 4 - eagle
    return Stored(
        hashes=hashes,
        parent=parent,
        tokens=tokens,
        block_size=block_size,
        tier=tier,
        connector=connector,
        adapter=adapter or None,
        salt=salt or root_salt,
        mm=mm,
        group=group,
        group_kind=kind,
        session_id=session_id,
        eagle=eagle,
        misaligned=_misaligned(count, len(hashes), block_size, len(keys), kind),
    )


def _misaligned(tokens: int, hashes: int, block_size: int, keys: int, kind: str | None) -> bool:
    """Whether tokens cannot be cut into one block per hash.

    A block size that contradicts the ratio is believed only of a group that is not known to be a main one: context
    parallelism multiplies the real size of main-group blocks (spec: user-cases A10).
    """
    if not tokens:
        return False
    if not hashes or tokens % hashes or (keys and keys != hashes):
        return True
    return bool(block_size) and tokens != hashes * block_size and kind not in MAIN_KINDS


def _typed_tail(wire: _StoredArray) -> tuple[int | None, str | None]:
    """Group and kind of an array event: the first integer and the first string after the extra keys."""
    group: int | None = None
    kind: str | None = None
    for value in (wire.tail_0, wire.tail_1, wire.tail_2):
        if isinstance(value, str):
            kind = kind or value
        elif isinstance(value, int) and kind is None and group is None:
            group = value
    return group, kind


def _hash(value: int | bytes) -> int:
    if isinstance(value, int):
        return value & _MASK64
    if not value:
        raise _RejectedError("bad_hash")
    return int.from_bytes(value[-8:], "big")


def _hashes(values: _Hashes) -> tuple[int, ...]:
    return tuple([_hash(value) for value in values])


def _tokens(token_ids: _TokenIds) -> tuple[bytes, bool]:
    """u32 bytes; of bigrams (Eagle) every first token and the last second one."""
    if not token_ids:
        return b"", False
    eagle = isinstance(token_ids[0], tuple)
    try:
        if not eagle:
            return pack_tokens(token_ids), False  # type: ignore[arg-type]  # a pair among integers raises TokensError
        firsts = [first for first, _ in token_ids]  # type: ignore[misc]  # so does an integer among pairs
        return pack_tokens([*firsts, token_ids[-1][1]]), True  # type: ignore[index]
    except (TokensError, TypeError) as error:
        raise _RejectedError("bad_token") from error


def _extra_keys(
    keys: list[Any], *, adapter: str | None, at_root: bool
) -> tuple[dict[int, tuple[int, ...]], str | None]:
    """Extra keys by position, as u64 values to hash, and the salt.

    vLLM publishes them untagged, in the order adapter, multimodal pairs [identifier, offset], salt (block 0 of a
    root only), digest of prompt embeddings (spec: engine-events §2.4). Offsets are not hashed.
    """
    salt: str | None = None
    mm: dict[int, tuple[int, ...]] = {}
    for position, entry in enumerate(keys):
        if not entry:
            continue
        values: list[int] = []
        rest = entry if isinstance(entry, list) else [entry]
        if adapter and rest[0] == adapter:
            rest = rest[1:]
        for key in rest:
            if isinstance(key, list) and len(key) == 2 and isinstance(key[0], str) and isinstance(key[1], int):
                values.append(multimodal_hash(key[0]))
            elif isinstance(key, str) and at_root and position == 0 and salt is None:
                salt = key
            else:
                values.append(_opaque(key))
        if values:
            mm[position] = tuple(values)
    return mm, salt


def _opaque(key: Any) -> int:
    """An extra key of a kind we do not know: it must keep blocks apart, so its bytes count, under a seed of their own.

    Decoding guarantees that it encodes again, except for extension types, which no engine sends.
    """
    try:
        return xxh3_64_intdigest(_encoder.encode(key), 2)
    except _DECODE_ERRORS as error:
        raise _RejectedError("bad_field") from error
