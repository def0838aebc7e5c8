"""One rank's event stream at the bridge: which process it comes from, and what is forwarded under which incarnation.

A sequence number alone does not tell a restarted engine from a running one (spec: engine-events §2.5: last before 1,
first after 1). So whenever the rank's socket has lost its peer, its batches wait until the engine's page, asked after
the socket stood again, has said which process it is; then they are fed to `kvcore.stream`, which finds gaps,
duplicates and regressions. After each such pause, once more soon after it (the first batches may have come before the
subscription was in force), and now and then while the rank is silent, the replay socket is asked for what may have been
missed (a *probe* where the process is known to be the same), because nobody announces a lost tail. A probe begins with
the newest batch known: an engine that has another one there is another process.

Two processes never stand under one name, as long as the loss of a process's socket is seen before a page or a replay
of the next process. A peer that goes without a word (its host lost power) breaks that order: batches of both can stand
under one name until the socket's keep-alives fail and the next page or probe clears the rank; and for good only where
nobody can be asked for the numbers in doubt (no replay socket, or a buffer that has lost them).

Incarnations are named ``<process start, Unix ms>.<n>``: n is 0 for a stream that is complete from its number 0, and the
Unix ms of the loss for one that goes on after lost history. So a bridge that restarts and reads the whole history
again speaks of the same incarnation, and nobody has to clear anything.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvcore.stream import (
    Clear,
    Connected,
    Deliver,
    Fetch,
    FetchFailed,
    Limits,
    LiveBatch,
    Rebuilt,
    ReplayedBatch,
    ReplayEnded,
    Restarted,
    StateChanged,
    StreamEvent,
    StreamRecovery,
    StreamState,
    Tick,
)
from schemas.worker import RankStream
from services.bridge.checkpoint import RankCheckpoint
from services.bridge.endpoints import RankSource

_RANKS_REMEMBERED = 8
_NAMES_REMEMBERED = 64
_NO_REPLAY = "no_replay"


@dataclass(frozen=True, slots=True)
class Forward:
    """Send this batch on, and apply it to the bridge's own index. ``first`` of its ``incarnation``."""

    seq: int
    payload: bytes
    incarnation: str
    first: bool


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop every block of the rank: its history has a hole (``reason``) or its process is another one."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask the replay socket for everything from ``start``; answer with ``ticket``."""

    start: int
    ticket: int


@dataclass(frozen=True, slots=True)
class Resume:
    """The process is the one of the checkpoint: its blocks of the rank are the bridge's index from now on."""


RankEffect = Forward | Forget | Ask | Resume


@dataclass(frozen=True, slots=True)
class FeedRules:
    """Seconds and batches. ``identify_timeout_s``: how long batches wait to learn which process sent them."""

    hold_limit: int
    replay_attempts: int
    replay_retry_s: float
    identify_timeout_s: float
    probe_after_s: float


@dataclass(slots=True)
class FeedCounters:
    """Since the start: batches that waited in vain for a name, and probes that brought something."""

    overflowed: int = 0
    probes: int = 0
    probes_found: int = 0


@dataclass(slots=True)
class RankFeed:
    """The stream of one rank.

    ``base``: the process's start (Unix ms), or a stand-in where the engine hides it. ``suspect_since``: nobody knows
    which process sends; ``None``: known. ``previous``: the incarnation that an earlier bridge named last.
    ``checkpoint``: what it left of this rank, until it is used. ``names``: the newest incarnations of this one.
    """

    source: RankSource
    rules: FeedRules
    base: str = ""
    incarnation: str = ""
    connected: bool = False
    suspect_since: float | None = 0.0
    previous: str = ""
    checkpoint: RankCheckpoint | None = None
    machine: StreamRecovery = field(init=False)
    counters: FeedCounters = field(default_factory=FeedCounters)
    _pending: deque[tuple[int, bytes]] = field(default_factory=deque)
    _pending_since: float = 0.0
    _stale: int = 0  # of those pending: from before the socket was lost last
    _confirmed: bool = False  # a page named the process behind the socket that stands
    _doomed: bool = False  # the page speaks of another process, the socket is still the old one's
    names: deque[str] = field(default_factory=lambda: deque(maxlen=_NAMES_REMEMBERED))
    _seen_ranks: set[int] = field(default_factory=set)
    _fresh: bool = True
    _ticket: int = 0
    _probe: int | None = None
    _probe_found: bool = False  # that there was something to be had
    _fetch: tuple[int, int, int] | None = None  # ticket, the machine's token, start
    _unanswered: tuple[int, int] | None = None  # token, start
    _heard_at: float = 0.0
    _probe_again_at: float | None = None

    def __post_init__(self) -> None:
        rules = self.rules
        limits = Limits(
            hold_batches=rules.hold_limit + 1, attempts=rules.replay_attempts, backoff_s=rules.replay_retry_s
        )
        self.machine = StreamRecovery("replay", limits)

    # What happens

    def batch(self, seq: int, payload: bytes, now: float) -> list[RankEffect]:
        """A live batch. While nobody knows which process sent it, it waits."""
        self._heard_at = now
        if self.suspect_since is None:
            return self._feed(LiveBatch(seq, payload), now)
        if self._doomed:
            self.counters.overflowed += 1
            return []
        if not self._pending:
            self._pending_since = now
        if len(self._pending) >= self.rules.hold_limit:
            self._drop_pending(1)
        self._pending.append((seq, payload))
        return []

    def disconnected(self, now: float) -> None:
        """The socket lost its peer. One that we bound may have others."""
        self.connected = self.connected and self.source.bind
        self._suspect(now)
        self._stale = len(self._pending)
        if self.source.replay:
            self.machine.drop_held()

    def connected_now(self, now: float) -> None:
        """The socket stands (again); only a page asked from now on tells which process is behind it."""
        self.connected = True
        self._suspect(now)

    def identified(self, started_ms: int | None, asked_at: float, now: float) -> list[RankEffect]:
        """A process answered a page asked at ``asked_at``. ``started_ms`` ``None``: it does not say when it started;
        then its newest batch tells after a loss of the socket, and without a replay socket it is taken for a new one.
        """
        out: list[RankEffect] = []
        known = bool(self.base)
        base = str(started_ms) if started_ms is not None else self.base or f"u{round(now * 1000)}"
        other = base != self.base
        if other or started_ms is None or self.source.replay:
            # What waits may be of the process before. A replay brings all of the new one anyway.
            self._drop_pending(len(self._pending) if other and known and self.source.replay else self._stale)
        if other and not known and (kept := self._fitting(started_ms)) is not None:
            out += self._resume(kept)
        elif other:
            out += self._other_process(base, known, now)
        if self.suspect_since is None or not self.connected or self._doomed or asked_at < self.suspect_since:
            return out
        if self._fresh or started_ms is None:
            out += self._look_back(now)
        else:
            out += self._start_probe(now)
        self._confirmed = True
        return out + self._release(now)

    def _fitting(self, started_ms: int | None) -> RankCheckpoint | None:
        """The checkpoint, if it may be of this process."""
        kept, self.checkpoint = self.checkpoint, None
        if kept is None or kept.seq < 0:
            return None
        if started_ms is not None:
            return kept if kept.process == str(started_ms) else None
        return kept if kept.process.startswith("u") and kept.fingerprint and self.source.replay else None

    def _resume(self, kept: RankCheckpoint) -> list[RankEffect]:
        self.base, self.incarnation = kept.process, kept.incarnation
        self.names.append(kept.incarnation)
        asked = self.source.replay and kept.fingerprint
        self.machine.resume(kept.seq, kept.missing, int(kept.fingerprint, 16) if asked else None)
        return [Resume()]

    def _other_process(self, base: str, known: bool, now: float) -> list[RankEffect]:
        self.base = base
        self._name(f"{base}.0", now)
        self._fresh = True
        self._seen_ranks.clear()
        self._probe = self._fetch = self._unanswered = None
        if not known:
            return []
        out = self._feed(Restarted(), now)
        if self.suspect_since is None and self._confirmed:
            # Its socket is about to break, if it has not already; until then it brings what the old process left.
            self._suspect(now)
            self.connected = False
            self._doomed = True
        elif self.suspect_since is None:
            # Its batches went on nameless and are forgotten now: read them again, from its start.
            self._confirmed = True
            self._fresh = False
            if self.source.replay:
                out += self._feed(Connected(), now)
        return out

    def tick(self, now: float) -> list[RankEffect]:
        """Time passes: postponed fetches, batches that waited too long for a name, probes of a silent rank."""
        out: list[RankEffect] = []
        timeout_s = self.rules.identify_timeout_s
        if self._doomed and self.suspect_since is not None and now - self.suspect_since >= timeout_s:
            # It did not break: whoever is behind it, what the replay socket says counts.
            self._doomed, self.connected, self._confirmed = False, True, True
            out += self._look_back(now) + self._release(now)
        elif self._pending and self.connected and self.base and now - self._pending_since >= timeout_s:
            # Nobody says which process sends them: as of an engine that hides its start.
            self._drop_pending(self._stale)
            self._confirmed = False
            if self.machine.last < 0:
                self._name(f"{self.base}.{max(1, round(now * 1000))}", now)  # nothing to tell the process by
            out += self._look_back(now) + self._release(now)
        if self.suspect_since is None and self.machine.wake_at is not None and now >= self.machine.wake_at:
            out += self._feed(Tick(), now)
        again = self._probe_again_at is not None and now >= self._probe_again_at
        if self.suspect_since is None and (again or now - self._heard_at >= self.rules.probe_after_s):
            self._probe_again_at = None
            out += self._start_probe(now)
        return out

    def replayed(
        self,
        ticket: int,
        batches: tuple[tuple[int, bytes], ...],
        problem: str | None,
        now: float,
        *,
        more: bool = False,
    ) -> list[RankEffect]:
        """A replay came to its end (or to a ``problem``, with what had come until then); ``more`` of it follows."""
        out: list[RankEffect] = []
        if self.suspect_since is not None:
            # The socket was lost since: another process may have answered. Asked again once it has a name.
            if ticket == self._probe:
                self._probe = None
            elif self._fetch is not None and ticket == self._fetch[0]:
                self._unanswered, self._fetch = self._fetch[1:], None
        elif ticket == self._probe:
            if not more:
                self._probe = None
            for seq, payload in batches:
                # Below the last one only what contradicts it, which is a restart.
                if seq > self.machine.last or self.machine.contradicts(seq, payload):
                    if not self._probe_found:
                        self.counters.probes_found += 1
                        self._probe_found = True
                    out += self._feed(LiveBatch(seq, payload), now)
        elif (fetch := self._fetch) is not None and ticket == fetch[0]:
            token = fetch[1]
            for seq, payload in batches:
                out += self._feed(ReplayedBatch(token, seq, payload), now)
            if more or self._fetch != fetch:
                return out
            self._fetch = None
            out += self._feed(ReplayEnded(token) if problem is None else FetchFailed(token, problem), now)
        return out

    def rebuilt(self, now: float) -> None:
        """The batch just forwarded emptied the engine's pool: nothing is missing any more."""
        self._feed(Rebuilt(), now)

    def stated_rank(self, rank: int) -> None:
        """A batch named its data-parallel rank. Two names on one socket mean that two ranks share a port (A13)."""
        if len(self._seen_ranks) < _RANKS_REMEMBERED:
            self._seen_ranks.add(rank)

    def left_behind(self) -> RankCheckpoint:
        """What the bridge's index of this rank stands for, when it has everything that was forwarded."""
        machine = self.machine
        return RankCheckpoint(
            rank=self.source.rank,
            incarnation=self.incarnation,
            seq=machine.last,
            missing=machine.incomplete,
            fingerprint="" if machine.fingerprint is None else f"{machine.fingerprint:016x}",
        )

    # What it looks like from outside

    @property
    def last(self) -> int:
        """Number of the last batch forwarded, -1 before the first."""
        return self.machine.last

    def stream(self, rejected: int) -> RankStream:
        """As `WorkerState.streams` says it."""
        state, reason = self.state()
        return RankStream(
            rank=self.source.rank,
            incarnation=self.incarnation,
            seq=self.last,
            state=state,
            reason=reason,
            gaps=self.machine.counters.gaps,
            rejected=rejected,
        )

    def state(self) -> tuple[StreamState, str | None]:
        """How far the stream can be trusted, and unless fully, why."""
        machine = self.machine
        if len(self._seen_ranks) > 1:
            return "blind", "port_collision"
        if self.suspect_since is not None:
            return "catching_up", "reconnecting" if self.base else "connecting"
        if machine.last < 0 and not self.source.replay:
            return "blind", "no_events"
        return machine.state, machine.reason

    # Inside

    def _drop_pending(self, count: int) -> None:
        """Give up the oldest ``count`` of those that wait; the hole is noticed like any other."""
        for _ in range(count):
            self._pending.popleft()
        self.counters.overflowed += count
        self._stale = max(0, self._stale - count)

    def _suspect(self, now: float) -> None:
        """From now on nobody knows which process sends."""
        if self._doomed:
            self._doomed = False
            self._drop_pending(len(self._pending))
        self.suspect_since = now

    def _look_back(self, now: float) -> list[RankEffect]:
        """Whether the process is the one that published the newest batch known, and what it has published since. Where
        nobody can be asked it is taken for another one."""
        fresh, self._fresh = self._fresh, False
        self._probe = None
        if self.source.replay:
            return self._feed(Connected(), now)
        if fresh or (self.machine.last < 0 and not self.machine.held):
            return []
        self._name(f"{self.base}.0", now)
        return self._feed(Restarted(), now)

    def _release(self, now: float) -> list[RankEffect]:
        self.suspect_since = None
        self._stale = 0
        self._heard_at = now
        self._probe_again_at = now + self.rules.replay_retry_s
        out: list[RankEffect] = []
        if self._unanswered is not None:
            token, start = self._unanswered
            self._ticket += 1
            self._fetch, self._unanswered, self._probe = (self._ticket, token, start), None, None
            out.append(Ask(start, self._ticket))
        while self._pending:
            seq, payload = self._pending.popleft()
            out += self._feed(LiveBatch(seq, payload), now)
        return out

    def _start_probe(self, now: float) -> list[RankEffect]:
        self._heard_at = now
        if not self.source.replay or self._probe is not None or self._fetch is not None:
            return []
        self._ticket += 1
        self._probe = self._ticket
        self._probe_found = False
        self.counters.probes += 1
        return [Ask(max(0, self.machine.last), self._ticket)]

    def _name(self, incarnation: str, now: float) -> None:
        """Begin an incarnation. A name that stood for something else already would hide the change."""
        taken = self.previous.rpartition(".")[0] == self.base and self.previous != incarnation
        number = max(1, round(now * 1000))
        while taken or incarnation in self.names:
            taken = False
            incarnation = f"{self.base}.{number}"
            number += 1
        self.names.append(incarnation)
        self.incarnation = incarnation

    def _feed(self, event: StreamEvent, now: float) -> list[RankEffect]:
        out: list[RankEffect] = []
        waiting: deque[StreamEvent] = deque([event])
        while waiting:
            current = waiting.popleft()
            for effect in self.machine.handle(current, now):
                match effect:
                    case Deliver():
                        out.append(Forward(effect.seq, effect.payload, self.incarnation, effect.first))
                    case Clear():
                        if not isinstance(current, Restarted):
                            self._name(f"{self.base}.{max(1, round(now * 1000))}", now)
                        out.append(Forget(effect.reason))
                    case Fetch():
                        if self.source.replay:
                            self._ticket += 1
                            # From the newest batch known on: whoever has another one there is another process.
                            start = max(0, min(effect.from_seq, self.machine.last))
                            self._fetch = (self._ticket, effect.token, start)
                            self._unanswered = None
                            self._probe = None
                            out.append(Ask(start, self._ticket))
                        else:
                            waiting.append(FetchFailed(effect.token, _NO_REPLAY, retry=False))
                    case StateChanged():
                        pass
        return out
