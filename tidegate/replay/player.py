"""When each request of a trace goes again: a state machine over plays, their triggers and delays. Pure.

A node goes when everything it waits for has fired, each delay has passed, and its own time has come. Delays and start
times are divided by ``speed``; how long answers take is the endpoint's affair. A node that fails fails its play: who
waits for its answer is skipped, and who waits for those; what does not goes on. Source: spec identity-and-traces §3.1
(agentic_mooncake v2), §6 (20: a lane is held until the whole tree has drained).

Without ``lanes`` plays begin when they were recorded to begin (an open loop). With lanes, so many plays run at a time:
the next one, in the order of recorded beginnings, begins when another is quiet, whatever its recorded time; times
inside it count from its own beginning.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from tidegate.trace.dependencies import Trigger
from tidegate.trace.play_nodes import PlayNode


@dataclass(frozen=True, slots=True)
class Begin:
    """The run begins now."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The answer to a node is complete (``ok``), or it failed."""

    node: int
    ok: bool


Event = Begin | Tick | Ended


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send this node now; ``due_ms``: when it should have gone."""

    node: int
    due_ms: float


@dataclass(frozen=True, slots=True)
class PlayQuiet:
    """Nothing of the play is under way, and nothing more of it will be sent. ``skipped``: nodes that were not sent."""

    play: str
    outcome: Literal["completed", "failed"]
    skipped: int
    began_ms: float
    ended_ms: float


Effect = Dispatch | PlayQuiet


class _State(Enum):
    WAITING = 1
    RUNNING = 2
    OVER = 3


@dataclass(slots=True)
class _Node:
    play: int
    not_before_ms: float
    waits: int
    followers: list[tuple[int, Trigger, float]] = field(default_factory=list)
    due_ms: float = 0.0
    state: _State = _State.WAITING


@dataclass(slots=True)
class _Play:
    name: str
    nodes: list[int] = field(default_factory=list)
    first_ms: float = 0.0
    open: int = 0
    skipped: int = 0
    failed: bool = False
    began_ms: float | None = None


class Player:
    """``handle(event, now_ms) -> effects``; times in ms after the run's beginning. ``next_ms``: when a `Tick` is due.

    Raises `ValueError` for nodes that wait for a node of another play, or for one that there is not.
    """

    def __init__(self, nodes: Sequence[PlayNode], *, speed: float = 1.0, lanes: int | None = None) -> None:
        self._speed = speed
        self._lanes = lanes
        self._nodes: list[_Node] = []
        self._plays: list[_Play] = []
        self._due: list[tuple[float, int]] = []
        self._load(nodes)
        self._queue = sorted(range(len(self._plays)), key=lambda play: self._plays[play].first_ms)
        self._begun = 0
        self._quiet = 0

    @property
    def done(self) -> bool:
        """All plays are quiet."""
        return self._quiet == len(self._plays)

    @property
    def next_ms(self) -> float | None:
        """When the next node is due; ``None`` while all wait for others."""
        due = self._due
        while due and self._nodes[due[0][1]].state is not _State.WAITING:
            heapq.heappop(due)
        return due[0][0] if due else None

    def handle(self, event: Event, now_ms: float) -> list[Effect]:
        """What follows from ``event``, in order."""
        effects: list[Effect] = []
        if isinstance(event, Ended):
            self._end(event, now_ms, effects)
        while True:
            self._begin_plays(now_ms)
            due_ms = self.next_ms
            if due_ms is None or due_ms > now_ms:
                return effects
            self._dispatch(heapq.heappop(self._due)[1], now_ms, effects)

    def _load(self, nodes: Sequence[PlayNode]) -> None:
        plays: dict[str, int] = {}
        numbers = {node.request_id: number for number, node in enumerate(nodes)}
        for number, node in enumerate(nodes):
            play = plays.setdefault(node.play, len(plays))
            if play == len(self._plays):
                self._plays.append(_Play(node.play))
            own = self._plays[play]
            own.nodes.append(number)
            own.open += 1
            self._nodes.append(_Node(play, node.not_before_ms, len(node.dependencies)))
        for number, node in enumerate(nodes):
            for dependency in node.dependencies:
                other = numbers.get(dependency.request_id)
                if other is None or self._nodes[other].play != self._nodes[number].play:
                    raise ValueError(f"{node.request_id} waits for {dependency.request_id}, which its play has not")
                self._nodes[other].followers.append((number, dependency.trigger, dependency.delay_ms / self._speed))
        for own in self._plays:
            own.first_ms = min(
                (self._nodes[number].not_before_ms for number in own.nodes if not self._nodes[number].waits),
                default=0.0,
            )

    def _begin_plays(self, now_ms: float) -> None:
        """All at once without lanes: each node's own time holds it back."""
        most = len(self._queue) if self._lanes is None else self._lanes + self._quiet
        while self._begun < min(most, len(self._queue)):
            own = self._plays[self._queue[self._begun]]
            self._begun += 1
            zero_ms, first_ms = (0.0, 0.0) if self._lanes is None else (now_ms, own.first_ms)
            for number in own.nodes:
                node = self._nodes[number]
                node.due_ms = zero_ms + max(0.0, node.not_before_ms - first_ms) / self._speed
                if not node.waits:
                    heapq.heappush(self._due, (node.due_ms, number))

    def _dispatch(self, number: int, now_ms: float, effects: list[Effect]) -> None:
        node = self._nodes[number]
        node.state = _State.RUNNING
        own = self._plays[node.play]
        if own.began_ms is None:
            own.began_ms = now_ms
        effects.append(Dispatch(number, node.due_ms))
        self._fire(node, "dispatch", now_ms)

    def _fire(self, node: _Node, trigger: Trigger, now_ms: float) -> None:
        for number, wanted, delay_ms in node.followers:
            if wanted != trigger:
                continue
            follower = self._nodes[number]
            follower.waits -= 1
            follower.due_ms = max(follower.due_ms, now_ms + delay_ms)
            if not follower.waits and follower.state is _State.WAITING:
                heapq.heappush(self._due, (follower.due_ms, number))

    def _end(self, event: Ended, now_ms: float, effects: list[Effect]) -> None:
        node = self._nodes[event.node]
        if node.state is not _State.RUNNING:
            return
        node.state = _State.OVER
        own = self._plays[node.play]
        own.open -= 1
        if event.ok:
            self._fire(node, "completion", now_ms)
        else:
            own.failed = True
            self._skip_followers(node, own)
        if not own.open:
            self._quiet += 1
            began_ms = now_ms if own.began_ms is None else own.began_ms
            outcome: Literal["completed", "failed"] = "failed" if own.failed else "completed"
            effects.append(PlayQuiet(own.name, outcome, own.skipped, began_ms, now_ms))

    def _skip_followers(self, failed: _Node, own: _Play) -> None:
        """Of a failed node those that wait for its answer; of a skipped one all."""
        lost = [number for number, trigger, _ in failed.followers if trigger == "completion"]
        while lost:
            node = self._nodes[lost.pop()]
            if node.state is not _State.WAITING:
                continue
            node.state = _State.OVER
            own.skipped += 1
            own.open -= 1
            lost += [number for number, _, _ in node.followers]
