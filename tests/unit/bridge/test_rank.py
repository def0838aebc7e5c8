"""One rank's stream at the bridge: identification, gaps, restarts, incarnations (spec: engine-events §2.5)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from services.bridge.endpoints import RankSource
from services.bridge.rank import Ask, FeedRules, Forget, Forward, RankEffect, RankFeed

RULES = FeedRules(hold_limit=64, replay_attempts=1, replay_retry_s=1.0, identify_timeout_s=5.0, probe_after_s=10.0)
WITH_REPLAY = RankSource(0, "tcp://h:1", "tcp://h:2")
WITHOUT_REPLAY = RankSource(0, "tcp://h:1")
START = 1_000_000


@dataclass
class World:
    """A feed and an engine that remembers; `run` answers every replay question from the engine's buffer."""

    feed: RankFeed
    history: dict[int, bytes] = field(default_factory=dict)
    started_ms: int = START
    now: float = 100.0
    out: list[RankEffect] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    problem: str | None = None

    def connect(self) -> None:
        self.feed.connected_now(self.now)
        self.identify()

    def identify(self) -> None:
        self.now += 0.01
        self.run(self.feed.identified(self.started_ms, self.now, self.now))

    def publish(self, seq: int, *, heard: bool = True, payload: bytes | None = None) -> None:
        self.history[seq] = payload or f"{self.started_ms}/{seq}".encode()
        if heard:
            self.now += 0.001
            self.run(self.feed.batch(seq, self.history[seq], self.now))

    def restart(self) -> None:
        self.history = {}
        self.started_ms += 5000

    def run(self, effects: list[RankEffect]) -> None:
        waiting = list(effects)
        while waiting:
            effect = waiting.pop(0)
            self.out.append(effect)
            if isinstance(effect, Ask):
                self.asked.append(effect.start)
                answer = tuple((seq, data) for seq, data in sorted(self.history.items()) if seq >= effect.start)
                if self.problem is not None:
                    answer = ()
                self.now += 0.001
                waiting += self.feed.replayed(effect.ticket, answer, self.problem, self.now)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.run(self.feed.tick(self.now))

    def forwarded(self) -> list[tuple[str, int]]:
        return [(effect.incarnation, effect.seq) for effect in self.out if isinstance(effect, Forward)]


def world(source: RankSource = WITH_REPLAY, previous: str = "") -> World:
    return World(RankFeed(source, RULES, previous=previous))


def test_batches_wait_for_the_name_of_their_process() -> None:
    """Nothing is forwarded before a page, asked after the socket stood, has named the process."""
    at = world()
    at.feed.connected_now(at.now)
    at.publish(0)
    assert at.out == []
    assert at.feed.state() == ("catching_up", "connecting")
    at.run(at.feed.identified(START, at.now - 50.0, at.now))
    assert at.forwarded() == []
    at.identify()
    assert at.forwarded() == [(f"{START}.0", 0)]
    assert at.feed.state() == ("synced", None)


def test_first_batch_of_an_incarnation_is_marked() -> None:
    """`first` is said once, so that a receiver who missed nothing knows it."""
    at = world()
    at.connect()
    at.publish(0)
    at.publish(1)
    assert [effect.first for effect in at.out if isinstance(effect, Forward)] == [True, False]


def test_history_is_read_at_the_start() -> None:
    """User case A2, bridge restart: an engine that has published is read from 0, though it is idle now."""
    at = world()
    for seq in range(5):
        at.publish(seq, heard=False)
    at.connect()
    assert at.asked == [0]
    assert at.forwarded() == [(f"{START}.0", seq) for seq in range(5)]
    assert at.feed.stream(0).seq == 4


def test_an_engine_that_has_said_nothing_is_synced() -> None:
    """Asked and answered with nothing: the empty index is the truth. Without a replay socket nobody knows."""
    at = world()
    at.connect()
    assert at.feed.state() == ("synced", None)
    blind = world(WITHOUT_REPLAY)
    blind.connect()
    assert blind.feed.state() == ("blind", "no_events")


def test_gap_is_replayed_in_order() -> None:
    """User case A1: 4-6 lost; live batches wait, the missing come first, each once."""
    at = world()
    at.connect()
    for seq in range(10):
        at.publish(seq, heard=seq not in (4, 5, 6))
    assert at.forwarded() == [(f"{START}.0", seq) for seq in range(10)]
    assert at.asked == [0, 3]


def test_truncated_history_starts_a_new_incarnation() -> None:
    """User case A1, second run: the buffer begins at 6; the rank is cleared, renamed and says so until rebuilt."""
    at = world()
    at.connect()
    for seq in range(4):
        at.publish(seq)
    at.publish(4, heard=False)
    at.publish(6, heard=False)
    del at.history[4]
    at.publish(7)
    assert [effect.reason for effect in at.out if isinstance(effect, Forget)] == ["history_gone"]
    name = at.feed.incarnation
    assert name.startswith(f"{START}.")
    assert at.forwarded()[-2:] == [(name, 6), (name, 7)]
    assert at.feed.state() == ("catching_up", "history_gone")
    at.feed.rebuilt(at.now)
    assert at.feed.state() == ("synced", None)


def test_failed_replay_is_not_repeated_without_end() -> None:
    """User case A4: one attempt, then the stream goes on from what is live."""
    at = world()
    at.connect()
    at.publish(0)
    at.problem = "replay_timeout"
    at.publish(2)
    at.publish(3)
    assert at.asked == [0, 0]
    assert [effect.reason for effect in at.out if isinstance(effect, Forget)] == ["replay_timeout"]
    assert [seq for _, seq in at.forwarded()] == [0, 2, 3]


def test_gap_without_a_replay_socket() -> None:
    """No replay endpoint: history is gone at once, nothing is asked."""
    at = world(WITHOUT_REPLAY)
    at.connect()
    at.publish(0)
    at.publish(2)
    assert at.asked == []
    assert [effect.reason for effect in at.out if isinstance(effect, Forget)] == ["no_replay"]
    assert at.feed.state() == ("catching_up", "no_replay")


def test_restart_that_looks_continuous() -> None:
    """User case A3, as captured from 0.32.0: last before 1, first heard after 1. The start time tells."""
    at = world()
    at.connect()
    at.publish(0)
    at.publish(1)
    at.feed.disconnected(at.now)
    at.restart()
    at.publish(0, heard=False)
    at.feed.connected_now(at.now)
    at.publish(1)
    assert at.feed.state() == ("catching_up", "reconnecting")
    at.identify()
    assert [effect.reason for effect in at.out if isinstance(effect, Forget)] == ["restarted"]
    assert at.forwarded()[2:] == [(f"{START + 5000}.0", 0), (f"{START + 5000}.0", 1)]


def test_network_loss_is_no_restart_and_its_tail_is_found() -> None:
    """The same process after a disconnect: nothing is cleared, and what was missed while away is replayed."""
    at = world()
    at.connect()
    at.publish(0)
    at.feed.disconnected(at.now)
    at.publish(1, heard=False)
    at.connect()
    assert at.forwarded() == [(f"{START}.0", 0), (f"{START}.0", 1)]
    assert not any(isinstance(effect, Forget) for effect in at.out)


def test_engine_that_hides_its_start() -> None:
    """Without a start time the newest batch tells: the engine that still has it is the same one."""
    at = world()
    at.feed.connected_now(at.now)
    at.run(at.feed.identified(None, at.now, at.now))
    at.publish(0)
    at.publish(1)
    name = at.feed.incarnation
    at.feed.disconnected(at.now)
    at.publish(2, heard=False)
    at.feed.connected_now(at.now)
    at.run(at.feed.identified(None, at.now, at.now))
    assert at.forwarded() == [(name, 0), (name, 1), (name, 2)]
    at.feed.disconnected(at.now)
    at.restart()
    at.publish(0, heard=False)
    at.feed.connected_now(at.now)
    at.run(at.feed.identified(None, at.now, at.now))
    assert at.feed.incarnation != name
    assert at.forwarded()[3:] == [(at.feed.incarnation, 0)]


def test_engine_that_hides_everything() -> None:
    """Neither a start time nor a replay socket: every loss of the socket counts as a restart, and only that."""
    at = world(WITHOUT_REPLAY)
    at.feed.connected_now(at.now)
    at.run(at.feed.identified(None, at.now, at.now))
    at.publish(0)
    name = at.feed.incarnation
    at.run(at.feed.identified(None, at.now, at.now))
    assert at.feed.incarnation == name
    at.now += 1
    at.feed.disconnected(at.now)
    at.feed.connected_now(at.now)
    at.run(at.feed.identified(None, at.now, at.now))
    at.restart()
    at.publish(0)
    assert at.forwarded() == [(name, 0), (at.feed.incarnation, 0)]
    assert at.feed.incarnation != name


def test_names_are_not_reused_for_another_history() -> None:
    """A bridge that restarts names a complete stream as before, unless an earlier bridge had lost some of it."""
    again = world(previous=f"{START}.0")
    again.connect()
    assert again.feed.incarnation == f"{START}.0"
    other = world(previous=f"{START}.77")
    other.connect()
    assert other.feed.incarnation not in (f"{START}.0", f"{START}.77")
    assert other.feed.incarnation.startswith(f"{START}.")
    unrelated = world(previous="999.77")
    unrelated.connect()
    assert unrelated.feed.incarnation == f"{START}.0"


def test_lost_tail_is_found_while_the_engine_is_idle() -> None:
    """A batch lost at the end shows by no later batch; the probe of a silent rank brings it."""
    at = world()
    at.connect()
    at.publish(0)
    at.tick(2.0)
    at.publish(1, heard=False)
    at.tick(5.0)
    assert [seq for _, seq in at.forwarded()] == [0]
    at.tick(5.1)
    assert [seq for _, seq in at.forwarded()] == [0, 1]
    assert at.feed.counters.probes_found == 1


def test_first_batches_that_came_before_the_subscription_are_found_soon() -> None:
    """engine-events §2.5: the connection stands, its subscription is not in force yet, and the engine falls silent."""
    at = world()
    at.connect()
    at.publish(0, heard=False)
    at.tick(1.1)
    assert [seq for _, seq in at.forwarded()] == [0]
    at.tick(1.1)
    assert len(at.asked) == 2


def test_nameless_batches_do_not_wait_for_ever() -> None:
    """The page stays silent, the events do not: after the time-out the sequence alone decides."""
    at = world()
    at.connect()
    at.publish(0)
    at.feed.disconnected(at.now)
    at.feed.connected_now(at.now)
    at.publish(1)
    assert [seq for _, seq in at.forwarded()] == [0]
    at.tick(5.1)
    assert [seq for _, seq in at.forwarded()] == [0, 1]


def test_waiting_batches_are_bounded() -> None:
    """Beyond the bound the oldest go and are counted; they are replayed later."""
    at = world()
    at.feed.connected_now(at.now)
    for seq in range(70):
        at.publish(seq)
    assert at.feed.counters.overflowed == 6
    at.identify()
    assert [seq for _, seq in at.forwarded()] == list(range(70))


def test_two_ranks_on_one_port_are_noticed() -> None:
    """User case A13: batches of two data-parallel ranks on one socket make the stream worthless, and it says so."""
    at = world()
    at.connect()
    at.feed.stated_rank(0)
    assert at.feed.state() == ("synced", None)
    at.feed.stated_rank(1)
    assert at.feed.state() == ("blind", "port_collision")


actions = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.booleans()),
        st.tuples(st.sampled_from(["blip", "restart", "forget", "tick", "resend"]), st.booleans()),
    ),
    max_size=40,
)


@given(actions=actions, replay=st.booleans())
def test_what_is_forwarded_is_what_was_published(actions: list[tuple[str, bool]], replay: bool) -> None:
    """Whatever is lost, repeated, forgotten or restarted: within one incarnation numbers have no hole, every batch is
    the one that its process published, and at rest the last one has come."""
    at = world(WITH_REPLAY if replay else WITHOUT_REPLAY)
    at.connect()
    published: dict[str, dict[int, bytes]] = {str(START): {}}
    seq = 0
    for action, flag in actions:
        if action == "publish":
            at.publish(seq, heard=flag)
            published[str(at.started_ms)][seq] = at.history[seq]
            seq += 1
        elif action == "blip":
            at.feed.disconnected(at.now)
            at.connect()
        elif action == "restart":
            at.feed.disconnected(at.now)
            at.restart()
            published[str(at.started_ms)] = {}
            seq = 0
            at.connect()
        elif action == "forget" and at.history:
            del at.history[min(at.history)]
        elif action == "tick":
            at.tick(11.0)
        elif action == "resend" and at.history:
            number = max(at.history)
            at.run(at.feed.batch(number, at.history[number], at.now))
    at.tick(11.0)
    at.publish(seq)
    published[str(at.started_ms)][seq] = at.history[seq]
    at.tick(11.0)
    last: dict[str, int] = {}
    for effect in at.out:
        if isinstance(effect, Forward):
            before = last.get(effect.incarnation)
            assert effect.first == (before is None)
            assert before is None or effect.seq == before + 1
            last[effect.incarnation] = effect.seq
            assert published[effect.incarnation.partition(".")[0]][effect.seq] == effect.payload
            assert effect.seq == 0 or effect.first is False or not effect.incarnation.endswith(".0")
    assert last[at.feed.incarnation] == seq


def test_a_new_process_does_not_inherit_a_port_collision() -> None:
    """User case A13, put right: the engine is started again with a port for each rank, and its stream counts again."""
    at = world()
    at.connect()
    at.feed.stated_rank(0)
    at.feed.stated_rank(1)
    at.feed.disconnected(at.now)
    at.restart()
    at.connect()
    at.publish(0)
    at.feed.stated_rank(0)
    assert at.feed.state() == ("synced", None)


def test_process_named_late_is_read_from_its_start() -> None:
    """Batches that went on nameless belong to a new process: once it is named, its history is read at once."""
    at = world()
    at.connect()
    at.publish(0)
    at.feed.disconnected(at.now)
    at.restart()
    at.feed.connected_now(at.now)
    for seq in range(3):
        at.publish(seq)
    at.tick(6.0)
    assert at.feed.suspect_since is None
    at.identify()
    name = f"{at.started_ms}.0"
    assert [number for incarnation, number in at.forwarded() if incarnation == name] == [0, 1, 2]
    assert at.feed.state() == ("synced", None)


def test_names_of_many_losses_differ_and_are_not_kept_for_ever() -> None:
    """A stream that loses history again and again, for months: each loss has a name of its own, few are remembered."""
    at = world(WITHOUT_REPLAY)
    at.connect()
    for number in range(300):
        at.publish(2 * number)
        at.tick(2.0)
    assert len({incarnation for incarnation, _ in at.forwarded()}) == len(at.forwarded()) == 300
    assert len(at.feed.names) <= 64


def test_nameless_batches_of_a_process_that_died_are_not_the_next_ones() -> None:
    """Batches that still wait for a name when their process is lost: kept for the same process, not for another one."""
    for restarts in (False, True):
        at = world()
        at.connect()
        at.publish(0)
        at.feed.disconnected(at.now)
        at.feed.connected_now(at.now)
        at.publish(1)
        at.feed.disconnected(at.now)
        if restarts:
            at.restart()
        at.feed.connected_now(at.now)
        at.publish(0 if restarts else 2)
        at.identify()
        at.publish(1 if restarts else 3)
        sent = [effect.payload.decode() for effect in at.out if isinstance(effect, Forward)]
        of_next = ["1005000/0", "1005000/1"] if restarts else ["1000000/1", "1000000/2", "1000000/3"]
        assert sent == ["1000000/0", *of_next]
        assert at.feed.state() == ("synced", None)
        # Of another process everything is read again, also what waits and may be the new one's.
        assert at.feed.counters.overflowed == 1 + restarts


def test_nobody_is_asked_for_history_while_the_process_is_unknown() -> None:
    """A hole of the old process is not filled by whoever answers now; it waits for the name."""
    at = World(RankFeed(WITH_REPLAY, replace(RULES, replay_attempts=3)))
    at.connect()
    at.publish(0)
    at.publish(1, heard=False)
    at.problem = "replay_timeout"
    at.publish(2)
    at.feed.disconnected(at.now)
    before = len(at.asked)
    at.tick(3.0)
    assert len(at.asked) == before
    at.problem = None
    at.connect()
    at.tick(3.0)
    assert [number for _, number in at.forwarded()] == [0, 1, 2]


def test_history_that_another_process_may_have_answered_is_asked_for_again() -> None:
    """Asked before the socket was lost, answered after: by whom? Nothing of it is taken, and nothing stays missing."""
    for restarts in (False, True):
        at = world()
        at.connect()
        at.publish(0)
        at.publish(1, heard=False)
        [ask] = [
            effect
            for effect in at.feed.batch(2, at.history.setdefault(2, b"1000000/2"), at.now)
            if isinstance(effect, Ask)
        ]
        at.feed.disconnected(at.now)
        if restarts:
            at.restart()
            for seq in range(3):
                at.publish(seq, heard=False)
        answer = tuple((seq, payload) for seq, payload in sorted(at.history.items()) if seq >= ask.start)
        assert at.feed.replayed(ask.ticket, answer, None, at.now) == []
        at.connect()
        assert [effect.payload for effect in at.out if isinstance(effect, Forward)] == [
            b"1000000/0",
            *([b"1005000/0", b"1005000/1", b"1005000/2"] if restarts else [b"1000000/1", b"1000000/2"]),
        ]
        assert at.feed.state() == ("synced", None)


@given(
    past=st.integers(1, 20),
    missed=st.integers(0, 10),
    parts=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 2)), max_size=40),
)
def test_replays_in_parts_with_live_batches_between(past: int, missed: int, parts: list[tuple[int, int]]) -> None:
    """A long past is taken a few batches at a time, first at the start, then after a pause of the socket; live batches
    come between the parts: each number is forwarded once, in order, under one incarnation."""
    at = world()
    sizes = iter(parts)
    asks: list[Ask] = []

    def take(effects: list[RankEffect]) -> None:
        at.out += effects
        asks.extend(effect for effect in effects if isinstance(effect, Ask))

    def live(count: int) -> None:
        for _ in range(count):
            seq = len(at.history)
            at.publish(seq, heard=False)
            take(at.feed.batch(seq, at.history[seq], at.now))

    def answer() -> None:
        while asks:
            ask = asks.pop()
            asks.clear()  # a newer question replaces an older one
            batches = [(seq, at.history[seq]) for seq in range(ask.start, len(at.history))]
            while batches and not asks:
                size, news = next(sizes, (6, 0))
                take(at.feed.replayed(ask.ticket, tuple(batches[:size]), None, at.now, more=True))
                del batches[:size]
                live(news)
            if not asks:
                take(at.feed.replayed(ask.ticket, (), None, at.now))

    for count in (past, missed):
        for _ in range(count):
            at.publish(len(at.history), heard=False)
        at.feed.connected_now(at.now)
        at.now += 0.01
        take(at.feed.identified(START, at.now, at.now))
        answer()
        at.feed.disconnected(at.now)
    assert at.forwarded() == [(f"{START}.0", seq) for seq in range(len(at.history))]
    # A live batch between the parts shows the hole as well; then the question is a fetch.
    assert at.feed.counters.probes_found <= bool(missed)
