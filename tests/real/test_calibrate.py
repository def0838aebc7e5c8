"""`tidegate calibrate` against a real vLLM on CPU: a toy vocabulary, a short window, its own cached-token counts."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.processes import start_process
from tests.support.vllm import MODEL, Vllm, interpreter

pytestmark = [pytest.mark.real, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

KV_BLOCKS = 161


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vllm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Vllm]:
    vllm = Vllm(interpreter(), tiny_model, tmp_path_factory.mktemp("vllm"), blocks=KV_BLOCKS)
    try:
        await vllm.start()
        yield vllm
    finally:
        await vllm.kill()


@pytest.mark.parametrize("options", [(), ("--max-context", "1600", "--runs", "5")])
async def test_a_real_engine_is_measured(vllm: Vllm, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Every prompt is taken as it was meant, none is found cached (vLLM says so), and the time grows with it."""
    command = [sys.executable, "-m", "tidegate", "calibrate", vllm.url, "--no-store", "--json", *options]
    process = await start_process(command, tmp_path, name="calibrate")
    try:
        assert await process.wait(120) == 0, process.output
    finally:
        await process.close()
    found = json.loads(process.stdout)["calibration"]
    assert (found["model"], found["engine"], found["max_model_len"]) == (MODEL, "vllm", 2048)
    longest = 1600 if options else 2047
    shortest = longest // 8
    tokens = [point["tokens"] for point in found["points"]]
    assert tokens == [shortest, 2 * shortest, 4 * shortest, longest]
    assert found["linear"] + found["quadratic"] > 0
    assert vllm.running() == 0


async def test_its_refusal_is_told(vllm: Vllm, tmp_path: Path) -> None:
    """A context over its window, by its own /v1/models."""
    command = [sys.executable, "-m", "tidegate", "calibrate", vllm.url, "--no-store", "--max-context", "4000"]
    process = await start_process(command, tmp_path, name="calibrate")
    try:
        assert await process.wait(60) == 2
        assert "takes prompts of up to 2047 tokens" in process.stderr
    finally:
        await process.close()
