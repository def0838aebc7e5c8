"""The question about shared pools in bytes, as admission asks an indexer over the bus."""

from __future__ import annotations

from kvcore import page_hashes
from replica.config import ReplicaSettings
from schemas.base import from_msgpack, to_msgpack
from schemas.index import MatchReply, MatchRequest
from services.indexer.config import IndexerSettings
from services.indexer.core import IndexerCore
from tests.unit.replica.bridge import BLOCK
from tests.unit.replica.pool_bridge import MODEL, PoolBridge, keys, layout, prompt


def test_an_answer_in_bytes_is_the_replica_s_own() -> None:
    """Asked over the bus or by a direct call: the same ranges, health and age of each pool, and who reads it."""
    indexer = IndexerCore(IndexerSettings(instance="index"), 1)
    at, tokens = PoolBridge(indexer.replica), prompt(4)
    at.worker("a", layout())
    at.worker("b", None)
    at.reset()
    at.beat()
    at.store(keys(tokens, layout(), [0, 1, 3]))
    direct = at.match(tokens)
    question = MatchRequest(
        model=MODEL, block_size=BLOCK, chain=b"\1" * 8, pages=page_hashes(tokens, BLOCK), page_size=BLOCK
    )
    answered = from_msgpack(indexer.match(to_msgpack(question), at.now), MatchReply)
    assert answered == direct
    assert answered.pools[0].ranges == ((0, 2), (3, 4))
    assert [each.pool for each in answered.matches] == ["p", None]


def test_bounds_of_pools_are_the_indexer_s_settings() -> None:
    """The same keys as of any replica."""
    given = IndexerSettings(pools=3, pool_pages=1000, pool_stale_s=7.0, pool_alarm_keys=5, engine_links=9)
    expected = ReplicaSettings(pools=3, pool_pages=1000, pool_stale_s=7.0, pool_alarm_keys=5, engine_links=9)
    assert given.replica() == expected
