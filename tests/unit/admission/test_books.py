"""D3, D4: random orders of everything that can happen, against a plain model of who is owed what."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from schemas.admit import AdmitCancel, AdmitRequest, Granted, Held, Refused
from schemas.request import RequestDispatched, RequestEnd, Usage
from services.admission.effects import AskIndex, Effect, Publish, Reply, WriteRow
from services.admission.events import (
    AdmitAsked,
    AdmitCancelled,
    Dispatched,
    LeadershipChanged,
    MatchAnswered,
    MatchFailed,
    Tick,
    WorkerStated,
)
from services.admission.outcomes import Noticed
from services.admission.state import hedge_id
from tests.unit.admission.build import (
    MODEL,
    Driven,
    accepted,
    ask,
    check_books,
    driven,
    end,
    in_flight,
    match_reply,
    worker_state,
)

WORKERS = ("a", "b")
SESSIONS = ("s0", "s1")
LIMIT = 1
TTL_S = 8.0
HOLD_S = 20.0
HEDGES = "hedge."
"""How the subjects begin to which answers about second sendings go."""


class Owed(msgspec.Struct):
    """What the model knows of one request of an ingress."""

    request_id: str
    session: str
    ingress: str
    epoch: int
    attempt: int = 0
    asked: int = 0
    waiting: bool = False
    worker: str | None = None
    hedged: str = ""
    gone: bool = False


class Books(RuleBasedStateMachine):
    """Two ingresses, two workers with one place each; the index answers at once or when the machine says so."""

    def __init__(self) -> None:
        super().__init__()
        self.core: Driven = self.fresh()
        self.core.answer_index = False
        self.requests: dict[str, Owed] = {}
        self.questions: list[int] = []
        self.stale: list[int] = []
        self.epochs = {"ingress-1": 1, "ingress-2": 1}
        self.silent: set[str] = set()
        self.alive: set[str] = set()
        self.lost: list[str] = []
        self.rows: list[str] = []
        self.grant_order: dict[str, list[int]] = {}
        self.epoch = 10
        self.asks = 0

    def fresh(self) -> Driven:
        return driven(max_grants_per_rank=LIMIT, grant_ttl_s=TTL_S, hold_deadline_s=HOLD_S, hold_queue_limit=6)

    @initialize(answered_at_once=st.booleans())
    def start(self, answered_at_once: bool) -> None:
        self.core.answer_index = answered_at_once
        for name in WORKERS:
            self.worker_speaks(name)

    # What the outside sees of every effect

    def saw(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Reply) and effect.reply_to.startswith(HEDGES):
                self.saw_hedge(effect)
                continue
            match effect:
                case AskIndex(ticket):
                    (self.stale if self.core.answer_index else self.questions).append(ticket)
                case Reply(_, Granted(request_id=request_id, grant=grant)):
                    owed = self.requests[request_id]
                    assert not owed.gone, "a grant for a request that is over"
                    if owed.waiting:
                        self.grant_order.setdefault(owed.session, []).append(owed.asked)
                    owed.waiting, owed.worker = False, grant.worker
                case Reply(_, Refused(request_id=request_id)):
                    self.requests[request_id].waiting = False
                case Reply(_, Held(request_id=request_id)):
                    assert self.requests[request_id].waiting, "a ghost in line"
                case Publish(RequestEnd(request_id=request_id, outcome="ingress_lost")):
                    self.lost.append(request_id)
                    self.requests[request_id].gone = True
                    self.requests[request_id].waiting = False
                case WriteRow(message_id=message_id):
                    self.rows.append(message_id)

    def saw_hedge(self, reply: Reply) -> None:
        """Granted or refused, once, and only beside the request's own grant."""
        assert not isinstance(reply.message, Held)
        owed = self.requests[reply.message.request_id]
        if isinstance(reply.message, Granted):
            entry = self.core.core.state.ledger.get(owed.request_id)
            assert entry is not None
            assert not owed.hedged
            owed.hedged = reply.message.grant.worker
            assert owed.hedged != entry.grant.worker

    def do(self, effects: list[Effect]) -> None:
        self.saw(effects)

    # Events

    @rule(
        sessions=st.lists(st.sampled_from(SESSIONS), min_size=1, max_size=3),
        ingress=st.sampled_from(("ingress-1", "ingress-2")),
        accept=st.booleans(),
    )
    def ask_new(self, sessions: list[str], ingress: str, accept: bool) -> None:
        for session in sessions:
            self.ask_once(session, ingress, accept)

    def ask_once(self, session: str, ingress: str, accept: bool) -> None:
        self.silent.discard(ingress)
        self.asks += 1
        owed = Owed(f"r{self.asks}", session, ingress, self.epochs[ingress], asked=self.asks, waiting=True)
        self.requests[owed.request_id] = owed
        if accept:
            self.core.accept(accepted(owed.request_id, session, ingress=ingress, epoch=owed.epoch))
        self.do(self.core.ask(self.message(owed)))

    def message(self, owed: Owed, excluded: tuple[str, ...] = ()) -> AdmitRequest:
        return ask(
            owed.request_id,
            owed.session,
            attempt=owed.attempt,
            ingress=owed.ingress,
            ingress_epoch=owed.epoch,
            excluded=excluded,
        )

    def live(self) -> list[Owed]:
        return [each for each in self.requests.values() if not each.gone]

    @precondition(lambda self: bool(self.live()))
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        owed = data.draw(st.sampled_from(self.live()))
        if owed.epoch != self.epochs[owed.ingress]:
            return
        self.silent.discard(owed.ingress)
        granted_before = self.core.core.state.ledger.get(owed.request_id)
        waiting = self.core.core.deciding.waits(owed.request_id)
        if granted_before is None and not waiting:
            self.asks += 1
            owed.asked = self.asks
        owed.waiting = owed.waiting or granted_before is None
        if granted_before is not None and granted_before.grant.worker not in self.alive:
            self.asks += 1
            owed.asked, owed.waiting = self.asks, True
        self.do(self.core.ask(self.message(owed)))

    @precondition(lambda self: any(each.worker and each.attempt == 0 for each in self.live()))
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        owed = data.draw(st.sampled_from([each for each in self.live() if each.worker and each.attempt == 0]))
        if owed.epoch != self.epochs[owed.ingress]:
            return
        self.silent.discard(owed.ingress)
        self.asks += 1
        owed.attempt, owed.asked, owed.waiting = 1, self.asks, True
        self.do(self.core.ask(self.message(owed, (owed.worker or "",))))

    @precondition(lambda self: any(each.worker and each.attempt == 0 for each in self.live()))
    @rule(data=st.data())
    def is_slow(self, data: st.DataObject) -> None:
        """A second sending is asked for."""
        owed = data.draw(st.sampled_from([each for each in self.live() if each.worker and each.attempt == 0]))
        if owed.epoch != self.epochs[owed.ingress]:
            return
        if owed.hedged and self.core.core.state.ledger.get(hedge_id(owed.request_id)) is None:
            return  # its ingress asks once: a leader that has not heard of the race yet is not asked
        self.silent.discard(owed.ingress)
        question = msgspec.structs.replace(self.message(owed, (owed.worker or "",)), attempt=1, hedge=True)
        self.do(self.core.do(AdmitAsked(question, f"{HEDGES}{owed.request_id}")))

    @precondition(lambda self: any(each.hedged for each in self.live()))
    @rule(data=st.data(), wins=st.booleans())
    def a_race_is_over(self, data: st.DataObject, wins: bool) -> None:
        """The second becomes the request, or goes."""
        owed = data.draw(st.sampled_from([each for each in self.live() if each.hedged]))
        booked = self.core.core.state.ledger.get(hedge_id(owed.request_id))
        if owed.epoch != self.epochs[owed.ingress] or owed.ingress != "ingress-1" or owed.attempt or booked is None:
            return
        self.silent.discard(owed.ingress)
        if wins:
            owed.attempt, owed.worker = 1, owed.hedged
            fact = RequestDispatched(
                source=owed.ingress, epoch=owed.epoch, seq=0, at_ms=0, request_id=owed.request_id, model=MODEL,
                worker=owed.hedged, rank=0, attempt=1, mode="policy", grant_id=booked.grant.grant_id,
            )  # fmt: skip
            self.do(self.core.do(Dispatched(fact)))
            entry = self.core.core.state.ledger.get(owed.request_id)
            assert entry is not None
            assert (entry.grant.worker, entry.attempt) == (owed.hedged, 1)
        else:
            cancel = AdmitCancel(request_id=owed.request_id, ingress=owed.ingress, reason="hedge_over", hedge=True)
            self.do(self.core.do(AdmitCancelled(cancel)))
            assert self.core.core.state.ledger.get(owed.request_id) is not None
        assert self.core.core.state.ledger.get(hedge_id(owed.request_id)) is None

    @precondition(lambda self: bool(self.live()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        owed = data.draw(st.sampled_from(self.live()))
        if owed.epoch != self.epochs[owed.ingress]:
            return
        self.silent.discard(owed.ingress)
        owed.gone, owed.waiting = True, False
        fact = end(
            owed.request_id, owed.session, ingress=owed.ingress, ingress_epoch=owed.epoch, usage=Usage(input_tokens=64)
        )
        self.do(self.core.end(fact))

    @precondition(lambda self: bool(self.live()))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        owed = data.draw(st.sampled_from(self.live()))
        owed.waiting = False
        self.do(self.core.cancel(owed.request_id, ingress=owed.ingress, reason="gave_up"))
        assert self.core.core.state.ledger.get(owed.request_id) is None

    @precondition(lambda self: any(each.gone for each in self.requests.values()))
    @rule(data=st.data())
    def late_facts_of_what_is_over(self, data: st.DataObject) -> None:
        owed = data.draw(st.sampled_from([each for each in self.requests.values() if each.gone]))
        if owed.epoch != self.epochs[owed.ingress]:
            return
        self.silent.discard(owed.ingress)
        self.do(self.core.ask(self.message(owed)))
        item = in_flight(owed.request_id, owed.session, worker="a")
        self.do(self.core.state(item, ingress=owed.ingress, epoch=owed.epoch))

    @precondition(lambda self: bool(self.questions) and not self.core.answer_index)
    @rule(data=st.data(), answered=st.booleans())
    def index_answers(self, data: st.DataObject, answered: bool) -> None:
        ticket = data.draw(st.sampled_from(self.questions[:4]))
        self.stale.append(ticket)
        self.questions.remove(ticket)
        if answered:
            self.do(self.core.do(MatchAnswered(ticket, match_reply({"a": 1, "b": 0}))))
        else:
            self.do(self.core.do(MatchFailed(ticket, "index_late")))

    @precondition(lambda self: bool(self.stale))
    @rule(data=st.data())
    def index_answers_twice(self, data: st.DataObject) -> None:
        assert self.core.do(MatchFailed(data.draw(st.sampled_from(self.stale)), "index_late")) == []

    @rule(ingress=st.sampled_from(("ingress-1", "ingress-2")))
    def ingress_restarts(self, ingress: str) -> None:
        self.epochs[ingress] += 1
        self.silent.discard(ingress)
        self.do(self.core.state(ingress=ingress, epoch=self.epochs[ingress]))
        self.do(self.core.wait(0.1, heartbeats=False))

    @rule(ingress=st.sampled_from(("ingress-1", "ingress-2")))
    def ingress_falls_silent(self, ingress: str) -> None:
        self.silent.add(ingress)

    @rule(name=st.sampled_from(WORKERS))
    def worker_speaks(self, name: str) -> None:
        self.alive.add(name)
        self.do(self.core.do(WorkerStated(worker_state(name))))

    @precondition(lambda self: len(self.alive) == 2)
    @rule(name=st.sampled_from(WORKERS))
    def worker_leaves(self, name: str) -> None:
        self.alive.discard(name)
        self.do(self.core.do(WorkerStated(worker_state(name, health="left"))))

    @rule(seconds=st.sampled_from((0.3, 1.0, 4.0)), named=st.booleans())
    def time_passes(self, seconds: float, named: bool) -> None:
        """``named``: living ingresses name what they have in flight; else only that they live."""
        until = self.core.now + seconds
        while self.core.now < until:
            self.core.now += 0.5
            for name in sorted(self.alive):
                self.do(self.core.do(WorkerStated(worker_state(name))))
            for ingress, epoch in self.epochs.items():
                if ingress not in self.silent:
                    mine = [each for each in self.live() if each.ingress == ingress and each.epoch == epoch]
                    items = [in_flight(each.request_id, each.session) for each in mine] if named else []
                    self.do(self.core.state(*items, ingress=ingress, epoch=epoch))
            self.do(self.core.do(Tick()))

    @rule(seconds=st.sampled_from((0.5, 3.0, 3600.0)))
    def the_clock_is_set_back(self, seconds: float) -> None:
        """It shows with the next tick."""
        self.core.now -= seconds
        self.do(self.core.do(Tick()))

    @rule()
    def leader_changes(self) -> None:
        """We lose the lead and win it again: whoever waited has to ask again."""
        self.epoch += 1
        left = self.core.do(LeadershipChanged(None))
        # A policy may fail at what it is told then, which is said in the log and nowhere else.
        assert [each for each in left if not (isinstance(each, Noticed) and each.event == "policy_failed")] == []
        for owed in self.requests.values():
            owed.waiting = False
        self.questions.clear()
        self.do(self.core.do(LeadershipChanged(self.epoch)))

    # Invariants

    @invariant()
    def the_books_are_exact(self) -> None:
        check_books(self.core.core)

    @invariant()
    def a_second_sending_is_booked_beside_a_first_only(self) -> None:
        ledger = self.core.core.state.ledger
        names = {entry.grant.request_id for entry in ledger}
        assert {name.removeprefix("hedge:") for name in names} <= names

    @invariant()
    def nobody_has_more_than_his_places(self) -> None:
        for (_, _), account in self.core.core.state.ledger.accounts():
            assert 0 <= account.requests <= LIMIT

    @invariant()
    def every_lost_request_has_exactly_one_end_and_one_row(self) -> None:
        assert sorted(self.lost) == sorted(set(self.lost)) == sorted(self.rows)

    @invariant()
    def nobody_waits_in_line_who_is_not_owed_an_answer(self) -> None:
        waiting = {each.request_id for each in self.requests.values() if each.waiting}
        in_line = {each.request.request_id for _, each in self.core.core.deciding.holds.in_line()}
        assert in_line <= waiting
        assert all(self.core.core.deciding.waits(request_id) for request_id in waiting)

    @invariant()
    def an_over_request_holds_nothing(self) -> None:
        for owed in self.requests.values():
            if owed.gone:
                assert self.core.core.state.ledger.get(owed.request_id) is None
                assert self.core.core.state.ledger.get(hedge_id(owed.request_id)) is None

    @invariant()
    def turns_of_a_session_are_granted_in_the_order_they_asked(self) -> None:
        assert all(order == sorted(order) for order in self.grant_order.values())

    def teardown(self) -> None:
        """Whoever still waits is answered before the hold deadline; what is not named any more holds nothing."""
        self.worker_speaks("a")
        self.questions.clear()
        self.core.answer_index = True
        for _ in range(8):
            self.core.now += 0.5
            self.answer_all()
        self.do(self.core.wait(HOLD_S + TTL_S + 2, ingresses=sorted(self.epochs)))
        assert not [each for each in self.requests.values() if each.waiting]
        assert len(self.core.core.deciding) == 0
        assert len(self.core.core.state.ledger) == 0
        state = self.core.core.state
        forgotten = [each for each in self.live() if each.epoch != self.epochs[each.ingress]]
        assert not [each for each in forgotten if state.requests.get(each.request_id) is not None]
        self.check_forgotten(forgotten)
        check_books(self.core.core)

    def check_forgotten(self, forgotten: list[Owed]) -> None:
        """Nobody ends what its ingress had not named for long before it was lost."""
        counters = self.core.core.state.counters
        assert len(forgotten) <= counters.vanished + counters.released["lapsed"]

    def answer_all(self) -> None:
        """Late index answers for whatever question is open."""
        open_questions = list(self.core.core.deciding._open)
        for ticket in open_questions:
            self.do(self.core.do(MatchFailed(ticket, "index_late")))


Books.TestCase.settings = settings(stateful_step_count=30, suppress_health_check=list(HealthCheck))
TestBooks = pytest.mark.long(Books.TestCase)
