"""The replica: recovery over the bus hop, health of sources, answers. No bus, no clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.errors import SettingsError
from kvcore import PrefixIndex
from kvcore import dump as kvcore_dump
from replica import core
from replica.config import ReplicaSettings
from replica.core import AT_ONCE
from replica.errors import BadQuestionError
from replica.events import BatchReceived, SnapshotFailed, Tick, Work
from schemas.index import MatchRequest
from schemas.kv import KvHeaders, RankMark
from schemas.request import Usage
from schemas.worker import RankStream, WorkerProfile
from tests.unit.replica.bridge import BLOCK, bridge, chain, ended, placed, removed, stored


def test_stream_from_its_first_batch() -> None:
    """An indexer that heard the marked first batch needs no snapshot, whatever its number."""
    at = bridge()
    at.beat()
    at.seq = 6
    for number in range(3):
        at.publish(stored(number))
    assert at.asked == []
    assert (at.match().health, at.match().blocks.reach) == ("synced", 1)
    assert at.told()[-1] == ("synced", None)


def test_late_start_asks_the_bridge() -> None:
    """User case A2: in the middle of an unknown incarnation: hold, ask, load, go on."""
    at = bridge()
    for number in range(5):
        at.publish(stored(number), heard=False)
    at.publish(stored(5))
    at.beat()
    assert len(at.asked) == 1
    at.publish(stored(6))
    at.answer()
    assert at.content() == at.expected()
    assert at.match().health == "synced"


def test_questions_go_only_to_bridges_that_are_known() -> None:
    """Batches of a worker that has not introduced itself wait for its heartbeat."""
    at = bridge()
    at.publish(stored(0), heard=False)
    at.publish(stored(1))
    assert at.asked == []
    at.beat()
    assert [question.worker for question in at.asked] == ["w"]


def test_gap_on_the_bus_is_repaired() -> None:
    """A batch lost on the bus: what follows waits for the snapshot; duplicates are dropped."""
    at = bridge()
    at.beat()
    at.publish(stored(0))
    at.publish(removed(0), heard=False)
    at.publish(stored(0))
    assert at.match().health == "catching_up"
    at.answer()
    assert at.content() == at.expected()
    at.give(BatchReceived(KvHeaders(worker="w", rank=0, incarnation="1000.0", seq=2), stored(0)))
    assert at.content() == at.expected()


def test_lost_tail_shows_in_the_heartbeats() -> None:
    """Nothing comes after the lost batch: the second heartbeat that names it makes the indexer ask."""
    at = bridge()
    at.beat()
    at.publish(stored(0))
    at.publish(stored(1), heard=False)
    at.beat()
    at.beat()
    at.answer()
    assert at.content() == at.expected()
    assert at.match().health == "synced"


def test_new_incarnation_clears() -> None:
    """User case A3: the old blocks go with the first word of the new incarnation, batch or heartbeat."""
    for heartbeat in (True, False):
        at = bridge()
        at.beat()
        at.publish(stored(0))
        at.restart("2000.0")
        if heartbeat:
            at.beat()
            assert at.content() == {}
        at.publish(stored(1))
        assert at.content() == at.expected()
        assert at.match(0).blocks.reach == 0
        assert at.match(1).blocks.reach == 1


def test_restart_while_a_snapshot_is_open() -> None:
    """The question was asked for the old incarnation; its answer serves the new one's hole, or another is asked for."""
    at = bridge()
    at.beat()
    at.publish(stored(0))
    at.publish(stored(1), heard=False)
    at.publish(stored(2))
    stale = at.asked[0]
    old = at.index.dump()
    at.restart("2000.0")
    at.publish(stored(3), heard=False)
    at.publish(stored(4))
    at.snapshot(stale, (RankMark(rank=0, incarnation="1000.0", seq=2),), old)
    assert at.match(0).blocks.reach == 0
    del at.asked[0]
    for _ in range(5):
        at.beat()
        at.answer()
        at.tick(0.5)
    assert at.content() == at.expected()
    assert at.match(4).health == "synced"


def test_batches_that_arrive_while_a_snapshot_is_loaded() -> None:
    """They wait or belong to a newer stream: a snapshot loaded in steps is whole, is the newest, or is not taken."""
    at = bridge()
    at.beat()
    for number in range(4):
        at.publish(stored(number), heard=number == 0)
    at.publish(stored(4))
    at.answer_slowly()
    at.publish(stored(5))
    at.load_on()
    assert [at.match(number).blocks.reach for number in (0, 3, 5)] == [1, 0, 0]
    while at.loading:
        at.load_on()
    assert (at.content(), at.match().health) == (at.expected(), "synced")
    at.publish(stored(6), heard=False)
    at.publish(stored(7))
    at.tick(1.0)
    at.answer_slowly()
    at.restart("2000.0")
    at.publish(stored(8))
    while at.loading:
        at.load_on()
    assert (at.content(), at.match(8).health) == (at.expected(), "synced")
    assert at.core.index.stats().unique == 1


def test_snapshots_that_fail_are_asked_for_again_later() -> None:
    """A bridge that does not answer: few questions, longer and longer apart; blind after a while, healed at the end."""
    at = bridge()
    at.publish(stored(0), heard=False)
    at.beat()
    asked = 0
    for _ in range(100):
        asked += len(at.asked)
        at.fail()
        at.tick(0.1)
        at.beat()
    assert 3 <= asked <= 12
    assert (at.match().health, at.match().reason) == ("blind", "no_responders")
    for _ in range(80):
        at.answer()
        at.tick(0.1)
        at.beat()
    assert at.content() == at.expected()
    assert at.match().health == "synced"


def test_damaged_snapshot_changes_nothing() -> None:
    """A dump that is none is counted like any failure."""
    at = bridge()
    at.publish(stored(0), heard=False)
    at.beat()
    question = at.asked.pop()
    at.snapshot(question, (RankMark(rank=0, incarnation="1000.0", seq=0),), b"junk")
    assert at.core.gaps["w", "bad_dump"] == 1
    at.snapshot(question, (), at.index.dump())
    assert at.content() == {}


def test_bridge_states_become_health() -> None:
    """What the bridge says of its own stream is part of the judgement: on its way, incomplete, blind, mismatch."""
    at = bridge()
    at.beat()
    at.publish(stored(0))

    def stream(state: str, reason: str | None) -> tuple[RankStream, ...]:
        return (RankStream(rank=0, incarnation="1000.0", seq=0, state=state, reason=reason),)  # type: ignore[arg-type]

    for told, health in (
        (stream("synced", None), ("synced", None)),
        (stream("catching_up", "reconnecting"), ("catching_up", "reconnecting")),
        (stream("catching_up", "history_gone"), ("approximate", "history_gone")),
        (stream("blind", "port_collision"), ("approximate", "port_collision")),
        ((), ("approximate", "no_events")),
    ):
        at.beat(streams=told)
        assert (at.match().health, at.match().reason) == health
    at.beat("mismatch")
    assert (at.match().health, at.match().reason, at.match().blocks.reach) == ("blind", "block_size", 0)


def test_workers_come_and_go() -> None:
    """User case A15: left at once, lost after silence; stale facts of an older bridge do not bring it back."""
    at = bridge(worker_lost_s=5.0)
    at.beat()
    at.publish(stored(0))
    at.tick(4.0)
    assert "w" in at.core.workers
    at.tick(2.0)
    assert ("blind", "lost") in at.told()
    assert at.core.index.ranks() == []
    at.beat()
    at.answer()
    assert at.match().blocks.reach == 1
    at.beat("left")
    assert at.told()[-1] == ("blind", "left")
    assert at.core.sources == {}


def test_silence_while_the_bus_is_away_is_nobodys() -> None:
    """While the indexer itself hears nothing, no worker is lost; its time counts from the return of the bus."""
    at = bridge(worker_lost_s=5.0)
    at.beat()
    at.publish(stored(0))
    at.now += 60.0
    at.give(Tick(connected=False))
    at.tick(1.0)
    assert at.match().blocks.reach == 1
    at.tick(6.0)
    assert at.core.workers == {}


def test_other_names_of_a_worker_are_in_its_pool() -> None:
    """Adapters are models of the worker; a change of names is followed."""
    at = bridge()
    at.beat()
    at.publish(stored(0))

    def pool(model: str) -> int:
        request = MatchRequest(model=model, block_size=BLOCK, chain=chain(0))
        return len(at.core.match(request, at.now).matches)

    assert (pool("tiny"), pool("lora-a")) == (1, 0)
    profile = WorkerProfile(url="http://e", model="tiny", models=("tiny", "lora-a"), block_size=BLOCK)
    at.beat(profile=profile)
    assert (pool("tiny"), pool("lora-a")) == (1, 1)


def test_requests_without_events_make_a_source_approximate() -> None:
    """Blocks should have been stored and no event came: `approximate: no_events`, until one does or a snapshot."""
    at = bridge(silent_requests=3)

    def silence() -> None:
        at.beats()
        for number in range(3):
            at.give(placed(number, chain(number)))
            at.give(ended(number, Usage(input_tokens=100)))
        assert at.match().health == "synced"
        at.beats(2)

    at.publish(stored(0))
    silence()
    assert (at.match().health, at.match().reason) == ("approximate", "no_events")
    assert at.core.counters.parity_alarms == 1
    at.publish(stored(1))
    assert at.match().health == "synced"
    silence()
    assert at.match().health == "approximate"
    at.publish(stored(2), heard=False)
    at.publish(stored(3))
    at.answer()
    assert at.match().health == "synced"


def test_requests_from_before_a_hole_do_not_tell_of_silence() -> None:
    """Their events are in the snapshot, or were never heard: what ends after it was placed before, and says nothing."""
    at = bridge(silent_requests=3)
    at.beats()
    at.publish(stored(0))
    for number in range(6):
        at.give(placed(number, chain(number)))
    at.publish(stored(1), heard=False)
    at.publish(stored(2))
    at.answer()
    for number in range(6):
        at.give(ended(number, Usage(input_tokens=100)))
    at.beats(3)
    assert (at.match().health, at.core.counters.parity_alarms) == ("synced", 0)


def test_bad_questions_are_the_askers() -> None:
    """A chain of half hashes is refused with a reason, and takes nothing with it."""
    at = bridge()
    with pytest.raises(BadQuestionError) as caught:
        at.core.match(MatchRequest(model="m", block_size=4, chain=b"123"), at.now)
    assert (caught.value.reason, at.core.counters.matches) == ("bad_chain", 0)


def test_settings_name_their_key() -> None:
    """Every mistake names its key."""
    for key, values in {
        "max_blocks": {"max_blocks": 0},
        "snapshot_retry_max_s": {"snapshot_retry_max_s": 0.1},
        "parity_min_requests": {"parity_min_requests": 100},
        "parity_alarm_ratio": {"parity_alarm_ratio": 2.0},
    }.items():
        with pytest.raises(SettingsError) as caught:
            ReplicaSettings(**values)  # type: ignore[arg-type]  # wrong on purpose
        assert caught.value.key == key


def test_many_held_batches_are_applied_a_few_at_a_time() -> None:
    """Behind a hole that was filled thousands may wait: each event and each `Work` applies a few, live ones line up
    behind them, and the source is on its way until all are in."""
    at = bridge()
    at.works = False
    at.beat()
    at.publish(stored(0), heard=False)
    for number in range(1, 3 * AT_ONCE):
        at.publish(stored(number))
    assert at.core.counters.batches == 0
    marks = (RankMark(rank=0, incarnation="1000.0", seq=0),)
    at.snapshot(at.asked.pop(), marks, PrefixIndex().dump())
    source = at.core.sources["w"][0]
    assert (at.core.counters.batches, source.applied, at.match().health) == (AT_ONCE, AT_ONCE, "catching_up")
    assert source.reason == "backlog"
    at.publish(stored(90))
    assert at.core.counters.batches == AT_ONCE
    at.give(Work())
    assert at.core.counters.batches == 2 * AT_ONCE
    at.give(Work())
    assert (at.core.behind, at.match().health, source.applied) == (False, "synced", 3 * AT_ONCE)
    assert at.match(90).blocks.reach == 1


def test_a_backlog_is_bounded_and_goes_with_its_stream() -> None:
    """A line that is full moves on at once; a restart, a snapshot or the worker's leave empties it."""
    for end in ("restart", "left", "full"):
        at = bridge(hold_limit=2 * AT_ONCE)
        at.works = False
        at.beat()
        at.publish(stored(0), heard=False)
        for number in range(1, 2 * AT_ONCE):
            at.publish(stored(number))
        at.snapshot(at.asked.pop(), (RankMark(rank=0, incarnation="1000.0", seq=0),), PrefixIndex().dump())
        source = at.core.sources["w"][0]
        if end == "restart":
            at.restart("2000.0")
            at.publish(stored(7))
            assert (at.core.behind, at.content()) == (False, at.expected())
        elif end == "left":
            at.beat("left")
            assert not at.core.behind
        else:
            for number in range(100, 100 + 3 * AT_ONCE):
                at.publish(stored(number))
            assert len(source.backlog) == 2 * AT_ONCE
            while at.core.behind:
                at.give(Work())
            assert at.core.counters.batches == 5 * AT_ONCE - 1


def test_answers_are_new_after_every_change() -> None:
    """What was last said of a source is said again only while it is true: blocks, size, health, and who is there."""
    at = bridge()
    at.beat()
    told = [at.match()]
    at.publish(stored(0))
    told.append(at.match())
    at.publish(stored(1))
    told.append(at.match())
    at.publish(removed(0))
    told.append(at.match())
    at.beat("mismatch")
    told.append(at.match())
    assert [(each.blocks.reach, each.resident_blocks, each.health) for each in told] == [
        (0, 0, "synced"),
        (1, 1, "synced"),
        (1, 2, "synced"),
        (0, 1, "synced"),
        (0, 1, "blind"),
    ]
    at.beat(profile=WorkerProfile(url="http://e", model="tiny", block_size=2 * BLOCK))
    assert at.match().reason == "block_size"


actions = st.lists(
    st.tuples(
        st.sampled_from(["store", "store", "remove", "beat", "answer", "answer slowly", "fail", "tick", "restart"]),
        st.integers(0, 5),
        st.booleans(),
    ),
    max_size=40,
)


@given(actions=actions)
def test_at_rest_the_index_is_the_bridges(actions: list[tuple[str, int, bool]]) -> None:
    """Whatever is lost on the bus, in whatever order facts and snapshots come, and whatever happens while one is being
    loaded: while `synced` is said nothing is there that the bridge has not, and at rest both are equal."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kvcore_dump, "SLICE_BLOCKS", 1)
        patch.setattr(core, "AT_ONCE", 1)
        play(actions)


def play(actions: list[tuple[str, int, bool]]) -> None:
    at = bridge()
    names = 0
    for action, number, heard in actions:
        if action == "store":
            at.publish(stored(number), heard=heard)
        elif action == "remove":
            at.publish(removed(number), heard=heard)
        elif action == "beat":
            at.beat()
        elif action == "answer":
            at.answer()
        elif action == "answer slowly":
            at.answer_slowly()
        elif action == "fail":
            at.fail()
        elif action == "tick":
            at.tick(0.5)
        else:
            names += 1
            at.restart(f"{2000 + names}.0")
        at.load_on()
        source = at.core.sources.get("w", {}).get(0)
        if source is not None and source.machine.last == at.seq and source.machine.incarnation == at.incarnation:
            assert at.content() == at.expected()
    while at.loading:
        at.load_on()
    for _ in range(20):
        at.beat()
        at.answer()
        at.tick(0.5)
    assert at.content() == at.expected()
    assert at.match().health == "synced"


def test_a_bridge_that_began_again_may_use_a_name_again() -> None:
    """A bridge killed before it could note its last incarnation names an older one: it is followed, not ignored."""
    at = bridge()
    at.beat()
    at.publish(stored(0))
    at.restart("1000.1700")
    at.publish(stored(1))
    at.restart("1000.0")
    at.epoch = 2
    for number in (2, 3):
        at.publish(stored(number))
    for _ in range(5):
        at.beat()
        at.answer()
        at.tick(0.5)
    assert at.content() == at.expected()
    assert (at.match(3).blocks.reach, at.match(3).health) == (1, "synced")


def test_a_question_that_its_bridge_may_not_have_got_is_asked_again() -> None:
    """Seen in a soak: a bridge that was cut off is let back, a replica asks it for a snapshot, and the question goes to
    the connection that the bridge is just giving up. The heartbeat that says so brings the question anew, instead of
    the deadline 15 s later; the same heartbeat again brings none."""
    at = bridge()
    at.beat()
    at.publish(stored(0))
    at.publish(stored(1), heard=False)
    at.publish(stored(2))
    (lost,) = at.asked
    at.beat(reconnects=1)
    at.beat(reconnects=1)
    _, again = at.asked
    assert (at.match(2).health, again.ticket) == ("catching_up", lost.ticket + 1)
    at.asked.remove(lost)
    at.answer()
    at.give(SnapshotFailed(lost.worker, lost.ticket, "timeout"))
    assert (at.content(), at.match(2).health) == (at.expected(), "synced")
    at.beat(reconnects=2)
    assert at.asked == []


def test_counts_of_a_worker_go_with_it() -> None:
    """Workers come and go under new names for months: nothing of one that is gone stays."""
    at = bridge()
    at.beat()
    at.publish(stored(0))
    at.publish(stored(1), heard=False)
    at.publish(stored(2))
    at.answer()
    at.give(ended(0, Usage(input_tokens=8, cached_tokens=4), predicted=4))
    core = at.core
    assert core.gaps["w", "restored"] == core.predicted["w"] // 4 == 1
    at.beat("left")
    assert (dict(core.gaps), dict(core.predicted), dict(core.reported)) == ({}, {}, {})
