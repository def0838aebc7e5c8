"""Pools made for the tests: both twins of the pool core, captured messages, events of every dialect, naive answers."""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from kvcore import page_hash, pool_index, pool_keys
from kvcore.dump import at_once
from kvcore.pool_events import DEFAULT_TENANT
from kvcore.pool_index import PoolIndex
from kvcore.pool_layout import TRAILING_PAGES, PoolLayout
from tests.unit.kvcore.twins import NATIVE_MISSING

FOLDER = Path(__file__).parents[2] / "fixtures" / "mooncake"
SETS = ("basic", "ctxflags_nolegacy", "evict", "hicache", "lifecycle", "noobjkey", "offload", "restart")
_encode = msgspec.msgpack.Encoder().encode

Fields = dict[str, Any]
Present = dict[tuple[str, str], set[str]]
"""(tenant, key) to media: the naive index."""


@dataclass(frozen=True)
class PoolTwin:
    """What of the pool core exists twice. Types are those of the Python twin."""

    name: str
    PoolIndex: type[pool_index.PoolIndex]
    page_hashes: Any
    parse_key: Any

    def __str__(self) -> str:
        return self.name


def _twins() -> list[PoolTwin]:
    twins = [PoolTwin("python", pool_index.PoolIndex, page_hash.page_hashes, pool_keys.parse_key)]
    if NATIVE_MISSING is None:
        native = importlib.import_module("tidegate_kvcore")
        twins.append(PoolTwin("native", native.PoolIndex, native.page_hashes, native.parse_key))
    return twins


POOL_TWINS = _twins()


def frames_of(name: str) -> Iterator[bytes]:
    """The payloads of one captured set, in order."""
    data = (FOLDER / f"{name}.frames").read_bytes()
    at = number = 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        at += 4 + size
        number += 1
        if number % 3 == 0:
            yield data[at - size : at]


@cache
def captured(name: str) -> tuple[dict[str, Any], ...]:
    """What an independent decoder read of the set's messages."""
    rows = map(json.loads, (FOLDER / "events.jsonl").read_text("utf-8").splitlines())
    return tuple(row for row in rows if row["set"] == name)


def stored(key: object, medium: object = "cpu", tenant: object = DEFAULT_TENANT, **more: object) -> Fields:
    """A stored event with the 21 fields of 0.3.14 (spec: pool-events §1)."""
    return {
        "event_id": 1,
        "timestamp": 1_795_972_783_827,
        "event_type": "stored",
        "type": "BlockStored",
        "model_name": None,
        "block_size": None,
        "additional_salt": None,
        "lora_name": None,
        "tenant_id": tenant,
        "backend_id": "pool-a",
        "medium": medium,
        "dp_rank": 0,
        "group_id": None,
        "object_key": key,
        "seq_hashes": [],
        "block_hashes": [],
        "session_id": None,
        "base_block_idx": None,
        "parent_hash": None,
        "token_ids": None,
        "parent_block_hash": None,
    } | more


def removed(key: object, medium: object = "cpu", tenant: object = DEFAULT_TENANT, **more: object) -> Fields:
    fields = stored(key, medium, tenant, event_type="removed", type="BlockRemoved")
    for name in ("session_id", "parent_hash", "token_ids", "parent_block_hash"):
        del fields[name]
    return fields | more


def cleared(tenant: object = DEFAULT_TENANT) -> Fields:
    return stored(None, None, tenant, event_type="cleared", type="AllBlocksCleared")


def payload(*events: object) -> bytes:
    """One message's last frame."""
    return _encode([1_795_972_783_827, list(events), 0])


def page_of(name: object) -> str:
    """A page's digest in hex, made of a name."""
    return hashlib.sha256(str(name).encode()).hexdigest()


def hicache_key(name: object, component: str = "__k", prefix: str = "") -> str:
    return f"{prefix}{page_of(name)}{component}"


def pages_of(names: Iterable[object]) -> bytes:
    """The pages that `hicache_key` names, as `PoolIndex.match` takes them."""
    return b"".join(bytes.fromhex(page_of(name))[:16] for name in names)


def told(twin: PoolTwin, *events: object) -> PoolIndex:
    """An index that was told these in one message."""
    index = twin.PoolIndex()
    index.apply_payload(payload(*events))
    return index


def copy_of(twin: PoolTwin, index: PoolIndex) -> PoolIndex:
    """The same in a new index, by way of a dump."""
    copy = twin.PoolIndex(index.limits)
    at_once(copy.load(at_once(index.dump())))
    return copy


def fold(present: Present, events: Iterable[Sequence[Any]]) -> None:
    """Apply [event_type, tenant, medium, key] by the words of pool-events §4 rule 1."""
    for kind, tenant, medium, key in events:
        if kind == "cleared":
            for owner in [owner for owner in present if owner[0] == tenant]:
                del present[owner]
        elif kind == "stored":
            present.setdefault((tenant, key), set()).add(medium or "cpu")
        else:
            media = present.get((tenant, key), set())
            media.difference_update({medium} if medium else set(media))


def ranges(positions: Mapping[int, frozenset[str]], length: int, layout: PoolLayout) -> tuple[tuple[int, int], ...]:
    """What a match must answer if each position has these components, by the words of `PoolIndex.match`."""
    every = {name for part in layout.sets if part.hit_policy != TRAILING_PAGES for name in part.components}
    trailing = [part for part in layout.sets if part.hit_policy == TRAILING_PAGES]

    def complete(position: int) -> bool:
        return position < length and every <= positions.get(position, frozenset())

    def may_end(start: int, end: int) -> bool:
        return all(
            set(part.components) <= positions.get(position, frozenset())
            for part in trailing
            for position in range(max(start, end - part.trailing_pages), end)
        )

    answer: list[tuple[int, int]] = []
    start = 0
    while every and start < length:
        end = start
        while complete(end):
            end += 1
        usable = max((possible for possible in range(start + 1, end + 1) if may_end(start, possible)), default=start)
        if usable > start:
            answer.append((start, usable))
        start = end + 1
    return tuple(answer)
