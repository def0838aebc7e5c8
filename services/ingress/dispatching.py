"""What goes to an engine with a request: where, in which place of it, and with which fields (`Forward`)."""

from __future__ import annotations

from schemas.admit import Granted
from schemas.session import engine_session_id
from schemas.worker import WorkerState
from services.ingress.effects import Forward
from services.ingress.engine_fields import FieldRules
from services.ingress.requests import Record
from services.ingress.workers import Workers


class Forwards:
    """Makes them from what is heard of workers and of sessions' hints."""

    def __init__(self, workers: Workers, fields: FieldRules) -> None:
        self._workers = workers
        self._fields = fields

    def granted(self, record: Record, attempt: int, granted: Granted, now: float) -> Forward:
        """To where admission says; a worker that we have not heard of is asked at the address that came along."""
        worker, rank = granted.grant.worker, granted.grant.rank
        known = self._workers.get(worker)
        url, ranks = (known.profile.url, known.profile.ranks) if known else (granted.url, rank + 1)
        return self._to(record, attempt, worker, url, rank, ranks, granted.priority, now)

    def hashed(self, record: Record, state: WorkerState, rank: int, now: float) -> Forward:
        """To where nobody but us has decided."""
        profile = state.profile
        return self._to(record, record.attempt, state.worker, profile.url, rank, profile.ranks, None, now)

    def _to(
        self,
        record: Record,
        attempt: int,
        worker: str,
        url: str,
        rank: int,
        ranks: int,
        priority: int | None,
        now: float,
    ) -> Forward:
        session_id = engine_session_id(record.identity.key, record.identity.session_id)
        fields, dialect = self._fields.of(record, worker, now), self._workers.dialect(worker)
        return Forward(record.request_id, attempt, worker, url, rank, ranks, priority, session_id, fields, dialect)
