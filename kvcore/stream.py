"""Recovery of one rank's event stream: batches in, the same batches out in order, none twice, none missing unsaid.

One machine for both hops (docs/architecture.md, "KV events"). Rules:

- seq = last + 1 is delivered, with whatever was held behind it; seq <= last is a duplicate and dropped.
- A gap (also one from 0, when the first seq seen is higher) holds what is live and fetches what is missing. The hold
  buffer is bounded.
- ``replay`` recovery (the bridge asks its engine): missing batches come one by one. If the engine no longer has them,
  or fetching failed `Limits.attempts` times, or the buffer is full, the rank is cleared and its stream goes on from
  the held batches; the picture stays incomplete, and the state says so, until `Rebuilt` or a restart. One gap whose
  history is gone is fetched once; the next fetch waits for `Limits.backoff_s`, as it does after a failure.
- `Connected` (replay only) asks for the newest batch known and what follows, so that an idle engine's past is read at
  once. Until that batch has come again unchanged nothing is delivered: the engine may be another process.
- ``snapshot`` recovery (an indexer asks the bridge): a snapshot stands for everything up to its seq. It is asked for
  again, `Limits.backoff_s` apart, until it comes; after `Limits.attempts` failures the rank is cleared and blind. A
  full buffer drops its oldest batches, since a later snapshot covers them.
- Restart. ``replay``: a known or forgotten number with another payload, or `Restarted`. ``snapshot``: another
  incarnation; its first batch may be marked. The rank is cleared at once.

Pure: time comes in with each event, and `StreamRecovery.wake_at` says when to send a `Tick`.
"""

from __future__ import annotations

from collections import deque

from xxhash import xxh3_64_intdigest

from kvcore.stream_events import (
    Clear,
    Connected,
    Deliver,
    Fetch,
    FetchFailed,
    Heartbeat,
    Limits,
    LiveBatch,
    Rebuilt,
    Recovery,
    ReplayedBatch,
    ReplayEnded,
    Restarted,
    Restored,
    StateChanged,
    StreamCounters,
    StreamEffect,
    StreamEvent,
    StreamState,
    Tick,
)

__all__ = [
    "Clear",
    "Connected",
    "Deliver",
    "Fetch",
    "FetchFailed",
    "Heartbeat",
    "Limits",
    "LiveBatch",
    "Rebuilt",
    "Recovery",
    "ReplayEnded",
    "ReplayedBatch",
    "Restarted",
    "Restored",
    "StateChanged",
    "StreamCounters",
    "StreamEffect",
    "StreamEvent",
    "StreamRecovery",
    "StreamState",
    "Tick",
]


class StreamRecovery:
    """The machine of one rank's stream."""

    def __init__(self, recovery: Recovery, limits: Limits | None = None) -> None:
        self.recovery: Recovery = recovery
        self.limits = limits or Limits()
        self.counters = StreamCounters()
        self.incarnation: str | None = None
        self.last = -1
        """Number of the last batch delivered, or that a snapshot stands for."""
        self.state: StreamState = "blind"
        self.reason: str | None = "no_events"
        self._effects: list[StreamEffect] = []
        self._first = True
        self._held: dict[int, bytes] = {}
        self._held_bytes = 0
        self._token = 0
        self._fetching = False
        self._probe = False
        self._open_ended = False
        self._suspect: int | None = None  # a number delivered before the reconnect, to be seen again unchanged
        self._target = -1  # known to be published: what an answer lacks up to here is gone
        self._attempts = 0
        self._not_before = float("-inf")
        self._catching_up: str | None = None
        self._incomplete: str | None = None
        self._lag = -1
        self._fingerprints: dict[int, int] = {}
        self._retired: deque[str] = deque(maxlen=8)

    @property
    def held(self) -> int:
        """Batches waiting for what is missing before them."""
        return len(self._held)

    @property
    def held_bytes(self) -> int:
        """Their payloads."""
        return self._held_bytes

    @property
    def incomplete(self) -> str | None:
        """Why the picture lacks something for good, if it does."""
        return self._incomplete

    @property
    def fingerprint(self) -> int | None:
        """XXH3-64 of the last batch delivered (``replay`` only)."""
        return self._fingerprints.get(self.last)

    @property
    def wake_at(self) -> float | None:
        """When to send a `Tick`, if at all."""
        return self._not_before if self._catching_up and not self._fetching else None

    def handle(self, event: StreamEvent, now: float) -> list[StreamEffect]:
        """What to do, in this order. ``now``: seconds, any clock that does not go back."""
        effects: list[StreamEffect] = []
        self._effects = effects
        match event:
            case LiveBatch():
                self._live(event, now)
            case ReplayedBatch():
                self._replayed(event, now)
            case ReplayEnded():
                self._ended(event, now)
            case FetchFailed():
                self._failed(event, now)
            case Restored():
                self._restored(event, now)
            case Heartbeat():
                self._heartbeat(event, now)
            case Connected():
                self._connected(now)
            case Restarted():
                self._restart("restarted", self.incarnation)
            case Rebuilt():
                self._incomplete = None
            case Tick():
                self._fetch(now)
        self._say_state()
        return effects

    def accepts(self, token: int, incarnation: str, seq: int) -> bool:
        """Whether a snapshot of this mark moves the stream forward: ask before loading it, then send `Restored`."""
        running = self._fetching and token == self._token and incarnation not in self._retired
        return running and (incarnation != self.incarnation or seq >= self.last)

    def forget_retired(self) -> None:
        """The publisher is another process: it may use a name again that was over for the old one."""
        self._retired.clear()

    def contradicts(self, seq: int, payload: bytes) -> bool:
        """Whether ``seq`` was delivered with another payload: then the publisher is another process."""
        known = self._fingerprints.get(seq)
        return known is not None and known != xxh3_64_intdigest(payload)

    def resume(self, seq: int, missing: str | None, fingerprint: int | None) -> None:
        """Go on where an earlier machine was: the rank's blocks are those after ``seq``, their picture lacks what
        ``missing`` says. ``fingerprint`` of that batch: `Connected` then makes sure that it comes again unchanged."""
        self.incarnation = ""
        self.last = seq
        self._first = False
        self._incomplete = missing
        if fingerprint is not None:
            self._fingerprints[seq] = fingerprint
        self._effects = []
        self._say_state()

    def drop_held(self) -> None:
        """Where what is held came from is in doubt: its numbers are fetched with those before them."""
        self._target = max(self._target, max(self._held, default=-1))
        self._drop_held()

    # Batches

    def _live(self, batch: LiveBatch, now: float) -> None:
        if batch.incarnation in self._retired:
            self.counters.dropped += 1
            return
        if self.incarnation is None:
            self.incarnation = batch.incarnation
        elif batch.incarnation != self.incarnation:
            self._restart("new_incarnation", batch.incarnation)
        if batch.first and self._first:
            self.last = batch.seq - 1
        if batch.seq <= self.last or batch.seq in self._held:
            if self.recovery == "snapshot" or self._seen(batch):
                self.counters.duplicates += 1
                return
            self._restart("restarted", self.incarnation)
        if batch.seq == self.last + 1 and self._suspect is None:
            self._deliver(batch.seq, batch.payload)
            self._settle()
            return
        self._hold(batch.seq, batch.payload)
        if self._missing():
            self._catch_up("late_start" if self._first else "gap", now)

    def _seen(self, batch: LiveBatch) -> bool:
        """Whether exactly these bytes had this number before."""
        if batch.seq in self._held:
            return self._held[batch.seq] == batch.payload
        return self._fingerprints.get(batch.seq) == xxh3_64_intdigest(batch.payload)

    def _replayed(self, batch: ReplayedBatch, now: float) -> None:
        if batch.token != self._token or not self._fetching:
            return
        gone = batch.seq > self.last + 1
        unseen = self._suspect is not None and batch.seq <= self.last and batch.seq not in self._fingerprints
        if unseen or self.contradicts(batch.seq, batch.payload):
            self._restart("restarted", self.incarnation)
            self._catch_up("restarted", now)
            return
        if self._suspect is not None:
            gone = batch.seq > self._suspect
            self._suspect = None
        if batch.seq > self.last:
            self._hold(batch.seq, batch.payload)
        if gone:
            self._not_before = now + self.limits.backoff_s
            self._go_on_from(self._run_start(batch.seq), "history_gone")
        self._settle()

    def _hold(self, seq: int, payload: bytes) -> None:
        self._unhold(seq)
        self._held[seq] = payload
        self._held_bytes += len(payload)
        limits = self.limits
        if len(self._held) <= limits.hold_batches and self._held_bytes <= limits.hold_bytes:
            return
        if self.recovery == "replay":
            self._target = -1
            self._go_on_from(self._run_start(max(self._held)), "hold_overflow")
            return
        self._target = max(self._target, seq)
        while self._held and (len(self._held) > limits.hold_batches or self._held_bytes > limits.hold_bytes):
            self._unhold(min(self._held))
            self.counters.dropped += 1

    def _unhold(self, seq: int) -> bytes | None:
        payload = self._held.pop(seq, None)
        if payload is not None:
            self._held_bytes -= len(payload)
        return payload

    def _drop_held(self) -> None:
        self.counters.dropped += len(self._held)
        self._held.clear()
        self._held_bytes = 0

    def _run_start(self, seq: int) -> int:
        """First number of the run of held batches that ends at ``seq``; ``seq`` + 1 when that is not held."""
        start = seq + 1
        while start - 1 in self._held:
            start -= 1
        return start

    def _settle(self) -> None:
        """Deliver what is held behind the last one delivered; nothing missing: caught up."""
        while self._held and self._suspect is None and (payload := self._unhold(self.last + 1)) is not None:
            self._deliver(self.last + 1, payload)
        # Of a fetch for what we do not know of, only its end tells that it is over.
        asking = self._probe or (self._fetching and self._open_ended)
        if not self._missing() and not asking:
            self._catching_up = None
            self._attempts = 0

    def _deliver(self, seq: int, payload: bytes) -> None:
        if seq == 0 and self._first:
            self._incomplete = None
        self._effects.append(Deliver(seq, payload, self._first))
        self._first = False
        self.last = seq
        if self.recovery == "replay":
            self._fingerprints[seq] = xxh3_64_intdigest(payload)
            self._fingerprints.pop(seq - self.limits.remembered, None)

    # Fetching

    def _missing(self) -> bool:
        return bool(self._held) or self._target > self.last

    def _catch_up(self, reason: str, now: float) -> None:
        if self._catching_up is None:
            self._catching_up = reason
            self.counters.gaps += reason in ("gap", "late_start")
        self._fetch(now)

    def _fetch(self, now: float) -> None:
        if self._fetching or not self._catching_up or now < self._not_before:
            return
        self._token += 1
        self._fetching = True
        self._target = max(self._target, max(self._held, default=-1))
        self._open_ended = not self._missing()
        self._probe = False
        self.counters.fetches += 1
        self._effects.append(Fetch(self._token, self.last + 1 if self._suspect is None else self._suspect))

    def _connected(self, now: float) -> None:
        if self.recovery != "replay":
            return
        if self.incarnation is None:
            self.incarnation = ""
        # What is held may be of another process: if not, it comes again behind the newest batch known.
        self._drop_held()
        self._target = -1
        self._fetching = False
        self._probe = True
        if self._suspect is None and self.last in self._fingerprints:
            self._suspect = self.last
        self._catch_up("connected", now)

    def _ended(self, event: ReplayEnded, now: float) -> None:
        if event.token != self._token or not self._fetching:
            return
        self._fetching = False
        self._attempts = 0
        if self._suspect is not None:
            # The engine does not have its own newest batch: it is another process.
            self._restart("restarted", self.incarnation)
            self._catch_up("restarted", now)
            return
        if self._missing() and self.last + 1 <= self._target:
            self._not_before = now + self.limits.backoff_s
            self._go_on_from(self._run_start(self._target), "history_gone")
        self._settle()
        if self._missing():
            self._catching_up = "gap"
        self._fetch(now)

    def _failed(self, event: FetchFailed, now: float) -> None:
        if event.token != self._token or not self._fetching:
            return
        self._fetching = False
        self._attempts += 1
        self._not_before = now + self.limits.backoff_s
        final = self._attempts >= self.limits.attempts or not event.retry
        if self._catching_up:
            self._catching_up = event.reason
        if not final:
            return
        if self.recovery == "snapshot":
            if self._catching_up and self._attempts == self.limits.attempts:
                self._clear(event.reason)
                self.last = -1
            return
        self._attempts = 0
        doubtful, self._suspect = self._suspect is not None, None
        if not doubtful:
            self._settle()
        if doubtful or self._missing():
            # In doubt whether it is still the same process, what is known of it is not kept.
            self._go_on_from(self._run_start(max(self._target, self.last)), event.reason)
        elif self._first:
            self._incomplete = event.reason
        self._settle()

    def _restored(self, event: Restored, now: float) -> None:
        if not self.accepts(event.token, event.incarnation, event.seq):
            return
        if event.incarnation != self.incarnation:
            self._adopt(event.incarnation)
        self._fetching = False
        self._attempts = 0
        self._incomplete = None
        self._first = False
        self.last = event.seq
        for seq in [seq for seq in self._held if seq <= event.seq]:
            self._unhold(seq)
        self._not_before = now + self.limits.backoff_s
        self._settle()

    # Losing history

    def _go_on_from(self, start: int, reason: str) -> None:
        """What is missing before ``start`` will not come: forget the rank, and go on from there."""
        self._clear(reason)
        self._suspect = None
        self._incomplete = reason
        for seq in [seq for seq in self._held if seq < start]:
            self._unhold(seq)
            self.counters.dropped += 1
        self.last = start - 1
        self._settle()

    def _clear(self, reason: str) -> None:
        self._effects.append(Clear(reason))
        self.counters.cleared += 1
        self._first = True
        self._fingerprints.clear()

    def _restart(self, reason: str, incarnation: str | None) -> None:
        self.counters.restarts += 1
        self._clear(reason)
        self._adopt(incarnation)

    def _adopt(self, incarnation: str | None) -> None:
        if self.incarnation is not None and incarnation != self.incarnation:
            self._retired.append(self.incarnation)
        self.incarnation = incarnation
        self.last = self._target = self._lag = -1
        self._drop_held()
        self._fetching = self._probe = False
        self._suspect = None
        self._attempts = 0
        self._catching_up = self._incomplete = None

    def _heartbeat(self, event: Heartbeat, now: float) -> None:
        if event.incarnation in self._retired:
            return
        if event.incarnation != self.incarnation:
            if self.incarnation is None:
                self.incarnation = event.incarnation
            else:
                self._restart("new_incarnation", event.incarnation)
            self._lag = event.seq
        if self._lag > self.last:
            self._target = max(self._target, self._lag)
            self._catch_up("late_start" if self._first else "gap", now)
        self._lag = max(self._lag, event.seq)

    # State

    def _say_state(self) -> None:
        state: StreamState = "synced"
        reason: str | None = None
        if self.incarnation is None:
            state, reason = "blind", "no_events"
        elif self._catching_up:
            given_up = self.recovery == "snapshot" and self._attempts >= self.limits.attempts
            state, reason = "blind" if given_up else "catching_up", self._catching_up
        elif self._incomplete:
            state, reason = "catching_up", self._incomplete
        if (state, reason) != (self.state, self.reason):
            self.state, self.reason = state, reason
            self._effects.append(StateChanged(state, reason))
