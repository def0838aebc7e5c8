"""Random engines: a forest of blocks that ranks store, lose, move and clear, told as raw payloads of any layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any
from zlib import crc32

import msgspec

from kvcore import hashing

MEDIA = ("GPU", "GPU", "GPU", None, "CPU", "CPU_PINNED", "cpu_tier1", "DISK", "STORAGE", "EXTERNAL", "OBJ", "TAPE", "")
KINDS = (None, None, "full_attention", "mla_attention", "sink_full_attention", "sliding_window", "mamba")
EDGE_HASHES = (0, 1, 2**63 - 1, 2**63, 2**64 - 1)


@dataclass(frozen=True)
class Node:
    """One block: its tokens, what else enters its identity, and its chain hash."""

    number: int
    parent: Node | None
    tokens: tuple[int, ...]
    adapter: str | None
    salt: str | None
    image: str | None
    own: int
    depth: int

    @property
    def path(self) -> list[Node]:
        """From the root to here."""
        return [*(self.parent.path if self.parent else ()), self]


class Forest:
    """Blocks of one block size, of several namespaces, and questions about them."""

    def __init__(self, rng: Random, size: int, block_size: int) -> None:
        self.block_size = block_size
        self.nodes: list[Node] = []
        for number in range(size):
            deep = rng.randrange(4) > 0
            parent = (self.nodes[-1] if deep else rng.choice(self.nodes)) if self.nodes and rng.randrange(8) else None
            self.nodes.append(self._node(rng, number, parent))

    def _node(self, rng: Random, number: int, parent: Node | None) -> Node:
        tokens = tuple(rng.choice((number, rng.randrange(2**32))) for _ in range(self.block_size))
        if parent is None:
            adapter = rng.choice((None, None, None, "lora", "\u65e5\u672c"))
            salt = rng.choice((None, None, None, "tenant", "s" * 40))
        else:
            adapter, salt = parent.adapter, parent.salt
        image = rng.choice(("img", "0" * 64)) if rng.randrange(12) == 0 else None
        packed = hashing.pack_tokens(tokens)
        mm = {0: (hashing.multimodal_hash(image),)} if image else None
        above = None if parent is None else parent.own
        chain = hashing.chain_hashes(packed, self.block_size, adapter=adapter, salt=salt, mm=mm, parent=above)
        own = hashing.unpack_chain(chain)[0]
        return Node(number, parent, tokens, adapter, salt, image, own, 0 if parent is None else parent.depth + 1)

    def questions(self, rng: Random, count: int) -> list[bytes]:
        """Chains of paths: whole, cut, gone astray, with half a hash behind. What follows a stranger is strange, as in
        every real chain: a chain hash stands for all before it, and the search relies on that."""
        chains = []
        for _ in range(count):
            owns = [node.own for node in rng.choice(self.nodes).path]
            match rng.randrange(8):
                case 0:
                    owns = owns[: rng.randrange(len(owns) + 1)]
                case 1 | 2:
                    kept = rng.randrange(len(owns) + 1)
                    owns[kept:] = [rng.randrange(2**64) for _ in range(len(owns) - kept + 1)]
                case _:
                    pass
            chains.append(hashing.pack_chain(owns) + (b"abc" if rng.randrange(20) == 0 else b""))
        return chains


@dataclass
class Engine:
    """One rank's publisher. ``tidy``: says only what is consistent (one meaning a hash, tokens that fit); else about
    one event in ten contradicts something. ``grouped``: has several KV-cache groups. ``hidden``: some blocks have a
    second name, as if of a namespace that is not published. ``clears``: now and then its whole pool."""

    rng: Random
    forest: Forest
    worker: str
    rank: int
    tidy: bool
    names: dict[tuple[int, int], int] = field(default_factory=dict)
    stores: list[tuple[list[int], str | None, int | None]] = field(default_factory=list)
    layout: str = "array"
    grouped: bool = False
    hidden: bool = True
    clears: bool = True

    def __post_init__(self) -> None:
        self.layout = self.rng.choice(("array", "map", "mixed"))
        self.grouped = self.rng.randrange(4) == 0

    def payload(self) -> bytes:
        """A batch of one to four events."""
        events = [self._event() for _ in range(self.rng.choice((1, 1, 1, 2, 4)))]
        payload = msgspec.msgpack.encode([1.5, events, self.rank])
        if crc32(payload) % 2:
            return payload
        # As vLLM publishes evictions and output. No draw decides this, so that cases that are kept stay what they are.
        return msgspec.msgpack.encode([1.5, [one for event in events for one in _one_by_one(event)], self.rank])

    def name(self, node: Node, variant: int = 0) -> int:
        """The engine's hash of a block; a second ``variant`` is a second name of the same block."""
        key = (node.number, variant)
        if key not in self.names:
            fresh = self.rng.choice(EDGE_HASHES) if self.rng.randrange(40) == 0 else self.rng.randrange(2**64)
            taken = set(self.names.values())
            while fresh in taken:
                fresh = self.rng.randrange(2**64)
            self.names[key] = fresh
        return self.names[key]

    def given(self) -> tuple[bytes, bytes, int | None, int]:
        """Some blocks by their hashes alone: engine hashes, chain hashes (seldom too few), hash of the parent, tier."""
        rng = self.rng
        path = rng.choice(self.forest.nodes).path[-rng.choice((1, 1, 2, 8)) :]
        variant = self._variant()
        hashes = [self.name(each, variant) for each in path]
        owns = [each.own for each in path]
        above = path[0].parent
        parent = None if above is None else self.name(above, self._variant())
        tier = rng.choice((0, 0, 0, 1, 2, 3))
        self.stores.append((hashes, ("GPU", "CPU", "DISK", "EXTERNAL")[tier], None))
        chain = hashing.pack_chain(owns)
        return (
            hashing.pack_chain(hashes),
            chain[: -rng.choice((1, 8))] if rng.randrange(30) == 0 else chain,
            parent,
            tier,
        )

    def _variant(self) -> int:
        return int(self.hidden and self.rng.randrange(10) == 0)

    def _event(self) -> Any:
        kind = self.rng.randrange(20)
        if kind < 10:
            return self._stored()
        if kind < 19 or not self.clears:
            return self._removed()
        return ["AllBlocksCleared"] if self._as_array() else {"type": "AllBlocksCleared"}

    def _as_array(self) -> bool:
        return self.layout == "array" or (self.layout == "mixed" and self.rng.randrange(2) == 0)

    def _group(self) -> tuple[int | None, str | None]:
        if not self.grouped:
            return None, None
        if self.tidy:
            return self.rng.choice(((0, "full_attention"), (1, "full_attention"), (2, "sliding_window"), (None, None)))
        return self.rng.choice((None, 0, 0, 1, 2, 7, -1)), self.rng.choice(KINDS)

    def _wire_hash(self, value: int) -> int | bytes:
        match self.rng.randrange(4):
            case 0:
                return value - 2**64 if value >= 2**63 else value
            case 1:
                return self.rng.choice((b"", b"\xff" * 24)) + value.to_bytes(8, "big")
            case _:
                return value

    def _stored(self) -> Any:
        rng = self.rng
        node = rng.choice(self.forest.nodes)
        path = node.path[-rng.choice((1, 1, 2, 3, 8)) :]
        variant = self._variant()
        hashes = [self.name(each, variant) for each in path]
        above = path[0].parent
        parent = None if above is None else self.name(above, self._variant())
        tokens = [token for each in path for token in each.tokens]
        size = self.forest.block_size
        keys: list[Any] = [[[each.image, rng.randrange(5)]] if each.image else None for each in path]
        if above is None and path[0].salt is not None:
            keys[0] = [*(keys[0] or ()), path[0].salt]
        adapter = path[0].adapter
        if adapter is not None:
            keys = [[adapter, *(key or ())] for key in keys]
        without_tokens = rng.randrange(8) == 0
        if without_tokens:
            tokens, size, parent, keys = [], 0, rng.choice((None, parent)), []
        medium = rng.choice(MEDIA)
        group, kind = self._group()
        self.stores.append((hashes, medium, group))
        if not self.tidy and rng.randrange(8) == 0:
            hashes, parent, tokens, size, keys = self._contradict(hashes, parent, tokens, size, keys)
        wire_hashes = [self._wire_hash(value) for value in hashes]
        wire_parent = None if parent is None else self._wire_hash(parent)
        if self._as_array():
            head = ["BlockStored", wire_hashes, wire_parent, tokens, size, None, medium, adapter, keys or None]
            return head if group is None and kind is None else [*head, group, kind]
        event: dict[str, Any] = {"type": "BlockStored", "block_hashes": wire_hashes, "parent_block_hash": wire_parent}
        event |= {"token_ids": tokens, "block_size": size, "medium": medium, "lora_name": adapter, "extra_keys": keys}
        if group is not None or kind is not None:
            event |= {"group_idx": group, "kv_cache_spec_kind": kind}
        return event

    def _contradict(
        self, hashes: list[int], parent: int | None, tokens: list[Any], size: int, keys: list[Any]
    ) -> tuple[list[int], int | None, list[Any], int, list[Any]]:
        """Something that does not fit, Eagle's pairs of tokens among it."""
        rng = self.rng
        match rng.randrange(10):
            case 0:
                hashes = [rng.choice(hashes) for _ in hashes]
            case 1:
                parent = rng.choice((None, *hashes, self.name(rng.choice(self.forest.nodes))))
            case 2:
                tokens = [*tokens, 5]
            case 3:
                tokens = [rng.randrange(50) for _ in tokens]
            case 4:
                size = rng.choice((0, 1, size * 2, -1))
            case 5:
                hashes = hashes[:-1]
            case 6:
                tokens, size = tokens * 2, size * 2
            case 7:
                keys = [["other"] for _ in keys]
            case 8:
                return hashes, parent, [[token, token ^ 1] for token in tokens], size, keys
            case _:
                hashes = [*hashes, *hashes]
                tokens = [*tokens, *tokens]
                keys = []
        return hashes, parent, tokens, size, keys

    def _removed(self) -> Any:
        """Mostly what was stored and not told to be gone yet."""
        rng = self.rng
        if self.stores and rng.randrange(5):
            names, medium, group = self.stores.pop(rng.randrange(len(self.stores)))
            kept = rng.randrange(len(names)) if rng.randrange(3) == 0 else 0
            names = names[kept:]
        else:
            path = rng.choice(self.forest.nodes).path[-rng.choice((1, 1, 2, 8)) :]
            names, medium, group = [self.name(each, self._variant()) for each in path], rng.choice(MEDIA), None
        if not self.tidy and rng.randrange(6) == 0:
            medium, group = rng.choice(MEDIA), self._group()[0]
        hashes = [self._wire_hash(name) for name in (reversed(names) if rng.randrange(2) else names)]
        if self._as_array():
            return ["BlockRemoved", hashes, medium, *(() if group is None else (group,))]
        event: dict[str, Any] = {"type": "BlockRemoved", "block_hashes": hashes, "medium": medium}
        return event if group is None else {**event, "group_idx": group}


def _one_by_one(event: Any) -> list[Any]:
    """The same as one event a block."""
    as_map = isinstance(event, dict)
    fields = list(event.values()) if as_map else event
    if len(fields) < 2 or len(fields[1]) < 2:
        return [event]
    tag, hashes, *others = fields
    events: list[Any] = [[tag, [value], *others] for value in hashes]
    if tag == "BlockStored":
        at = 7 if as_map else 8
        tokens, keys = fields[3], fields[at] if len(fields) > at else None
        share = len(tokens) // len(hashes)
        for place, one in enumerate(events):
            one[2] = hashes[place - 1] if place else fields[2]
            one[3] = tokens[place * share : (place + 1) * share]
            if keys:
                one[at] = keys[place : place + 1]
    return [dict(zip(event, one, strict=True)) for one in events] if as_map else events
