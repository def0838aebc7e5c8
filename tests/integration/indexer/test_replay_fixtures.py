"""Bytes captured from real engines, through PUB -> bridge -> NATS -> indexer, leave the index that they mean.

What they mean is computed directly: the same payloads decoded and applied to a `PrefixIndex` of the test. Compared are
all blocks: chain hash, group, tier and number of copies.
"""

from __future__ import annotations

import pytest

from bus import subjects
from bus.nats import connect
from kvcore.events import decode_batch
from kvcore.index import Content, PrefixIndex
from schemas.base import from_json, to_json
from schemas.kv import RankMark, SnapshotReply, SnapshotRequest
from tests.integration.bridge.house import running_bridge, running_indexer, source_of, until_applied
from tests.integration.bridge.scripted_engine import ScriptedEngine, read_frames

CHECK_EVERY = 8
"""Batches between two comparisons: streams end with an emptied pool here and there, so the end alone says little."""

STREAMS = {
    "vllm_0.32.0_map": 32,
    "vllm_0.23.0_array": 32,
    "vllm_0.32.0_bytes_hashes": 32,
    "vllm_0.32.0_hybrid": 32,
    "vllm_0.32.0_lora": 32,
    "sglang_0.5.23_server": 16,
    "sglang_0.5.23_radix_default": 16,
    "sglang_0.5.23_radix_dynamo": 16,
    "sglang_0.5.23_radix_rank1": 16,
    "sglang_0.5.23_hicache_tiers": 16,
}


def meant_by(payloads: list[bytes], rank: int = 0) -> PrefixIndex:
    """The index that these payloads mean, without any of our transport."""
    index = PrefixIndex()
    for payload in payloads:
        index.apply("w", rank, decode_batch(payload))
    return index


def blocks(content: Content) -> int:
    return sum(len(rank) for rank in content.values())


@pytest.mark.parametrize("name", STREAMS)
async def test_captured_stream(url: str, name: str) -> None:
    """Every captured set, numbered from 0 (they were captured in pieces): equal at every eighth batch and at the end,
    in the indexer and in the bridge's snapshot."""
    messages = read_frames(name)
    payloads = [payload for _, _, payload in messages]
    owner = "sglang" if name.startswith("sglang") else "vllm"
    most = 0
    async with (
        ScriptedEngine(block_size=STREAMS[name], topic=messages[0][0], owner=owner) as engine,
        running_indexer(url) as indexer,
        running_bridge(engine, url, kv_topic=messages[0][0].decode()),
    ):
        for number, payload in enumerate(payloads):
            await engine.publish(payload)
            if number % CHECK_EVERY == CHECK_EVERY - 1 or number == len(payloads) - 1:
                await until_applied(indexer, number)
                expected = meant_by(payloads[: number + 1]).content()
                assert indexer.core.replica.index.content() == expected
                most = max(most, blocks(expected))
        assert source_of(indexer).health == "synced"
        assert most > 0
        bus = await connect(url, name="test")
        answer = await bus.request(subjects.kv_snapshot("w"), to_json(SnapshotRequest(indexer="test")), timeout_s=30)
        reply = from_json(answer.payload, SnapshotReply)
        assert reply.marks == (RankMark(rank=0, incarnation="1795973180250.0", seq=len(payloads) - 1),)
        restored = PrefixIndex()
        restored.load(await (await bus.objects(reply.bucket)).get(reply.key))
        await bus.close()
        assert restored.content() == meant_by(payloads).content()


async def test_captured_numbers_with_their_holes(url: str) -> None:
    """As numbered by vLLM 0.32, of which 25-51 and 74-90 were not captured and cannot be replayed: user case A1. The
    index is what the batches after the last hole mean, and the source says that it is not complete."""
    messages = read_frames("vllm_0.32.0_map")
    after = [payload for _, seq, payload in messages if seq >= 91]
    async with (
        ScriptedEngine(block_size=32, topic=messages[0][0]) as engine,
        running_indexer(url) as indexer,
        running_bridge(engine, url),
    ):
        for _, seq, payload in messages:
            await engine.publish(payload, seq=seq)
        await until_applied(indexer, messages[-1][1])
        assert indexer.core.replica.index.content() == meant_by(after).content()
        # Batch 91 empties the pool (AllBlocksCleared), so nothing is missing from then on.
        assert source_of(indexer).health == "synced"


async def test_two_ranks_as_captured(url: str) -> None:
    """User case A13: two data-parallel ranks of one engine, both with number 0, each on its own socket and in its own
    source; what the batch says of its rank agrees."""
    messages = read_frames("vllm_0.32.0_two_ranks")
    ranks = [decode_batch(payload).rank for _, _, payload in messages]
    assert sorted(rank for rank in ranks if rank is not None) == [0, 1]
    async with (
        ScriptedEngine(block_size=32, ranks=2, topic=messages[0][0], discovery=True) as engine,
        running_indexer(url) as indexer,
        running_bridge(engine, url, kv_events=(), kv_replay=()),
    ):
        expected = PrefixIndex()
        for rank, (_, _, payload) in zip(ranks, messages, strict=True):
            assert rank is not None
            await engine.publish(payload, rank=rank)
            expected.apply("w", rank, decode_batch(payload))
        for rank in (0, 1):
            await until_applied(indexer, 0, rank)
        assert indexer.core.replica.index.content() == expected.content()


async def test_restart_as_captured(url: str) -> None:
    """User case A3: vLLM was killed and restarted on the same port; the last number before and the first one heard
    after were both 1. Only what the second process published remains."""
    messages = read_frames("vllm_0.32.0_restart")
    before, after = messages[:2], messages[2:]
    assert [seq for _, seq, _ in (before[-1], after[0])] == [1, 1]
    async with (
        ScriptedEngine(block_size=32, topic=messages[0][0]) as engine,
        running_indexer(url) as indexer,
        running_bridge(engine, url),
    ):
        for _, seq, payload in before:
            await engine.publish(payload, seq=seq)
        await until_applied(indexer, 1)
        await engine.restart()
        for _, seq, payload in after:
            await engine.publish(payload, seq=seq, lost=True)
        await until_applied(indexer, after[-1][1])
        assert indexer.core.replica.index.content() == meant_by([payload for _, _, payload in after]).content()
