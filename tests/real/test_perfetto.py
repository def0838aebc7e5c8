"""The timeline in Perfetto's own trace processor: what it finds by SQL is what the trace holds."""

from __future__ import annotations

import importlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.tidegate.trace.making import SAMPLE
from tidegate.cli import main
from tidegate.trace.reading import Trace, read_trace
from tidegate.trace.tools import tool_uses

pytestmark = [pytest.mark.real, pytest.mark.timeout(120)]

SOURCES = [SAMPLE, SAMPLE.with_name("agents.jsonl.gz")]
INSTALL = "pip install perfetto; it fetches trace_processor_shell, or TRACE_PROCESSOR_SHELL names one"


@pytest.fixture(params=SOURCES, ids=["harnesses", "run"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Any, Trace]]:
    """The processor with a timeline in it, and the trace; `Any`: it is not installed where types are checked."""
    path = tmp_path / "run.json"
    assert main(["trace", "export", str(request.param), "--as", "perfetto", "-o", str(path)]) == 0
    try:
        module = importlib.import_module("perfetto.trace_processor")
        config = module.TraceProcessorConfig(bin_path=os.environ.get("TRACE_PROCESSOR_SHELL"))
        processor = module.TraceProcessor(trace=str(path), config=config)
    except ImportError as error:
        pytest.skip(f"perfetto is not installed ({INSTALL}): {error}")
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no trace processor to run ({INSTALL}): {error}")
    yield processor, read_trace([request.param])
    processor.close()


def number(processor: Any, query: str) -> int:
    """The one number that the query is about."""
    (row,) = list(processor.query(f"select count(*) as n from ({query})"))
    return int(row.n)


def test_every_request_tool_and_session_is_found(opened: tuple[Any, Trace]) -> None:
    """Counted by SQL; nothing of the file was refused or lost; arrows have both ends, workers their counters."""
    processor, trace = opened
    bad = list(processor.query("select name from stats where severity in ('error', 'data_loss') and value > 0"))
    assert [row.name for row in bad] == []
    assert number(processor, "select id from slice where category = 'tidegate.request'") == len(trace.requests)
    assert number(processor, "select id from slice where category = 'tidegate.tool'") == len(tool_uses(trace))
    lanes = {row.name for row in processor.query("select name from thread where name is not null")}
    for session in trace.sessions():
        assert any(lane.removeprefix("↳ ").startswith(f"{session} ") for lane in lanes), session
    assert number(processor, "select id from flow") > 0
    assert number(processor, "select id from process_counter_track") > 0
    inside = "select s.id from slice s join slice p on s.parent_id = p.id where s.category = 'tidegate.stage'"
    stages = "select id from slice where category = 'tidegate.stage'"
    assert number(processor, f"{inside} and p.category = 'tidegate.request'") == number(processor, stages)
