"""Captured messages of a real Mooncake master: the presence that its own record says, whatever the layout."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from kvcore.hashing import pack_tokens
from kvcore.pool_events import decode_pool_batch
from kvcore.pool_index import PoolIndex
from kvcore.pool_keys import HICACHE, LMCACHE, VLLM, parse_key
from kvcore.pool_layout import (
    LayoutSet,
    PoolLayout,
    hicache_prefix,
    lmcache_components,
    mha_components,
    mla_components,
    vllm_components,
)
from tests.unit.kvcore.pool_making import (
    FOLDER,
    POOL_TWINS,
    SETS,
    PoolTwin,
    Present,
    captured,
    fold,
    frames_of,
    hicache_key,
)

each_twin = pytest.mark.parametrize("twin", POOL_TWINS, ids=str)


@pytest.mark.parametrize("name", SETS)
def test_events_as_another_decoder_read_them(name: str) -> None:
    """Each message, in order: kind, tenant, medium and key of every event; nothing is rejected."""
    payloads = list(frames_of(name))
    rows = captured(name)
    assert len(payloads) == len(rows)
    for data, row in zip(payloads, rows, strict=True):
        batch = decode_pool_batch(data)
        read = [[event.kind, event.tenant, event.medium, event.object_key or None] for event in batch.events]
        assert read == row["events"]
        assert (batch.rejected, batch.backend_id) == ({}, "pool-a")


def presence(index: PoolIndex, keys: set[tuple[str, str]]) -> Present:
    found = {(tenant, key): set(index.present(key, tenant=tenant)) for tenant, key in keys}
    return {owner: media for owner, media in found.items() if media}


@each_twin
@pytest.mark.parametrize("name", SETS)
def test_presence_of_every_set(twin: PoolTwin, name: str) -> None:
    """After each message the index holds what the record says of keys that name pages, in the right media; the others
    are counted, one by one (spec: pool-events §4 rules 1 and 8)."""
    index, expected = twin.PoolIndex(), Present()
    unparsed = 0
    for data, row in zip(frames_of(name), captured(name), strict=True):
        applied = index.apply_payload(data)
        events = [event for event in row["events"] if event[0] == "cleared" or parse_key(event[3]) is not None]
        unparsed += len(row["events"]) - len(events)
        fold(expected, events)
        expected = {owner: media for owner, media in expected.items() if media}
        assert presence(index, set(expected)) == expected
        assert applied.stored + applied.removed + applied.unchanged + applied.cleared == len(events)
    stats = index.stats()
    assert (stats.objects, stats.unparsed, stats.evicted, stats.rejected) == (len(expected), unparsed, 0, {})
    assert stats.backend_id == "pool-a"


@each_twin
@pytest.mark.parametrize("name", SETS)
def test_presence_of_every_set_with_keys_of_pages(twin: PoolTwin, name: str) -> None:
    """The same events with every key made a page's: two media and their removal one by one (Mooncake #2214, #3818),
    upserts, removals by pattern, clears. Restarts and silent evictions leave what was there: the stream does not say
    it, the bridge has to (spec: pool-events §3)."""
    index, expected = twin.PoolIndex(), Present()
    for data, row in zip(frames_of(name), captured(name), strict=True):
        message: list[Any] = msgspec.msgpack.decode(data)
        for event in message[1]:
            if "object_key" in event:
                event["object_key"] = hicache_key(event["object_key"])
        index.apply_payload(msgspec.msgpack.encode(message))
        fold(expected, [(kind, tenant, medium, hicache_key(key)) for kind, tenant, medium, key in row["events"]])
        expected = {owner: media for owner, media in expected.items() if media}
        assert presence(index, set(expected)) == expected
        assert index.stats().objects == len(expected)
    if name == "restart":
        assert index.stats().pages == 5


def layout(scheme: str, prefix: str, components: tuple[str, ...]) -> PoolLayout:
    return PoolLayout(scheme, prefix, (LayoutSet(components),))


def pages(case: str) -> bytes:
    expected = json.loads((FOLDER / "hicache_pages.json").read_text("utf-8"))
    return b"".join(bytes.fromhex(page)[:16] for page in expected[case]["pages"])


def engine_pages() -> bytes:
    """Pages of the captured vLLM and LMCache keys, in order."""
    keys = [event[3] for row in captured("hicache") for event in row["events"] if event[3].startswith("rollout2@")]
    return b"".join(bytes(8) + bytes.fromhex(key[-16:]) for key in keys)


QWEN = hicache_prefix(model="Qwen/Qwen3-8B")
DEEPSEEK = hicache_prefix(model="deepseek-ai/DeepSeek-V3")


@each_twin
def test_hicache_set_under_every_layout(twin: PoolTwin) -> None:
    """The captured set: MHA with two ranks, of which one lost K of page 1 and never had page 3; MLA with and without
    stages; keys without a prefix and with a tag; vLLM and LMCache.

    A page with one object gone is no page (Mooncake #1887, #2127, #3589): K alone, V alone or one rank's shard can be
    evicted. Versions of SGLang before 0.5.17 have no model in front, and nobody takes the one for the other."""
    index = twin.PoolIndex()
    for data in frames_of("hicache"):
        index.apply_payload(data)
    mha, mla, engine = pages("mha"), pages("mla"), engine_pages()
    assert index.match(layout(HICACHE, QWEN, mha_components(2)), mha) == ((0, 1), (2, 3))
    assert index.match(layout(HICACHE, QWEN, mha_components(1)), mha) == ((0, 1), (2, 4))
    assert index.match(layout(HICACHE, QWEN, mha_components(4)), mha) == ()
    assert index.match(layout(HICACHE, "", mha_components(1)), mha) == ((0, 4),)
    assert index.match(layout(HICACHE, hicache_prefix("prod", "Qwen/Qwen3-8B"), mha_components(1)), mha) == ((0, 1),)
    assert index.match(layout(HICACHE, DEEPSEEK, mla_components()), mla) == ((0, 3),)
    assert index.match(layout(HICACHE, DEEPSEEK, mla_components(pp=2)), mla) == ((0, 3),)
    assert index.match(layout(HICACHE, DEEPSEEK, mla_components(pp=3)), mla) == ()
    assert index.match(layout(VLLM, "rollout2@Qwen3-8B", vllm_components(1)), engine) == ((0, 2),)
    assert index.match(layout(VLLM, "rollout2@Qwen3-8B", vllm_components(2)), engine) == ()
    assert index.match(layout(LMCACHE, "Qwen/Qwen3-8B@1", lmcache_components(1, "bfloat16")), engine) == ((0, 2),)
    assert index.match(layout(LMCACHE, "Qwen/Qwen3-8B@1", lmcache_components(1, "half")), engine) == ()


@each_twin
def test_pages_of_tokens_are_found(twin: PoolTwin) -> None:
    """From token ids to the pool in two calls, as a router asks."""
    index = twin.PoolIndex()
    for data in frames_of("hicache"):
        index.apply_payload(data)
    tokens = pack_tokens(range(1000, 1192))
    found = layout(HICACHE, DEEPSEEK, mla_components())
    assert index.match(found, twin.page_hashes(tokens, 64)) == ((0, 3),)
    assert index.match(found, twin.page_hashes(tokens, 64, salt="other")) == ()
