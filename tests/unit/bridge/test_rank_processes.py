"""Processes that come and go behind one rank's socket, seen late: none of them is ever taken for another.

The world has what a bridge has not: the truth. Notes and batches of the socket come in the order of the wire but late;
pages and replays are answered by whoever lives at that moment, and those answers come late too. Nothing else is
arranged: engines die before anybody looked, reach the number of the one before, forget, hide their start, do not
answer replays; bridges are replaced and begin with what the one before left behind, some time ago.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from services.bridge.checkpoint import RankCheckpoint
from services.bridge.endpoints import RankSource
from services.bridge.rank import Ask, FeedRules, Forget, Forward, RankEffect, RankFeed, Resume

RULES = FeedRules(hold_limit=32, replay_attempts=2, replay_retry_s=1.0, identify_timeout_s=5.0, probe_after_s=10.0)


@dataclass
class Process:
    """One engine process. ``born``: how many things had gone over the wire before it."""

    started_ms: int
    born: int
    history: dict[int, bytes] = field(default_factory=dict)
    next_seq: int = 0


@dataclass
class Replay:
    """A question to whoever has the replay socket; ``answer`` once somebody did."""

    ask: Ask
    by: Process | None = None
    answer: list[tuple[int, bytes]] = field(default_factory=list)


@dataclass
class World:
    """``orderly``: the end of a process is heard before what the next one answers. Else a host vanishes without a word,
    once, and only a replay socket that works and still has its numbers can tell."""

    feed: RankFeed
    hides_start: bool
    orderly: bool
    replay_works: bool = True
    now: float = 1000.0
    processes: list[Process] = field(default_factory=list)
    alive: Process | None = None
    linked: bool = False
    wire: deque[tuple[str, int, bytes]] = field(default_factory=deque)
    wired: int = 0
    page: tuple[float, Process | None] | None = None
    replay: Replay | None = None
    sent: list[Forward] = field(default_factory=list)
    lives: list[int] = field(default_factory=lambda: [0])
    content: list[tuple[int, bytes]] = field(default_factory=list)
    kept: tuple[RankCheckpoint, list[tuple[int, bytes]]] | None = None

    # The engine's side

    def boot(self) -> None:
        if self.alive is None:
            self.alive = Process(1_000_000 + 1000 * len(self.processes), self.wired)
            self.processes.append(self.alive)

    def die(self) -> None:
        if self.orderly or len(self.processes) == 1:
            self.cut()
            self.alive = None

    def cut(self) -> None:
        if self.linked:
            self._wire("lost")
        self.linked = False

    def link(self) -> None:
        if self.alive is not None and not self.linked:
            self.linked = True
            self._wire("up")

    def publish(self, heard: bool) -> None:
        if self.alive is None:
            return
        seq, self.alive.next_seq = self.alive.next_seq, self.alive.next_seq + 1
        payload = b"%d/%d" % (self.alive.started_ms, seq)
        self.alive.history[seq] = payload
        if heard and self.linked:
            self._wire("batch", seq, payload)

    def forget(self) -> None:
        if self.alive is not None and self.alive.history and self.orderly:
            del self.alive.history[min(self.alive.history)]

    def _wire(self, what: str, seq: int = 0, payload: bytes = b"") -> None:
        self.wire.append((what, seq, payload))
        self.wired += 1

    # The bridge's side

    def hear(self, count: int) -> None:
        for _ in range(min(count, len(self.wire))):
            what, seq, payload = self.wire.popleft()
            self.now += 0.001
            if what == "batch":
                self._do(self.feed.batch(seq, payload, self.now))
            elif what == "up":
                self.feed.connected_now(self.now)
            else:
                self.feed.disconnected(self.now)

    def ask_page(self) -> None:
        if self.page is None:
            self.now += 0.001
            self.page = (self.now, None)

    def answer_page(self) -> None:
        if self.page is not None and self.page[1] is None and self.alive is not None:
            self.page = (self.page[0], self.alive)

    def take_page(self) -> None:
        page, self.page = self.page, None
        if page is None or page[1] is None:
            return
        self._in_order(page[1])
        self.now += 0.001
        started = None if self.hides_start else page[1].started_ms
        self._do(self.feed.identified(started, page[0], self.now))

    def answer_replay(self) -> None:
        replay = self.replay
        if replay is not None and replay.by is None and self.alive is not None and self.replay_works:
            replay.by = self.alive
            replay.answer = [entry for entry in sorted(self.alive.history.items()) if entry[0] >= replay.ask.start]

    def take_replay(self, count: int) -> None:
        replay = self.replay
        if replay is None:
            return
        self.now += 0.001
        if not self.orderly:
            self.answer_replay()
        if replay.by is None:
            self.replay = None
            self._do(self.feed.replayed(replay.ask.ticket, (), "replay_timeout", self.now))
            return
        self._in_order(replay.by)
        part, replay.answer = tuple(replay.answer[:count]), replay.answer[count:]
        more = bool(replay.answer)
        if not more:
            self.replay = None
        self._do(self.feed.replayed(replay.ask.ticket, part, None, self.now, more=more))

    def tick(self, seconds: float) -> None:
        while not self.orderly and self.wire and self.wire[0][0] != "lost":
            self.hear(1)  # only that a peer is gone shows seconds later, not what it had sent
        self.now += seconds
        self._do(self.feed.tick(self.now))

    def keep(self) -> None:
        if self.feed.incarnation:
            self.kept = self.feed.left_behind(), list(self.content)

    def replace_bridge(self) -> None:
        """Another bridge: what was on its way to the one before is lost."""
        if not self.orderly:
            return  # who vanishes before a bridge has named him is beyond telling
        kept = self.kept[0] if self.kept is not None else None
        self.feed = RankFeed(self.feed.source, RULES, previous=self.feed.incarnation, checkpoint=kept)
        self.content, self.page, self.replay = [], None, None
        self.wire.clear()
        self.lives.append(len(self.sent))
        if self.linked:
            self._wire("up")

    def _in_order(self, answered: Process) -> None:
        if self.orderly:
            self.hear(answered.born - (self.wired - len(self.wire)))

    def _do(self, effects: list[RankEffect]) -> None:
        for effect in effects:
            match effect:
                case Ask():
                    self.replay = Replay(effect)  # the shell gives up the question before
                case Forward():
                    self.sent.append(effect)
                    self.content.append((effect.seq, effect.payload))
                case Forget():
                    self.content = []
                case Resume():
                    assert self.kept is not None
                    self.content = list(self.kept[1])

    # The end

    def settle(self) -> None:
        """The engine lives and is heard, pages and replays are answered, and time passes."""
        self.boot()
        self.link()
        for _ in range(4):
            self.hear(len(self.wire))
            self.page = None
            self.ask_page()
            self.answer_page()
            self.take_page()
            for _ in range(8):
                self.answer_replay()
                self.take_replay(1000)
            self.tick(11.0)

    def check_names(self) -> None:
        """Under one name numbers have no hole, the first one is marked, and a name that says so begins with 0. What
        another bridge says once more under the same name is the same."""
        said: dict[str, dict[int, bytes]] = {}
        for at, effect in enumerate(self.sent):
            before = said.setdefault(effect.incarnation, {})
            assert before.setdefault(effect.seq, effect.payload) == effect.payload
            assert effect.first == (effect.seq == min(before))
            assert effect.first or effect.seq - 1 in before
            assert not effect.first or effect.seq == 0 or not effect.incarnation.endswith(".0")
            if at not in self.lives and not effect.first and self.sent[at - 1].incarnation == effect.incarnation:
                assert effect.seq == self.sent[at - 1].seq + 1

    def check_unmixed(self) -> None:
        """One name, one process; and where it says which, that one."""
        owners: dict[str, set[str]] = {}
        for effect in self.sent:
            owners.setdefault(effect.incarnation, set()).add(effect.payload.decode().partition("/")[0])
        assert all(len(of) == 1 for of in owners.values()), owners


acts = st.one_of(
    st.tuples(st.sampled_from(["boot", "die", "cut", "link", "forget", "ask_page", "answer_page", "take_page"])),
    st.tuples(st.sampled_from(["answer_replay", "mute_replay"])),
    st.tuples(st.just("publish"), st.booleans()),
    st.tuples(st.just("publish"), st.just(True)),
    st.tuples(st.just("hear"), st.integers(1, 4)),
    st.tuples(st.just("take_replay"), st.integers(1, 4)),
    st.tuples(st.just("tick"), st.sampled_from([0.5, 5.5, 11.0])),
    st.tuples(st.sampled_from(["restart", "look", "settle", "keep", "replace_bridge"])),
)


def act(world: World, name: str, *arguments: bool | int | float) -> None:
    match name:
        case "restart":
            world.die()
            world.boot()
            world.link()
        case "look":
            world.ask_page()
            world.answer_page()
            world.take_page()
        case "mute_replay":
            world.replay_works = not world.replay_works or not world.orderly
        case _:
            getattr(world, name)(*arguments)


def run(script: list[tuple[str, ...]], *, replay: bool, hides: bool, bind: bool, orderly: bool) -> World:
    """The script, then peace, a batch, and peace again."""
    source = RankSource(0, "tcp://h:1", "tcp://h:2" if replay or not orderly else "", bind=bind)
    world = World(RankFeed(source, RULES), hides, orderly)
    if not orderly:
        world.settle()
    for name, *arguments in script:
        act(world, name, *arguments)  # type: ignore[arg-type]  # a script's arguments are those of its act
    world.replay_works = True
    world.settle()
    world.publish(heard=True)
    world.settle()
    return world


@given(
    script=st.lists(acts, max_size=60),
    replay=st.booleans(),
    hides=st.booleans(),
    bind=st.booleans(),
    orderly=st.booleans(),
)
def test_processes_are_told_apart(
    script: list[tuple[str, ...]], replay: bool, hides: bool, bind: bool, orderly: bool
) -> None:
    """User case A3, in any order: at rest only what the living process published is presented, without a hole and up
    to its newest batch; all of it where the state says `synced`. Where ends are heard in time, no name ever stood for
    two processes, not even for a moment."""
    world = run(script, replay=replay, hides=hides, bind=bind, orderly=orderly)
    assert world.alive is not None
    present = world.content
    published = {seq: b"%d/%d" % (world.alive.started_ms, seq) for seq in range(world.alive.next_seq)}
    first = world.alive.next_seq - len(present)
    assert present == [(seq, published[seq]) for seq in range(first, world.alive.next_seq)]
    if world.feed.state()[0] == "synced":
        assert first == 0
    if not hides:
        assert world.feed.incarnation.startswith(f"{world.alive.started_ms}.")
    world.check_names()
    if orderly:
        world.check_unmixed()
