"""Keys of pages in a shared pool: what the pool's index parses and matches, for every layout."""

from __future__ import annotations

from typing import Any

import pytest

from kvcore import LayoutSet, PoolIndex, PoolLayout, page_hashes, parse_key
from load.engine.block_hash import ExtraKeys
from load.engine.kv_cache import BlockContent
from load.engine.pool_pages import PoolLayoutConfig, PoolPages, reach_of
from load.pool.events import EventContext, EventEncoder, PoolEvent
from tests.unit.engine.tiered import Driver, core_of, request, turn

LAYOUTS: list[dict[str, Any]] = [
    {"scheme": "sglang_hicache", "tp": 2},
    {"scheme": "sglang_hicache", "tp": 2, "pp": 2, "tag": "blue"},
    {"scheme": "sglang_hicache", "attention": "mla"},
    {"scheme": "sglang_hicache", "attention": "mla", "pp": 2},
    {"scheme": "vllm_mooncake", "tp": 2, "tag": "blue"},
]


def contents_of_a_turn() -> list[BlockContent]:
    driver = Driver(core_of(pool=True))
    driver.serve(request("a", turn(0, 50), session="s"))
    return list(driver.core._scheduler.sessions.chain("s"))


@pytest.mark.parametrize("options", LAYOUTS)
def test_the_pools_index_finds_what_was_put(options: dict[str, Any]) -> None:
    """Events of the keys, applied to the index, match the pages by the layout; one object less, and a page is gone."""
    config = PoolLayoutConfig(model="Qwen/Qwen3-8B", block_size=4, page_size=8, page_bytes=1000, **options)
    pages = PoolPages(config)
    contents = contents_of_a_turn()
    hashes = pages.pages(contents)
    assert len(hashes) == 6
    keys = [key for page in hashes for key in pages.keys(page)]
    index = PoolIndex()
    events = [PoolEvent("stored", "default", key, "cpu", pages.group_id(hashes[0])) for key in keys]
    for payload in EventEncoder(EventContext()).batches(events, 1):
        index.apply_payload(payload)
    key = parse_key(keys[0])
    assert key is not None
    assert key.scheme == config.scheme
    layout = PoolLayout(config.scheme, key.prefix, (LayoutSet(pages.components),))
    if config.scheme == "sglang_hicache":
        tokens = b"".join(content.tokens for content in contents)
        wanted = page_hashes(tokens, 8)
        assert pages.describe()["enabled"] == (config.attention == "mla")
    else:
        wanted = b"".join(bytes(8) + bytes.fromhex(page)[-8:] for page in hashes)
        assert pages.describe()["enabled"] is False
    assert index.match(layout, wanted) == ((0, 6),)
    gone = pages.keys(hashes[3])[-1]
    [payload] = EventEncoder(EventContext()).batches([PoolEvent("removed", "default", gone, "cpu")], 2)
    index.apply_payload(payload)
    assert index.match(layout, wanted) == ((0, 3), (4, 6))


def test_salt_and_adapter_keep_pages_apart() -> None:
    pages = PoolPages(PoolLayoutConfig(scheme="sglang_hicache", model="m", block_size=4, page_size=4))
    plain = contents_of_a_turn()
    salted = [BlockContent(part.digest, None, part.tokens, ExtraKeys("lora", "salt"), part.index) for part in plain]
    assert not set(pages.pages(plain)) & set(pages.pages(salted))
    assert pages.pages([]) == []


def test_a_prefix_ends_at_the_first_page_that_lacks_an_object() -> None:
    assert reach_of([True] * 6, 2) == 3
    assert reach_of([True, True, True, False, True, True], 2) == 1
    assert reach_of([True, True, True], 2) == 1
    assert reach_of([], 2) == 0
