"""The same random orders as `test_books`, under a policy that holds turns back: what it has booked is conserved.

A standby hears the same facts, and takes over when the leader goes. Every ask gets one final answer.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule, run_state_machine_as_test

from schemas.admit import AdmitRequest, Granted, Refused
from services.admission.config import AdmissionSettings
from services.admission.core import Core
from services.admission.effects import Effect, Reply
from services.admission.events import LeadershipChanged
from services.admission.policies.commit import Commit
from tests.unit.admission.build import START, ask, check_conserved
from tests.unit.admission.pair import Pair, choose
from tests.unit.admission.test_books import HOLD_S, LIMIT, TTL_S, Books, Owed
from tests.unit.admission.words import SessionWords

SIZES = (1_000, 6_000, 9_000, 12_000)
"""Prompts of 1 to 12 of the 16 thousand tokens that a worker holds."""

SETTINGS: dict[str, Any] = {
    "policy": "commit",
    "policy_parameters": {"output_tokens": 100, "hold_limit_s": 5.0, "idle_expiry_s": 10.0},
    "max_grants_per_rank": LIMIT,
    "grant_ttl_s": TTL_S,
    "hold_deadline_s": HOLD_S,
    "hold_queue_limit": 6,
    "session_idle_s": 15.0,
    "warmup_s": 0.0,
}


def process(name: str, now: float) -> Core:
    return Core(AdmissionSettings(**SETTINGS), name, choose(7), now)


class ScheduledBooks(Books):
    """`Books` with policy `commit`, under pressure, and a standby."""

    core: Pair
    histories = 0
    events = 0

    def __init__(self) -> None:
        self.asked_again: set[str] = set()
        self.clock_was_set_back = False
        self.due: set[str] = set()
        self.unheard: set[str] = set()
        self.words = SessionWords()
        super().__init__()
        self.retried: set[int] = set()

    def fresh(self) -> Pair:
        pair = Pair(process("admission-1", START), fresh=process)
        pair.do(LeadershipChanged(10))
        for ingress in ("ingress-1", "ingress-2"):
            pair.state(ingress=ingress)
        return pair

    def message(self, owed: Owed, excluded: tuple[str, ...] = ()) -> AdmitRequest:
        if excluded:
            self.retried.add(owed.asked)
        if owed.worker is not None:
            self.asked_again.add(owed.request_id)
        if self.core.standby.state.requests.newest_epoch(owed.ingress) is None:  # heartbeats come with asks
            self.do(self.core.state(ingress=owed.ingress, epoch=owed.epoch))
        entry = self.core.core.state.ledger.get(owed.request_id)
        if (
            entry is not None and entry.attempt < owed.attempt and not owed.waiting
        ):  # a new leader knows of the first attempt only
            self.asks += 1
            owed.asked, owed.waiting = self.asks, True
        self.due.add(owed.request_id)
        return ask(
            owed.request_id,
            owed.session,
            tokens=SIZES[int(owed.request_id[1:]) % len(SIZES)],
            attempt=owed.attempt,
            ingress=owed.ingress,
            ingress_epoch=owed.epoch,
            excluded=excluded,
        )

    def saw(self, effects: list[Effect]) -> None:
        """One final answer to each ask; to one that is asked again before, one to both."""
        for effect in effects:
            if isinstance(effect, Reply) and isinstance(effect.message, Granted | Refused):
                assert effect.message.request_id in self.due, "answered twice"
                self.due.remove(effect.message.request_id)
        super().saw(effects)
        self.words.hear(effects)

    @rule(seconds=st.sampled_from((0.5, 3.0, 3600.0)))
    def the_clock_is_set_back(self, seconds: float) -> None:
        """From then on receipts lie in the future for who was asked: what a table does not name ends with its grant's
        time, and 3 s after the decision for who heard that alone. Later the books are alike again (`teardown`)."""
        super().the_clock_is_set_back(seconds)
        self.clock_was_set_back = True

    def leader_changes(self) -> None:
        """In place of the rule of `Books`: somebody else takes over."""

    @rule(crashed=st.booleans())
    def another_leads(self, crashed: bool) -> None:
        """The standby takes over, with what it has heard: whoever waited has to ask again."""
        self.epoch += 1
        self.words.hear(self.core.take_over(self.epoch, crashed=crashed))
        for ingress, epoch in self.epochs.items():  # a process hears their heartbeats before it is of use
            self.do(self.core.state(ingress=ingress, epoch=epoch))
        self.silent.clear()
        for owed in self.requests.values():
            owed.waiting = False
        if crashed:  # a process that comes later cannot know what was over before
            self.requests = {name: owed for name, owed in self.requests.items() if not owed.gone}
        self.due.clear()
        self.questions.clear()
        self.stale.clear()

    def check_forgotten(self, forgotten: list[Owed]) -> None:
        """Counters die with their process."""

    def live(self) -> list[Owed]:
        return [each for each in super().live() if each.request_id not in self.unheard]

    def granted(self) -> list[Owed]:
        return [each for each in self.live() if each.worker and not each.waiting]

    @precondition(lambda self: bool(self.granted()))
    @rule(data=st.data())
    def the_end_is_lost(self, data: st.DataObject) -> None:
        """Its ingress has it no more, and nobody heard so: the grant lapses when it is named no longer."""
        self.unheard.add(data.draw(st.sampled_from(self.granted())).request_id)

    @invariant()
    def nobody_has_more_than_his_places(self) -> None:
        """A new leader also has grants of attempts that were given up, for only the old one was asked again; and one
        that knew of no grants gave others."""
        unknown = len(self.asked_again | self.core.apart) if self.epoch > 10 else 0
        for (_, _), account in self.core.core.state.ledger.accounts():
            assert 0 <= account.requests <= LIMIT + unknown

    @invariant()
    def the_standby_has_the_same_books(self) -> None:
        if not self.clock_was_set_back:
            self.core.check_alike(self.asked_again)

    @invariant()
    def what_is_booked_is_conserved(self) -> None:
        check_conserved(self.core)

    @invariant()
    def the_leader_knows_who_is_paused(self) -> None:
        """But for what was told before a crash, to a process that came later."""
        known = set(self.core.core.state.sessions.paused)
        assert known <= set(self.words.paused)
        assert known == set(self.words.paused) or self.core.names > 2

    @invariant()
    def the_policy_has_not_raised(self) -> None:
        assert self.core.core.state.scheduled is not None
        assert not self.core.core.state.scheduled.failed

    @invariant()
    def turns_of_a_session_are_granted_in_the_order_they_asked(self) -> None:
        """A retry has waited its turn once, and waits for no later turn."""
        for order in self.grant_order.values():
            first = [asked for asked in order if asked not in self.retried]
            assert first == sorted(first)

    def teardown(self) -> None:
        """All is over, for leader and standby: no grants, L = 0, empty maps."""
        super().teardown()
        self.do(self.core.wait(TTL_S + SETTINGS["session_idle_s"] + 2, ingresses=sorted(self.epochs)))
        check_conserved(self.core)
        assert not self.words.paused or self.core.names > 2
        for core in (self.core.core, self.core.standby):
            assert (len(core.deciding), len(core.state.ledger), len(core.state.sessions)) == (0, 0, 0)
            scheduled = core.state.scheduled
            assert scheduled is not None
            assert (scheduled.failed, scheduled.turns) == ({}, {})
            for pool in scheduled.pools.values():
                assert isinstance(pool.policy, Commit)
                book = pool.policy.book
                assert not pool.leases
                assert (len(book.programs), len(book.turns), len(book.cold), len(book.new)) == (0, 0, 0, 0)
                assert [seat.load for seat in book.seats.values() if seat.load] == []
        type(self).histories += 1
        type(self).events += len(self.core.said)


def run(machine: type[ScheduledBooks], histories: int, steps: int, number: int) -> None:
    """That many histories, from a seed of their own."""
    given = settings(
        max_examples=histories,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(number)(machine), settings=given)


@pytest.mark.long
def test_books_under_a_policy() -> None:
    """A few; the many are in `tests/histories`."""
    run(ScheduledBooks, 12, 25, 1)
