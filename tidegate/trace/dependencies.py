"""What each request of a trace waited for: a graph of dispatch and completion triggers with delays.

Source: spec identity-and-traces §3.2 (sessions in order, spawn and join by time or by the tool that says so, checks)
and §3.1 (agentic_mooncake v2: triggers and relations). Two rules are ours. Where a request began before the one that it
follows had ended, it waits for the other's dispatch, not its completion, so that what overlapped overlaps again. And of
a session's requests that overlap (a turn and its title), the next waits for all, not for the last that began.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import pairwise
from typing import Literal

from tidegate.trace.errors import Place, Problems, Rule
from tidegate.trace.reading import Trace
from tidegate.trace.rows import Request, ToolSpan

Trigger = Literal["dispatch", "completion"]
Relation = Literal["sequence", "spawn", "join", "replay_barrier"]
"""``replay_barrier``: an order that no cause is known of; others' files have it."""


@dataclass(frozen=True, slots=True)
class Dependency:
    """``request_id`` is waited for; then ``delay_ms`` pass."""

    request_id: str
    trigger: Trigger
    relation: Relation
    delay_ms: float


@dataclass(frozen=True, slots=True)
class Node:
    """A request, what it waits for, and which run of an agent (a play) it belongs to.

    ``session`` is never absent: a request that names none is a session of its own. ``play`` is the session of the
    play's first request.
    """

    request: Request
    session: str
    play: str
    dependencies: tuple[Dependency, ...]


def dependency_graph(trace: Trace) -> list[Node]:
    """Nodes in the order of their beginning. Raises `TraceFileError`: conflicting parents, links that lead nowhere,
    cycles."""
    builder = _Builder(trace)
    builder.follow()
    return builder.nodes()


LEFT_OUT: dict[Rule, str] = {
    "conflicting_parents": "its session names two parents",
    "unknown_request": "a tool of its session names a request that is not there",
    "wrong_session": "a tool of its session names a request of another",
    "execution_mode": "a tool of its session has an unknown execution mode",
    "child_named_twice": "a tool of its session names a child that another has",
    "cycle": "requests of its session wait for themselves",
}
"""Why requests are left out, by the rule that their session breaks."""


def without_unplayable(trace: Trace) -> tuple[Trace, Counter[str]]:
    """Without the sessions that `dependency_graph` would refuse, and how many requests those had, by the words of
    `LEFT_OUT`. Their sub-agents stay, as runs of their own."""
    left_out: Counter[str] = Counter()
    while True:
        builder = _Builder(trace)
        builder.follow()
        wrong = builder.wrong_sessions()
        if not wrong:
            return trace, left_out
        left_out.update(LEFT_OUT[wrong[name]] for request in trace.requests if (name := own_session(request)) in wrong)
        trace = replace(
            trace,
            requests=tuple(request for request in trace.requests if own_session(request) not in wrong),
            tools=tuple(tool for tool in trace.tools if wrong.keys().isdisjoint(_sessions_of(tool))),
        )


def _sessions_of(tool: ToolSpan) -> tuple[str | None, ...]:
    """The sessions that a tool's row needs."""
    link = tool.fields.claude
    return (tool.session,) if link is None else (tool.session, link.child_session_id)


class _Builder:
    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._problems = Problems()
        self._wrong: dict[str | None, Rule] = {}
        self._requests = {request.request_id: request for request in trace.requests}
        self._sessions = trace.sessions()
        self._waits: dict[str, dict[str, Relation]] = {request.request_id: {} for request in trace.requests}

    def follow(self) -> None:
        """Everything that says who waits for whom."""
        self._follow_sessions()
        self._follow_parents(self._follow_links())

    def wrong_sessions(self) -> dict[str | None, Rule]:
        """Sessions that break a rule, and the first that each breaks."""
        if not self._wrong:
            self._note_cycle()
        return self._wrong

    def _note(self, row: Request | ToolSpan, rule: Rule, text: str) -> None:
        self._problems.add(row.place, rule, text)
        self._wrong.setdefault(own_session(row) if isinstance(row, Request) else row.session, rule)

    def _follow_sessions(self) -> None:
        """Each request waits for those before it in its session that had ended, and that no other waited for already;
        where none had, for the dispatch of the one before it."""
        for requests in self._sessions.values():
            running: list[tuple[float, int]] = []  # a heap of (end, number)
            for number, (before, request) in enumerate(pairwise(requests)):
                heappush(running, (before.end_ms, number))
                ended: list[int] = []
                while running and running[0][0] <= request.start_ms:
                    ended.append(heappop(running)[1])
                for each in sorted(ended) or [number]:
                    self._wait(request, requests[each], "sequence")

    def _follow_links(self) -> set[str]:
        """Sub-agents whose tool says which request began them. Returns their sessions."""
        linked: dict[str, ToolSpan] = {}
        for tool in self._trace.tools:
            link = tool.fields.claude
            if link is None:
                continue
            if link.execution_mode not in ("blocking", "background"):
                self._note(tool, "execution_mode", f"execution_mode is {link.execution_mode[:64]!r}")
                continue
            source = self._named(tool, link.source_request_id)
            consumer = self._named(tool, link.consumer_request_id) if link.consumer_request_id else None
            child = link.child_session_id
            if child is None or source is None:
                continue
            if child in linked:
                text = f"session {child} was begun by the tool in {linked[child].place} already"
                self._note(tool, "child_named_twice", text)
                continue
            linked[child] = tool
            requests = self._sessions.get(child)
            if requests is None:
                self._note(tool, "unknown_request", f"no request of the child session {child}")
                continue
            self._wait(requests[0], source, "spawn")
            if consumer is not None:
                self._wait(consumer, max(requests, key=_end), "join")
        return set(linked)

    def _named(self, tool: ToolSpan, request_id: str) -> Request | None:
        request = self._requests.get(request_id)
        if request is None:
            self._note(tool, "unknown_request", f"there is no request {request_id}")
        elif request.session != tool.session:
            text = f"request {request_id} is of session {request.session}, the tool of {tool.session}"
            self._note(tool, "wrong_session", text)
            return None
        return request

    def _follow_parents(self, linked: set[str]) -> None:
        """The other sub-agents, by time: the parent's latest request begun by then began them, and the first that
        begins after their end waited for it. Of requests that begin at once, the trace's order says which was first,
        so that time alone makes no cycle."""
        place = {request.request_id: number for number, request in enumerate(self._trace.requests)}
        for child, parent in self._parents().items():
            requests, others = self._sessions.get(child), self._sessions.get(parent)
            if child in linked or requests is None or others is None:
                continue
            places = [place[other.request_id] for other in others]
            if (before := bisect_left(places, place[requests[0].request_id])) > 0:
                self._wait(requests[0], others[before - 1], "spawn")
            last = max(requests, key=_end)
            after = max(bisect_left(others, last.end_ms, key=_start), bisect_right(places, place[last.request_id]))
            if after < len(others):
                self._wait(others[after], last, "join")

    def _parents(self) -> dict[str, str]:
        found: dict[str, tuple[str, Place]] = {}
        rows: Iterable[Request | ToolSpan] = (*self._trace.requests, *self._trace.tools)
        for row in rows:
            if row.session is None or row.parent is None or row.parent == row.session:
                continue
            parent, place = found.setdefault(row.session, (row.parent, row.place))
            if parent != row.parent:
                text = f"session {row.session} has the parent {row.parent} here and {parent} in {place}"
                self._note(row, "conflicting_parents", text)
        return {session: parent for session, (parent, _) in found.items()}

    def _wait(self, request: Request, other: Request, relation: Relation) -> None:
        # What is waited for as the session's next is so whatever else is said of it.
        self._waits[request.request_id].setdefault(other.request_id, relation)

    def nodes(self) -> list[Node]:
        self._problems.raise_any()
        self._note_cycle()
        self._problems.raise_any()
        plays = self._plays()
        return [
            Node(request, own_session(request), plays[request.request_id], self._dependencies(request))
            for request in self._trace.requests
        ]

    def _dependencies(self, request: Request) -> tuple[Dependency, ...]:
        """All with the same delay: what passed after the last of them (spec §3.2, 6)."""
        fired: list[tuple[float, Request, Trigger, Relation]] = []
        for name, relation in self._waits[request.request_id].items():
            other = self._requests[name]
            trigger: Trigger = "completion" if other.end_ms <= request.start_ms else "dispatch"
            fired.append((other.end_ms if trigger == "completion" else other.start_ms, other, trigger, relation))
        if not fired:
            return ()
        delay_ms = round(max(0.0, request.start_ms - max(at for at, *_ in fired)), 3)
        return tuple(Dependency(other.request_id, trigger, relation, delay_ms) for _, other, trigger, relation in fired)

    def _note_cycle(self) -> None:
        """One request of a cycle, if there is any."""
        left = in_cycles(self._waits)
        if left:
            request = self._requests[left[0]]
            text = f"request {request.request_id} waits for itself, over {len(left)} requests"
            self._note(request, "cycle", text)

    def _plays(self) -> dict[str, str]:
        """The session of each play's first request, by request: what waits for another is of one play with it."""
        play: dict[str, str] = {}
        head = {name: name for name in self._waits}

        def find(name: str) -> str:
            while head[name] != name:
                head[name] = name = head[head[name]]
            return name

        for name, waits in self._waits.items():
            for other in waits:
                head[find(name)] = find(other)
        for request in self._trace.requests:  # the first of each play comes first
            play.setdefault(find(request.request_id), own_session(request))
        return {name: play[find(name)] for name in self._waits}


def in_cycles(waits: Mapping[str, Collection[str]]) -> list[str]:
    """Of requests by whom they wait for: those that wait for themselves, and all that wait for them."""
    left = {name: len(others) for name, others in waits.items()}
    followers: dict[str, list[str]] = {}
    for name, others in waits.items():
        for other in others:
            followers.setdefault(other, []).append(name)
    free = [name for name, count in left.items() if not count]
    while free:
        name = free.pop()
        del left[name]
        for follower in followers.get(name, ()):
            left[follower] -= 1
            if not left[follower]:
                free.append(follower)
    return list(left)


def own_session(request: Request) -> str:
    """The session's name; of a request that names none, a name of its own."""
    return request.session if request.session is not None else f"request:{request.request_id}"


def _start(request: Request) -> float:
    return request.start_ms


def _end(request: Request) -> float:
    return request.end_ms


def edges(nodes: Sequence[Node], relation: Relation) -> list[tuple[Request, Request]]:
    """(who is waited for, who waits) of one relation."""
    requests = {node.request.request_id: node.request for node in nodes}
    return [
        (requests[dependency.request_id], node.request)
        for node in nodes
        for dependency in node.dependencies
        if dependency.relation == relation
    ]
