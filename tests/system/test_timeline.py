"""The timeline of a real run: agents with tools and sub-agents some of whom tell of their tools."""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path

import pytest

from tests.support.processes import start_process
from tests.support.system import running_system
from tests.unit.tidegate.trace.timeline_format import Counters, FlowStart, Instant, Timeline, checked_file
from tidegate.cli import main
from tidegate.trace.reading import Trace, read_trace

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(400)]

EXAMPLE = Path(__file__).parents[2] / "examples" / "harness" / "agents_with_tools.py"
CONFIG = """
[recorder]
load_samples_s = 0.2
tool_events_http_port = 0
[engine]
num_blocks = 420
"""


async def recorded(directory: Path) -> Path:
    """The recorder's files of a short run of the example."""
    config = directory / "tidegate.toml"
    config.write_text(CONFIG)
    async with running_system(directory, "--config", str(config)) as system:
        log = "".join(path.read_text() for path in (system.workdir / "logs").glob("recorder*.log"))
        posts = re.search(r"(http://[\d.:]+/v1/tool_events)", log)
        assert posts, log
        more = ["--tool-events", posts[1], "--agents", "3", "--turns", "4", "--words", "900", "--seed", "3"]
        agents = await start_process(
            [sys.executable, str(EXAMPLE), "--url", system.url, *more], directory, name="agents"
        )
        try:
            assert await agents.wait(120) == 0, agents.output
        finally:
            await agents.close()
        assert await system.process.stop(40) == 0, system.process.output
        return system.workdir / "traces"


def check_holds_all(timeline: Timeline, trace: Trace, lines: list[dict[str, object]]) -> None:
    """Counted from the files themselves."""
    ends = [line for line in lines if line["event_type"] == "request_end"]
    assert len(timeline.of("request")) == len(trace.requests) == len(ends)
    told = [tool for tool in timeline.of("tool") if not tool.args["inferred"]]
    assert len(told) == sum(line["event_type"] in ("tool_end", "tool_error") for line in lines)
    calls = {
        (request.session, call.id)
        for request in trace.requests
        if request.metrics.finish_reason_metadata is not None
        for call in request.metrics.finish_reason_metadata.tool_calls
    }
    assert {(tool.args["session"], tool.args["tool_call_id"]) for tool in timeline.of("tool")} == calls
    assert {request.args["session"] for request in timeline.of("request")} == set(trace.sessions())
    marks = [event for event in timeline.traceEvents if isinstance(event, Instant) and event.cat == "tidegate.decision"]
    assert len(marks) == sum(line["event_type"] == "decision" for line in lines)


async def test_a_run_on_a_timeline(tmp_path: Path) -> None:
    """Every request, tool, session and decision is on it; tools of the agent that tells nothing are inferred; workers
    have the counters that their bridges told; each request has its stages, and sub-agents hang on their parents."""
    traces = await recorded(tmp_path)
    path = tmp_path / "run.json"
    assert main(["trace", "export", str(traces), "--as", "perfetto", "-o", str(path)]) == 0
    timeline, trace = checked_file(path), read_trace([traces])
    lines = [
        json.loads(line)["event"]
        for file in sorted(traces.glob("*.jsonl.gz"))
        for line in gzip.decompress(file.read_bytes()).splitlines()
    ]
    check_holds_all(timeline, trace, lines)
    quiet = [tool for tool in timeline.of("tool") if "quiet" in tool.args["session"]]
    assert quiet
    assert all(tool.args["inferred"] for tool in quiet)
    counters = {event.name for event in timeline.traceEvents if isinstance(event, Counters)}
    assert {"requests running", "requests waiting", "KV use (%)", "KV tokens"} <= counters
    assert not any("estimate" in name for name in counters)
    used = [
        event.args["value"]
        for event in timeline.traceEvents
        if isinstance(event, Counters) and event.name == "KV tokens"
    ]
    assert max(used) > 0
    assert {stage.name for stage in timeline.of("stage")} >= {"queued", "prefill", "decode"}
    arrows = [event.name for event in timeline.traceEvents if isinstance(event, FlowStart)]
    children = [session for session, parent in trace.parents().items() if parent]
    assert arrows.count("spawn") == len(children) > 0
    assert arrows.count("join") == len(children)
