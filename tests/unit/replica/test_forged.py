"""Somebody else publishes under a bridge's name: the replica finds back to what the bridge says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.events import SnapshotFailed
from schemas.kv import RankMark
from tests.unit.replica.bridge import Bridge, bridge, stored

HEAL_S = 20
"""Heartbeats within which everything is right again: the proof takes 5, failed questions pause up to 5 s."""


def attacked() -> Bridge:
    at = bridge()
    at.beats()
    for number in range(4):
        at.publish(stored(number))
    return at


def assert_right(at: Bridge) -> None:
    assert at.content() == at.expected()
    assert (at.match().health, at.match().reason) == ("synced", None)


@pytest.mark.parametrize("publishes", [False, True])
def test_forged_batches_ahead_of_the_bridge(publishes: bool) -> None:
    """Blocks that the engine never had are not kept: an idle bridge is proven right by its heartbeats, a busy one by
    its next batch, which has another payload than the forged one of its number."""
    at = attacked()
    for ahead in range(1, 30):
        at.forge(stored(100 + ahead), at.seq + ahead)
    assert at.match().resident_blocks == 33
    if publishes:
        at.publish(stored(4))
    at.live(7)
    assert_right(at)
    assert at.core.gaps["w", "contradicted" if publishes else "ahead_of_bridge"] == 1


@pytest.mark.parametrize("seq", [10**12, (1 << 63) - 1])
def test_a_number_that_cannot_be(seq: int) -> None:
    """It is waited for a few heartbeats long and no longer, meanwhile with pauses; nothing is cleared."""
    at = attacked()
    at.forge(stored(100), seq)
    at.live(10)
    assert_right(at)
    assert at.core.gaps["w", "asked"] < 10
    at.publish(stored(5))
    assert_right(at)


@pytest.mark.parametrize("first", [False, True])
def test_one_batch_of_another_incarnation(first: bool) -> None:
    """The true incarnation is taken back when the bridge goes on naming it; what it published meanwhile is fetched."""
    at = attacked()
    at.forge(stored(100), 5, "x", first=first)
    at.publish(stored(4))
    at.live(HEAL_S)
    assert_right(at)
    at.publish(stored(5))
    assert_right(at)
    assert at.core.gaps["w", "false_incarnation"] == 1


def test_stale_snapshots_are_asked_for_with_growing_pauses() -> None:
    """A bridge whose snapshots cannot be used is not asked several times a second for ever."""
    at = bridge(snapshot_retry_s=0.2, snapshot_retry_max_s=5.0)
    at.beats()
    at.publish(stored(0))
    at.publish(stored(1))
    at.publish(stored(2), heard=False)
    at.publish(stored(3))
    asked = 0
    for _ in range(300):
        at.tick(0.2)
        while at.asked:
            asked += 1
            question = at.asked.pop()
            at.snapshot(question, (RankMark(rank=0, incarnation="1000.0", seq=0),), at.index.dump())
        at.beat()
    assert 60 / 5 <= asked <= 60 / 5 + 10


def test_a_new_bridge_is_asked_at_once() -> None:
    """The question to the one that died is not waited for; an answer that still comes to it is nobody's."""
    at = attacked()
    at.publish(stored(4), heard=False)
    at.publish(stored(5))
    dead = at.asked.pop()
    at.tick(1.0)
    assert not at.asked
    at.epoch += 1
    at.beat()
    assert [question.worker for question in at.asked] == ["w"]
    at.give(SnapshotFailed("w", dead.ticket, "bus_timeout"))
    assert at.core.gaps["w", "bus_timeout"] == 0
    at.answer()
    assert_right(at)


steps = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "beat", "answer", "slowly", "fail", "tick", "restart", "bridge"])
        | st.sampled_from(["next", "far", "name", "old name", "repeat"]),
        st.integers(0, 7),
        st.booleans(),
    ),
    max_size=40,
)


@pytest.mark.long
@given(steps=steps)
def test_after_the_attack_everything_is_the_bridges_again(steps: list[tuple[str, int, bool]]) -> None:
    """Forged batches and incarnations at any time, among restarts of engines and bridges: when the attacker
    stops and heartbeats go on, every block is the bridge's, within a bounded number of heartbeats."""
    at = bridge()
    names = ["1000.0"]
    for action, number, flag in steps:
        match action:
            case "store":
                at.publish(stored(number))
            case "beat":
                at.beats()
            case "answer":
                at.answer()
            case "slowly":
                at.answer_slowly()
            case "fail":
                at.fail()
            case "tick":
                at.tick(0.3)
            case "restart":
                at.restart(f"{2000 + len(names)}.0")
                names.append(at.incarnation)
            case "bridge":
                at.epoch += 1
            case "next":
                for ahead in range(1, number + 2):
                    at.forge(stored(100 + ahead), at.seq + ahead, first=flag)
            case "far":
                at.forge(stored(100 + number), 10**12 + number, first=flag)
            case "name":
                at.forge(stored(100 + number), number, f"x{number}", first=flag)
            case "old name":
                at.forge(stored(100 + number), number, names[number % len(names)], first=flag)
            case "repeat":
                at.forge(stored(100 + number), max(0, at.seq - number))
        at.load_on()
    while at.loading:
        at.load_on()
    at.live(HEAL_S)
    assert_right(at)
    at.publish(stored(9))
    at.live(1)
    assert_right(at)
