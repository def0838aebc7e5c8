"""Prompts as vLLM's own code makes them, of every recorded request of every harness and of requests at the edges.

Runs where ``VLLM_PYTHON`` names a Python that has vLLM 0.32 or newer; it needs no server, no model and no device.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.ingress.endpoints import Endpoint
from tests.support.harness import whole
from tests.support.processes import start_process
from tests.support.prompt_cases import GOLDEN, Case, cases, ours, read, write
from tests.support.vllm import interpreter

pytestmark = [pytest.mark.real, pytest.mark.asyncio, pytest.mark.timeout(600)]

SCRIPT = str(Path(__file__).parents[1] / "support" / "vllm_prompts.py")


async def prompts_of_vllm(directory: Path, given: list[Case]) -> list[str | None]:
    """What vLLM makes of them, ``None`` where it refuses."""
    write(directory, given)
    process = await start_process([interpreter(), SCRIPT, str(directory)], directory, name="vllm-prompts")
    try:
        assert await process.wait(500) == 0, process.output
    finally:
        await process.close()
    return read(directory / "prompts.jsonl")


def recordings() -> Iterator[Case]:
    """Every recorded request, for a template that shows parts and one that takes no late system message."""
    for number, row in enumerate(whole()):
        names = {name.lower() for name, _ in row.headers}
        endpoint: Endpoint = "responses" if "input" in row.body else "chat_completions"
        if endpoint != "responses" and "anthropic-version" in names:
            endpoint = "messages"
        body = {"max_tokens": 8} | row.body if endpoint == "messages" else row.body
        yield from (Case(f"{number}", endpoint, template, body) for template in ("parts", "system_first"))


async def test_the_table_is_what_this_vllm_makes(tmp_path: Path) -> None:
    """The kept prompts are this vLLM's."""
    assert await prompts_of_vllm(tmp_path, list(cases())) == read(GOLDEN)


async def test_every_recorded_request_is_rendered_as_vllm_renders_it(tmp_path: Path) -> None:
    """Byte for byte. Refused are OpenCode's Responses with an assistant's item without a ``type``."""
    given = list(recordings())
    texts = await prompts_of_vllm(tmp_path, given)
    assert {case.endpoint for case in given} == {"chat_completions", "messages", "responses"}
    assert sum(text is None for text in texts) == 4
    different = [
        (case.name, case.endpoint, case.template)
        for case, text in zip(given, texts, strict=True)
        if text is not None and ours(case) != text
    ]
    assert different == []
