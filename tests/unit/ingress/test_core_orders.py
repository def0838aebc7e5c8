"""Any order of anything: every accepted request ends exactly once, and nothing of it is left behind (B2, C2, D3).

A naive shell plays against the core: it does what the effects say and reports what it likes, late and twice. What it
has seen is the model.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from schemas.admit import Held, Refused
from schemas.base import Fact
from schemas.ingress import IngressState
from schemas.request import RequestAccepted, RequestDispatched, RequestEnd, RequestFirstToken
from services.ingress import events
from services.ingress.answers import AnswerFacts
from services.ingress.core import IngressCore, IngressRules
from services.ingress.effects import (
    Answer,
    AskAdmission,
    AskHedge,
    BreakOff,
    CancelAdmission,
    CloseUpstream,
    CountPrompt,
    Effect,
    Follow,
    Forward,
    Publish,
    PublishRow,
    Relay,
)
from tests.unit.ingress.builders import GOOD, counted, granted, held, received, refused, worker

NAMES = ("w1", "w2", "w3")
names = st.sampled_from(NAMES)
attempts = st.integers(0, 1)
pick = st.integers(0, 50)
undecided = st.sampled_from(["admit_silent", "no_responders", "bus_down", "bad_reply", "hold_timeout"])
failures = st.sampled_from(
    [
        "connect_error",
        "first_byte_timeout",
        "idle_timeout",
        "total_timeout",
        "connection_lost",
        "event_too_large",
        "api_not_served",
    ]
)
ARRIVALS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {}),
    "batch": ("/v1/completions", {"prompt": ["a", "b"]}),
    "messages": ("/v1/messages", {}),
    "stored": ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}),
    "count": ("/v1/messages/count_tokens", {}),
}
answers = st.sampled_from([GOOD, AnswerFacts(), AnswerFacts(error="x"), AnswerFacts(data_lines=3)])


class Seen:
    """What the naive shell saw of one request."""

    def __init__(self) -> None:
        self.effects: list[Effect] = []
        self.accepted = 0
        self.ends: list[RequestEnd] = []
        self.rows: list[PublishRow] = []
        self.open: set[int] = set()
        self.closed: Counter[int] = Counter()
        self.forwards: list[Forward] = []
        self.asked = 0
        self.asking = False
        self.hedge_asked = False
        self.hedging = False
        self.retried = False
        self.counts = False
        self.relayed = self.answered = self.broken = 0


class Orders(RuleBasedStateMachine):
    """Rules are events; `check` is the contract of every effect."""

    @initialize(rules=st.builds(IngressRules, retry=st.booleans(), hedge=st.booleans(), fallback=st.booleans()))
    def start(self, rules: IngressRules) -> None:
        self.rules_in_force = rules
        self.core = IngressCore("ingress-1", 1, rules)
        self.now = 1000.0
        self.seen: dict[str, Seen] = defaultdict(Seen)
        self.worker_seq = 0
        self.request_seqs: Counter[type[Fact]] = Counter()
        self.state_seq = -1
        self.stopped = False
        for name in NAMES:
            self.play(worker(name))

    def play(self, event: events.Event) -> list[Effect]:
        self.now += 0.25
        effects = self.core.handle(event, self.now)
        for effect in effects:
            self.check(effect)
        return effects

    # The contract

    def check(self, effect: Effect) -> None:
        if isinstance(effect, Publish) and isinstance(effect.fact, IngressState):
            self.check_state(effect.fact)
            return
        seen = self.seen[self.request_of(effect)]
        assert not seen.rows or isinstance(effect, PublishRow), "after the row there is nothing"
        seen.effects.append(effect)
        checks: dict[type, Callable[[Seen, Any], None]] = {
            Publish: self.check_fact,
            PublishRow: self.check_row,
            AskAdmission: self.check_ask,
            CancelAdmission: self.check_cancel,
            AskHedge: self.check_ask_hedge,
            Forward: self.check_forward,
            Follow: self.check_follow,
            CloseUpstream: self.check_close,
            Relay: self.check_relay,
            Answer: self.check_answer,
            BreakOff: self.check_break_off,
            CountPrompt: lambda seen, effect: None,
        }
        checks[type(effect)](seen, effect)

    def request_of(self, effect: Any) -> str:
        if isinstance(effect, Publish):
            return str(effect.fact.request_id)  # type: ignore[attr-defined]
        if isinstance(effect, PublishRow):
            return effect.message_id
        if isinstance(effect, AskAdmission | AskHedge):
            return effect.question.request_id
        if isinstance(effect, CancelAdmission):
            return effect.cancel.request_id
        return str(effect.request_id)

    def check_state(self, state: IngressState) -> None:
        self.state_seq += 1
        assert state.seq == self.state_seq
        living = {name for name, seen in self.seen.items() if seen.accepted and not seen.ends}
        assert {one.request_id for one in state.in_flight} == living
        assert all(one.worker is None for one in state.in_flight if self.seen[one.request_id].counts)
        racing = {name for name, seen in self.seen.items() if name in living and len(seen.open) == 2}
        assert {one.request_id for one in state.in_flight if one.hedge is not None} == racing

    def check_fact(self, seen: Seen, effect: Publish) -> None:
        assert effect.fact.seq == self.request_seqs[type(effect.fact)]
        self.request_seqs[type(effect.fact)] += 1
        if isinstance(effect.fact, RequestAccepted):
            seen.accepted += 1
            assert seen.accepted == 1
            return
        assert seen.accepted, "nothing is said of a request before it is accepted"
        if isinstance(effect.fact, RequestEnd):
            seen.ends.append(effect.fact)
            assert len(seen.ends) == 1
        if isinstance(effect.fact, RequestFirstToken):
            assert seen.relayed

    def check_row(self, seen: Seen, effect: PublishRow) -> None:
        seen.rows.append(effect)
        assert len(seen.rows) == 1
        (end,) = seen.ends
        assert effect.row.request is not None
        assert (effect.row.request.outcome, effect.row.request.reason) == (end.outcome, end.reason)
        assert not seen.open, "an engine's connection was left open"
        assert not seen.asking, "the leader was left waiting"
        assert not seen.hedging, "a second sending was left booked"
        assert (effect.row.request.hedged is not None) == (len(seen.forwards) == 2 and not seen.retried)
        answering = [one.worker for one in seen.forwards if one.attempt + 1 == effect.row.request.attempts]
        assert end.worker in answering or (end.worker is None and not answering)
        if end.outcome == "completed":
            assert seen.relayed
            assert not seen.answered
            assert not seen.broken
        if end.outcome in ("refused", "client_disconnect"):
            assert not seen.broken
        assert seen.relayed or seen.answered or end.outcome == "client_disconnect", "the client was left without a word"

    def check_ask(self, seen: Seen, effect: AskAdmission) -> None:
        assert not seen.counts
        assert effect.question.attempt == seen.asked
        assert not effect.question.hedge
        seen.retried = seen.asked > 0
        assert set(effect.question.excluded) == {forward.worker for forward in seen.forwards}
        seen.asked += 1
        seen.asking = True

    def check_ask_hedge(self, seen: Seen, effect: AskHedge) -> None:
        """Once, of what was granted and not answered, and never besides a retry."""
        assert self.rules_in_force.hedge
        assert self.rules_in_force.retry
        assert not any((seen.counts, seen.hedge_asked, seen.relayed, seen.answered, self.stopped))
        (first,) = seen.forwards
        assert seen.open == {first.attempt}
        assert (effect.question.attempt, effect.question.hedge) == (1, True)
        assert effect.question.excluded == (first.worker,)
        seen.hedge_asked = seen.hedging = True

    def check_cancel(self, seen: Seen, effect: CancelAdmission) -> None:
        if effect.cancel.hedge:
            assert seen.hedging
            seen.hedging = False
            return
        assert seen.asking
        seen.asking = False

    def check_follow(self, seen: Seen, effect: Follow) -> None:
        """The first is closed, the second is said to be the request's, and is nobody else's booking."""
        assert seen.open == {effect.attempt} == {1}
        assert seen.hedging
        last = [one.fact for one in seen.effects if isinstance(one, Publish)][-1]
        assert isinstance(last, RequestDispatched)
        assert (last.worker, last.attempt) == (seen.forwards[1].worker, 1)
        seen.hedging = False

    def check_forward(self, seen: Seen, effect: Forward) -> None:
        assert effect.attempt == len(seen.forwards) < (2 if self.rules_in_force.retry else 1)
        last = [one.fact for one in seen.effects if isinstance(one, Publish)][-1]
        if seen.counts:
            assert not isinstance(last, RequestDispatched)
            seen.retried = effect.attempt > 0
        elif seen.hedging:
            assert not seen.relayed
        else:
            assert isinstance(last, RequestDispatched)
            assert (last.worker, last.attempt) == (effect.worker, effect.attempt)
        assert effect.worker not in {one.worker for one in seen.forwards}
        seen.forwards.append(effect)
        seen.open.add(effect.attempt)
        seen.asking = False

    def check_close(self, seen: Seen, effect: CloseUpstream) -> None:
        seen.closed[effect.attempt] += 1
        assert seen.closed[effect.attempt] == 1
        seen.open.discard(effect.attempt)

    def check_relay(self, seen: Seen, effect: Relay) -> None:
        seen.relayed += 1
        assert seen.relayed == 1
        assert not seen.answered

    def check_answer(self, seen: Seen, effect: Answer) -> None:
        seen.answered += 1
        assert seen.answered == 1
        assert not seen.relayed, "an answer of ours after the engine's has begun"
        seen.asking = False

    def check_break_off(self, seen: Seen, effect: BreakOff) -> None:
        seen.broken += 1
        assert seen.broken == seen.relayed == 1

    # What happens

    def some(self, number: int) -> str:
        """One of the requests so far: mostly one that lives, sometimes one that has ended, or nobody's."""
        living = sorted(name for name, seen in self.seen.items() if not seen.rows)
        known = living if living and number % 5 else sorted(self.seen)
        return known[number % len(known)] if known else "nobody"

    @precondition(lambda self: not self.stopped and len(self.core) < 3)
    @rule(stream=st.booleans(), what=st.sampled_from(["chat", *ARRIVALS]))
    def arrives(self, stream: bool, what: str) -> None:
        request_id = f"r{len(self.seen)}"
        path, members = ARRIVALS[what]
        self.seen[request_id].counts = what == "count"
        self.play(received(request_id, path=path, stream=stream, **members))

    @rule(number=pick, choice=pick)
    def goes_on(self, number: int, choice: int) -> None:
        """One request takes the next step of the usual way, as its last effect asks."""
        request_id = self.some(number)
        seen = self.seen.get(request_id)
        if seen is None or not seen.effects:
            return
        attempt = max(0, len(seen.forwards) - 1)
        tried = {one.worker for one in seen.forwards}
        for effect in reversed(seen.effects):
            match effect:
                case CountPrompt():
                    self.play(counted(request_id))
                case AskAdmission():
                    name = next((name for name in NAMES if name not in tried), "w1")
                    self.play(granted(request_id, name, effect.question.attempt))
                case Forward() if choice % 3 == 0:
                    self.play(events.AnswerFailed(request_id=request_id, attempt=attempt, reason="connection_lost"))
                case Forward() if choice % 3 == 1 and not seen.hedge_asked and self.rules_in_force.hedge:
                    self.play(events.HedgeDue(request_id=request_id, attempt=attempt))
                case AskHedge():
                    name = next(name for name in NAMES if name not in tried)
                    reply = granted(request_id, name, 1).reply
                    assert not isinstance(reply, Held | Refused)
                    self.play(events.HedgeAnswered(request_id=request_id, attempt=1, granted=reply))
                case Forward():
                    attempt = choice % (attempt + 1)
                    self.play(events.FirstByte(request_id=request_id, attempt=attempt, status=200))
                case Relay():
                    self.is_answered_at(request_id, attempt, GOOD)
                case _:
                    continue
            return

    @rule(number=pick, choice=pick)
    def goes_on_too(self, number: int, choice: int) -> None:
        """The usual way is usual."""
        self.goes_on(number, choice)

    @rule(number=pick, choice=pick)
    def goes_on_as_well(self, number: int, choice: int) -> None:
        """The usual way is very usual."""
        self.goes_on(number, choice)

    @rule(number=pick, tokens=st.sampled_from([None, 0, 9]))
    def is_counted(self, number: int, tokens: int | None) -> None:
        self.play(counted(self.some(number), tokens))

    @rule(number=pick, attempt=attempts, name=names)
    def is_granted(self, number: int, attempt: int, name: str) -> None:
        request_id = self.some(number)
        if request_id not in self.seen or name not in {one.worker for one in self.seen[request_id].forwards}:
            self.play(granted(request_id, name, attempt))

    @rule(number=pick, attempt=attempts)
    def is_held(self, number: int, attempt: int) -> None:
        self.play(held(self.some(number), attempt))

    @rule(number=pick, attempt=attempts)
    def is_refused(self, number: int, attempt: int) -> None:
        self.play(refused(self.some(number), attempt))

    @rule(number=pick, attempt=attempts, reason=undecided)
    def is_undecided(self, number: int, attempt: int, reason: Any) -> None:
        self.play(events.AdmitFailed(request_id=self.some(number), attempt=attempt, reason=reason))

    @rule(number=pick, attempt=attempts, status=st.sampled_from([200, 200, 404, 500, 503]))
    def first_byte(self, number: int, attempt: int, status: int) -> None:
        self.play(events.FirstByte(request_id=self.some(number), attempt=attempt, status=status))

    @rule(number=pick, attempt=attempts)
    def is_slow(self, number: int, attempt: int) -> None:
        self.play(events.HedgeDue(request_id=self.some(number), attempt=attempt))

    @precondition(lambda self: any(seen.hedging for seen in self.seen.values()))
    @rule(number=pick, name=names, grants=st.sampled_from([True, True, False]))
    def a_second_sending_is_decided(self, number: int, name: str, grants: bool) -> None:
        asked = sorted(name for name, seen in self.seen.items() if seen.hedging and len(seen.forwards) == 1)
        if not asked:
            return
        request_id = asked[number % len(asked)]
        reply = granted(request_id, name, 1).reply if grants else None
        assert not isinstance(reply, Held | Refused)
        self.play(events.HedgeAnswered(request_id=request_id, attempt=1, granted=reply))

    @rule(number=pick, attempt=attempts)
    def streams(self, number: int, attempt: int) -> None:
        self.play(events.AnswerProgress(request_id=self.some(number), attempt=attempt, chunks=3))

    @rule(number=pick, attempt=attempts, answer=answers)
    def is_answered(self, number: int, attempt: int, answer: AnswerFacts) -> None:
        self.is_answered_at(self.some(number), attempt, answer)

    def is_answered_at(self, request_id: str, attempt: int, answer: AnswerFacts) -> None:
        seen = self.seen.get(request_id)
        if seen and seen.relayed and not seen.rows and attempt in seen.open:
            seen.open.discard(attempt)  # a complete answer's connection is the shell's own again
        self.play(events.AnswerEnded(request_id=request_id, attempt=attempt, answer=answer))

    @rule(number=pick, attempt=attempts, reason=failures)
    def fails(self, number: int, attempt: int, reason: Any) -> None:
        self.play(events.AnswerFailed(request_id=self.some(number), attempt=attempt, reason=reason))

    @rule(number=pick, ours=st.booleans(), answer=st.sampled_from([None, GOOD, AnswerFacts()]))
    def client_goes_or_we_fail(self, number: int, ours: bool, answer: AnswerFacts | None) -> None:
        request_id = self.some(number)
        kind = events.RequestFailed if ours else events.ClientGone
        self.play(kind(request_id=request_id, answer=answer))

    @rule(name=names, health=st.sampled_from(["ready", "ready", "unhealthy", "left"]))
    def worker_is_heard(self, name: str, health: Any) -> None:
        self.worker_seq += 1
        self.play(worker(name, self.worker_seq, health))

    @rule()
    def a_second_passes(self) -> None:
        self.play(events.Tick())

    @precondition(lambda self: len(self.seen) > 6)
    @rule()
    def stops(self) -> None:
        self.stopped = True
        self.play(events.Stopped())
        assert len(self.core) == 0

    @invariant()
    def the_table_holds_who_has_not_ended(self) -> None:
        living = sum(bool(seen.accepted) and not seen.ends for seen in self.seen.values())
        assert len(self.core) == living

    def teardown(self) -> None:
        """At the end of all, everyone who was accepted has one end and one row; nobody else has any."""
        if not hasattr(self, "core"):
            return
        self.play(events.Stopped())
        for request_id, seen in self.seen.items():
            assert (len(seen.ends), len(seen.rows)) == (seen.accepted, seen.accepted), request_id
            assert not seen.open


class HedgedOrders(Orders):
    """Where every slow request may be sent twice."""

    @initialize(rules=st.builds(IngressRules, hedge=st.just(True)))
    def start(self, rules: IngressRules) -> None:
        super().start(rules)

    @precondition(lambda self: not self.stopped and len(self.core) < 3)
    @rule(steps=st.integers(3, 5), first=names, second=names, stream=st.booleans())
    def is_slow_from_the_beginning(self, steps: int, first: str, second: str, stream: bool) -> None:
        """The usual way to two engines, or some of it: chance alone goes it too seldom."""
        request_id = f"r{len(self.seen)}"
        reply = granted(request_id, second, 1).reply
        assert not isinstance(reply, Held | Refused)
        way: list[events.Event] = [
            received(request_id, stream=stream),
            counted(request_id),
            granted(request_id, first),
            events.HedgeDue(request_id=request_id, attempt=0),
            events.HedgeAnswered(request_id=request_id, attempt=1, granted=reply),
        ]
        for event in way[:steps]:
            self.play(event)


TestOrders = pytest.mark.long(Orders.TestCase)
TestOrders.settings = settings(stateful_step_count=60)
TestHedgedOrders = pytest.mark.long(HedgedOrders.TestCase)
TestHedgedOrders.settings = settings(stateful_step_count=30)
