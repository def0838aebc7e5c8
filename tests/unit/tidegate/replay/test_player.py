"""When nodes go: against a naive model of the same rules, and the rules one by one."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tidegate.replay.making import node
from tidegate.replay.player import Begin, Dispatch, Effect, Ended, Player, PlayQuiet, Tick
from tidegate.trace.dependencies import Trigger
from tidegate.trace.play_nodes import PlayNode


@dataclass(frozen=True)
class Case:
    """Nodes, how long each takes, which fail, and the settings of the run. All times are multiples of 1/4 ms, so that
    sums are exact."""

    nodes: list[PlayNode]
    service_ms: list[float]
    fails: set[int]
    speed: float
    lanes: int | None


_TRIGGERS: st.SearchStrategy[Trigger] = st.sampled_from(("dispatch", "completion"))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Up to three plays; a node waits for earlier ones of its play, by either trigger."""
    nodes: list[PlayNode] = []
    for play in range(draw(st.integers(1, 3))):
        names: list[str] = []
        for number in range(draw(st.integers(1, 6))):
            others = draw(st.lists(st.sampled_from(names), max_size=3, unique=True)) if names else []
            waits = [(other, draw(_TRIGGERS), float(draw(st.integers(0, 8)))) for other in others]
            names.append(f"{play}.{number}")
            not_before = float(draw(st.integers(0, 20)))
            nodes.append(node(names[-1], play=str(play), not_before_ms=not_before, waits=waits))
    return Case(
        nodes,
        [float(draw(st.integers(0, 10))) for _ in nodes],
        draw(st.sets(st.integers(0, len(nodes) - 1), max_size=2)),
        draw(st.sampled_from((1.0, 2.0))),
        draw(st.sampled_from((None, 1, 2))),
    )


@dataclass
class Outcome:
    """``sent``: when each node went; ``quiet``: each play's outcome, skipped nodes, and times."""

    sent: dict[int, float] = field(default_factory=dict)
    quiet: dict[str, tuple[str, int, float, float]] = field(default_factory=dict)


def played(case: Case) -> Outcome:
    """The player under a clock that stands at its next moment."""
    player = Player(case.nodes, speed=case.speed, lanes=case.lanes)
    outcome = Outcome()
    ends: list[tuple[float, int]] = []

    def carry_out(effects: list[Effect], now: float) -> None:
        for effect in effects:
            if isinstance(effect, Dispatch):
                assert effect.node not in outcome.sent
                assert effect.due_ms <= now
                outcome.sent[effect.node] = now
                ends.append((now + case.service_ms[effect.node], effect.node))
            else:
                told = (effect.outcome, effect.skipped, effect.began_ms, effect.ended_ms)
                assert outcome.quiet.setdefault(effect.play, told) is told

    carry_out(player.handle(Begin(), 0.0), 0.0)
    while not player.done:
        due = math.inf if player.next_ms is None else player.next_ms
        if ends and min(ends)[0] <= due:
            now, number = min(ends)
            ends.remove((now, number))
            carry_out(player.handle(Ended(number, number not in case.fails), now), now)
        else:
            assert due < math.inf, "nothing is under way and nothing is due, but the player is not done"
            carry_out(player.handle(Tick(), due), due)
    assert player.next_ms is None
    assert not ends
    return outcome


def naive(case: Case) -> Outcome:
    """The rules as they are written, over all nodes again and again."""
    outcome = Outcome()
    number_of = {each.request_id: number for number, each in enumerate(case.nodes)}
    names = list(dict.fromkeys(each.play for each in case.nodes))
    first = {
        name: min(each.not_before_ms for each in case.nodes if each.play == name and not each.dependencies)
        for name in names
    }
    queue = sorted(names, key=lambda name: first[name])

    def of(name: str) -> list[int]:
        return [number for number, each in enumerate(case.nodes) if each.play == name]

    def lost(number: int) -> bool:
        return any(
            lost(other) or (wait.trigger == "completion" and other in case.fails)
            for wait in case.nodes[number].dependencies
            for other in (number_of[wait.request_id],)
        )

    def due(number: int, zero: float, origin: float) -> float:
        each = case.nodes[number]
        at = zero + max(0.0, each.not_before_ms - origin) / case.speed
        for wait in each.dependencies:
            other = number_of[wait.request_id]
            if other not in outcome.sent:
                return math.inf
            fired = outcome.sent[other] + (case.service_ms[other] if wait.trigger == "completion" else 0.0)
            at = max(at, fired + wait.delay_ms / case.speed)
        return at

    # A play on its own: nothing but its beginning depends on others.
    lanes = [0.0] * (len(names) if case.lanes is None else case.lanes)
    for name in queue:
        began = min(lanes)
        zero, origin = (0.0, 0.0) if case.lanes is None else (began, first[name])
        going = {number for number in of(name) if not lost(number)}
        while going:
            at, number = min((due(number, zero, origin), number) for number in going)
            outcome.sent[number] = at
            going.remove(number)
        own = [number for number in of(name) if number in outcome.sent]
        ended = max(outcome.sent[number] + case.service_ms[number] for number in own)
        failed = any(number in case.fails for number in own)
        skipped = len(of(name)) - len(own)
        told = ("failed" if failed else "completed", skipped, min(outcome.sent[number] for number in own), ended)
        outcome.quiet[name] = told
        lanes[lanes.index(began)] = ended
    return outcome


@pytest.mark.long
@given(cases())
def test_nodes_go_when_the_rules_say(case: Case) -> None:
    """Any graph, both triggers, failures, speeds and lanes: the same times, plays and skipped nodes as the naive
    model's; every play becomes quiet once, and a lane is held until then (AIPerf #1056)."""
    assert played(case) == naive(case)


def test_a_sub_agent_overlaps_its_parent() -> None:
    """Spawned by a dispatch, it goes while the parent's answer comes; the join waits for both (the peer's #13477)."""
    nodes = [
        node("root"),
        node("child", waits=[("root", "dispatch", 5.0)]),
        node("join", waits=[("root", "completion", 1.0), ("child", "completion", 1.0)]),
    ]
    player = Player(nodes)
    assert player.handle(Begin(), 0.0) == [Dispatch(0, 0.0)]
    assert player.handle(Tick(), 4.75) == []
    assert player.handle(Tick(), 5.25) == [Dispatch(1, 5.0)]
    assert player.handle(Ended(0, ok=True), 7.0) == []
    assert player.next_ms is None
    assert player.handle(Ended(1, ok=True), 30.0) == []
    assert player.handle(Tick(), 31.0) == [Dispatch(2, 31.0)]
    assert player.handle(Ended(2, ok=True), 40.0) == [PlayQuiet("p", "completed", 0, 0.0, 40.0)]


def test_a_node_that_ends_twice_ends_once() -> None:
    """A late answer changes nothing."""
    player = Player([node("a"), node("b", waits=[("a", "completion", 0.0)])])
    player.handle(Begin(), 0.0)
    assert player.handle(Ended(0, ok=True), 1.0) == [Dispatch(1, 1.0)]
    assert player.handle(Ended(0, ok=False), 2.0) == []
    assert player.handle(Ended(1, ok=True), 3.0) == [PlayQuiet("p", "completed", 0, 0.0, 3.0)]
