"""A trace as a Chrome/Perfetto timeline (JSON). Sources: spec conventions §4.5, identity-and-traces §2.11.

Workers and admission come first, with their counters (`tidegate.trace.perfetto_counters`). The process *Sessions* has,
for each session in the order of their beginning (sub-agents behind their parent), its requests with their stages, and
its tools, on lanes: what overlaps goes to the lowest lane that is free. Arrows lead from the request that began a
sub-agent to its first, from its last to the one that waited for it, and from where a session was forked. Marks say what
was decided, tried again, forked, made shorter, and how it failed. Times are in µs (Unix), as the format wants them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from schemas.session import MOVES_SESSION
from tidegate.trace.dependencies import Node
from tidegate.trace.perfetto_counters import counters
from tidegate.trace.perfetto_events import Event, Span, instant, name_process, name_thread, slice_of, us
from tidegate.trace.reading import Trace
from tidegate.trace.rows import DecisionRow, Request
from tidegate.trace.tools import ToolUse, tool_uses

SESSIONS_PID = 1
FIRST_WORKER_PID = 10
FIRST_THREAD = 1_001
"""Numbers of threads are of no other process or thread: some readers tell them by the number alone."""
NO_SESSION = "request-only"
"""The lane of requests that name no session."""


@dataclass
class _Track:
    """Lanes of one session's requests, or of its tools: their threads, who is busy until when, who is free."""

    threads: list[int] = field(default_factory=list)
    busy: list[Span] = field(default_factory=list)
    """Heap of (end in µs, lane)."""
    free: list[int] = field(default_factory=list)
    """Heap of lanes."""


@dataclass
class _Lanes:
    """Threads of the process *Sessions*."""

    tracks: dict[tuple[str, str], _Track] = field(default_factory=dict)
    """By session and kind."""
    _numbers: Iterator[int] = field(default_factory=lambda: count(FIRST_THREAD))

    def thread(self, session: str, kind: str, span: Span) -> int:
        """The number of the lowest lane that is free, for something that lasts so long. What is asked for comes
        in order of start."""
        start_us, end_us = span
        track = self.tracks.setdefault((session, kind), _Track())
        while track.busy and track.busy[0][0] <= start_us:
            heappush(track.free, heappop(track.busy)[1])
        if not track.free:
            heappush(track.free, len(track.threads))
            track.threads.append(next(self._numbers))
        lane = heappop(track.free)
        heappush(track.busy, (end_us, lane))
        return track.threads[lane]

    def names(self, order: Mapping[str, tuple[int, int]]) -> Iterator[Event]:
        """Names and order of all threads. ``order``: each session's place, and how deep it is below its root."""
        last = len(order)
        places = sorted(self.tracks, key=lambda each: (order.get(each[0], (last, 0))[0], each[0], each[1]))
        place = count(1)
        for session, kind in places:
            below = "↳ " * order.get(session, (0, 0))[1]
            for number, thread in enumerate(self.tracks[session, kind].threads, 1):
                lane = f" [lane {number}]" if number > 1 else ""
                yield from name_thread(SESSIONS_PID, thread, f"{below}{session}{lane} {kind}", next(place))


def perfetto_events(trace: Trace, nodes: Sequence[Node] = ()) -> Iterator[Event]:
    """Every request, tool and session of the trace. ``nodes``: of its dependency graph, for the arrows."""
    lanes = _Lanes()
    threads: dict[str, int] = {}
    decisions: dict[str, list[DecisionRow]] = {}
    for decision in trace.decisions:
        decisions.setdefault(decision.decision.request_id, []).append(decision)
    yield from counters(trace, first_pid=FIRST_WORKER_PID, stages_of=stages)
    # Behind the workers, however many there are.
    yield from name_process(SESSIONS_PID, "Sessions", 1_000_000)
    turns: dict[str, int] = {}
    for request in trace.requests:
        session = request.session or NO_SESSION
        thread = threads[request.request_id] = lanes.thread(session, "requests", _span(request))
        if request.session is not None and _moves(request):
            turns[session] = turns.get(session, 0) + 1
        made = decisions.get(request.request_id, [])
        yield slice_of(
            SESSIONS_PID,
            thread,
            request_name(request, turns.get(session)),
            "tidegate.request",
            _span(request),
            _request_args(request, made),
        )
        yield from _stages(request, thread)
        yield from _marks(request, made, thread)
    for use in tool_uses(trace):
        yield _tool(use, lanes)
    yield from lanes.names(session_order(trace))
    yield from _arrows(trace, nodes, threads)


def session_order(trace: Trace) -> dict[str, tuple[int, int]]:
    """Each session's place, by its beginning, sub-agents behind their parent; and how deep below its root it is."""
    sessions = list(trace.sessions())
    known, parents = set(sessions), trace.parents()
    children: dict[str | None, list[str]] = {}
    for session in sessions:
        parent = parents.get(session)
        children.setdefault(parent if parent in known else None, []).append(session)
    order: dict[str, tuple[int, int]] = {}
    # Whoever is its own ancestor is below no root: such come behind.
    for first in (*children.get(None, []), *sessions):
        left = [(first, 0)]
        while left:
            session, depth = left.pop()
            if session not in order:
                order[session] = (len(order), depth)
                left += [(child, depth + 1) for child in reversed(children.get(session, []))]
    return order


def _moves(request: Request) -> bool:
    return (request.metrics.kind or "turn") in MOVES_SESSION


def request_name(request: Request, turn: int | None) -> str:
    """Short: which turn or what else, how much of its prompt was cached, and how it failed."""
    metrics = request.metrics
    name = (metrics.kind or "request") if turn is None or not _moves(request) else f"turn {turn}"
    if metrics.cached_tokens is not None and metrics.input_tokens:
        name += f" · {100 * metrics.cached_tokens / metrics.input_tokens:.0f} % cached"
    return name if metrics.outcome in (None, "completed") else f"{name} · {metrics.outcome}"


def _span(request: Request) -> Span:
    """At least 1 µs long, so that it can be seen."""
    start_us = us(request.start_ms)
    return start_us, max(start_us + 1, us(request.end_ms))


def _said(args: Event) -> Event:
    return {key: value for key, value in args.items() if value is not None}


def _request_args(request: Request, made: Sequence[DecisionRow]) -> Event:
    metrics, context, finish = request.metrics, request.context, request.metrics.finish_reason_metadata
    turn = context.turn if context is not None else None
    args = {
        "request_id": metrics.request_id,
        "x_request_id": metrics.x_request_id,
        "model": metrics.model,
        "session": request.session,
        "parent": request.parent,
        "forked_from": turn.forked_from_session_id if turn is not None else None,
        "kind": metrics.kind,
        "outcome": metrics.outcome,
        "reason": metrics.reason,
        "attempts": metrics.attempts,
        "worker": metrics.worker.worker if metrics.worker else None,
        "rank": metrics.worker.rank if metrics.worker else None,
        "input_tokens": metrics.input_tokens,
        "cached_tokens": metrics.cached_tokens,
        "predicted_cached_tokens": metrics.predicted_cached_tokens,
        "output_tokens": metrics.output_tokens,
        "ttft_ms": metrics.ttft_ms,
        "hold_ms": metrics.hold_ms,
        "hold_reason": metrics.hold_reason,
        "decision_ms": metrics.decision_ms,
        "policy": metrics.policy,
        "index_health": metrics.index_health,
        "finish_reason": finish.finish_reason if finish else None,
        "tool_calls": " ".join(call.name or "?" for call in finish.tool_calls)
        if finish and finish.tool_calls
        else None,
    }
    last = next((each for each in reversed(made) if each.decision.grant_id == metrics.grant_id), None)
    return _said(args) | ({"decision": _decision_args(last)} if last is not None else {})


def _decision_args(row: DecisionRow) -> Event:
    """The chosen rank's cost and its terms, and the best of the others."""
    decision = row.decision
    chosen = next(
        (
            each
            for each in decision.candidates
            if (each.worker, each.rank) == (decision.worker.worker, decision.worker.rank)
        ),
        None,
    )
    others = [each for each in decision.candidates if each is not chosen and each.cost is not None]
    second = min(others, key=lambda each: each.cost or 0.0, default=None)
    return _said(
        {
            "worker": decision.worker.worker,
            "rank": decision.worker.rank,
            "cost": chosen.cost if chosen is not None else None,
            "parts": dict(chosen.parts) if chosen is not None and chosen.parts else None,
            "open_grants": chosen.open_grants if chosen is not None else None,
            "runner_up": f"{second.worker}/{second.rank}" if second is not None else None,
            "runner_up_cost": second.cost if second is not None else None,
            "candidates_seen": decision.candidates_seen,
            "mode": decision.mode,
            "policy": decision.policy,
            "index_health": decision.index_health,
            "index_reason": decision.index_reason,
            "predicted_cached_tokens": decision.predicted_cached_tokens,
            "previous_worker": decision.previous_worker,
            "decide_us": decision.decide_us or None,
        }
    )


def stages(request: Request) -> list[tuple[str, float, float]]:
    """(name, start, end) in ms after receipt, one after the other: held, queued, prefill, decode.

    ``held``: admission made it wait on purpose. ``queued``: what else passes until an engine has it (tokens are
    counted, a decision is made, a first worker fails). ``prefill``: from there to the first token, the engine's own
    queue included; all from the grant on where nobody says when the engine had it.
    """
    metrics = request.metrics
    total = request.end_ms - request.start_ms
    held = min(float(metrics.hold_ms or 0), total)
    granted = min(max(metrics.admission_wait_ms or 0.0, held), total)
    first = total if metrics.ttft_ms is None else min(max(metrics.ttft_ms, granted), total)
    begun = granted
    if metrics.prefill_wait_time_ms is not None:
        begun = min(max(metrics.prefill_wait_time_ms, granted), first)
    found = [("held", 0.0, held), ("queued", held, begun)]
    if metrics.ttft_ms is not None:
        found += [("prefill", begun, first), ("decode", first, total)]
    return _merged(stage for stage in found if stage[2] > stage[1])


def _merged(found: Iterable[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Neighbours of one name are one."""
    merged: list[tuple[str, float, float]] = []
    for name, start, end in found:
        if merged and merged[-1][0] == name:
            merged[-1] = (name, merged[-1][1], end)
        else:
            merged.append((name, start, end))
    return merged


def _stages(request: Request, thread: int) -> Iterator[Event]:
    for name, start, end in stages(request):
        start_us, end_us = us(request.start_ms + start), us(request.start_ms + end)
        if end_us > start_us:
            yield slice_of(SESSIONS_PID, thread, name, "tidegate.stage", (start_us, end_us))


def _marks(request: Request, made: Sequence[DecisionRow], thread: int) -> Iterator[Event]:
    """What happened at a moment, within the request's slice: another process's clock may say a time outside."""
    metrics, context = request.metrics, request.context
    start_us, end_us = _span(request)

    def mark(name: str, at_us: int, category: str = "tidegate.mark", args: Event | None = None) -> Event:
        return instant(SESSIONS_PID, thread, name, category, min(max(at_us, start_us), end_us - 1), args)

    if context is not None:
        if context.turn is not None and context.turn.forked_from_session_id is not None:
            yield mark(f"fork of {context.turn.forked_from_session_id}", start_us)
        elif context.implicit is not None and context.implicit.relation == "forks":
            yield mark("fork", start_us, args={"confidence": context.implicit.confidence})
        if context.compaction is not None:
            said = {name: getattr(context.compaction, name) for name in context.compaction.__struct_fields__}
            yield mark("compaction", start_us, args=_said(said))
    for row in made:
        decision = row.decision
        moved = decision.previous_worker not in (None, decision.worker.worker)
        name = f"decided {decision.worker.worker}" + (f", was at {decision.previous_worker}" if moved else "")
        yield mark(name, us(row.time_ms), "tidegate.decision", _decision_args(row))
    if metrics.hedged is not None:
        sent_ms = request.start_ms + (metrics.prefill_wait_time_ms or 0.0)
        yield mark(f"sent twice, the second {metrics.hedged}", us(sent_ms))
    elif (metrics.attempts or 1) > 1:
        again = [row.time_ms for row in made if row.decision.attempt > 0]
        at_ms = again[0] if again else request.start_ms + (metrics.prefill_wait_time_ms or 0.0)
        yield mark(f"retry (attempt {metrics.attempts})", us(at_ms))
    if metrics.outcome not in (None, "completed"):
        yield mark(f"{metrics.outcome}", end_us - 1, args=_said({"reason": metrics.reason, "status": metrics.status}))


def _tool(use: ToolUse, lanes: _Lanes) -> Event:
    span = us(use.start_ms), max(us(use.start_ms) + 1, us(use.end_ms))
    thread = lanes.thread(use.session, "tools", span)
    name = f"tool {use.name}" if use.status != "error" else f"tool {use.name} (error)"
    args: Event = {"session": use.session, "status": use.status, "inferred": use.inferred}
    if use.call_id is not None:
        args["tool_call_id"] = use.call_id
    if not use.known:
        args["duration_unknown"] = True
    return slice_of(SESSIONS_PID, thread, name, "tidegate.tool", span, args)


def _arrows(trace: Trace, nodes: Sequence[Node], threads: Mapping[str, int]) -> Iterator[Event]:
    """From within the slice of the one that is waited for, to the beginning of the one that waits."""
    requests = {node.request.request_id: node.request for node in nodes}
    numbers = count(1)
    for node in nodes:
        for dependency in node.dependencies:
            if dependency.relation != "sequence":
                other = requests[dependency.request_id]
                yield from _arrow(next(numbers), dependency.relation, other, node.request, threads)
    sessions = trace.sessions()
    for own in sessions.values():
        turn = own[0].context.turn if own[0].context is not None else None
        others = sessions.get(turn.forked_from_session_id or "", []) if turn is not None else []
        before = [other for other in others if other.start_ms <= own[0].start_ms]
        if before and before[-1] is not own[0]:
            yield from _arrow(next(numbers), "fork", before[-1], own[0], threads)


def _arrow(number: int, name: str, origin: Request, target: Request, threads: Mapping[str, int]) -> Iterator[Event]:
    (origin_start, origin_end), (start_us, _) = _span(origin), _span(target)
    leaves_us = max(origin_start, min(origin_end - 1, start_us))
    common = {"name": name, "cat": "tidegate.agent", "id": number, "pid": SESSIONS_PID}
    yield {**common, "ph": "s", "tid": threads[origin.request_id], "ts": leaves_us}
    yield {**common, "ph": "f", "bp": "e", "tid": threads[target.request_id], "ts": start_us}
