"""Memory below the device, a shared pool and hints, through real processes: HTTP, ZeroMQ, and a router's own index."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from kvcore import LayoutSet, PoolIndex, PoolLayout, PrefixIndex, page_hashes
from kvcore.events import Tier
from kvcore.hashing import chain_hashes, pack_tokens
from load.pool.client import PoolClient
from tests.integration.engine.engines import RunningEngine, replay, running_engine, until
from tests.support.processes import python_process

SESSION = list(range(1000, 1160))
"""Ten blocks of 16 tokens, all but the last of which can be hit."""
OTHER = list(range(5000, 5400))


@asynccontextmanager
async def running_pool(directory: Path, *options: str) -> AsyncIterator[PoolClient]:
    async with python_process("load.pool", *options, directory=directory, name="pool") as process:
        client = PoolClient(json.loads(await process.wait_line())["url"])
        try:
            yield client
        finally:
            await client.close()


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    """Directories of three processes."""
    directories = [tmp_path / name for name in ("pool", "one", "two")]
    for directory in directories:
        directory.mkdir()
    return directories


def cached(answer: Any) -> int:
    return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


async def hint(engine: RunningEngine, kind: str, session: str, **payload: Any) -> tuple[str, str | None]:
    """Send one action; (outcome, reason)."""
    target = {"session_id": session}
    action = {
        "action_id": f"{kind}-{session}-{len(payload)}",
        "action_type": kind,
        "payload": {"target": target, "expires_ms": 1 << 50, **payload},
    }
    body = {"protocol_version": "0.1", "message_id": "m1", "actions": [action]}
    status, answer = await engine.post("/kv_hints", body)
    assert status == 200, answer
    [row] = answer["results"]
    assert (row["action_id"], row["action_type"], answer["message_id"]) == (action["action_id"], kind, "m1")
    return row["outcome"], row["reason"]


@pytest.mark.parametrize(
    ("form", "described"), [("vllm-map", "false"), ("vllm-map", "true"), ("vllm-array", "false"), ("sglang", "false")]
)
async def test_an_index_knows_each_block_at_its_tier(tmp_path: Path, form: str, described: str) -> None:
    """Everything that the engine publishes, applied to the exact index: reach and tier agree with what is resident."""
    options = ("--event-form", form, "--describe-tiers", described, "--num-blocks", "40", "--host-blocks", "30")
    async with running_engine(tmp_path, *options, "--disk-blocks", "100") as engine:
        await engine.complete(SESSION, session_id="s")
        await engine.complete(OTHER)
        assert cached(await engine.complete([*SESSION, 1])) == 160
        await engine.complete(OTHER[::-1])
        resident = (await engine.get("/sim/resident"))["ranks"]["0"]
        index = PrefixIndex()
        frames = 3 if form == "vllm-array" else 4
        for _, payload in await replay(engine.replay[0], 0, frames=frames):
            index.apply_payload("w", 0, payload)
        chain = chain_hashes(pack_tokens(SESSION), 16)
        [match] = index.match(chain)
        where = {name: set(hashes) for name, hashes in resident["tiers"].items()}
        where["device"] = set(resident["chain_hashes"])
        names = ("device", "host", "disk")
        expected = []
        for value in _hex_of(chain):
            best = next((number for number, name in enumerate(names) if value in where[name]), None)
            if best is None:
                break
            expected.append(best)
        by_tier = {Tier.DEVICE: match.device, Tier.HOST: match.host, Tier.DISK: match.disk}
        assert len(expected) == 10, "all of it is somewhere"
        assert {tier: expected.count(int(tier)) for tier in by_tier} == by_tier
        assert where["disk"], "the host had too little room"


def _hex_of(chain: bytes) -> list[str]:
    return [f"{int.from_bytes(chain[at : at + 8], 'little'):016x}" for at in range(0, len(chain), 8)]


@pytest.mark.parametrize(
    "layout",
    [
        ("--pool-scheme", "sglang_hicache", "--pool-tp", "2", "--model", "Qwen/Qwen3-8B"),
        ("--pool-scheme", "sglang_hicache", "--pool-attention", "mla", "--pool-pp", "2", "--pool-page-size", "32"),
        ("--pool-scheme", "vllm_mooncake", "--pool-tp", "2"),
    ],
)
async def test_two_engines_share_a_pool(places: list[Path], layout: tuple[str, ...]) -> None:
    """What one engine computed the other loads, if every object is there; what is evicted silently it computes."""
    async with running_pool(places[0]) as pool:
        options = (*layout, "--pool-url", pool.url, "--pool-threshold-tokens", "16")
        async with (
            running_engine(places[1], *options, "--instance", "one") as one,
            running_engine(places[2], *options, "--instance", "two") as two,
        ):
            assert cached(await one.complete(SESSION, session_id="s")) == 0
            page = 32 if "32" in layout else 16
            objects = (160 // page) * 4 if "--pool-tp" in layout and "sglang_hicache" in layout else 160 // page * 2

            async def all_there() -> bool:
                return len(await pool.keys()) == objects

            await until(all_there)
            assert cached(await two.complete([*SESSION, 1])) == 160
            assert (await two.metric("vllm:prompt_tokens_cached_by_source_total"))[
                '{engine="0",model_name="' + ("Qwen/Qwen3-8B" if "--model" in layout else "sim-8b") + '",source="pool"}'
            ] == 160
            assert len(await pool.keys()) == objects, "nothing was put twice"
            if "vllm_mooncake" not in layout:
                await _page_matches(one, pool, page)
            await two.post("/reset_prefix_cache", {})
            last = sorted(await pool.keys())[-1]
            assert await pool.evict([last]) == 1
            again = cached(await two.complete([*SESSION, 1]))
            assert again < 160, "one object of a page is gone, and with it the page"
            assert again % page == 0


async def _page_matches(engine: RunningEngine, pool: PoolClient, page: int) -> None:
    """The pool's list, read by a router's index with the layout that the engine tells."""
    told = await engine.get("/get_hicache_l3_cache_layout")
    info = await engine.get("/server_info")
    if told["enabled"]:
        shape = told["hicache_object_layout"]
        prefix, components = f"{shape['key_prefix']}_", tuple(shape["pools"][0]["suffixes"])
        assert told["page_size"] == page
    else:
        prefix = info["served_model_name"].replace("/", "-") + "_"
        components = tuple(f"_{rank}_{side}" for rank in range(info["tp_size"]) for side in "kv")
    index = PoolIndex()
    index.add_keys("\n".join(sorted(await pool.keys())).encode())
    layout = PoolLayout("sglang_hicache", prefix, (LayoutSet(components),))
    assert index.match(layout, page_hashes(pack_tokens(SESSION), page)) == ((0, 160 // page),)


async def test_a_pool_that_fails_costs_its_hits_only(places: list[Path]) -> None:
    """Answers go on, the same ones, when the pool has lost everything, and when it is not there at all."""
    async with running_pool(places[0]) as pool:
        options = ("--pool-url", pool.url, "--pool-threshold-tokens", "16")
        async with running_engine(places[1], *options) as engine:
            first = await engine.complete(SESSION)

            async def some_there() -> bool:
                return len(await pool.keys()) == 20

            await until(some_there)
            await pool.misbehave(restart=True)
            assert await pool.keys() == set()
            await engine.post("/reset_prefix_cache", {})
            again = await engine.complete(SESSION)
            assert cached(again) == 0
            assert again["choices"][0]["text"] == first["choices"][0]["text"]
    async with running_engine(places[2], "--pool-url", pool.url, "--pool-threshold-tokens", "16") as engine:
        alone = await engine.complete(SESSION)
        assert alone["choices"][0]["text"] == first["choices"][0]["text"], "the pool is gone"


async def test_hints_over_http(tmp_path: Path) -> None:
    """Each action once through the whole process, also in a request's body; what is wrong is refused."""
    options = ("--num-blocks", "40", "--host-blocks", "60", "--ranks", "2", "--max-pinned-ratio", "0.3")
    async with running_engine(tmp_path, *options) as engine:
        rank_one = [(b"X-data-parallel-rank", b"1")]
        await engine.complete(SESSION, rank_one, session_id="s")
        assert (await engine.get("/kv_hints"))["tiers"] == ["host"]
        assert await hint(engine, "pin", "s", ttl_ms=60_000) == ("accepted", None)
        assert (await engine.metric("vllm:sim_pinned_blocks"))['{engine="1",model_name="sim-8b"}'] == 10
        await engine.complete(OTHER, rank_one)
        assert cached(await engine.complete([*SESSION, 1], rank_one, session_id="s")) == 160
        assert await hint(engine, "demote", "s", to="host") == ("accepted", None)
        assert await hint(engine, "prefetch", "s", to="device") == ("accepted", None)
        assert await hint(engine, "retain", "s", priority=3) == ("accepted", None)
        assert await hint(engine, "share", "s") == ("unsupported", "tier")
        action = {"action_id": "x", "action_type": "pin", "payload": {"target": {"session_id": "s"}}}
        envelope = {"protocol_version": "0.1", "message_id": "m", "actions": [action]}
        action["payload"] |= {"expires_ms": 1 << 50, "ttl_ms": 60_000}  # type: ignore[operator]
        await engine.complete([1, 2, 3], rank_one, kv_hints=envelope)
        assert (await engine.metric("vllm:sim_pinned_blocks"))['{engine="1",model_name="sim-8b"}'] == 10
        assert await hint(engine, "dereference", "s", reason="closed") == ("accepted", None)
        assert (await engine.metric("vllm:sim_pinned_blocks"))['{engine="1",model_name="sim-8b"}'] == 0
        assert await hint(engine, "pin", "s", ttl_ms=1, to="device") == ("missing", "unknown_session")
        other = {**envelope, "protocol_version": "7"}
        assert (await engine.post("/kv_hints", other))[1]["results"][0]["reason"] == "protocol_version"
        for body in (b"{", {**envelope, "actions": []}, {**envelope, "actions": [action, action]}):
            assert (await engine.post("/kv_hints", body))[0] == 400
        assert (await engine.post("/kv_hints?rank=2", envelope))[0] == 400
    async with running_engine(tmp_path, "--kv-hints", "false") as engine:
        assert (await engine.post("/kv_hints", envelope))[0] == 404
        assert await engine.get("/version") == {"version": "0.32.0"}


async def test_a_load_takes_its_time_and_others_do_not_wait(tmp_path: Path) -> None:
    """Over a slow link a request from host memory is answered after one that came later."""
    options = ("--profile", "h100-8b", "--num-blocks", "40", "--host-blocks", "60", "--host-gbps", "0.1")
    async with running_engine(tmp_path, *options) as engine:
        await engine.complete(SESSION, session_id="s")
        assert await hint(engine, "demote", "s", to="host") == ("accepted", None)
        order: list[str] = []

        async def ask(name: str, prompt: list[int]) -> None:
            answer = await engine.complete(prompt)
            order.append(f"{name} {cached(answer)}")

        slow = asyncio.create_task(ask("loaded", [*SESSION, 1]))

        async def begun() -> bool:
            return sum((await engine.metric("vllm:num_requests_waiting")).values()) == 1

        await until(begun)
        await ask("computed", [1, 2, 3])
        await slow
        assert order == ["computed 0", "loaded 160"]
