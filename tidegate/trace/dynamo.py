"""Rows as the peer writes them, and its rows as ours. Source: spec identity-and-traces §2.2-2.7, §8.3.

The peer's rows of requests without identity have exactly four fields of ``request``; its rows of agents have the rest.
Its reader takes a file of agents, or one without identities, not a mixture: in a mixture, a request without identity
gets a session of its own here. Nor does it take a parent of which there is no request (seen with 1.6.1, whose own rows
name such): that parent is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

import msgspec

from schemas.trace import RequestMetrics, TracedWorker, TraceRow
from tidegate.trace.dependencies import own_session
from tidegate.trace.reading import Trace
from tidegate.trace.replayable import Playable
from tidegate.trace.rows import OURS, PEERS, Request, ToolFields, ToolSpan, ToolStart

_SHARED = (
    "x_request_id",
    "model",
    "input_tokens",
    "cached_tokens",
    "prefill_wait_time_ms",
    "prefill_time_ms",
    "ttft_ms",
    "total_time_ms",
    "avg_itl_ms",
    "kv_hit_rate",
    "queue_depth",
)
"""Fields of ``request`` that mean the same to both, of agents' rows."""

_LARGEST_ID = (1 << 64) - 1


def dynamo_lines(source: Playable, *, wrapped: bool = True) -> Iterator[dict[str, Any]]:
    """The peer's rows of requests and tools, by the time of their event."""
    trace = source.trace
    known = set(trace.sessions())
    named = bool(known)
    rows = [(request.event_time_ms, _peers_request(request, known)) for request in trace.requests]
    if named:
        ends = [(tool.event_time_ms, _tool(tool, PEERS, "harness")) for tool in trace.tools]
        starts = [(start.event_time_ms, _tool(start, PEERS, "harness")) for start in trace.open_tools]
        rows += ends + starts
    rows.sort(key=lambda row: row[0])
    zero_ms = rows[0][0]
    for time_ms, row in rows:
        yield {"timestamp": time_ms - zero_ms, "event": row} if wrapped else row


def _peers_request(request: Request, known: Set[str]) -> dict[str, Any]:
    """``known``: sessions of the file; none means that nobody has one."""
    metrics = request.metrics
    row: dict[str, Any] = {
        "schema": PEERS,
        "event_type": "request_end",
        "event_time_unix_ms": request.event_time_ms,
    }
    said: dict[str, Any] = {"request_id": metrics.request_id}
    if known:
        row["event_source"] = "dynamo"
        row["agent_context"] = _context(request, known)
        said |= {name: value for name in _SHARED if (value := getattr(metrics, name)) is not None}
        if metrics.worker is not None and (worker := _worker(metrics.worker)) is not None:
            said["worker"] = worker
        if metrics.finish_reason_metadata is not None:
            said["finish_reason_metadata"] = msgspec.to_builtins(metrics.finish_reason_metadata)
    said["output_tokens"] = metrics.output_tokens or 0
    said["request_received_ms"] = round(request.start_ms)
    said["replay"] = msgspec.to_builtins(request.replay)
    row["request"] = said
    return row


def _context(request: Request, known: Set[str]) -> dict[str, Any]:
    context = request.context
    if context is None:
        return {"session_id": own_session(request)}
    said = {
        "session_id": context.session_id,
        "parent_session_id": context.parent_session_id if context.parent_session_id in known else None,
        "session_final": context.session_final,
        "input_trigger": context.input_trigger,
    }
    return {key: value for key, value in said.items() if value is not None}


def _worker(worker: TracedWorker) -> dict[str, int] | None:
    """The peer's workers are numbers: one that came from there goes back, a name of ours is left out."""
    if not (worker.worker.isascii() and worker.worker.isdecimal()) or (number := int(worker.worker)) > _LARGEST_ID:
        return None
    return {
        "prefill_worker_id": number,
        "prefill_dp_rank": worker.rank,
        "decode_worker_id": number,
        "decode_dp_rank": worker.rank,
    }


def our_rows(trace: Trace) -> Iterator[dict[str, Any]]:
    """Rows of ours, bare, by the time of their event; their source stays what it was."""
    rows: list[tuple[int, dict[str, Any]]] = [(each.event_time_ms, _our_request(each)) for each in trace.requests]
    rows += [(tool.event_time_ms, _tool(tool, OURS, "harness")) for tool in trace.tools]
    rows += [(start.event_time_ms, _tool(start, OURS, "harness")) for start in trace.open_tools]
    for each in trace.decisions:
        decision = TraceRow(
            event_type="decision",
            event_time_unix_ms=each.time_ms,
            agent_context=each.context,
            decision=each.decision,
        )
        rows.append((each.time_ms, msgspec.to_builtins(decision)))
    for sample in trace.loads:
        load = TraceRow(event_type="worker_load", event_time_unix_ms=sample.time_ms, worker_load=sample.load)
        rows.append((sample.time_ms, msgspec.to_builtins(load)))
    rows.sort(key=lambda row: row[0])
    yield from (row for _, row in rows)


def _our_request(request: Request) -> dict[str, Any]:
    metrics: RequestMetrics = request.metrics
    if metrics.request_received_ms is None:
        metrics = msgspec.structs.replace(metrics, request_received_ms=round(request.start_ms))
    if metrics.replayable is None:
        metrics = msgspec.structs.replace(metrics, replayable=metrics.replay is not None)
    row = TraceRow(
        event_type="request_end",
        event_time_unix_ms=request.event_time_ms,
        agent_context=request.context,
        request=metrics,
        event_source=request.event_source or "dynamo",
    )
    said: dict[str, Any] = msgspec.to_builtins(row)
    return said


def _tool(tool: ToolSpan | ToolStart, schema: str, source: str) -> dict[str, Any]:
    """The same row for both. What its end did not tell and its start did (times) is told."""
    fields: ToolFields = tool.fields
    if isinstance(tool, ToolSpan):
        times = {}
        if tool.timed and tool.start_ms <= tool.end_ms:
            times = {"started_at_unix_ms": round(tool.start_ms), "ended_at_unix_ms": round(tool.end_ms)}
        fields = msgspec.structs.replace(fields, status=tool.status, **times)
    context = {"session_id": tool.session}
    if tool.parent is not None:
        context["parent_session_id"] = tool.parent
    return {
        "schema": schema,
        "event_type": tool.event_type if isinstance(tool, ToolSpan) else "tool_start",
        "event_time_unix_ms": tool.event_time_ms,
        "event_source": source,
        "agent_context": context,
        "tool": msgspec.to_builtins(fields),
    }
