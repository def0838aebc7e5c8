"""The process: settings, stop, clients that leave, long prompts, priorities."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path

from load.engine.misbehave import Misbehaviour
from tests.integration.engine.engines import RunningEngine, running_engine, until
from tests.support.processes import start_process
from web.client import HttpClient


async def run(directory: Path, *options: str) -> tuple[int, str]:
    """Exit code and standard error of an engine that does not come up."""
    process = await start_process([sys.executable, "-m", "load.engine", *options], directory, name="refused")
    try:
        return await process.wait(), process.stderr
    finally:
        await process.close()


async def test_wrong_settings_are_one_sentence_and_exit_2(tmp_path: Path) -> None:
    """Bad input: the key is named; a taken port is a wrong setting too."""
    code, said = await run(tmp_path, "--block-size", "0")
    assert code == 2
    assert said.endswith("block_size must be at least 1\n")
    assert len(said.splitlines()) == 1
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, said = await run(tmp_path, "--http-port", str(port))
        assert (code, said.startswith(f"engine: http_port: 127.0.0.1:{port} is taken")) == (2, True)
        assert len(said.splitlines()) == 1
        code, said = await run(tmp_path, "--kv-events-endpoint", f"tcp://127.0.0.1:{port}")
        assert (code, said.startswith(f"engine: kv_events_endpoint: tcp://127.0.0.1:{port} ")) == (2, True)


async def test_help_names_what_may_be_chosen(tmp_path: Path) -> None:
    """The values of every choice, and the keys of --misbehave."""
    process = await start_process([sys.executable, "-m", "load.engine", "--help"], tmp_path, name="help")
    try:
        assert await process.wait() == 0
        words = " ".join(process.stdout.split())
    finally:
        await process.close()
    for choice in ("h100-8b|h100x4-70b|instant", "vllm-map|vllm-array|sglang", "int|bytes", "fcfs|priority"):
        assert choice in words
    for key in Misbehaviour.__struct_fields__:
        assert key in words


async def test_stop_lets_running_requests_end(tmp_path: Path) -> None:
    """SIGTERM: what runs is served to its end, then exit 0."""
    async with running_engine(tmp_path, "--profile", "h100-8b") as engine:
        running = asyncio.create_task(engine.complete(list(range(40)), max_tokens=60))
        await engine.wait_count("started", 1)
        assert await engine.process.stop() == 0
        assert (await running)["usage"]["completion_tokens"] == 60


async def test_clients_that_leave_free_what_they_held(tmp_path: Path) -> None:
    """B2: 30 clients leave at once, before or after the first token: nothing runs or waits, no block is held."""
    async with running_engine(tmp_path, "--profile", "h100-8b", "--max-num-seqs", "8") as engine:
        clients = [HttpClient() for _ in range(30)]

        async def begin(number: int) -> None:
            body = {"prompt": [number * 50 + i for i in range(40)], "max_tokens": 5000, "stream": True}
            await clients[number].open("POST", engine.url + "/v1/completions", [], json.dumps(body).encode())

        tasks = [asyncio.create_task(begin(number)) for number in range(30)]
        await engine.wait_count("started", 30)
        for client in clients:
            await client.close()
        await asyncio.gather(*tasks, return_exceptions=True)
        await engine.wait_count("disconnected", 30)
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            assert set((await engine.metric(f"vllm:{name}")).values()) == {0.0}
        assert (await engine.counts())["served"] == 0
        assert sum((await engine.metric("vllm:request_success_total")).values()) == 30


async def test_load_is_visible_while_it_runs(tmp_path: Path) -> None:
    """Running and waiting requests and the KV use are in the metrics; queueing by priority, lower first."""
    options = ("--profile", "h100-8b", "--max-num-seqs", "1", "--scheduling-policy", "priority")
    async with running_engine(tmp_path, *options) as engine:
        order: list[str] = []

        async def ask(name: str, priority: int, tokens: int) -> None:
            await engine.complete([ord(name)] * 40, max_tokens=tokens, priority=priority)
            order.append(name)

        tasks = [asyncio.create_task(ask("a", 0, 40))]
        await wait_metric(engine, "vllm:num_requests_running", 1)
        assert sum((await engine.metric("vllm:kv_cache_usage_perc")).values()) > 0
        for name, priority in (("c", 5), ("b", -5)):
            tasks.append(asyncio.create_task(ask(name, priority, 1)))
        await wait_metric(engine, "vllm:num_requests_waiting", 2)
        await asyncio.gather(*tasks)
        assert order == ["a", "b", "c"]
        assert sum((await engine.metric("vllm:time_to_first_token_seconds_count")).values()) == 3


async def wait_metric(engine: RunningEngine, name: str, value: float) -> None:
    async def reached() -> bool:
        return sum((await engine.metric(name)).values()) == value

    await until(reached)


async def test_long_prompts_do_not_stop_the_health_page(tmp_path: Path) -> None:
    """B6: while 400 KB prompts are tokenised one after the other, probes are answered between and during them."""
    async with running_engine(tmp_path) as engine:

        async def tokenize(name: str) -> int:
            text = " ".join(f"{name}{number}" for number in range(50_000))[:400_000]
            status, page = await engine.post("/tokenize", {"prompt": text})
            assert status == 200
            return int(page["count"])

        tasks = [asyncio.create_task(tokenize(name)) for name in ("one", "two", "three")]
        probes = 0
        while not all(task.done() for task in tasks):
            assert (await engine.http.fetch("GET", engine.url + "/health", [], b"")).status == 200
            probes += 1
        assert min([await task for task in tasks]) > 100_000
        assert probes > 25
