"""Reading the books after a soak: requests against rows, failures and marks against faults, grants against requests in
flight. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from load.soak.attribution import Failure, Fault, Mark, Symptom, explain, explained_mark
from load.soak.plan import LOSES_FACTS, TAKEOVER_MS, WHOLE_MS
from schemas.trace import RequestMetrics

UNSCORED = "no_chain"
"""The reason of an index health that is of the request, not of a source: nobody counts an embedding's tokens."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request as its client saw it. ``sent_id``: the client's own ``x-request-id``; ``request_id``: the front
    door's, from its answer's head. ``symptom`` of a failure; ``aborted``: its client went away, as it wanted to.
    Unix seconds."""

    sent_id: str
    ingress: str
    api: str
    began_at: float
    ended_at: float
    request_id: str | None = None
    status: int | None = None
    symptom: Symptom | None = None
    reason: str = ""
    aborted: bool = False

    @property
    def owed(self) -> bool:
        """Whether it surely reached a front door and was accepted: an answer of status 200 began."""
        return self.status == 200 and self.request_id is not None


@dataclass(frozen=True, slots=True)
class Level:
    """Requests accepted and not ended at one moment: as the leader counts them, and as the front doors do together."""

    at: float
    leader: int
    ingresses: int


@dataclass(frozen=True, slots=True)
class RowBook:
    """Rows on the disk beside what was sent; each list has the ids of what is wrong."""

    rows: int
    lost: tuple[str, ...]
    doubled: tuple[str, ...]
    unknown: tuple[str, ...]
    ingress_lost: int


@dataclass(frozen=True, slots=True)
class FailureBook:
    """Failures by class, and those that nothing explains, each in words."""

    explained: dict[str, int]
    unexplained: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recovery:
    """How one fault went. ``recovered_ms``: from where its bound counts until the last request that failed or was
    marked for it; ``whole_ms``: from its mending until every part was well (``None``: never)."""

    fault: Fault
    recovered_ms: int
    whole_ms: int | None
    failures: int
    marks: int

    @property
    def takeover_ms(self) -> float | None:
        """From a leader's fault until another admission led; ``None``: nobody had to."""
        led_at = self.fault.led_at
        if led_at is None or led_at == float("inf"):
            return led_at
        return round((led_at - self.fault.began_at) * 1000)

    def late(self, short_s: float) -> list[str]:
        """What took longer than promised, the seconds in which the machine was short of processors not counted."""
        step, words = self.fault.step, []
        bound_ms = self.fault.promise.bound_ms
        if self.recovered_ms - short_s * 1000 > bound_ms:
            words.append(f"{step.what} {self.fault.name}: requests suffered for {self.recovered_ms} ms, not {bound_ms}")
        if self.whole_ms is None:
            words.append(f"{step.what} {self.fault.name}: the system was never whole again")
        elif self.whole_ms - short_s * 1000 > WHOLE_MS:
            words.append(f"{step.what} {self.fault.name}: whole again after {self.whole_ms} ms, not {WHOLE_MS}")
        if self.takeover_ms is not None and self.takeover_ms - short_s * 1000 > TAKEOVER_MS:
            words.append(f"{step.what} {self.fault.name}: nobody led for {self.takeover_ms} ms, not {TAKEOVER_MS}")
        return words


def row_book(exchanges: Sequence[Exchange], rows: Iterable[RequestMetrics]) -> RowBook:
    """Every answered request has one row, every other one at most one, and there are no others."""
    by_request: Counter[str] = Counter()
    by_sent: Counter[str] = Counter()
    ingress_lost = 0
    for row in rows:
        by_request[row.request_id] += 1
        by_sent[row.x_request_id or ""] += 1
        ingress_lost += row.outcome == "ingress_lost"
    known = {exchange.sent_id for exchange in exchanges}
    owed = [exchange for exchange in exchanges if exchange.owed]
    return RowBook(
        rows=sum(by_request.values()),
        lost=tuple(exchange.request_id or "" for exchange in owed if exchange.request_id not in by_request),
        doubled=tuple(sent for sent, count in by_sent.items() if sent in known and count > 1),
        unknown=tuple(sent for sent in by_sent if sent not in known),
        ingress_lost=ingress_lost,
    )


def failures_of(exchanges: Iterable[Exchange], rows: Iterable[RequestMetrics]) -> list[tuple[Exchange, Failure]]:
    """Every exchange that failed, with what its row says of it."""
    by_sent = {row.x_request_id: row for row in rows}
    failures = []
    for exchange in exchanges:
        if exchange.symptom is None:
            continue
        row = by_sent.get(exchange.sent_id)
        worker = row.worker.worker if row is not None and row.worker is not None else None
        failure = Failure(
            exchange.ingress,
            exchange.began_at,
            exchange.ended_at,
            exchange.symptom,
            exchange.reason,
            worker,
            row.outcome if row is not None else None,
            exchange.status,
        )
        failures.append((exchange, failure))
    return failures


def failure_book(failures: Sequence[tuple[Exchange, Failure]], faults: Sequence[Fault]) -> FailureBook:
    """Each failure owed to a fault, or in words."""
    explained: Counter[str] = Counter()
    unexplained = []
    for exchange, failure in failures:
        found = explain(failure, faults)
        if found is not None:
            explained[found[1]] += 1
        else:
            unexplained.append(
                f"{exchange.sent_id} {exchange.api} at {failure.ingress}, {failure.began_at:.2f} to "
                f"{failure.ended_at:.2f}: {failure.symptom} {failure.reason}, status {exchange.status}, "
                f"row {failure.outcome} at {failure.worker}"
            )
    return FailureBook(dict(sorted(explained.items())), tuple(unexplained))


def marks_of(rows: Iterable[RequestMetrics]) -> list[tuple[str, Mark]]:
    """Request ids and the marks of their decisions."""
    found = []
    for row in rows:
        received = (row.request_received_ms or 0) / 1000
        decided = received + (row.admission_wait_ms or 0.0) / 1000
        if row.decision_mode == "fallback":
            found.append((row.request_id, Mark(received, decided, "fallback")))
        elif row.index_health not in (None, "synced") and row.index_reason != UNSCORED:
            found.append((row.request_id, Mark(received, decided, str(row.index_health))))
    return found


def stray_marks(marks: Iterable[tuple[str, Mark]], faults: Sequence[Fault]) -> list[tuple[str, Mark]]:
    """Those outside every fault's time."""
    return [(request, mark) for request, mark in marks if explained_mark(mark, faults) is None]


def recoveries(
    faults: Sequence[Fault], failures: Iterable[tuple[Exchange, Failure]], marks: Iterable[tuple[str, Mark]]
) -> list[Recovery]:
    """Fault by fault, how long requests suffered. A mark counts by its request's receipt: how long the decision then
    took is bounded by the front door's patience, not by the fault."""
    last: dict[int, float] = {}
    failed: Counter[int] = Counter()
    marked: Counter[int] = Counter()
    place = {id(fault): at for at, fault in enumerate(faults)}
    for _, failure in failures:
        found = explain(failure, faults)
        if found is not None:
            at = place[id(found[0])]
            failed[at] += 1
            last[at] = max(last.get(at, 0.0), failure.began_at)
    for _, mark in marks:
        owed = explained_mark(mark, faults)
        if owed is not None:
            at = place[id(owed)]
            marked[at] += 1
            last[at] = max(last.get(at, 0.0), mark.received_at)
    return [
        Recovery(
            fault,
            recovered_ms=max(0, round((last.get(at, 0.0) - fault.counted_from) * 1000)),
            whole_ms=None if fault.whole_at == float("inf") else round((fault.whole_at - fault.mended_at) * 1000),
            failures=failed[at],
            marks=marked[at],
        )
        for at, fault in enumerate(faults)
    ]


REFRESH_S = 2.2
"""The kernel adds its totals of shortage up every two seconds."""


def short_between(shortage: Sequence[tuple[float, float]], began_at: float, ended_at: float) -> float:
    """Seconds in which the machine was short of something in that time and until the kernel has added it up.
    ``shortage``: Unix seconds and the total until then, not empty."""
    before = [total for at, total in shortage if at <= began_at] or [shortage[0][1]]
    after = [total for at, total in shortage if at >= ended_at + REFRESH_S] or [shortage[-1][1]]
    return max(0.0, after[0] - before[-1])


STARVED_S, STARVED_SHARE = 5.0, 0.9
"""A lease, two renewals and a front door's patience: who had no processor for nearly all of that cannot keep them."""


def is_starved(shortage: Sequence[tuple[float, float]], at: float) -> bool:
    """Whether the machine was short of something for nearly all of the last `STARVED_S`. ``shortage``: as above; where
    the machine does not say, it was not."""
    seconds = STARVED_S + REFRESH_S
    return bool(shortage) and short_between(shortage, at - STARVED_S, at) >= STARVED_SHARE * seconds


def longest_excess_s(levels: Sequence[Level], faults: Sequence[Fault] = ()) -> float:
    """The longest time for which the leader always counted more requests than the front doors did. While the load
    goes up and down, the two cross each other all the time; a grant that leaked stays. It is counted anew from the
    end of a fault with which facts are lost."""
    ends = [fault.mended_at for fault in faults if fault.step.kind in LOSES_FACTS]
    longest, since = 0.0, None
    for level in levels:
        if level.leader <= level.ingresses:
            since = None
            continue
        since = max([level.at if since is None else since, *(end for end in ends if end <= level.at)])
        longest = max(longest, level.at - since)
    return longest
