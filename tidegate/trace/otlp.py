"""A trace as OpenTelemetry spans: lines of OTLP JSON, or sent to a collector.

The spans are those of the recorder's sink ``otlp`` (`services.recorder.spans`), with the same ids, but made of the
whole trace: a session's span lasts from its first request to its last, and sub-agents of sub-agents are in their root's
trace. A line is one run's ``resourceSpans``, as the collector's file exporter writes them and its ``otlpjsonfile``
receiver reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any

from schemas.tool import ToolStatus
from schemas.trace import AgentContext, ToolRun, TraceRow
from services.recorder.errors import SinkError
from services.recorder.span_builder import SpanBuilder
from services.recorder.spans import SCHEMA_URL, SCOPE, Attributes, Kind, Runs, Span, Value
from tidegate.errors import MissingPartError, TidegateError
from tidegate.trace.reading import Trace
from tidegate.trace.rows import Request, ToolSpan
from tidegate.trace.tools import ToolUse, tool_uses

SERVICE = "tidegate"
MOST_SPANS = 1_000
"""In one line, and in one request to a collector."""

_KINDS: dict[Kind, int] = {"internal": 1, "client": 3}
_ERROR = 2


class CollectorError(TidegateError):
    """A collector did not take the spans."""

    reason = "collector_failed"


def otlp_spans(trace: Trace) -> list[Span]:
    """Of requests, of tools told and inferred (where their duration is known), and of sessions; run by run."""
    contexts = {request.session: request.context for request in trace.requests if request.context is not None}
    rows = [_request(request) for request in trace.requests]
    rows += [_told(tool, contexts.get(tool.session)) for tool in trace.tools]
    inferred = [use for use in tool_uses(trace) if use.inferred and use.known and use.call_id is not None]
    told = {(tool.session, tool.fields.tool_call_id) for tool in trace.tools}
    rows += [_inferred(use, contexts.get(use.session)) for use in inferred if (use.session, use.call_id) not in told]
    spans, _ = SpanBuilder(Runs(parents=trace.parents()), limit=max(1, len(rows))).spans(rows)
    return sorted(spans, key=lambda span: (span.trace_id, span.start_ns, -span.end_ns, span.span_id))


def otlp_lines(spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    """OTLP JSON of `otlp_spans`, a run a line, `MOST_SPANS` at most."""
    for _, run in groupby(spans, key=lambda span: span.trace_id):
        while part := list(islice(run, MOST_SPANS)):
            scope = {"scope": {"name": SCOPE}, "schemaUrl": SCHEMA_URL, "spans": [_span(span) for span in part]}
            resource = {"attributes": _attributes({"service.name": SERVICE})}
            yield {"resourceSpans": [{"resource": resource, "scopeSpans": [scope]}]}


def send_spans(spans: Sequence[Span], endpoint: str, timeout_s: float, done: Callable[[int], None]) -> int:
    """To the collector at the base URL ``endpoint``; returns how many it refused. ``done`` is told how many it has.

    Raises `MissingPartError`, `CollectorError`.
    """
    try:
        from services.recorder.shell.otlp_sender import OtlpSender
    except ImportError as error:
        text = f"sending spans needs OpenTelemetry's SDK: pip install 'tidegate[otlp]' ({error})"
        raise MissingPartError(text) from error
    sender, refused = OtlpSender(endpoint, timeout_s), 0
    try:
        for first in range(0, len(spans), MOST_SPANS):
            refused += sender.send_spans(spans[first : first + MOST_SPANS])
            done(min(first + MOST_SPANS, len(spans)))
    except SinkError as error:
        raise CollectorError(f"{endpoint}: {error}") from error
    finally:
        sender.close()
    return refused


def _request(request: Request) -> TraceRow:
    return TraceRow(
        event_type="request_end",
        event_time_unix_ms=request.event_time_ms,
        agent_context=request.context,
        request=request.metrics,
    )


def _context(session: str, parent: str | None, known: AgentContext | None) -> AgentContext:
    """With the key that the session's requests have: the tenant is in it."""
    if known is None:
        return AgentContext(session_id=session, parent_session_id=parent)
    return AgentContext(
        session_id=session, parent_session_id=parent or known.parent_session_id, session=known.session, weak=known.weak
    )


def _told(tool: ToolSpan, known: AgentContext | None) -> TraceRow:
    fields, timed = tool.fields, tool.timed and tool.start_ms <= tool.end_ms
    run = ToolRun(
        tool_call_id=fields.tool_call_id,
        tool_class=fields.tool_class,
        started_at_unix_ms=round(tool.start_ms) if timed else None,
        ended_at_unix_ms=round(tool.end_ms) if timed else None,
        status=tool.status,
        output_tokens=fields.output_tokens,
        output_bytes=fields.output_bytes,
        error_type=fields.error_type,
        inferred=fields.inferred,
    )
    return TraceRow(
        event_type=tool.event_type,
        event_time_unix_ms=tool.event_time_ms,
        agent_context=_context(tool.session, tool.parent, known),
        tool=run,
    )


def _inferred(use: ToolUse, known: AgentContext | None) -> TraceRow:
    status: ToolStatus = "succeeded"
    run = ToolRun(
        tool_call_id=use.call_id or "",
        tool_class=use.name,
        started_at_unix_ms=round(use.start_ms),
        ended_at_unix_ms=round(use.end_ms),
        status=status,
        inferred=True,
    )
    return TraceRow(
        event_type="tool_end",
        event_time_unix_ms=round(use.end_ms),
        agent_context=_context(use.session, None, known),
        tool=run,
    )


def _span(span: Span) -> dict[str, Any]:
    """As OTLP JSON wants it: ids in hex, 64-bit numbers as text."""
    said: dict[str, Any] = {"traceId": f"{span.trace_id:032x}", "spanId": f"{span.span_id:016x}"}
    if span.parent_id is not None:
        said["parentSpanId"] = f"{span.parent_id:016x}"
    said |= {
        "name": span.name,
        "kind": _KINDS[span.kind],
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.attributes),
    }
    if span.events:
        said["events"] = [
            {"timeUnixNano": str(event.time_ns), "name": event.name, "attributes": _attributes(event.attributes)}
            for event in span.events
        ]
    said["status"] = {} if span.error is None else {"code": _ERROR, "message": span.error}
    return said


def _attributes(attributes: Attributes) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value(value)} for name, value in attributes.items()]


def _value(value: Value) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, str):
        return {"stringValue": value}
    return {"arrayValue": {"values": [_value(each) for each in value]}}
