"""``python -m load.bench router``: every key, no failed request, and null for peers that are not installed."""

from __future__ import annotations

import asyncio

from load.bench.router_client import Held, Prompts, held_streams
from tests.integration.bench.test_bench import bench

KEYS = (
    "cpu_us_per_chunk",
    "cpu_us_per_chunk_burst",
    "added_ttft_p50_ms",
    "200k_added_p50_ms",
    "200k_resent_added_p50_ms",
    "200k_resent_cpu_ms",
    "2k_c1_added_p50_ms",
    "2k_c128_per_s",
    "most_per_s",
    "pieces_per_chunk",
    "rss_mb",
)


def test_router_reports_the_house_beside_the_engines() -> None:
    """All processes start, and every cell is measured; who is not on PATH has null."""
    result = bench("router", PATH="/nowhere")
    assert result["failed"] == 0
    for name in ("ours", "ours_proxy"):
        for key in KEYS:
            assert isinstance(result[f"{name}_{key}"], float), f"{name}_{key}"
    assert result["ours_cpu_us_per_chunk"] > 0
    for key in ("200k_added_p50_ms", "200k_cpu_ms", "200k_resent_added_p50_ms", "200k_resent_cpu_ms", "rss_mb"):
        assert isinstance(result[f"ours_2w_{key}"], float), key
    assert result["ours_2w_200k_cpu_ms"] > 0
    for key in KEYS:
        assert result[f"smg_{key}"] is None
        assert result[f"vllm_router_kv_{key}"] is None


async def _held_of(answered: int, *, cuts: bool = False) -> Held:
    """Four streams at a server that begins so many of them, and leaves the others waiting or cuts them."""
    seen = 0
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen += 1
        is_answered = seen <= answered
        await reader.readuntil(b"\r\n\r\n")
        if is_answered:
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n")
        if is_answered or not cuts:
            await ended.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        return await held_streams(
            [port], lambda: Prompts(100, stream=True), 4, 0.0, 0.0, lambda: 0.0, begin_s=60.0 if cuts else 0.2
        )
    finally:
        ended.set()
        server.close()
        await server.wait_closed()


async def test_who_cannot_hold_all_streams_is_told_and_ends_nothing() -> None:
    """Those that never begin, or are cut before, have failed; the run goes on."""
    waits = await _held_of(0)
    assert (waits.begun, waits.failed, waits.chunks) == (0, 4, 0)
    cut = await _held_of(2, cuts=True)
    assert (cut.begun, cut.failed) == (2, 2)
