"""What the demo measured, and whether it is what we promise. Pure."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from load.nearest_rank import nearest_rank
from load.workload.results import RequestResult
from schemas.trace import TraceRow

PREDICTION_TOLERANCE = 0.02
LEAST_HIT_RATIO = 0.8
LEAST_STICKY_RATIO = 0.9


class Observed(msgspec.Struct, frozen=True, kw_only=True):
    """Everything seen of one run.

    ``rows``: request_end rows of the stream, by request; ``stored``: their request ids in order, repeats included.
    ``recorded``: request ids in the recorder's files, in order,
    ``None`` where they are out of reach. ``decisions``: request ids seen on ``tg.v1.decision.<worker>``, ``served``:
    what each engine says it served, by worker; ``None`` where it cannot be asked.
    """

    results: tuple[RequestResult, ...]
    rows: Mapping[str, TraceRow]
    stored: tuple[str, ...]
    recorded: tuple[str, ...] | None
    decisions: Mapping[str, Sequence[str]]
    served: Mapping[str, Sequence[str]] | None


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Counts, tokens, ratios 0..1, times in ms. ``traces``: rows in the recorder's files (in the stream where those
    are out of reach), ``traces_in_stream``: in the stream. ``problems``: what is not as promised, a sentence each;
    ``broken``: the figures that they are about."""

    requests: int
    failed: int
    traces: int
    traces_in_stream: int
    sessions: int
    input_tokens: int
    cached_tokens_predicted: int
    cached_tokens_reported: int
    hit_ratio: float
    sticky_ratio: float
    decision_ms_p50: float | None
    decision_ms_p99: float | None
    ttft_ms_p50: float | None
    ttft_ms_p99: float | None
    decisions: int
    decisions_match_served: bool | None
    problems: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        return not self.problems


def measure(observed: Observed) -> Figures:
    """The figures of one run, and which promises they break."""
    good = [result for result in observed.results if not result.failed]
    rows = [row for row in (observed.rows.get(result.request_id or "") for result in good) if row is not None]
    requests = [row.request for row in rows if row.request is not None]
    input_tokens = sum(result.input_tokens for result in good)
    reported = sum(result.cached_tokens for result in good)
    decision_ms = [request.decision_ms for request in requests if request.decision_ms is not None]
    ttft_ms = [result.ttft_ms for result in good if result.ttft_ms is not None]
    recorded = observed.recorded
    figures = Figures(
        requests=len(observed.results),
        failed=len(observed.results) - len(good),
        traces=len(observed.stored) if recorded is None else len(recorded),
        traces_in_stream=len(observed.stored),
        sessions=len({row.agent_context.session_id for row in rows if row.agent_context is not None}),
        input_tokens=input_tokens,
        cached_tokens_predicted=sum(request.predicted_cached_tokens or 0 for request in requests),
        cached_tokens_reported=reported,
        hit_ratio=round(reported / input_tokens, 4) if input_tokens else 0.0,
        sticky_ratio=round(sticky_ratio(good, observed.rows), 4),
        decision_ms_p50=percentile(decision_ms, 50),
        decision_ms_p99=percentile(decision_ms, 99),
        ttft_ms_p50=percentile(ttft_ms, 50),
        ttft_ms_p99=percentile(ttft_ms, 99),
        decisions=sum(len(ids) for ids in observed.decisions.values()),
        decisions_match_served=None if observed.served is None else same_requests(observed.decisions, observed.served),
    )
    found = list(problems(figures, observed))
    broken = tuple(dict.fromkeys(name for name, _ in found))
    return msgspec.structs.replace(figures, problems=tuple(sentence for _, sentence in found), broken=broken)


def problems(figures: Figures, observed: Observed) -> Iterable[tuple[str, str]]:
    """For each promise that does not hold, the figure's name and one sentence."""
    if figures.requests == 0:
        yield "requests", "no request was made"
    if figures.failed:
        first = next(result for result in observed.results if result.failed)
        where = f"{first.session_id} turn {first.turn + 1}"
        yield "failed", f"{figures.failed} requests failed, the first: {where}: {first.error}"
    if figures.traces != figures.requests:
        yield "traces", f"{figures.traces} rows were recorded for {figures.requests} requests"
    if figures.traces_in_stream != figures.requests:
        yield "traces_in_stream", f"the stream holds {figures.traces_in_stream} rows for {figures.requests} requests"
    if observed.recorded is not None and sorted(observed.recorded) != sorted(observed.stored):
        yield "traces", "the recorder's files and the stream do not hold the same requests"
    difference = abs(figures.cached_tokens_predicted - figures.cached_tokens_reported)
    if difference > PREDICTION_TOLERANCE * figures.cached_tokens_reported:
        yield (
            "cached_tokens_reported",
            f"{figures.cached_tokens_predicted} cached tokens were predicted, "
            f"{figures.cached_tokens_reported} reported: more than {PREDICTION_TOLERANCE:.0%} apart",
        )
    if figures.hit_ratio < LEAST_HIT_RATIO:
        yield "hit_ratio", f"hit_ratio {figures.hit_ratio:g} is below {LEAST_HIT_RATIO:g}"
    if figures.requests and not any(result.turn for result in observed.results):
        yield "sticky_ratio", "no second turn was made: sticky_ratio says nothing"
    elif figures.sticky_ratio < LEAST_STICKY_RATIO:
        yield "sticky_ratio", f"sticky_ratio {figures.sticky_ratio:g} is below {LEAST_STICKY_RATIO:g}"
    decided = {request for requests in observed.decisions.values() for request in requests}
    undecided = sum(not result.failed and result.request_id not in decided for result in observed.results)
    if undecided:
        yield "decisions", f"{undecided} requests were served without a decision on the bus"
    if figures.decisions_match_served is False:
        yield "decisions_match_served", "the decisions seen on the bus are not the requests that the engines served"


def sticky_ratio(results: Iterable[RequestResult], rows: Mapping[str, TraceRow]) -> float:
    """Of the second and later turns, the share that ran on their session's previous worker; 0.0 when there is none.

    A turn whose worker, or whose previous turn's, is not known did not stay.
    """
    workers: dict[str, list[str | None]] = defaultdict(list)
    for result in sorted(results, key=lambda result: result.turn):
        row = rows.get(result.request_id or "")
        traced = row.request.worker if row is not None and row.request is not None else None
        workers[result.session_id].append(traced.worker if traced is not None else None)
    pairs = [pair for turns in workers.values() for pair in itertools.pairwise(turns)]
    return sum(before == after is not None for before, after in pairs) / len(pairs) if pairs else 0.0


def same_requests(decisions: Mapping[str, Sequence[str]], served: Mapping[str, Sequence[str]]) -> bool:
    """Each worker's decisions are exactly what its engine served, each once."""
    workers = {*decisions, *served}
    return all(sorted(decisions.get(worker, ())) == sorted(served.get(worker, ())) for worker in workers)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Nearest rank, rounded to 3 digits; ``None`` of nothing."""
    if not values:
        return None
    return round(nearest_rank(sorted(values), percent), 3)


def as_json(figures: Figures) -> dict[str, Any]:
    """What ``--json`` prints."""
    built: dict[str, Any] = msgspec.to_builtins(figures)
    return {**built, "ok": figures.good}
