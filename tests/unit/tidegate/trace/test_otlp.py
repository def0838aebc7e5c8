"""``tidegate trace export --as otlp``: lines that a collector reads, or spans that are sent to one."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.collector import collector, values
from tests.unit.tidegate.trace.making import SAMPLE, request_row, tool_row, trace_of, write
from tidegate.cli import main
from tidegate.trace.otlp import otlp_lines, otlp_spans


def decoded(line: dict[str, Any]) -> list[Span]:
    """By OpenTelemetry's own messages. Ids are hex in OTLP JSON, where Protobuf's own JSON has base64."""
    for each in line["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        for name in ("traceId", "spanId", "parentSpanId"):
            if name in each:
                each[name] = base64.b64encode(bytes.fromhex(each[name])).decode()
    said = ParseDict(line, ExportTraceServiceRequest())
    return list(said.resource_spans[0].scope_spans[0].spans)


@pytest.mark.long
def test_a_file_holds_what_is_sent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lines, read back, are to the byte the spans that the SDK sends; a line is a run."""
    path = tmp_path / "spans.jsonl"
    assert main(["trace", "export", str(SAMPLE), "--as", "otlp", "-o", str(path)]) == 0
    assert "spans of 18 requests" in capsys.readouterr().err
    lines = [decoded(json.loads(line)) for line in path.read_text().splitlines()]
    assert all(len({span.trace_id for span in line}) == 1 for line in lines)
    with collector() as own:
        assert main(["trace", "export", str(SAMPLE), "--as", "otlp", "--endpoint", own.url]) == 0
    written = {span.span_id: span for line in lines for span in line}
    assert len(written) == sum(map(len, lines)) == len(own.spans)
    for sent in own.spans:
        sent.flags = 0  # the SDK's: whether the parent is remote
        assert written[sent.span_id] == sent


def test_the_whole_tree_is_one_trace(tmp_path: Path) -> None:
    """Sub-agents of sub-agents; sessions from their first request to their last; tools told and inferred."""
    calls = {"tool_calls": [{"id": "c1", "name": "bash"}, {"id": "c2", "name": "read"}]}
    trace = trace_of(
        tmp_path,
        request_row("a", 1_000, 1_100, "run", finish_reason_metadata=calls),
        tool_row("run", "c1", 1_300, started_at_unix_ms=1_150),
        request_row("b", 1_400, 1_500, "run"),
        request_row("c", 1_150, 1_200, "child", parent="run"),
        request_row("d", 1_160, 1_190, "grandchild", parent="child"),
    )
    spans = [span for line in otlp_lines(otlp_spans(trace)) for span in decoded(line)]
    assert len({span.trace_id for span in spans}) == 1
    ids = {span.span_id: span for span in spans}
    sessions = {values(span.attributes)["session.id"]: span for span in spans if span.name == "invoke_agent"}
    root = sessions["run"]
    assert (root.parent_span_id, root.start_time_unix_nano, root.end_time_unix_nano) == (
        b"",
        1_000_000_000,
        1_500_000_000,
    )
    assert ids[sessions["grandchild"].parent_span_id] == sessions["child"]
    assert ids[sessions["child"].parent_span_id] == root
    tools = {span.name: span for span in spans if span.name.startswith("execute_tool")}
    assert {values(ids[span.parent_span_id].attributes)["tidegate.request.id"] for span in tools.values()} == {"a"}
    assert "tidegate.tool.inferred" not in values(tools["execute_tool bash"].attributes)
    inferred = tools["execute_tool read"]
    assert values(inferred.attributes)["tidegate.tool.inferred"] is True
    assert (inferred.start_time_unix_nano, inferred.end_time_unix_nano) == (1_100_000_000, 1_400_000_000)


def test_a_collector_that_does_not_take_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Away or wrong: exit code 1 and why; spans that it refuses are counted."""
    arguments = ["trace", "export", str(SAMPLE), "--as", "otlp", "--timeout", "0.5", "--endpoint"]
    assert main([*arguments, "http://127.0.0.1:9"]) == 1
    assert "refused" in capsys.readouterr().err
    with collector() as own:
        own.answer = lambda path, names: (401, b"")
        assert main([*arguments, own.url]) == 1
        assert "answered 401" in capsys.readouterr().err
        own.answer = lambda path, names: (400, b"")
        trace = write(tmp_path / "trace.jsonl", [request_row("a", 0, 1), request_row("b", 0, 1)])
        assert main(["trace", "export", str(trace), "--as", "otlp", "--endpoint", own.url]) == 1
        assert "refused 2 of 2 spans" in capsys.readouterr().err
    assert main([*arguments, own.url, "-o", "x"]) == 2
    assert main(["trace", "export", str(SAMPLE), "--as", "dynamo", "--endpoint", own.url]) == 2
