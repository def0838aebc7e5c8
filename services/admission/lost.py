"""A request whose ingress is lost: the `request.end` fact and the row that its ingress cannot write any more."""

from __future__ import annotations

from schemas.request import Outcome
from schemas.trace import RequestMetrics, TracedWorker, TraceRow
from services.admission.decision_rows import context_of
from services.admission.requests import RequestRecord

OUTCOME: Outcome = "ingress_lost"


def total_ms(record: RequestRecord, now: float) -> float:
    """Milliseconds from receipt until now."""
    return max(0.0, round(now * 1000.0 - record.received_ms, 3))


def lost_row(record: RequestRecord, reason: str, now: float) -> TraceRow:
    """The row, as complete as admission can make it: usage and finish died with the ingress.

    ``reason``: ``newer_epoch`` or ``silence``.
    """
    identity, decision = record.identity, record.decision
    metrics = RequestMetrics(
        request_id=record.request_id,
        x_request_id=record.x_request_id,
        model=record.model,
        endpoint=record.endpoint,
        kind=record.kind,
        tenant=identity.key.tenant,
        stream=record.stream,
        outcome=OUTCOME,
        reason=reason,
        attempts=record.attempt + 1 if record.worker is not None else None,
        input_tokens=record.input_tokens or None,
        usage_estimated=True,
        predicted_cached_tokens=record.predicted_cached_tokens,
        predicted_shared_tokens=(decision.predicted_shared_tokens or None) if decision else None,
        request_received_ms=record.received_ms,
        hold_ms=decision.hold_ms if decision else None,
        hold_reason=decision.hold_reason if decision else None,
        decision_ms=decision.decide_us / 1000.0 if decision else None,
        decision_mode=record.mode,
        policy=decision.policy if decision else None,
        grant_id=record.grant_id,
        index_health=decision.index_health if decision else None,
        index_reason=decision.index_reason if decision else None,
        ttft_ms=record.ttft_ms,
        total_time_ms=total_ms(record, now),
        worker=TracedWorker(worker=record.worker, rank=record.rank or 0) if record.worker is not None else None,
        replayable=False,
    )
    return TraceRow(
        event_type="request_end",
        event_time_unix_ms=int(now * 1000),
        agent_context=context_of(identity),
        request=metrics,
    )
