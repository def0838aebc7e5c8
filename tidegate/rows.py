"""Trace rows for people: which to show, and as what line. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, tzinfo

import msgspec

from schemas.trace import RequestMetrics, TraceRow

_decoder = msgspec.json.Decoder(TraceRow)


@dataclass(frozen=True, slots=True)
class RowFilter:
    """``None`` lets everything pass. ``session``: an id as the harness sent it, or the house's key as text."""

    session: str | None = None
    model: str | None = None
    worker: str | None = None

    def passes(self, row: TraceRow) -> bool:
        request = row.request or RequestMetrics(request_id="")
        if self.model is not None and request.model != self.model:
            return False
        if self.worker is not None and (request.worker is None or request.worker.worker != self.worker):
            return False
        if self.session is None:
            return True
        context = row.agent_context
        if context is None:
            return False
        key = context.session.text() if context.session is not None else None
        return self.session in (context.session_id, key)


def read_row(payload: bytes) -> TraceRow | None:
    """``None`` for what is not a row of this version."""
    try:
        return _decoder.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def one_line(row: TraceRow, zone: tzinfo | None = None) -> str:
    """``12:00:01.123  completed  engine-1  session  in 1200 (cached 1100, 92 %)  out 32  ttft 40 ms  total 90 ms``"""
    request = row.request or RequestMetrics(request_id="")
    when = datetime.fromtimestamp(row.event_time_unix_ms / 1000, zone)
    parts = [f"{when:%H:%M:%S}.{row.event_time_unix_ms % 1000:03d}", request.outcome or row.event_type]
    parts.append(request.worker.worker if request.worker else "-")
    parts.append(_session(row))
    if request.kind not in (None, "turn"):
        parts.append(str(request.kind))
    parts += _tokens(request)
    if request.hold_ms:
        parts.append(f"held {request.hold_ms} ms ({request.hold_reason or '?'})")
    if request.ttft_ms is not None:
        parts.append(f"ttft {request.ttft_ms:.0f} ms")
    if request.total_time_ms is not None:
        parts.append(f"total {request.total_time_ms:.0f} ms")
    if request.decision_mode not in (None, "policy"):
        parts.append(f"placed by {request.decision_mode}")
    if request.reason:
        parts.append(request.reason)
    return "  ".join(parts)


def _session(row: TraceRow) -> str:
    context = row.agent_context
    if context is None:
        return "-"
    return f"{context.session_id} (of {context.parent_session_id})" if context.parent_session_id else context.session_id


def _tokens(request: RequestMetrics) -> list[str]:
    parts = []
    if request.input_tokens is not None:
        text = f"in {request.input_tokens}"
        if request.cached_tokens is not None and request.input_tokens > 0:
            text += f" (cached {request.cached_tokens}, {100 * request.cached_tokens / request.input_tokens:.0f} %)"
        parts.append(text)
    if request.output_tokens is not None:
        parts.append(f"out {request.output_tokens}")
    return parts
