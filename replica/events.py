"""What happens to a replica: batches, facts about workers and requests, and snapshots that it asked for.

Questions (`Replica.match`) are answered by a direct call: they are the hot path.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvcore import PoolIndex
from kvcore.index import PreparedRanks
from schemas.kv import KvHeaders, RankMark
from schemas.placed import Placed
from schemas.pool import PoolHeaders, PoolReset, PoolState
from schemas.request import RequestEnd
from schemas.worker import WorkerState


@dataclass(frozen=True, slots=True)
class BatchReceived:
    """One message of ``tg.v1.kv.<worker>.<rank>``, whole or a part."""

    headers: KvHeaders
    payload: bytes


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """A heartbeat of a bridge."""

    state: WorkerState


@dataclass(frozen=True, slots=True)
class SnapshotReceived:
    """A bridge's dump, fetched from the object store and prepared by `Replica.prepare`. What is left of ``prepared``
    afterwards must be discarded."""

    worker: str
    ticket: int
    marks: tuple[RankMark, ...]
    prepared: PreparedRanks


@dataclass(frozen=True, slots=True)
class SnapshotFailed:
    """The question or the fetch failed; ``reason`` as in the error raised."""

    worker: str
    ticket: int
    reason: str


@dataclass(frozen=True, slots=True)
class PoolBatchReceived:
    """One message of ``tg.v1.pool.<pool>``, whole or a part."""

    headers: PoolHeaders
    payload: bytes


@dataclass(frozen=True, slots=True)
class PoolResetReceived:
    """A pool is told again from here on."""

    reset: PoolReset


@dataclass(frozen=True, slots=True)
class PoolStated:
    """A heartbeat of a pool's bridge."""

    state: PoolState


@dataclass(frozen=True, slots=True)
class PoolSnapshotReceived:
    """A pool's dump, fetched from the object store and loaded into ``index`` by `Replica.prepare_pool`: its picture as
    after ``seq`` of ``epoch``."""

    pool: str
    ticket: int
    epoch: int
    seq: int
    index: PoolIndex


@dataclass(frozen=True, slots=True)
class PoolSnapshotFailed:
    """The question or the fetch failed; ``reason`` as in the error raised."""

    pool: str
    ticket: int
    reason: str


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A request ended; carries predicted and reported cached tokens."""

    end: RequestEnd


@dataclass(frozen=True, slots=True)
class PromptPlaced:
    """A prompt was sent somewhere."""

    placed: Placed


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes, several times a second: silent workers are lost, postponed snapshots are asked for.

    ``connected``: whether the bus is there and could be listened to; while not, silence says nothing.
    """

    connected: bool = True


@dataclass(frozen=True, slots=True)
class Work:
    """There is time: while `Replica.behind`, apply a few of the batches that wait."""


PoolEvent = PoolBatchReceived | PoolResetReceived | PoolStated | PoolSnapshotReceived | PoolSnapshotFailed

ReplicaEvent = (
    BatchReceived
    | WorkerSeen
    | SnapshotReceived
    | SnapshotFailed
    | PoolEvent
    | RequestEnded
    | PromptPlaced
    | Tick
    | Work
)
