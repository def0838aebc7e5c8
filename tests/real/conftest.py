"""Fixtures of the tests against a real vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.processes import start_process
from tests.support.vllm import interpreter


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's directory, built by vLLM's interpreter in a few seconds."""
    python = interpreter()
    directory = tmp_path_factory.mktemp("tiny-model")
    script = str(Path(__file__).parents[1] / "support" / "tiny_model.py")
    builder = await start_process([python, script, str(directory / "model")], directory, name="builder")
    try:
        assert await builder.wait(300) == 0, builder.output
    finally:
        await builder.close()
    return directory / "model"
