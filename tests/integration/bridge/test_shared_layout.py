"""What an engine's bridge says of its pages is what its pool's bridge sees arrive: both from real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from bus.interface import Bus
from kvcore import PoolLayout, page_hashes
from kvcore.hashing import pack_tokens
from kvcore.pool_layout import LayoutSet
from schemas.pool import SharedLayout
from services.bridge.config import BridgeSettings
from services.bridge.shell.service import BridgeService
from tests.integration.bridge.house import Watcher, running, until
from tests.integration.bridge.pools import running_pool, running_pool_bridge
from tests.integration.engine.engines import running_engine
from tests.support.pool_follower import PoolFollower
from tests.support.processes import settings_arguments

BLOCK = 16
PROMPT = list(range(1000, 1000 + 8 * BLOCK))


@pytest.mark.parametrize(
    ("engine", "components", "page_hash"),
    [
        ({"pool_tp": 2, "pool_tag": "blue"}, 4, "sha256_chain"),
        ({"pool_tp": 1, "pool_pp": 2}, 4, "sha256_chain"),
        ({"pool_attention": "mla", "pool_tp": 4}, 1, "sha256_chain"),
        ({"pool_scheme": "vllm_mooncake"}, 1, "engine"),
    ],
)
async def test_the_layout_is_that_of_the_keys_that_arrive(
    url: str, bus: Bus, tmp_path: Path, engine: dict[str, object], components: int, page_hash: str
) -> None:
    """SGLang #40467, Dynamo #14952: a prefix or a suffix that is guessed wrong misses every page. The engine is asked;
    the objects that it writes are those that its profile names, and a page counts when all are there."""
    workers, follower = await Watcher.of(bus, "tg.v1.worker.state.*"), await PoolFollower.of(bus)
    async with running_pool(tmp_path) as pool, running_pool_bridge(pool, url):
        given = {"pool_url": pool.url, "pool_page_size": BLOCK, "block_size": BLOCK, **engine}
        async with running_engine(tmp_path, *settings_arguments(given)) as process:
            settings = BridgeSettings(
                nats_url=url,
                worker="w",
                instance="bridge-w",
                engine_url=process.url,
                scrape_interval_s=0.1,
                heartbeat_interval_s=0.1,
                shared_pool="pool-a",
                shared_tag=str(engine.get("pool_tag", "")),
                shared_tp=0 if page_hash == "sha256_chain" else 1,
            )
            async with running(url, BridgeService(settings), "bridge-w"):
                await until(lambda: shared(workers) is not None, "its layout")
                layout = shared(workers)
                assert layout is not None
                assert (layout.page_size, layout.page_hash, len(layout.sets[0].components)) == (
                    BLOCK,
                    page_hash,
                    components,
                )
                await process.complete(PROMPT)
                await until(lambda: arrived(follower, layout) >= len(PROMPT) // BLOCK * components, "its objects")
                if page_hash == "sha256_chain":
                    pages = page_hashes(pack_tokens(PROMPT), BLOCK)
                    assert follower.index.match(compiled(layout), pages) == ((0, len(PROMPT) // BLOCK),)


def shared(workers: Watcher) -> SharedLayout | None:
    """As the newest fact of the worker says it."""
    newest = workers.newest()
    assert newest is None or newest.profile.shared_problem in (None, "its block size is not known")
    return newest.profile.shared if newest else None


def arrived(follower: PoolFollower, layout: SharedLayout) -> int:
    """Objects under the layout's prefix; under another there are none."""
    prefixes = follower.index.prefixes()
    assert all((each.scheme, each.prefix) == (layout.scheme, layout.key_prefix) for each in prefixes)
    return sum(each.objects for each in prefixes)


def compiled(layout: SharedLayout) -> PoolLayout:
    sets = tuple(LayoutSet(each.components, each.hit_policy, each.trailing_pages) for each in layout.sets)
    return PoolLayout(layout.scheme, layout.key_prefix, sets)
