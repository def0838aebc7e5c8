"""Trace rows for people: which to show, and as what line. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, tzinfo

import msgspec

from schemas.trace import RequestMetrics, TracedDecision, TraceRow
from tidegate.safe_text import safe

_decoder = msgspec.json.Decoder(TraceRow)


@dataclass(frozen=True, slots=True)
class RowFilter:
    """``None`` lets everything pass. ``session``: an id as the harness sent it, or the house's key as text."""

    session: str | None = None
    model: str | None = None
    worker: str | None = None

    def passes(self, row: TraceRow) -> bool:
        about = row.decision or row.request or RequestMetrics(request_id="")
        if self.model is not None and about.model != self.model:
            return False
        if self.worker is not None and (about.worker is None or about.worker.worker != self.worker):
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
    """``12:00:01.123  completed  engine-1  session  in 1200 (cached 1100, 92 %)  out 32  ttft 40 ms  total 90 ms``

    Of a decision: ``12:00:01.123  decision  engine-1  session  in 1200 (expected cached 1104, 92 %)  cost 6 (engine-2
    75)  decided in 180 us``. Whatever strangers wrote, it is one line, and drives no terminal.
    """
    when = datetime.fromtimestamp(row.event_time_unix_ms / 1000, zone)
    time = f"{when:%H:%M:%S}.{row.event_time_unix_ms % 1000:03d}"
    if row.decision is not None:
        return safe("  ".join([time, "decision", row.decision.worker.worker, _session(row), *_decision(row.decision)]))
    request = row.request or RequestMetrics(request_id="")
    parts = [time, request.outcome or row.event_type]
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
    if request.hedged:
        parts.append(f"hedged {request.hedged}")
    elif (request.attempts or 0) > 1:
        parts.append(f"{request.attempts} attempts")
    if request.reason:
        parts.append(request.reason)
    return safe("  ".join(parts))


def _decision(decision: TracedDecision) -> list[str]:
    parts = [] if decision.kind == "turn" else [str(decision.kind)]
    text = f"in {decision.input_tokens}"
    if decision.input_tokens > 0:
        share = 100 * decision.predicted_cached_tokens / decision.input_tokens
        text += f" (expected cached {decision.predicted_cached_tokens}, {share:.0f} %)"
    parts.append(text)
    parts += _costs(decision)
    if decision.hold_ms:
        parts.append(f"held {decision.hold_ms} ms ({decision.hold_reason or '?'})")
    parts.append(f"decided in {decision.decide_us} us")
    if decision.mode != "policy":
        parts.append(f"placed by {decision.mode}")
    if decision.index_health not in (None, "synced"):
        parts.append(f"index {decision.index_health}")
    return parts


def _costs(decision: TracedDecision) -> list[str]:
    """The chosen rank's, then those of others, or why they were out of the question."""
    chosen = (decision.worker.worker, decision.worker.rank)
    own, others = "?", []
    for each in decision.candidates:
        cost = each.excluded or ("?" if each.cost is None else f"{each.cost:g}")
        if (each.worker, each.rank) == chosen:
            own = cost
        else:
            name = each.worker if each.rank == 0 else f"{each.worker}/{each.rank}"
            others.append(f"{name} {cost}")
    left_out = decision.candidates_seen - len(decision.candidates)
    others += [f"and {left_out} more"] if left_out > 0 else []
    if not decision.candidates:
        return []
    return [f"cost {own}" + (f" ({', '.join(others)})" if others else "")]


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
