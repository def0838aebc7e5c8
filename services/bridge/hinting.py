"""Hints at the bridge: every action of an envelope is judged, lowered to what the engine can do, and answered once.

What needs the engine is asked over HTTP by the shell (`effects.CallEngine`), each call answered by exactly one
`events.HintCallAnswered`; an envelope is answered when the last of its calls is.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal
from zlib import crc32

import msgspec

from schemas.base import BadMessageError, from_json
from schemas.hint import ActionResult
from schemas.session import SessionKey
from services.bridge.adapters.actions import Call, CallAnswer, Done, EngineFacts
from services.bridge.adapters.judging import KNOWN_TYPES, Judged, judge
from services.bridge.adapters.lowering import clipped, lower
from services.bridge.effects import CallEngine


@dataclass(frozen=True, slots=True)
class HintAnswer:
    """What a `HintResult` says, but for its place in the stream of facts."""

    rank: int
    session: SessionKey
    message_id: str
    results: tuple[ActionResult, ...]
    error: str | None = None


class _SessionHead(msgspec.Struct):
    """`schemas.session.SessionFact`, as far as it matters here."""

    session: SessionKey
    state: Literal["opened", "closed"]


@dataclass(slots=True)
class _Open:
    """An envelope of which some calls are not answered yet."""

    judged: Judged
    waits_for: int
    done: dict[int, Done]


class ClosedSessions:
    """Sessions that are over, the last ``limit`` that were closed: a hint that comes after is too late. By digests of
    their keys: a client may make an id as long as its headers."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._closed: OrderedDict[bytes, None] = OrderedDict()
        self.unreadable = 0

    def heard(self, payload: bytes) -> None:
        """A session was closed, or opened (again). What cannot be read is counted."""
        try:
            fact = from_json(payload, _SessionHead)
        except BadMessageError:
            self.unreadable += 1
            return
        key = _digest(fact.session.text())
        self._closed.pop(key, None)
        if fact.state == "closed":
            self._closed[key] = None
            if len(self._closed) > self._limit:
                self._closed.popitem(last=False)

    def __contains__(self, key: str) -> bool:
        return _digest(key) in self._closed

    def __len__(self) -> int:
        return len(self._closed)


def _digest(key: str) -> bytes:
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16).digest()


class HintDesk:
    """At most ``max_calls`` are under way; those of one session share one of ``lanes`` and stay in order. ``counts``:
    actions by (type, outcome), those of unknown types as ``other``; ``calls``: by how they ended."""

    def __init__(self, worker: str, *, max_calls: int, lanes: int, max_sessions: int) -> None:
        self._worker = worker
        self._max_calls = max_calls
        self._lanes = lanes
        self._tickets = 0
        self._open: dict[int, tuple[_Open, Call]] = {}
        self.closed = ClosedSessions(max_sessions)
        self.counts: Counter[tuple[str, str]] = Counter()
        self.calls: Counter[str] = Counter()
        self.hints = 0
        self.unreadable = 0

    @property
    def waiting(self) -> int:
        """Calls that are not answered."""
        return len(self._open)

    def received(self, payload: bytes, facts: EngineFacts, ranks: int, now: float) -> HintAnswer | list[CallEngine]:
        """One command: its answer, or the calls that it takes. ``now``: Unix seconds."""
        self.hints += 1
        judged = judge(payload, self._worker, ranks, int(now * 1000), self.closed.__contains__)
        self.unreadable += judged.error is not None
        lowered = lower(judged.asked, facts, judged.message_id, judged.rank)
        envelope = _Open(judged, len(lowered.calls), {**judged.done, **lowered.done})
        if len(self._open) + len(lowered.calls) > self._max_calls:
            for call in lowered.calls:
                self.calls["bridge_busy"] += 1
                self._settle(envelope, call, CallAnswer(problem="bridge_busy"))
            return self._answer(envelope)
        if not lowered.calls:
            return self._answer(envelope)
        lane = crc32(judged.session.text().encode("utf-8", "surrogatepass")) % self._lanes
        effects = []
        for call in lowered.calls:
            self._tickets += 1
            self._open[self._tickets] = envelope, call
            effects.append(CallEngine(self._tickets, lane, call.path, call.body))
        return effects

    def answered(self, ticket: int, answer: CallAnswer) -> HintAnswer | None:
        """A call is over; the answer to its envelope, if it was the last one. An unknown ticket changes nothing."""
        opened = self._open.pop(ticket, None)
        if opened is None:
            return None
        envelope, call = opened
        self.calls[answer.problem or f"http_{answer.status}"] += 1
        self._settle(envelope, call, answer)
        return self._answer(envelope) if envelope.waits_for == 0 else None

    def _settle(self, envelope: _Open, call: Call, answer: CallAnswer) -> None:
        envelope.waits_for -= 1
        told = call.read(call, answer)
        for asked in call.asked:
            envelope.done[asked.place] = clipped(asked, told[asked.place])

    def _answer(self, envelope: _Open) -> HintAnswer:
        judged = envelope.judged
        results = []
        for place, (action_id, action_type) in judged.heads.items():
            done = envelope.done[place]
            self.counts[action_type if action_type in KNOWN_TYPES else "other", done.outcome] += 1
            results.append(
                ActionResult(action_id=action_id, action_type=action_type, outcome=done.outcome, reason=done.reason)
            )
        return HintAnswer(judged.rank, judged.session, judged.message_id, tuple(results), judged.error)
