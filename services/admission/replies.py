"""The answer to an ask that was granted, the first time and every time it is asked again."""

from __future__ import annotations

from schemas.admit import Grant, Granted
from services.admission.requests import RequestRecord
from services.admission.workers import Worker


def granted_reply(epoch: int, grant: Grant, worker: Worker, record: RequestRecord) -> Granted:
    """``epoch``: of the leader that answers. A grant learned from heartbeats alone says less than its first answer."""
    decision, predicted = record.decision, record.predicted_cached_tokens or 0
    if decision is None or decision.grant.grant_id != grant.grant_id:
        return Granted(
            request_id=grant.request_id,
            epoch=epoch,
            grant=grant,
            url=worker.state.profile.url,
            predicted_cached_tokens=predicted,
            priority=record.priority,
        )
    return Granted(
        request_id=grant.request_id,
        epoch=epoch,
        grant=grant,
        url=worker.state.profile.url,
        mode=decision.mode,
        policy=decision.policy,
        predicted_cached_tokens=predicted,
        predicted_shared_tokens=decision.predicted_shared_tokens,
        index_health=decision.index_health,
        index_reason=decision.index_reason,
        hold_ms=decision.hold_ms,
        hold_reason=decision.hold_reason,
        priority=record.priority,
    )
