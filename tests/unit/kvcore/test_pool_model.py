"""The pool index against a naive model: any history of events in any dialect, lists, reconciles, clears and reloads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.pool_index import PoolIndex
from kvcore.pool_keys import HICACHE, LMCACHE, VLLM, parse_key
from kvcore.pool_layout import LayoutSet, PoolLayout
from tests.unit.kvcore.pool_making import (
    POOL_TWINS,
    PoolTwin,
    Present,
    copy_of,
    fold,
    hicache_key,
    page_of,
    pages_of,
    payload,
    ranges,
    stored,
)

Told = tuple[str, str, str | None, int]
"""Kind, tenant, medium, number of the key."""

PAGES = range(3)
TENANTS = ("default", "b")
MEDIA = ("cpu", "disk", "tape", None)
WRITERS = (
    (HICACHE, "", ("_0_k", "_0_v", "_swa"), "{prefix}{page}{component}"),
    (HICACHE, "m_", ("_0_k", "_0_v", "_swa"), "{prefix}{page}{component}"),
    (VLLM, "m", ("@tp_rank:0", "@tp_rank:1", "@tp_rank:2"), "{prefix}{component}@{page}"),
    (LMCACHE, "m@1", ("@0@@half", "@1@@half", "@2@@half"), "{prefix}{component}"),
)


def key_of(writer: int, page: int, component: int) -> str:
    _, prefix, components, form = WRITERS[writer]
    name = components[component].replace("@@", f"@{page_of(page)}@")
    return form.format(prefix=prefix, page=page_of(page), component=name)


KEYS = [key_of(writer, page, part) for writer in range(len(WRITERS)) for page in PAGES for part in range(3)]
LAYOUTS = [
    PoolLayout(scheme, prefix, (LayoutSet(components[:2]), LayoutSet(components[2:], "trailing_pages", 1)))
    for scheme, prefix, components, _ in WRITERS
]

KEY = st.one_of(st.integers(0, 5), st.integers(0, 5), st.integers(0, len(KEYS) - 1))
"""Mostly a few, so that something happens to each more than once."""
TENANT = st.sampled_from(TENANTS)
EVENT = st.one_of(
    st.tuples(st.just("stored"), TENANT, st.sampled_from(MEDIA), KEY),
    st.tuples(st.sampled_from(["stored", "removed"]), TENANT, st.sampled_from(MEDIA), KEY),
    st.tuples(st.sampled_from(["removed"] * 9 + ["cleared"]), TENANT, st.sampled_from(MEDIA), KEY),
)
OPERATION = st.one_of(
    st.tuples(st.just("events"), st.lists(EVENT, max_size=12), st.integers(0, 3)),
    st.tuples(st.just("list"), st.sets(KEY, max_size=12)),
    st.tuples(st.just("reconcile"), st.sets(KEY, max_size=40), st.randoms(use_true_random=False)),
    st.tuples(st.just("follow"), st.sets(KEY, max_size=12)),
    st.tuples(st.sampled_from(["clear", "reload"])),
)


def on_the_wire(event: Told, dialect: int) -> dict[str, Any]:
    """One event as one of the dialects has it (spec: pool-events §1)."""
    kind, tenant, medium, number = event
    fields = stored(KEYS[number] if kind != "cleared" else None, medium, tenant, event_type=kind)
    del fields["type"]
    if dialect == 0:
        return fields
    if dialect == 1:
        return fields | {"base_block_idx": 0, "dp_rank": None, "seq_hashes": [7]}
    if dialect == 2:
        return fields | {"cache_prefix": "", "tp_rank": 0, "connector_block_hash": page_of(number)}
    kinds = {"stored": "BlockStored", "removed": "BlockRemoved", "cleared": "AllBlocksCleared"}
    return {"object_key": fields["object_key"], "medium": medium, "tenant_id": tenant, "type": kinds[kind]}


class World:
    """An index, and what it must hold."""

    def __init__(self, twin: PoolTwin) -> None:
        self.twin = twin
        self.index = twin.PoolIndex()
        self.present: Present = {}

    def events(self, events: Sequence[Told], dialect: int) -> None:
        self.index.apply_payload(payload(*(on_the_wire(event, dialect) for event in events)))
        fold(self.present, [(kind, tenant, medium, KEYS[number]) for kind, tenant, medium, number in events])

    def list(self, numbers: set[int]) -> None:
        self.index.add_keys("\n".join(KEYS[number] for number in sorted(numbers)).encode())
        for number in numbers:
            if not self.present.get(("default", KEYS[number])):
                self.present["default", KEYS[number]] = {"cpu"}

    def reconcile(self, numbers: set[int], random: Any) -> None:
        """The master's list says that exactly these are there: whatever order the deltas come in, and however often."""
        target = self.twin.PoolIndex()
        target.add_keys("\n".join(KEYS[number] for number in numbers).encode(), known=self.index)
        deltas = self.index.difference(target, part_bytes=200)
        deltas += deltas[:1]
        random.shuffle(deltas)
        for delta in deltas:
            self.index.apply_delta(delta)
        listed = {KEYS[number] for number in numbers}
        for tenant, key in list(self.present):
            if tenant == "default" and key not in listed:
                del self.present[tenant, key]
        self.list(numbers)
        assert self.index.difference(target) == []

    def follow(self, numbers: set[int]) -> None:
        """Another index becomes as this one by deltas alone, media and all tenants included."""
        other = self.twin.PoolIndex()
        other.add_keys("\n".join(KEYS[number] for number in numbers).encode(), known=self.index)
        for delta in other.difference(self.index, tenant=None, part_bytes=200):
            other.apply_delta(delta)
        self.check(other)

    def clear(self) -> None:
        self.index.clear("default")
        fold(self.present, [("cleared", "default", None, None)])

    def reload(self) -> None:
        self.index = copy_of(self.twin, self.index)

    def check(self, index: PoolIndex) -> None:
        held = {owner: media for owner, media in self.present.items() if media}
        found = {(tenant, key): set(index.present(key, tenant=tenant)) for tenant in TENANTS for key in KEYS}
        assert {owner: media for owner, media in found.items() if media} == held
        stats = index.stats()
        identities = {(tenant, *place(key)) for tenant, key in held}
        assert stats.objects == len(held)
        assert stats.pages == len({identity[:4] for identity in identities})
        assert stats.prefixes == len({identity[:3] for identity in identities})
        assert (stats.evicted, stats.unparsed, stats.rejected) == (0, 0, {})
        for tenant in TENANTS:
            for writer, layout in enumerate(LAYOUTS):
                self._check_match(index, tenant, writer, layout, held)

    def _check_match(self, index: PoolIndex, tenant: str, writer: int, layout: PoolLayout, held: Present) -> None:
        _, _, components, _ = WRITERS[writer]
        positions = {
            page: frozenset(components[part] for part in range(3) if (tenant, key_of(writer, page, part)) in held)
            for page in PAGES
        }
        engine = b"".join(bytes(8) + bytes.fromhex(page_of(page))[-8:] for page in PAGES)
        asked = pages_of(PAGES) if layout.scheme == HICACHE else engine
        assert index.match(layout, asked, tenant=tenant) == ranges(positions, len(PAGES), layout)


def place(key: str) -> tuple[str, str, bytes]:
    parsed = parse_key(key)
    assert parsed is not None
    return parsed.scheme, parsed.prefix, parsed.page


@pytest.mark.long
@pytest.mark.parametrize("twin", POOL_TWINS, ids=str)
@given(st.lists(OPERATION, max_size=7))
def test_any_history(twin: PoolTwin, operations: list[tuple[Any, ...]]) -> None:
    """Presence, media, sizes and matches are those of a dict of sets, after every step."""
    world = World(twin)
    for name, *arguments in operations:
        getattr(world, name)(*arguments)
        world.check(world.index)


@pytest.mark.long
@pytest.mark.parametrize("twin", POOL_TWINS, ids=str)
@given(st.lists(EVENT, max_size=12, unique_by=lambda event: (event[1], event[3])), st.randoms(use_true_random=False))
def test_order_and_repetition(twin: PoolTwin, events: list[Told], random: Any) -> None:
    """Events of different objects may come in any order, each as often as it likes (spec: pool-events §4 rule 1)."""
    events = [event for event in events if event[0] != "cleared"]
    before: list[Told] = [("stored", tenant, "cpu", number) for _, tenant, _, number in events[::2]]
    shuffled = events * 2
    random.shuffle(shuffled)
    worlds = []
    for history in (events, shuffled):
        world = World(twin)
        world.events(before, 0)
        world.events(history, 0)
        worlds.append(world)
    assert worlds[0].index.difference(worlds[1].index, tenant=None) == []
    worlds[0].check(worlds[1].index)


def test_the_keys_of_this_model_are_distinct() -> None:
    """Each names its own object."""
    assert len({(*place(key), parse_key(key)) for key in KEYS}) == len(KEYS) == 36
    assert hicache_key(0, "_0_k", "m_") in KEYS
