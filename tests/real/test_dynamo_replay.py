"""What `tidegate trace export` writes is played by the peer's own replay (`dynamo.replay`, package ``ai-dynamo``)."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tidegate.trace.making import SAMPLE
from tidegate.cli import main
from tidegate.trace.reading import read_trace

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

RUN = SAMPLE.with_name("agents.jsonl.gz")
"""Rows of ours: agents with tools and a sub-agent; prompts with hashes of blocks of 16 tokens, and of 512."""
BLOCKS = {SAMPLE: 16, RUN: 512}
INSTALL = "pip install --no-deps ai-dynamo ai-dynamo-runtime pydantic pydantic-core annotated-types typing-inspection"


@pytest.fixture(scope="module")
def replay() -> Any:
    """The peer's package; `Any`, because it is not installed where types are checked."""
    try:
        return importlib.import_module("dynamo.replay")
    except ImportError as error:
        pytest.skip(f"ai-dynamo is not installed ({INSTALL}): {error}")


def played(replay: Any, path: Path, trace_format: str, block: int) -> dict[str, Any]:
    """The summary of a replay on one simulated engine."""
    engine = {"engine": {"block_size": block}}
    report = replay.run_trace_replay(
        [str(path)],
        trace_format=trace_format,
        trace_block_size=block,
        extra_engine_args=engine,
        execution_model=None if trace_format == "mooncake" else "tiny",
    )
    summary: dict[str, Any] = report["summary"] if isinstance(report, dict) else report.summary
    return summary


@pytest.mark.parametrize("source", BLOCKS, ids=["harnesses", "run"])
@pytest.mark.parametrize("kind", ["dynamo", "mooncake", "agentic-mooncake"])
def test_the_peer_plays_what_we_export(replay: Any, kind: str, source: Path, tmp_path: Path) -> None:
    """Every request and token of a recording with harnesses, a sub-agent, and requests without identity; and of a run
    of ours."""
    path = tmp_path / "trace.jsonl"
    assert main(["trace", "export", str(source), "--as", kind, "-o", str(path)]) == 0
    summary = played(replay, path, kind.replace("-", "_"), BLOCKS[source])
    requests = read_trace([source]).requests
    inputs = [request.replay.input_length for request in requests if request.replay is not None]
    outputs = [request.metrics.output_tokens or 0 for request in requests]
    assert (summary["completed_requests"], summary["total_input_tokens"], summary["total_output_tokens"]) == (
        len(requests),
        sum(inputs),
        sum(outputs),
    )
    assert summary["prefix_cache_reused_ratio"] > 0.5


@pytest.mark.parametrize("source", BLOCKS, ids=["harnesses", "run"])
def test_a_shared_prefix_is_shared_in_every_format(replay: Any, source: Path, tmp_path: Path) -> None:
    """Small ids keep what the hashes had in common: the same requests hit the same share of their prompts."""
    ratios = set()
    for kind in ("mooncake", "agentic-mooncake"):
        path = tmp_path / f"{kind}.jsonl"
        assert main(["trace", "export", str(source), "--as", kind, "-o", str(path)]) == 0
        ratios.add(round(played(replay, path, kind.replace("-", "_"), BLOCKS[source])["prefix_cache_reused_ratio"], 6))
    assert len(ratios) == 1
