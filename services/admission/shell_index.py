"""Admission's own replica of the index: fed by the facts that admission hears anyway and by the bridges' batches.

Whatever is wrong with the replica is no harm to admission: a failure is counted, answered as `index_failed`, and the
replica begins anew.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bus.interface import Bus
from bus.tasks import Tasks
from replica.core import Replica
from replica.errors import ReplicaError
from replica.metrics import replica_families
from replica.shell import ReplicaFeed
from schemas.index import MatchReply, MatchRequest
from schemas.placed import Placed
from schemas.request import RequestEnd
from schemas.session import SessionFact
from schemas.worker import WorkerState
from services.admission.config import AdmissionSettings

PREFIX = "tidegate_admission_index_"


class OwnIndexError(Exception):
    """The replica could not answer. ``reason`` is stable: metric label, reason in the decision."""

    reason = "index_failed"


class OwnIndex(Collector):
    """A replica that answers by a direct call, and its metrics."""

    def __init__(self, settings: AdmissionSettings) -> None:
        replica = Replica(settings.replica, settings.instance or "admission-1")
        self._feed = ReplicaFeed(replica, settings.replica, isolated=True)

    async def start(self, bus: Bus, tasks: Tasks) -> None:
        """Listen to the bridges' batches. Facts are handed over by `worker_stated`, `ended` and `placed`."""
        await self._feed.start(bus, tasks, facts=False)

    def stop(self) -> None:
        """Take nothing in any more."""
        self._feed.stop()

    def not_ready(self) -> str | None:
        """While warming up: what is not there yet."""
        return self._feed.not_ready()

    def worker_stated(self, state: WorkerState) -> None:
        """A bridge's heartbeat."""
        self._feed.worker_seen(state)

    def ended(self, end: RequestEnd) -> None:
        """A request is over."""
        self._feed.request_ended(end)

    def placed(self, fact: Placed) -> None:
        """A prompt was sent somewhere."""
        self._feed.prompt_placed(fact)

    def told(self, fact: Placed | RequestEnd | SessionFact) -> None:
        """What admission says itself."""
        if isinstance(fact, Placed):
            self.placed(fact)
        elif isinstance(fact, RequestEnd):
            self.ended(fact)

    def match(self, question: MatchRequest, now: float) -> MatchReply:
        """As an indexer answers. ``now``: Unix seconds. Raises `OwnIndexError`."""
        if self._feed.broken:
            raise OwnIndexError("it failed a short while ago")
        try:
            return self._feed.replica.match(question, now)
        except ReplicaError as error:
            raise OwnIndexError(str(error)) from error
        except Exception as error:
            # The border to the replica: a turn is placed by session and load rather than not at all.
            self._feed.broke(error)
            raise OwnIndexError(repr(error)) from error

    def collect(self) -> Iterable[Metric]:
        """Every family's name begins with `PREFIX`."""
        feed = self._feed
        yield from replica_families(feed.replica, PREFIX, "")
        for name, text, value in (
            ("failures", "Failures of the replica, after each of which it began anew.", feed.failures),
            ("dropped_batches", "Batches that did not fit into the line.", feed.dropped),
        ):
            yield CounterMetricFamily(f"{PREFIX}{name}", text, value=value)
        yield GaugeMetricFamily(f"{PREFIX}waiting_batches", "Batches that wait to be read.", value=feed.waiting)
