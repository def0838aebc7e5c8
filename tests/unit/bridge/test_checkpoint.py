"""What a bridge leaves behind, and how its successor begins with it."""

from __future__ import annotations

import pytest

from schemas.base import BadMessageError, from_json, to_json
from services.bridge.checkpoint import RankCheckpoint
from services.bridge.rank import Ask, Forget, Forward, RankFeed, Resume
from tests.unit.bridge.test_rank import RULES, START, World, world


def left_by(at: World) -> RankCheckpoint:
    """What the bridge before left behind, as it comes back from the store."""
    return from_json(to_json(at.feed.left_behind()), RankCheckpoint)


def successor(at: World, kept: RankCheckpoint) -> World:
    """The next bridge of the same engine."""
    feed = RankFeed(at.feed.source, RULES, previous=at.feed.incarnation, checkpoint=kept)
    return World(feed, at.history, at.started_ms, at.now + 1)


def test_a_checkpoint_reaches_back_beyond_the_replay_buffer() -> None:
    """The next bridge goes on behind it, under the same name, as complete as the one before was; what it replays begins
    with the batch that must come again."""
    at = world()
    at.connect()
    for seq in range(5):
        at.publish(seq)
    kept = left_by(at)
    at.publish(5)
    for seq in range(4):
        del at.history[seq]
    after = successor(at, kept)
    after.connect()
    assert [effect for effect in after.out if not isinstance(effect, Ask)] == [
        Resume(),
        Forward(5, b"1000000/5", f"{START}.0", first=False),
    ]
    assert after.asked == [4]
    assert after.feed.state() == ("synced", None)
    assert after.feed.left_behind() == at.feed.left_behind()


def test_what_a_checkpoint_lacks_is_not_forgotten() -> None:
    """The bridge before had lost history: its successor's picture is as incomplete, until the pool is emptied."""
    at = world()
    at.connect()
    at.publish(0)
    at.publish(1, heard=False)
    del at.history[1]
    at.publish(2)
    assert at.feed.state() == ("catching_up", "history_gone")
    after = successor(at, left_by(at))
    after.connect()
    assert after.feed.state() == ("catching_up", "history_gone")
    assert after.feed.incarnation == at.feed.incarnation
    after.feed.rebuilt(after.now)
    assert after.feed.state() == ("synced", None)


def test_a_checkpoint_too_old_for_the_buffer_is_given_up() -> None:
    """Between it and the buffer's beginning something is missing: cleared, renamed, and it says so."""
    at = world()
    at.connect()
    at.publish(0)
    kept = left_by(at)
    for seq in range(1, 5):
        at.publish(seq)
    for seq in range(3):
        del at.history[seq]
    after = successor(at, kept)
    after.connect()
    assert [effect.reason for effect in after.out if isinstance(effect, Forget)] == ["history_gone"]
    assert [seq for _, seq in after.forwarded()] == [3, 4]
    assert after.feed.incarnation != at.feed.incarnation
    assert after.feed.state() == ("catching_up", "history_gone")


def test_a_checkpoint_is_for_its_process_only() -> None:
    """User case A3 while no bridge ran: another start time, or the same one with another newest batch."""
    at = world()
    at.connect()
    at.publish(0)
    at.publish(1)
    kept = left_by(at)
    at.restart()
    at.publish(0, heard=False)
    other = successor(at, kept)
    other.connect()
    assert other.forwarded() == [(f"{START + 5000}.0", 0)]
    assert other.feed.state() == ("synced", None)
    at.started_ms = START
    at.publish(1, heard=False, payload=b"another")
    twin = successor(at, kept)
    twin.connect()
    assert [effect.reason for effect in twin.out if isinstance(effect, Forget)] == ["restarted"]
    assert [seq for _, seq in twin.forwarded()] == [0, 1]
    assert twin.feed.incarnation != at.feed.incarnation


def test_a_checkpoint_of_an_engine_that_hides_its_start() -> None:
    """The newest batch alone tells whether it is the same process."""
    for restarts in (False, True):
        at = world()
        at.feed.connected_now(at.now)
        at.run(at.feed.identified(None, at.now, at.now))
        for seq in range(3):
            at.publish(seq)
        kept = left_by(at)
        if restarts:
            at.restart()
            for seq in range(3):
                at.publish(seq, heard=False)
        after = successor(at, kept)
        after.feed.connected_now(after.now)
        after.run(after.feed.identified(None, after.now, after.now))
        assert (after.feed.incarnation == at.feed.incarnation) != restarts
        assert [seq for _, seq in after.forwarded()] == ([0, 1, 2] if restarts else [])
        assert after.feed.state() == ("synced", None)


@pytest.mark.parametrize("fingerprint", ["junk", "1" * 17, "-000000000000001", "0x00000000000001"])
def test_a_fingerprint_that_is_none_is_no_checkpoint(fingerprint: str) -> None:
    """What is damaged in the store is refused where it is read, not met again in the stream at every start."""
    kept = RankCheckpoint(rank=0, incarnation=f"{START}.0", seq=4, fingerprint=fingerprint)
    with pytest.raises(BadMessageError):
        from_json(to_json(kept), RankCheckpoint)
