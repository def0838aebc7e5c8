"""Every request that an ingress accepted and has not ended, by id and by the ingress's epoch.

A request is known from whichever fact comes first (accepted, the ask itself, a decision, the ingress's heartbeat):
subjects are not ordered among each other. What is over is remembered for a while, so that a late fact revives nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from schemas.admit import DecisionMode
from schemas.decision import Decision
from schemas.session import RequestKind, SessionIdentity

REMEMBER_S = 60.0
"""How long an ended or cancelled request is remembered, in seconds."""
REMEMBER_MOST = 131_072

MAX_REQUESTS = 131_072
MAX_LIVES = 4096
"""Open requests, and lives of ingresses, known at a time; more is taken for a broken sender."""


@dataclass(slots=True)
class RequestRecord:
    """One accepted request: what its row needs should its ingress die. ``named``: when a fact named it last.

    ``attempt``: the highest asked for or dispatched. ``turn_open``: its session counts it as in flight.
    ``priority``: of its grant, as its engine is to read it. ``digest``: of its body.
    ``hedge_over``: it was sent twice, or was to be, and the race is over: a late fact begins none anew.
    """

    request_id: str
    model: str
    identity: SessionIdentity
    ingress: str
    ingress_epoch: int
    received_ms: int
    named: float
    kind: RequestKind = "turn"
    endpoint: str = "chat_completions"
    stream: bool | None = None
    x_request_id: str | None = None
    input_tokens: int = 0
    attempt: int = 0
    worker: str | None = None
    rank: int | None = None
    grant_id: str | None = None
    mode: DecisionMode | None = None
    predicted_cached_tokens: int | None = None
    decision: Decision | None = None
    ttft_ms: float | None = None
    turn_open: bool = False
    priority: int | None = None
    digest: bytes = b""
    hedge_over: bool = False


@dataclass(slots=True)
class IngressEpoch:
    """One life of an ingress. ``seen``: Unix seconds of its last fact."""

    ingress: str
    epoch: int
    seen: float
    requests: set[str] = field(default_factory=set)


class RequestTable:
    """Requests by id, ingress epochs, and what is over."""

    def __init__(self, max_requests: int = MAX_REQUESTS) -> None:
        self._max_requests = max_requests
        self._records: dict[str, RequestRecord] = {}
        self._epochs: dict[tuple[str, int], IngressEpoch] = {}
        self._newest: dict[str, int] = {}
        self._over: OrderedDict[str, float] = OrderedDict()
        self._cancelled: OrderedDict[str, float] = OrderedDict()
        self.refused = 0

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(self._records.values())

    @property
    def ingresses(self) -> int:
        """Ingresses being heard."""
        return len(self._newest)

    def get(self, request_id: str) -> RequestRecord | None:
        return self._records.get(request_id)

    def newest_epoch(self, ingress: str) -> int | None:
        """The newest life of this ingress that was heard."""
        return self._newest.get(ingress)

    def heard(self, ingress: str, epoch: int, now: float) -> None:
        """A fact of this ingress came."""
        life = self._epochs.get((ingress, epoch))
        if life is None:
            if len(self._epochs) >= MAX_LIVES:
                return
            life = self._epochs[ingress, epoch] = IngressEpoch(ingress, epoch, now)
        life.seen = now
        if epoch > self._newest.get(ingress, -1):
            self._newest[ingress] = epoch

    def note(self, record: RequestRecord) -> RequestRecord | None:
        """The known record of this request, or this one from now on; ``None`` when the request is over, or beyond the
        bounds (counted in ``refused``).

        The ingress must have been `heard`.
        """
        if record.request_id in self._over:
            return None
        known = self._records.get(record.request_id)
        if (record.ingress, record.ingress_epoch) not in self._epochs or (
            known is None and len(self._records) >= self._max_requests
        ):
            self.refused += 1
            return None
        if known is None:
            self._records[record.request_id] = record
            self._epochs[record.ingress, record.ingress_epoch].requests.add(record.request_id)
            return record
        known.named = max(known.named, record.named)
        known.input_tokens = known.input_tokens or record.input_tokens
        known.digest = known.digest or record.digest
        if known.ingress_epoch < record.ingress_epoch or known.ingress != record.ingress:
            self._adopt(known, record)
        return known

    def end(self, request_id: str, now: float) -> RequestRecord | None:
        """The request is over: forget it, and remember that it is."""
        _remember(self._over, request_id, now)
        return self._forget(request_id)

    def forget(self, request_id: str) -> RequestRecord | None:
        """Forget a request that no fact names any more; if it is named again, it is known again."""
        return self._forget(request_id)

    def is_over(self, request_id: str) -> bool:
        return request_id in self._over

    def cancel(self, request_id: str, now: float) -> None:
        """Its client is gone: it may not be asked for or adopted any more."""
        _remember(self._cancelled, request_id, now)

    def is_cancelled(self, request_id: str) -> bool:
        return request_id in self._cancelled

    def dead(self, silent_since: float) -> list[tuple[IngressEpoch, str]]:
        """Lives of ingresses that are over, with the reason: ``newer_epoch`` or ``silence``."""
        found = []
        for life in self._epochs.values():
            if life.epoch < self._newest.get(life.ingress, life.epoch):
                found.append((life, "newer_epoch"))
            elif life.seen <= silent_since:
                found.append((life, "silence"))
        return found

    def bury(self, life: IngressEpoch) -> None:
        """Forget a life whose requests are all ended. Raises `ValueError` when some are not."""
        if life.requests:
            raise ValueError(f"{len(life.requests)} requests of {life.ingress} are not ended")
        del self._epochs[life.ingress, life.epoch]
        if self._newest.get(life.ingress) == life.epoch:
            del self._newest[life.ingress]

    def of(self, ingress: str, epoch: int) -> list[RequestRecord]:
        """Requests of one life of an ingress."""
        life = self._epochs.get((ingress, epoch))
        return [self._records[request_id] for request_id in life.requests] if life is not None else []

    def forgive(self, now: float) -> None:
        """We could not listen: count everybody's silence from now."""
        for life in self._epochs.values():
            life.seen = now
        for record in self._records.values():
            record.named = now

    def unnamed(self, since: float) -> list[RequestRecord]:
        """Requests that no fact has named after ``since`` (Unix seconds)."""
        return [record for record in self._records.values() if record.named <= since]

    def sweep(self, now: float) -> None:
        """Forget what was over long ago."""
        for memory in (self._over, self._cancelled):
            while memory and next(iter(memory.values())) <= now - REMEMBER_S:
                memory.popitem(last=False)

    def _forget(self, request_id: str) -> RequestRecord | None:
        record = self._records.pop(request_id, None)
        if record is not None:
            life = self._epochs.get((record.ingress, record.ingress_epoch))
            if life is not None:
                life.requests.discard(request_id)
        return record

    def _adopt(self, known: RequestRecord, record: RequestRecord) -> None:
        """The same request id from another life of an ingress: that life answers for it now."""
        life = self._epochs.get((known.ingress, known.ingress_epoch))
        if life is not None:
            life.requests.discard(known.request_id)
        known.ingress, known.ingress_epoch = record.ingress, record.ingress_epoch
        self._epochs[record.ingress, record.ingress_epoch].requests.add(known.request_id)


def _remember(memory: OrderedDict[str, float], request_id: str, now: float) -> None:
    memory[request_id] = now
    memory.move_to_end(request_id)
    while len(memory) > REMEMBER_MOST:
        memory.popitem(last=False)
