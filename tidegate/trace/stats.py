"""Tables of what happened: per session, tool, model and worker, how it was decided and held, and what the cache lost
while sessions were away."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile

from load.nearest_rank import nearest_rank
from schemas.base import Message
from schemas.session import MOVES_SESSION
from schemas.trace import ReplayBlock
from tidegate.trace.reading import Trace
from tidegate.trace.rows import Request
from tidegate.trace.tools import ToolUse, tool_uses

GAPS_S = (1.0, 10.0, 60.0, 300.0)
"""Bounds of the classes of `GapStats`."""


class Percentiles(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Of ``count`` values in ms, by the nearest rank: each is one of them."""

    count: int
    p50: float
    p90: float
    p99: float
    max: float


class Tokens(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Sums. ``cache_hit``: cached of input tokens (0..1), over the requests that tell both."""

    input: int
    output: int
    cached: int
    cache_hit: float | None = None


class SessionStats(Message, frozen=True, kw_only=True, omit_defaults=True):
    """``turns``: requests that moved the session (not titles, compactions, counts). ``away_ms``: between its requests.
    ``held_ms``: what admission held it back. ``duration_ms``: first receipt to last end."""

    session: str
    parent: str | None = None
    models: tuple[str, ...] = ()
    requests: int
    turns: int
    failed: int
    tokens: Tokens
    tools: int
    tool_ms: float
    held_ms: int
    away_ms: float
    duration_ms: float
    ttft_ms: Percentiles | None = None


class ToolStats(Message, frozen=True, kw_only=True, omit_defaults=True):
    """``time_ms`` is of the calls whose duration is known, told or ``inferred``. ``gaps``, ``reusable``, ``lost``: of
    the gaps (`GapStats`) in which it ran."""

    tool: str
    calls: int
    inferred: int
    failed: int
    sessions: int
    gaps: int
    reusable: int
    lost: int
    time_ms: Percentiles | None = None


class ServedStats(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Of one model, or one worker. ``wait_ms``: admission's, of all that tell it; ``held``: those it held;
    ``decision_ms``: the wait without what they were held."""

    name: str
    requests: int
    outcomes: dict[str, int]
    sessions: int
    tokens: Tokens
    held: int
    wait_ms: Percentiles | None = None
    decision_ms: Percentiles | None = None
    ttft_ms: Percentiles | None = None
    itl_ms: Percentiles | None = None
    total_ms: Percentiles | None = None


class HoldStats(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Requests that were held for this ``reason``, and for how long (ms). ``refused``: those that nobody let in."""

    reason: str
    requests: int
    sessions: int
    refused: int
    hold_ms: Percentiles | None = None


class DecisionStats(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Requests placed by this ``policy`` in this ``mode``.

    ``index_health``: of the chosen worker's source, by how many. Of those that tell both: cached tokens ``predicted``
    and ``reported`` by the engine, and how many were ``exact``. ``decision_ms``: as the front door waited for them,
    holds not counted; ``decide_us``: admission's own work, and ``moved``: away from the worker that served the turn
    before (both from decision rows).
    """

    policy: str
    mode: str
    requests: int
    index_health: dict[str, int]
    compared: int
    exact: int
    predicted: int
    reported: int
    moved: int
    decision_ms: Percentiles | None = None
    decide_us: Percentiles | None = None


class GapStats(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Times between a session's requests, up to ``up_to_s`` long (absent: longer than all), with what filled them.

    ``reusable``: tokens in whole blocks that the later prompt has in common with the one before; ``found``: those that
    the engine had in its cache; ``lost``: the rest, evicted meanwhile or placed elsewhere (``moved``: gaps after which
    another worker served).
    """

    up_to_s: float | None = None
    gaps: int
    with_tools: int
    moved: int
    reusable: int
    found: int
    lost: int


class TraceStats(Message, frozen=True, kw_only=True, omit_defaults=True):
    """All tables of one trace."""

    requests: int
    without_session: int
    skipped: dict[str, int]
    sessions: tuple[SessionStats, ...]
    tools: tuple[ToolStats, ...]
    models: tuple[ServedStats, ...]
    workers: tuple[ServedStats, ...]
    gaps: tuple[GapStats, ...]
    holds: tuple[HoldStats, ...]
    decisions: tuple[DecisionStats, ...]


def trace_stats(trace: Trace) -> TraceStats:
    """Sessions in the order of their beginning; all else by how much there was of it, gaps by their length."""
    uses = tool_uses(trace)
    gaps = _found_gaps(trace, uses)
    return TraceStats(
        requests=len(trace.requests),
        without_session=sum(request.session is None for request in trace.requests),
        skipped=dict(trace.skipped),
        sessions=_sessions(trace, uses),
        tools=_tools(uses, gaps),
        models=_served(trace.requests, lambda request: request.metrics.model or "?"),
        workers=_served(
            [request for request in trace.requests if request.metrics.worker is not None],
            lambda request: request.metrics.worker.worker if request.metrics.worker else "?",
        ),
        gaps=_gaps(gaps),
        holds=_holds(trace.requests),
        decisions=_decisions(trace),
    )


def percentiles(values: Iterable[float | None]) -> Percentiles | None:
    """``None`` where nothing is known."""
    known = sorted(value for value in values if value is not None and math.isfinite(value))
    if not known:
        return None
    return Percentiles(
        count=len(known),
        p50=nearest_rank(known, 50),
        p90=nearest_rank(known, 90),
        p99=nearest_rank(known, 99),
        max=known[-1],
    )


def _tokens(requests: Sequence[Request]) -> Tokens:
    told = [request.metrics for request in requests if request.metrics.cached_tokens is not None]
    asked = sum(metrics.input_tokens or 0 for metrics in told if metrics.input_tokens is not None)
    cached = sum(metrics.cached_tokens or 0 for metrics in told if metrics.input_tokens is not None)
    return Tokens(
        input=sum(_input(request) for request in requests),
        output=sum(request.metrics.output_tokens or 0 for request in requests),
        cached=sum(metrics.cached_tokens or 0 for metrics in told),
        cache_hit=round(cached / asked, 6) if asked else None,
    )


def _input(request: Request) -> int:
    """As the row tells it; else as long as what was hashed."""
    if request.metrics.input_tokens is not None:
        return request.metrics.input_tokens
    return request.replay.input_length if request.replay is not None else 0


def _failed(request: Request) -> bool:
    return request.metrics.outcome not in (None, "completed")


def _sessions(trace: Trace, uses: Sequence[ToolUse]) -> tuple[SessionStats, ...]:
    parents = trace.parents()
    tools: dict[str, list[ToolUse]] = {}
    for use in uses:
        tools.setdefault(use.session, []).append(use)
    return tuple(
        _session(session, parents.get(session), requests, tools.get(session, []))
        for session, requests in trace.sessions().items()
    )


def _session(session: str, parent: str | None, requests: list[Request], uses: list[ToolUse]) -> SessionStats:
    ends = [request.end_ms for request in requests]
    away = sum(max(0.0, later.start_ms - end) for end, later in zip(ends, requests[1:], strict=False))
    return SessionStats(
        session=session,
        parent=parent,
        models=tuple(dict.fromkeys(request.metrics.model for request in requests if request.metrics.model)),
        requests=len(requests),
        turns=sum((request.metrics.kind or "turn") in MOVES_SESSION for request in requests),
        failed=sum(map(_failed, requests)),
        tokens=_tokens(requests),
        tools=len(uses),
        tool_ms=_ms(sum(use.duration_ms for use in uses if use.known)),
        held_ms=sum(request.metrics.hold_ms or 0 for request in requests),
        away_ms=_ms(away),
        duration_ms=_ms(max(ends) - requests[0].start_ms),
        ttft_ms=percentiles(request.metrics.ttft_ms for request in requests),
    )


def _ms(value: float) -> float:
    return round(value, 3)


def _wait(request: Request) -> float | None:
    metrics = request.metrics
    return metrics.admission_wait_ms if metrics.admission_wait_ms is not None else metrics.hold_ms


def _tools(uses: Sequence[ToolUse], gaps: Sequence[_Gap]) -> tuple[ToolStats, ...]:
    by_name: dict[str, list[ToolUse]] = {}
    for use in uses:
        by_name.setdefault(use.name, []).append(use)
    within: dict[str, list[_Gap]] = {}
    for gap in gaps:
        for name in gap.tools:
            within.setdefault(name, []).append(gap)
    found = [
        ToolStats(
            tool=name,
            calls=len(own),
            inferred=sum(use.inferred for use in own),
            failed=sum(use.status in ("error", "cancelled") for use in own),
            sessions=len({use.session for use in own}),
            gaps=len(within.get(name, ())),
            reusable=sum(gap.reusable for gap in within.get(name, ())),
            lost=sum(gap.reusable - gap.found for gap in within.get(name, ())),
            time_ms=percentiles(use.duration_ms for use in own if use.known),
        )
        for name, own in by_name.items()
    ]
    return tuple(sorted(found, key=lambda each: (-each.calls, each.tool)))


def _served(requests: Sequence[Request], name_of: Callable[[Request], str]) -> tuple[ServedStats, ...]:
    groups: dict[str, list[Request]] = {}
    for request in requests:
        groups.setdefault(name_of(request), []).append(request)
    found = [
        ServedStats(
            name=name,
            requests=len(own),
            outcomes=dict(Counter(request.metrics.outcome or "?" for request in own)),
            sessions=len({request.session for request in own if request.session is not None}),
            tokens=_tokens(own),
            held=sum(bool(request.metrics.hold_ms) for request in own),
            wait_ms=percentiles(map(_wait, own)),
            decision_ms=percentiles(request.metrics.decision_ms for request in own),
            ttft_ms=percentiles(request.metrics.ttft_ms for request in own),
            itl_ms=percentiles(request.metrics.avg_itl_ms for request in own),
            total_ms=percentiles(request.metrics.total_time_ms for request in own),
        )
        for name, own in groups.items()
    ]
    return tuple(sorted(found, key=lambda each: (-each.requests, each.name)))


def _holds(requests: Sequence[Request]) -> tuple[HoldStats, ...]:
    by_reason: dict[str, list[Request]] = {}
    for request in requests:
        if request.metrics.hold_ms:
            by_reason.setdefault(request.metrics.hold_reason or "?", []).append(request)
    found = [
        HoldStats(
            reason=reason,
            requests=len(own),
            sessions=len({request.session for request in own if request.session is not None}),
            refused=sum(request.metrics.outcome == "refused" for request in own),
            hold_ms=percentiles(request.metrics.hold_ms for request in own),
        )
        for reason, own in by_reason.items()
    ]
    return tuple(sorted(found, key=lambda each: (-each.requests, each.reason)))


def _decisions(trace: Trace) -> tuple[DecisionStats, ...]:
    """Of requests that were placed; their decision rows by the grant."""
    rows = {row.decision.grant_id: row.decision for row in trace.decisions}
    groups: dict[tuple[str, str], list[Request]] = {}
    for request in trace.requests:
        if request.metrics.decision_mode is not None:
            groups.setdefault((request.metrics.policy or "?", request.metrics.decision_mode), []).append(request)
    found = []
    for (policy, mode), own in groups.items():
        metrics = [request.metrics for request in own]
        told = [
            (each.predicted_cached_tokens, each.cached_tokens)
            for each in metrics
            if each.predicted_cached_tokens is not None and each.cached_tokens is not None
        ]
        made = [rows[each.grant_id] for each in metrics if each.grant_id in rows]
        found.append(
            DecisionStats(
                policy=policy,
                mode=mode,
                requests=len(own),
                index_health=dict(Counter(each.index_health or "?" for each in metrics)),
                compared=len(told),
                exact=sum(predicted == reported for predicted, reported in told),
                predicted=sum(predicted for predicted, _ in told),
                reported=sum(reported for _, reported in told),
                moved=sum(row.previous_worker not in (None, row.worker.worker) for row in made),
                decision_ms=percentiles(each.decision_ms for each in metrics),
                decide_us=percentiles(row.decide_us or None for row in made),
            )
        )
    return tuple(sorted(found, key=lambda each: (-each.requests, each.policy, each.mode)))


@dataclass(frozen=True, slots=True)
class _Gap:
    """Between two turns of a session whose prompts and cached tokens are known. ``tools``: those that ran in it."""

    seconds: float
    tools: frozenset[str]
    moved: bool
    reusable: int
    found: int


def _found_gaps(trace: Trace, uses: Sequence[ToolUse]) -> list[_Gap]:
    by_session: dict[str, list[ToolUse]] = {}
    for use in uses:
        by_session.setdefault(use.session, []).append(use)
    gaps: list[_Gap] = []
    for session, requests in trace.sessions().items():
        own = by_session.get(session, [])
        starts = [use.start_ms for use in own]
        latest = list(accumulate((use.end_ms for use in own), max))
        turns = [request for request in requests if (request.metrics.kind or "turn") in MOVES_SESSION]
        for before, later in pairwise(turns):
            reusable, cached = reusable_tokens(before, later), later.metrics.cached_tokens
            seconds = (later.start_ms - before.end_ms) / 1000
            if reusable is None or cached is None or seconds < 0:
                continue
            tools: set[str] = set()
            place = bisect_left(starts, later.start_ms)
            # Back from the last that began before the later turn, as long as any before it ended within the gap.
            while place > 0 and latest[place - 1] > before.end_ms:
                place -= 1
                if own[place].end_ms > before.end_ms:
                    tools.add(own[place].name)
            moved = before.metrics.worker != later.metrics.worker
            gaps.append(_Gap(seconds, frozenset(tools), moved, reusable, min(cached, reusable)))
    return gaps


def _gaps(gaps: Sequence[_Gap]) -> tuple[GapStats, ...]:
    """A gap's class is its length."""
    classes: list[list[_Gap]] = [[] for _ in (*GAPS_S, None)]
    for gap in gaps:
        classes[sum(gap.seconds > bound for bound in GAPS_S)].append(gap)
    return tuple(
        GapStats(
            up_to_s=bound,
            gaps=len(own),
            with_tools=sum(bool(gap.tools) for gap in own),
            moved=sum(gap.moved for gap in own),
            reusable=sum(gap.reusable for gap in own),
            found=sum(gap.found for gap in own),
            lost=sum(gap.reusable - gap.found for gap in own),
        )
        for bound, own in zip((*GAPS_S, None), classes, strict=True)
        if own
    )


def reusable_tokens(before: Request, later: Request) -> int | None:
    """Tokens in whole blocks that two prompts have in common from their beginning; ``None`` where hashes are unknown.

    Of blocks of two sizes the larger one counts, where the smaller divides it (long prompts have the hashes of larger
    blocks). The last token of a prompt is always computed anew, so a prompt that was sent before whole is a token less.
    """
    first, second = before.replay, later.replay
    if first is None or second is None:
        return None
    size = max(first.trace_block_size, second.trace_block_size)
    if size % first.trace_block_size or size % second.trace_block_size:
        return None
    pairs = zip(_whole_blocks(first, size), _whole_blocks(second, size), strict=False)
    common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return min(common, max(0, second.input_length - 1) // size) * size


def _whole_blocks(block: ReplayBlock, size: int) -> Sequence[int]:
    """Hashes of the whole blocks of ``size``: chained, so that of a larger block is the last of those in it."""
    every = size // block.trace_block_size
    return block.input_sequence_hashes[every - 1 : block.input_length // size * every : every]
