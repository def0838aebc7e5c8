"""What engines' bridges say of their load each second, as rows beside those of requests: one in a while of each worker.

The times at which a sample is due are the same for every recorder (whole multiples of ``every_s`` on the bridge's
clock), and a sample's message id names worker, incarnation and that time: however many recorders hear the same bridge,
the stream keeps one.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from bus import subjects
from schemas.base import to_json
from schemas.trace import TracedLoad, TraceRow
from schemas.worker import WorkerState

MAX_WORKERS = 4_096
"""Workers that are remembered; who was heard longest ago is forgotten first."""


@dataclass(frozen=True, slots=True)
class LoadRow:
    """A row for the stream; ``message_id`` keeps it from being stored twice."""

    subject: str
    payload: bytes
    message_id: str


@dataclass(slots=True)
class _Worker:
    """``slot``: the time (in units of ``every_s``) of its last sample, taken at ``taken_s`` (Unix seconds).
    ``loaded``: it told a load then."""

    slot: int
    taken_s: float
    loaded: bool


class LoadSampler:
    """Facts ``worker.state`` in, at most one row per worker and ``every_s`` out."""

    def __init__(self, every_s: float, workers: int = MAX_WORKERS) -> None:
        self._every_ms = max(1, round(every_s * 1000))
        self._limit = workers
        self._workers: OrderedDict[str, _Worker] = OrderedDict()

    def __len__(self) -> int:
        return len(self._workers)

    def handle(self, fact: WorkerState, now: float) -> LoadRow | None:
        """``now`` in Unix seconds. A worker that tells no load has no rows; one that told and tells no more has one
        without loads, so that nobody draws its last one for ever."""
        slot = fact.at_ms // self._every_ms
        worker = self._workers.get(fact.worker)
        if worker is None:
            if not fact.loads or not fact.profile.model:  # its bridge does not know the engine yet
                return None
        else:
            self._workers.move_to_end(fact.worker)
            # The clock of a bridge may be set, and anybody on the bus can say any time: ours bounds the rows.
            soon = 0 <= now - worker.taken_s < self._every_ms / 2000
            if slot == worker.slot or soon or not (fact.loads or worker.loaded):
                return None
        self._workers[fact.worker] = _Worker(slot, now, bool(fact.loads))
        while len(self._workers) > self._limit:
            self._workers.popitem(last=False)
        return self._row(fact, slot)

    def _row(self, fact: WorkerState, slot: int) -> LoadRow:
        profile = fact.profile
        load = TracedLoad(worker=fact.worker, model=profile.model, kv_tokens=profile.kv_tokens, loads=fact.loads)
        row = TraceRow(event_type="worker_load", event_time_unix_ms=fact.at_ms, worker_load=load)
        name, incarnation = subjects.encode_id(fact.worker), subjects.encode_id(fact.incarnation)
        return LoadRow(
            subject=subjects.trace("worker_load", profile.model, fact.worker),
            payload=to_json(row),
            message_id=f"load:{name}:{incarnation}:{slot * self._every_ms}",
        )
