"""The event streams of a real engine: live over SUB, replayed to a DEALER, and true to what is resident."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from kvcore.events import Cleared, Removed, Stored
from kvcore.hashing import chain_hashes, pack_tokens, unpack_chain
from tests.integration.engine.engines import Listener, decoded, replay, resident_after, running_engine

FORMS = [
    ("vllm-map", "int", 4),
    ("vllm-map", "bytes", 4),
    ("vllm-array", "int", 3),
    ("sglang", "int", 4),
]


@pytest.mark.parametrize(("form", "hashes", "frames"), FORMS)
async def test_live_and_replayed_events_tell_what_is_resident(
    tmp_path: Path, form: str, hashes: str, frames: int
) -> None:
    """Under evictions, decode and resets: sequence without gaps, replay equal to live bytes, set equal to the cache."""
    options = ("--event-form", form, "--hash-form", hashes, "--num-blocks", "40", "--topic", "kv@pod@m")
    async with running_engine(tmp_path, *options) as engine:
        listener = Listener(engine.kv_events[0], "kv@")
        try:
            await listener.subscribed(engine)
            for number in range(12):
                await engine.complete([1000 + 50 * number + i for i in range(100)], max_tokens=20)
            assert (await engine.post("/reset_prefix_cache", {}))[1] == {"success": True}
            for number in range(3):
                await engine.complete([2000 + i for i in range(32 + 16 * number)], max_tokens=20, cache_salt="s")
            resident = (await engine.get("/sim/resident"))["ranks"]["0"]
            await listener.take_until(resident["seq"] - 1)
        finally:
            listener.close()
        replayed = await replay(engine.replay[0], 0, frames=frames)
        assert [seq for seq, _ in replayed] == list(range(resident["seq"]))
        assert listener.messages == replayed[listener.messages[0][0] :]
        batches = decoded(replayed)
        assert all(batch.rejected == {} and batch.rank == 0 for batch in batches)
        kinds = {type(event) for batch in batches for event in batch.events}
        assert kinds == {Stored, Removed, Cleared}
        if form == "sglang":
            assert batches[0].events == (Cleared(),)
        assert resident_after(batches) == {digest[-16:] for digest in resident["engine_hashes"]}
        tail = await replay(engine.replay[0], resident["seq"] - 2, frames=frames)
        assert tail == replayed[-2:]
        assert await replay(engine.replay[0], 10**6, frames=frames) == []


async def test_own_chain_hashes_of_what_is_resident(tmp_path: Path) -> None:
    """What the engine says is resident, hashed our way, is the chain of the prompts it served, salted and not."""
    async with running_engine(tmp_path) as engine:
        prompt = list(range(300, 350))
        await engine.complete(prompt)
        await engine.complete(prompt, cache_salt="tenant")
        resident = (await engine.get("/sim/resident"))["ranks"]["0"]
        plain = unpack_chain(chain_hashes(pack_tokens(prompt), 16))
        salted = unpack_chain(chain_hashes(pack_tokens(prompt), 16, salt="tenant"))
        assert {f"{value:016x}" for value in (*plain, *salted)} == set(resident["chain_hashes"])
        assert len(resident["engine_hashes"]) == 6


async def test_ranks_have_streams_of_their_own(tmp_path: Path) -> None:
    """A13: each rank its port, its sequence and its number; a header pins, 0 included; without one load is spread."""
    async with running_engine(tmp_path, "--ranks", "2", "--seed", "1") as engine:
        for rank in (0, 1, 1):
            await engine.complete([rank * 100 + i for i in range(40)], [(b"X-data-parallel-rank", b"%d" % rank)])
        batches = [decoded(await replay(endpoint, 0)) for endpoint in engine.replay]
        assert [[batch.rank for batch in stream] for stream in batches] == [[0], [1]]
        body = {"prompt": [1, 2], "max_tokens": 1}
        status, page = await engine.post("/v1/completions", body, [(b"X-data-parallel-rank", b"2")])
        assert status == 400
        assert "out of range [0, 2)" in page["error"]["message"]
        for _ in range(4):
            await engine.complete([7] * 8)
        queries = await engine.metric("vllm:prefix_cache_queries_total")
        assert sorted(queries.values()) == [40 + 16, 80 + 16]
        assert (await engine.metric("vllm:prefix_cache_hits_total"))['{engine="1",model_name="sim-8b"}'] == 32


async def test_replay_requests_that_are_not_understood_get_no_answer(tmp_path: Path) -> None:
    """As vLLM: anything but an empty frame and a number is ignored, and the next good request is answered."""
    async with running_engine(tmp_path) as engine:
        await engine.complete(list(range(40)))
        with pytest.raises(TimeoutError):
            await replay(engine.replay[0], struct.unpack(">Q", b"\xff" * 8)[0], timeout_s=0.0)
        assert len(await replay(engine.replay[0], 0)) == 1
