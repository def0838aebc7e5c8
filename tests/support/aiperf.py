"""A real AIPerf as a test's part: found through ``AIPERF``, given the simulated engine's tokenizer, run to its end.

AIPerf is a client of its own kind: it synthesises prompts by the model's tokenizer, and its report says what it
believes it sent and received. `Report` is that, by request.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import load.engine.assets
from tests.support.processes import start_process

EXECUTABLE = "AIPERF"
VERSION = "0.13.0"
TOKENIZER = "tidegate/sim-8b"
"""A name as a model hub's: a path will not do, AIPerf's helpers look it up in the hub's cache (0.13.0)."""

TIMEOUT_S = 150.0
"""Most of it goes into starting AIPerf's own processes, each of which imports transformers."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request, as AIPerf's record of it says. ``session``: AIPerf's ``x_correlation_id``."""

    request_id: str
    session: str
    turn: int
    parent: str | None
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    start_ms: float


@dataclass(frozen=True, slots=True)
class Report:
    """What AIPerf says of a run: ``summary`` is ``profile_export_aiperf.json``, ``exchanges`` by request id."""

    summary: dict[str, Any]
    exchanges: dict[str, Exchange]

    def total(self, name: str) -> int:
        """A figure that is one number."""
        return int(self.summary[name]["avg"])


def executable() -> str:
    """Skips the test where AIPerf is not installed."""
    path = os.environ.get(EXECUTABLE, "")
    if not path or not os.access(path, os.X_OK):
        pytest.skip(f"AIPerf is not installed: `make aiperf`, or {EXECUTABLE}=path of its executable")
    return path


def offline_hub(directory: Path) -> dict[str, str]:
    """A model hub's cache that holds the simulated engine's tokenizer, and the environment that names it and nothing
    else."""
    home = directory / "hub" / f"models--{TOKENIZER.replace('/', '--')}"
    snapshot = home / "snapshots" / "local"
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text("local")
    assets = Path(load.engine.assets.__file__).parent
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(assets / name, snapshot / name)
    return {"HF_HUB_CACHE": str(directory / "hub"), "HF_HUB_OFFLINE": "1"}


async def profile(
    directory: Path, url: str, model: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> Report:
    """``aiperf profile`` against a front door; it must end with 0 and have no failed request. ``directory`` is
    made."""
    artifacts = directory / "artifacts"
    command = [executable(), "profile", "--model", model, "--url", url, "--tokenizer", TOKENIZER, "--streaming"]
    command += ["--ui", "none", "--random-seed", "7", "--artifact-dir", str(artifacts), "--no-gpu-telemetry"]
    command += ["--workers-max", "1", "--record-processors", "1", *arguments]
    said = {**offline_hub(directory), **(environment or {})}
    process = await start_process(command, directory, name="aiperf", environment=said)
    try:
        assert await process.wait(TIMEOUT_S) == 0, process.output
    finally:
        await process.close()
    summary = json.loads((artifacts / "profile_export_aiperf.json").read_text())
    assert summary["error_summary"] == [], summary["error_summary"]
    lines = (artifacts / "profile_export.jsonl").read_text().splitlines()
    exchanges = [_exchange(json.loads(line)) for line in lines]
    assert len({exchange.request_id for exchange in exchanges}) == len(exchanges)
    return Report(summary, {exchange.request_id: exchange for exchange in exchanges})


def _exchange(record: dict[str, Any]) -> Exchange:
    about, figures = record["metadata"], record["metrics"]

    def tokens(name: str) -> int:
        return int(figures[name]["value"]) if name in figures else 0

    return Exchange(
        request_id=about["x_request_id"],
        session=about["x_correlation_id"],
        turn=about["turn_index"],
        parent=about.get("parent_correlation_id"),
        input_tokens=tokens("input_sequence_length"),
        output_tokens=tokens("output_sequence_length"),
        cached_tokens=tokens("usage_prompt_cache_read_tokens"),
        start_ms=about["request_start_ns"] / 1e6,
    )
