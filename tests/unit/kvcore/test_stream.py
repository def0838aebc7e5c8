"""Recovery of one rank's stream: the orders in which batches, replays, snapshots and restarts may come."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcore.stream import (
    Clear,
    Connected,
    Deliver,
    Fetch,
    FetchFailed,
    Heartbeat,
    Limits,
    LiveBatch,
    Rebuilt,
    ReplayedBatch,
    ReplayEnded,
    Restarted,
    Restored,
    StateChanged,
    StreamEffect,
    StreamEvent,
    StreamRecovery,
    Tick,
)


def payload(seq: int, process: int = 0) -> bytes:
    return b"%d/%d" % (process, seq)


def live(seq: int, process: int = 0) -> LiveBatch:
    return LiveBatch(seq, payload(seq, process))


def feed(stream: StreamRecovery, events: Iterable[StreamEvent], now: float = 0.0) -> list[StreamEffect]:
    return [effect for event in events for effect in stream.handle(event, now)]


def delivered(effects: Iterable[StreamEffect]) -> list[int]:
    return [effect.seq for effect in effects if isinstance(effect, Deliver)]


def fetches(effects: Iterable[StreamEffect]) -> list[Fetch]:
    return [effect for effect in effects if isinstance(effect, Fetch)]


def test_a_stream_from_its_start() -> None:
    """Batches from 0 on are delivered as they come; the first one is marked; the stream is synced."""
    stream = StreamRecovery("replay")
    assert (stream.state, stream.reason) == ("blind", "no_events")
    assert feed(stream, [live(0), live(1)]) == [
        Deliver(0, payload(0), True),
        StateChanged("synced", None),
        Deliver(1, payload(1), False),
    ]


def test_gap_holds_live_batches_until_the_replay_is_applied() -> None:
    """User case A1: 0-9 published, 4-6 lost; live ones wait for the replay; duplicates are dropped by number."""
    stream = StreamRecovery("replay")
    effects = feed(stream, [live(seq) for seq in (0, 1, 2, 3, 7, 8)])
    assert delivered(effects) == [0, 1, 2, 3]
    assert effects[-2:] == [Fetch(1, 4), StateChanged("catching_up", "gap")]
    assert (stream.held, stream.held_bytes) == (2, 6)
    effects = feed(stream, [ReplayedBatch(1, 4, payload(4)), live(9), ReplayedBatch(1, 5, payload(5))])
    assert delivered(effects) == [4, 5]
    effects = feed(stream, [ReplayedBatch(1, seq, payload(seq)) for seq in (6, 7, 8)] + [ReplayEnded(1)])
    assert effects == [*(Deliver(seq, payload(seq), False) for seq in (6, 7, 8, 9)), StateChanged("synced", None)]
    assert feed(stream, [live(9), live(5)]) == []
    assert stream.counters.duplicates == 2
    assert (stream.held, stream.held_bytes, stream.counters.gaps) == (0, 0, 1)


def test_history_gone_clears_and_says_so() -> None:
    """User case A1: a replay that begins later than asked for means lost history: clear, go on, incomplete."""
    stream = StreamRecovery("replay")
    feed(stream, [live(seq) for seq in (0, 1, 2, 3, 7)])
    effects = feed(stream, [ReplayedBatch(1, 6, payload(6)), ReplayedBatch(1, 7, payload(7)), ReplayEnded(1)])
    assert effects == [
        Clear("history_gone"),
        Deliver(6, payload(6), True),
        Deliver(7, payload(7), False),
        StateChanged("catching_up", "history_gone"),
    ]
    assert feed(stream, [live(8)]) == [Deliver(8, payload(8), False)]
    assert feed(stream, [Rebuilt()]) == [StateChanged("synced", None)]


def test_late_start_is_a_gap_from_zero() -> None:
    """User case A2: the first number seen is above 0, so the past is asked for before anything is trusted."""
    stream = StreamRecovery("replay")
    assert feed(stream, [live(5)]) == [Fetch(1, 0), StateChanged("catching_up", "late_start")]
    effects = feed(stream, [ReplayedBatch(1, seq, payload(seq)) for seq in range(6)] + [ReplayEnded(1)])
    assert delivered(effects) == [0, 1, 2, 3, 4, 5]
    assert (stream.state, stream.counters.cleared) == ("synced", 0)


def test_restart_is_seen_by_number() -> None:
    """User case A3: the sequence returns to 0: the rank is cleared within that batch, the new stream accepted."""
    stream = StreamRecovery("replay")
    feed(stream, [live(seq) for seq in range(8)])
    assert feed(stream, [live(0, 1), live(1, 1)]) == [
        Clear("restarted"),
        Deliver(0, payload(0, 1), True),
        Deliver(1, payload(1, 1), False),
    ]
    assert (stream.state, stream.counters.restarts) == ("synced", 1)


def test_restart_whose_number_looks_continuous() -> None:
    """Seen with real vLLM: last before 1, first after 1. Other bytes under a known number are another process."""
    stream = StreamRecovery("replay")
    feed(stream, [live(0), live(1)])
    assert feed(stream, [live(1, 1)]) == [
        Clear("restarted"),
        Fetch(1, 0),
        StateChanged("catching_up", "late_start"),
    ]
    effects = feed(stream, [ReplayedBatch(1, 0, payload(0, 1)), ReplayedBatch(1, 1, payload(1, 1)), ReplayEnded(1)])
    assert [effect.payload for effect in effects if isinstance(effect, Deliver)] == [payload(0, 1), payload(1, 1)]


def test_restart_while_a_replay_runs() -> None:
    """Answers to a question of before the restart are ignored."""
    stream = StreamRecovery("replay")
    feed(stream, [live(0), live(3)])
    effects = feed(stream, [live(0, 1), ReplayedBatch(1, 1, payload(1)), ReplayEnded(1), live(1, 1)])
    assert [effect.payload for effect in effects if isinstance(effect, Deliver)] == [payload(0, 1), payload(1, 1)]
    assert feed(stream, [live(3, 1)])[0] == Fetch(2, 2)


def test_noticed_restart() -> None:
    """A restart noticed otherwise (monitor, process start time) clears at once."""
    stream = StreamRecovery("replay")
    feed(stream, [live(0)])
    assert feed(stream, [Restarted(), live(0, 1)]) == [Clear("restarted"), Deliver(0, payload(0, 1), True)]


def test_a_replay_that_only_ends_is_asked_once() -> None:
    """User case A4: an engine that always answers the end mark alone is asked once per gap, never in a loop."""
    stream = StreamRecovery("replay", Limits(backoff_s=1.0))
    asked = 0
    now = 0.0
    for step in range(200):
        now = step * 0.01
        effects = stream.handle(live(step * 2), now)
        if stream.wake_at is not None and stream.wake_at <= now:
            effects += stream.handle(Tick(), now)
        while fetched := fetches(effects):
            asked += len(fetched)
            effects = stream.handle(ReplayEnded(fetched[-1].token), now)
    assert asked <= 3
    assert (stream.state, stream.reason) == ("catching_up", "gap")
    effects = stream.handle(Tick(), now + 1)
    effects = stream.handle(ReplayEnded(fetches(effects)[0].token), now + 1)
    assert effects[:2] == [Clear("history_gone"), Deliver(398, payload(398), True)]
    assert (stream.state, stream.reason, stream.held) == ("catching_up", "history_gone", 0)


def test_failed_replay_is_retried_then_given_up() -> None:
    """A failing or timed-out replay is visible, retried after a pause, and given up after the last attempt."""
    stream = StreamRecovery("replay", Limits(attempts=2, backoff_s=5.0))
    feed(stream, [live(0), live(2)])
    assert feed(stream, [FetchFailed(1, "replay_timeout")], 10.0) == [StateChanged("catching_up", "replay_timeout")]
    assert stream.wake_at == 15.0
    assert feed(stream, [Tick()], 14.9) == []
    assert feed(stream, [Tick()], 15.0) == [Fetch(2, 1)]
    assert not stream.wake_at
    assert feed(stream, [FetchFailed(1, "late"), FetchFailed(2, "replay_timeout")], 20.0) == [
        Clear("replay_timeout"),
        Deliver(2, payload(2), True),
    ]
    assert (stream.state, stream.reason) == ("catching_up", "replay_timeout")


def test_no_replay_socket() -> None:
    """Without a replay socket a gap clears at once, and a stream seen from 0 is complete all the same."""
    stream = StreamRecovery("replay")
    assert feed(stream, [Connected()]) == [Fetch(1, 0), StateChanged("catching_up", "connected")]
    assert feed(stream, [FetchFailed(1, "no_replay", retry=False)]) == [StateChanged("catching_up", "no_replay")]
    assert feed(stream, [live(0)])[-1] == StateChanged("synced", None)
    assert fetches(feed(stream, [live(2)], 5.0)) == [Fetch(2, 1)]
    assert feed(stream, [FetchFailed(2, "no_replay", retry=False)], 5.0)[:2] == [
        Clear("no_replay"),
        Deliver(2, payload(2), True),
    ]


def test_connecting_to_an_idle_engine() -> None:
    """The past of an engine that publishes nothing is read at once; a fresh one is known to be empty."""
    stream = StreamRecovery("replay")
    feed(stream, [Connected()])
    effects = feed(stream, [ReplayedBatch(1, 0, payload(0)), ReplayedBatch(1, 1, payload(1)), ReplayEnded(1)])
    assert effects[-1] == StateChanged("synced", None)
    assert delivered(effects) == [0, 1]
    fresh = StreamRecovery("replay")
    assert feed(fresh, [Connected(), ReplayEnded(1)])[-1] == StateChanged("synced", None)


def test_reconnecting_finds_a_lost_tail_or_a_restart() -> None:
    """After a reconnect the newest known batch is asked for: there: same process; other or none: a restart."""
    stream = StreamRecovery("replay")
    feed(stream, [live(0), live(1)])
    assert fetches(feed(stream, [Connected()])) == [Fetch(1, 1)]
    effects = feed(stream, [ReplayedBatch(1, 1, payload(1)), ReplayedBatch(1, 2, payload(2)), ReplayEnded(1)])
    assert effects == [Deliver(2, payload(2), False), StateChanged("synced", None)]

    assert fetches(feed(stream, [Connected()])) == [Fetch(2, 2)]
    effects = feed(stream, [ReplayedBatch(2, 2, payload(2, 1))])
    assert effects == [Clear("restarted"), Fetch(3, 0), StateChanged("catching_up", "restarted")]
    feed(stream, [ReplayedBatch(3, seq, payload(seq, 1)) for seq in (0, 1, 2)] + [ReplayEnded(3)])
    assert (stream.state, stream.last) == ("synced", 2)

    assert fetches(feed(stream, [live(4, 1), Connected()])) == [Fetch(4, 3), Fetch(5, 2)]
    assert feed(stream, [ReplayedBatch(4, 3, payload(3, 1)), ReplayEnded(4)]) == []
    assert feed(stream, [ReplayEnded(5)])[:2] == [Clear("restarted"), Fetch(6, 0)]
    assert feed(stream, [ReplayEnded(6), live(0, 2)])[-1] == Deliver(0, payload(0, 2), True)


def test_hold_buffer_is_bounded() -> None:
    """A full buffer gives the gap up: cleared, and delivered from the newest run without a gap."""
    stream = StreamRecovery("replay", Limits(hold_batches=3))
    effects = feed(stream, [live(seq) for seq in (0, 2, 4, 5, 6)])
    assert effects[-5:] == [
        Clear("hold_overflow"),
        Deliver(4, payload(4), True),
        Deliver(5, payload(5), False),
        Deliver(6, payload(6), False),
        StateChanged("catching_up", "hold_overflow"),
    ]
    assert (stream.held, stream.counters.dropped) == (0, 1)
    big = StreamRecovery("replay", Limits(hold_bytes=2))
    assert delivered(feed(big, [live(0), live(2)])) == [0, 2]


def test_a_reordered_batch_fills_its_gap() -> None:
    """Two swapped live batches are put right without waiting for the replay, whose answers are then duplicates."""
    stream = StreamRecovery("replay")
    effects = feed(stream, [live(0), live(2), live(1), ReplayedBatch(1, 1, payload(1)), ReplayEnded(1), live(3)])
    assert delivered(effects) == [0, 1, 2, 3]
    assert stream.state == "synced"


# The bus hop: incarnations, snapshots, heartbeats.


def bus(seq: int, incarnation: str = "a", *, first: bool = False) -> LiveBatch:
    return LiveBatch(seq, payload(seq), incarnation, first)


def test_first_batch_of_an_incarnation_needs_no_snapshot() -> None:
    """A marked batch is the start, whatever its number."""
    stream = StreamRecovery("snapshot")
    effects = feed(stream, [Heartbeat("a", -1), bus(7, first=True), bus(8)])
    assert delivered(effects) == [7, 8]
    assert (stream.state, stream.counters.fetches) == ("synced", 0)


def test_joining_late_takes_a_snapshot() -> None:
    """User case A16: an indexer that starts late holds what is live and takes the bridge's snapshot."""
    stream = StreamRecovery("snapshot")
    assert feed(stream, [bus(7), bus(8)]) == [Fetch(1, 0), StateChanged("catching_up", "late_start")]
    assert not stream.accepts(2, "a", 7)
    assert stream.accepts(1, "a", 7)
    assert feed(stream, [Restored(1, "a", 7)]) == [Deliver(8, payload(8), False), StateChanged("synced", None)]


def test_a_new_incarnation_clears_at_once() -> None:
    """Another incarnation clears; marked first it goes on at once, else it waits for a snapshot; the old is ignored."""
    stream = StreamRecovery("snapshot")
    feed(stream, [bus(0, first=True)])
    assert feed(stream, [bus(3, "b", first=True)]) == [Clear("new_incarnation"), Deliver(3, payload(3), True)]
    assert feed(stream, [bus(1, "a"), Heartbeat("a", 9)]) == []
    assert feed(stream, [bus(5, "c")]) == [
        Clear("new_incarnation"),
        Fetch(1, 0),
        StateChanged("catching_up", "late_start"),
    ]
    assert not stream.accepts(1, "b", 9)
    assert stream.accepts(1, "d", 2)
    assert feed(stream, [Restored(1, "d", 2), bus(3, "d")]) == [
        StateChanged("synced", None),
        Deliver(3, payload(3), False),
    ]


def test_heartbeats_find_a_lost_tail() -> None:
    """A tail that is missing for two heartbeats is fetched although nothing is published; one is no alarm."""
    stream = StreamRecovery("snapshot")
    assert feed(stream, [Heartbeat("a", -1)]) == [StateChanged("synced", None)]
    assert feed(stream, [bus(0, first=True), Heartbeat("a", 1), bus(1), Heartbeat("a", 2)])[-1] == Deliver(
        1, payload(1), False
    )
    assert feed(stream, [Heartbeat("a", 2)]) == [Fetch(1, 2), StateChanged("catching_up", "gap")]
    assert feed(stream, [Restored(1, "a", 2)]) == [StateChanged("synced", None)]
    late = StreamRecovery("snapshot")
    assert feed(late, [Heartbeat("a", 4)]) == [Fetch(1, 0), StateChanged("catching_up", "late_start")]


def test_a_stale_snapshot_is_not_accepted() -> None:
    """A snapshot older than what was applied would take blocks back; it is refused before loading."""
    stream = StreamRecovery("snapshot")
    feed(stream, [bus(0, first=True), bus(1), bus(2), bus(4)])
    assert not stream.accepts(1, "a", 1)
    assert feed(stream, [Restored(1, "a", 1)]) == []
    effects = feed(stream, [FetchFailed(1, "snapshot_stale")], 3.0)
    assert effects == [StateChanged("catching_up", "snapshot_stale")]
    assert feed(stream, [Tick()], 4.0) == [Fetch(2, 3)]


def test_failing_snapshots_blind_the_rank_but_are_retried() -> None:
    """After the last attempt the rank is cleared and blind; a snapshot that comes at last heals it."""
    stream = StreamRecovery("snapshot", Limits(attempts=2, backoff_s=1.0, hold_batches=2))
    feed(stream, [bus(0, first=True), bus(2)])
    feed(stream, [FetchFailed(1, "snapshot_failed")], 1.0)
    feed(stream, [Tick()], 2.0)
    assert feed(stream, [FetchFailed(2, "snapshot_failed")], 2.0) == [
        Clear("snapshot_failed"),
        StateChanged("blind", "snapshot_failed"),
    ]
    assert feed(stream, [bus(3), bus(4), bus(5), Tick()], 3.0) == [Fetch(3, 0)]
    assert stream.held == 2
    effects = feed(stream, [Restored(3, "a", 4)], 3.0)
    assert effects == [Deliver(5, payload(5), False), StateChanged("synced", None)]


def test_a_snapshot_that_is_not_far_enough_is_followed_by_another() -> None:
    """When a gap remains behind the snapshot, the next one is asked for after the pause."""
    stream = StreamRecovery("snapshot", Limits(backoff_s=1.0))
    feed(stream, [bus(0, first=True), bus(2), bus(4)])
    assert feed(stream, [Restored(1, "a", 2)], 5.0) == []
    assert stream.wake_at == 6.0
    assert feed(stream, [Tick()], 6.0) == [Fetch(2, 3)]
    assert feed(stream, [Restored(2, "a", 4)], 6.0) == [StateChanged("synced", None)]


# Doubt: heartbeats and payloads that contradict what was heard.


def beats(stream: StreamRecovery, incarnation: str, seq: int, times: Iterable[float]) -> list[StreamEffect]:
    return [effect for now in times for effect in stream.handle(Heartbeat(incarnation, seq), now)]


def test_heartbeats_that_stay_below_end_a_lie() -> None:
    """Somebody published ahead of the bridge: three heartbeats in a row that are not just late clear the rank, and a
    lower snapshot is taken."""
    stream = StreamRecovery("snapshot")
    feed(stream, [bus(0, first=True), *(bus(seq) for seq in range(1, 30))])
    assert beats(stream, "a", 3, [1.0, 2.0, 3.0, 4.0]) == []
    assert beats(stream, "a", 3, [5.0]) == [
        Clear("ahead_of_bridge"),
        Fetch(1, 0, fresh=True),
        StateChanged("catching_up", "ahead_of_bridge"),
    ]
    assert feed(stream, [Restored(1, "a", 3)], 5.0) == [StateChanged("synced", None)]
    assert delivered(feed(stream, [bus(4)], 5.0)) == [4]


def test_heartbeats_behind_the_batches_are_no_lie() -> None:
    """A heartbeat that is one and a half seconds late, or ten in a burst after the batches, clear nothing;
    neither do those of a bridge that is on its way to where the one before it was."""
    stream = StreamRecovery("snapshot")
    for tenth in range(300):
        now = tenth / 10
        feed(stream, [bus(tenth, first=not tenth)], now)
        if tenth >= 15 and not tenth % 10:
            feed(stream, [Heartbeat("a", tenth - 15)], now)
    feed(stream, [bus(seq) for seq in range(300, 400)], 40.0)
    feed(stream, [Heartbeat("a", seq) for seq in range(300, 400, 10)], 40.0)
    feed(stream, [Heartbeat("a", seq, settled=False) for seq in range(100, 400, 10)], 50.0)
    for now in range(50, 60):
        feed(stream, [Heartbeat("a", 100, settled=False)], float(now))
    assert (stream.state, stream.counters.cleared, stream.counters.fetches) == ("synced", 0, 0)


def test_numbers_that_cannot_be_are_not_waited_for() -> None:
    """What waits behind a number that the bridge never reached is given up; what was delivered stands."""
    stream = StreamRecovery("snapshot")
    feed(stream, [bus(0, first=True), bus(10**12), bus((1 << 63) - 1)])
    assert feed(stream, [Restored(1, "a", 0)]) == []
    assert beats(stream, "a", 0, [1.0, 2.0, 3.0, 4.0]) == []
    assert beats(stream, "a", 0, [5.0]) == [StateChanged("synced", None)]
    assert (stream.held, stream.last, stream.counters.cleared) == (0, 0, 0)


def test_the_incarnation_that_heartbeats_go_on_naming_is_taken_back() -> None:
    """One forged batch retires the true incarnation; two heartbeats that are not just late bring it back."""
    stream = StreamRecovery("snapshot")
    feed(stream, [bus(0, first=True), bus(1)])
    feed(stream, [bus(5, "x")], 0.5)
    assert beats(stream, "a", 1, [1.0, 1.5, 2.0]) == []
    assert beats(stream, "a", 1, [3.0]) == [
        Clear("false_incarnation"),
        Fetch(2, 0, fresh=True),
    ]
    assert not stream.accepts(2, "x", 5)
    assert feed(stream, [Restored(2, "a", 1), bus(6, "x"), bus(2)], 3.0) == [
        StateChanged("synced", None),
        Deliver(2, payload(2), False),
    ]


def test_two_payloads_of_one_number() -> None:
    """One is false: what was delivered is cleared and fetched, what waits is fetched. The same twice is a duplicate."""
    stream = StreamRecovery("snapshot")
    feed(stream, [bus(0, first=True), bus(1), bus(1)])
    assert stream.counters.duplicates == 1
    assert feed(stream, [LiveBatch(1, b"other", "a")])[:2] == [Clear("contradicted"), Fetch(1, 0, fresh=True)]
    feed(stream, [Restored(1, "a", 1), bus(3), LiveBatch(3, b"other", "a")])
    assert (stream.held, stream.counters.cleared) == (0, 1)
    feed(stream, [Tick()], 2.0)
    feed(stream, [Restored(2, "a", 3)], 2.0)
    assert (stream.state, stream.last) == ("synced", 3)


@pytest.mark.long
@example(gaps=[0.5], delays=[1.0], restarts={0}, late="facts")
@given(
    gaps=st.lists(st.floats(0.01, 0.6), min_size=1, max_size=60),
    delays=st.lists(st.floats(0.0, 1.2), min_size=1, max_size=20),
    restarts=st.sets(st.integers(0, 59), max_size=1),
    late=st.sampled_from(["facts", "batches", "both"]),
)
def test_nothing_is_cleared_however_facts_and_batches_interleave(
    gaps: list[float], delays: list[float], restarts: set[int], late: str
) -> None:
    """Two subjects, each in order and up to 1.2 s late, nobody lies and nothing is lost: no fetch that was not made
    good, and the only clears are those of restarts."""
    stream = StreamRecovery("snapshot")
    published, incarnation, seq, first = 0.0, 0, -1, True
    arrivals: list[tuple[float, int, StreamEvent]] = []
    newest = {"facts": 0.0, "batches": 0.0}
    marks: list[tuple[float, str, int]] = []

    def send(at: float, subject: str, event: StreamEvent) -> None:
        delay = delays[len(arrivals) % len(delays)] if late in (subject, "both") else 0.0
        newest[subject] = max(newest[subject], at + delay)
        arrivals.append((newest[subject], len(arrivals), event))

    beat_at = 0.0
    for number, gap in enumerate(gaps * 3):
        published += gap
        while beat_at < published:
            send(beat_at, "facts", Heartbeat(str(incarnation), seq))
            beat_at += 1.0
        if number in restarts:
            incarnation, seq, first = incarnation + 1, -1, True
        seq += 1
        send(published, "batches", LiveBatch(seq, payload(seq, incarnation), str(incarnation), first))
        marks.append((published, str(incarnation), seq))
        first = False
    for _ in range(8):
        send(beat_at, "facts", Heartbeat(str(incarnation), seq))
        beat_at += 1.0
    asked: list[int] = []
    for now, _, event in sorted(arrivals, key=lambda arrival: arrival[:2]):
        effects = stream.handle(event, now) + stream.handle(Tick(), now)
        assert {effect.reason for effect in effects if isinstance(effect, Clear)} <= {"new_incarnation"}
        asked += [effect.token for effect in effects if isinstance(effect, Fetch)]
        known = [mark for mark in marks if mark[0] <= now]
        while asked and known:
            token = asked.pop()
            _, name, reached = known[-1]
            if stream.accepts(token, name, reached):
                stream.handle(Restored(token, name, reached), now)
            else:
                stream.handle(FetchFailed(token, "stale"), now)
    assert stream.counters.cleared <= len([number for number in restarts if number < len(gaps) * 3])
    assert (stream.state, stream.last, stream.incarnation) == ("synced", seq, str(incarnation))


# Against a naive model.

LOSS = st.sampled_from(["live", "live", "live", "lost", "twice", "late", "restart"])


@given(steps=st.lists(LOSS, max_size=30), retained=st.integers(1, 40), chunk=st.integers(1, 5))
def test_replay_recovery_against_a_naive_engine(steps: list[str], retained: int, chunk: int) -> None:
    """Whatever is lost, doubled, late or restarted: per incarnation what is delivered is the engine's own order without
    a gap or a repeat, and in the end it is everything since the last restart, or a suffix if history was gone."""
    stream = StreamRecovery("replay", Limits(backoff_s=1.0, attempts=2))
    process, log, now = 0, list[bytes](), 0.0
    runs: list[list[bytes]] = [[]]
    answers: list[StreamEvent] = []
    late: list[LiveBatch] = []

    def take(event: StreamEvent) -> None:
        for effect in stream.handle(event, now):
            match effect:
                case Clear():
                    runs.append([])
                case Deliver(seq=seq, payload=data, first=first):
                    assert first == (not runs[-1])
                    assert data.endswith(b"/%d" % seq)
                    runs[-1].append(data)
                case Fetch(token=token, from_seq=start):
                    kept = range(max(start, len(log) - retained), len(log))
                    answers.extend(ReplayedBatch(token, seq, log[seq]) for seq in kept)
                    answers.append(ReplayEnded(token))

    def answer(count: int) -> None:
        for _ in range(min(count, len(answers))):
            take(answers.pop(0))

    for step in steps:
        now += 0.3
        if step == "restart":
            process, log = process + 1, []
            late.clear()
            if answers:  # the old process does not finish them
                answers[:] = [FetchFailed(stream.counters.fetches, "replay_timeout")]
            take(Connected())
            continue
        batch = LiveBatch(len(log), payload(len(log), process))
        log.append(batch.payload)
        if step == "late":
            late.append(batch)
        elif step != "lost":
            for _ in range(2 if step == "twice" else 1):
                take(batch)
            while late:
                take(late.pop())
        answer(chunk)
        if stream.wake_at is not None and stream.wake_at <= now:
            take(Tick())
    for _ in range(10):
        now += 2.0
        take(LiveBatch(len(log), payload(len(log), process)))
        log.append(payload(len(log), process))
        while answers:
            answer(1)
        take(Tick())
    for run in runs:
        numbers = [int(data.split(b"/")[1]) for data in run]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
    assert runs[-1] == log[len(log) - len(runs[-1]) :]
    assert stream.held == 0
    if runs[-1][0] != log[0]:
        assert (stream.state, stream.reason) == ("catching_up", "history_gone")
        assert len(log) > retained
    else:
        assert stream.state == "synced"


@given(
    steps=st.lists(st.sampled_from(["live", "live", "lost", "beat", "new", "answer", "fail"]), max_size=40),
    hold=st.integers(1, 20),
)
def test_snapshot_recovery_against_a_naive_bridge(steps: list[str], hold: int) -> None:
    """Whatever is lost on the bus, the receiver's picture is a prefix of the bridge's at all times, and equal to it
    after two heartbeats and a snapshot."""
    stream = StreamRecovery("snapshot", Limits(hold_batches=hold, backoff_s=1.0, attempts=2))
    incarnation, log, start, now = 0, list[int](), 0, 0.0
    picture: list[int] = []
    asked: list[int] = []

    def take(event: StreamEvent) -> None:
        for effect in stream.handle(event, now):
            match effect:
                case Clear():
                    picture.clear()
                case Deliver(seq=seq):
                    picture.append(seq)
                case Fetch(token=token):
                    asked.append(token)
        if stream.state == "synced" and stream.incarnation == str(incarnation):
            assert picture == log[: len(picture)]

    def restore() -> None:
        token = asked.pop()
        if not log or not stream.accepts(token, str(incarnation), log[-1]):
            take(FetchFailed(token, "snapshot_stale"))
            return
        picture[:] = log
        take(Restored(token, str(incarnation), log[-1]))

    for step in steps:
        now += 0.4
        match step:
            case "new":
                incarnation, start = incarnation + 1, start + 3
                log = []
            case "beat":
                take(Heartbeat(str(incarnation), log[-1] if log else -1))
            case "answer" if asked:
                restore()
            case "fail" if asked:
                take(FetchFailed(asked.pop(), "snapshot_failed"))
            case "live" | "lost":
                seq = log[-1] + 1 if log else start
                log.append(seq)
                if step == "live":
                    take(LiveBatch(seq, b"x", str(incarnation), first=len(log) == 1))
        take(Tick())
    for _ in range(4):
        now += 2.0
        take(Heartbeat(str(incarnation), log[-1] if log else -1))
        take(Tick())
        while asked:
            restore()
    assert picture == log
    assert stream.state == "synced"
