"""The same random orders as `test_books`, under a policy that holds turns back: what it has booked is conserved."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis.stateful import invariant

from schemas.admit import AdmitRequest
from tests.unit.admission.build import Driven, ask, check_conserved, driven
from tests.unit.admission.test_books import HOLD_S, LIMIT, TTL_S, Books, Owed

SIZES = (1_000, 6_000, 9_000, 12_000)
"""Prompts of 1 to 12 of the 16 thousand tokens that a worker holds."""


class ScheduledBooks(Books):
    """`Books` with policy `commit`, under pressure."""

    def __init__(self) -> None:
        super().__init__()
        self.retried: set[int] = set()

    def fresh(self) -> Driven:
        return driven(
            policy="commit",
            policy_parameters={"output_tokens": 100, "hold_limit_s": 5.0, "idle_expiry_s": 10.0},
            max_grants_per_rank=LIMIT,
            grant_ttl_s=TTL_S,
            hold_deadline_s=HOLD_S,
            hold_queue_limit=6,
            session_idle_s=15.0,
        )

    def message(self, owed: Owed, excluded: tuple[str, ...] = ()) -> AdmitRequest:
        if excluded:
            self.retried.add(owed.asked)
        return ask(
            owed.request_id,
            owed.session,
            tokens=SIZES[int(owed.request_id[1:]) % len(SIZES)],
            attempt=owed.attempt,
            ingress=owed.ingress,
            ingress_epoch=owed.epoch,
            excluded=excluded,
        )

    @invariant()
    def what_is_booked_is_conserved(self) -> None:
        check_conserved(self.core)

    @invariant()
    def turns_of_a_session_are_granted_in_the_order_they_asked(self) -> None:
        """A retry has waited its turn once, and waits for no later turn."""
        for order in self.grant_order.values():
            first = [asked for asked in order if asked not in self.retried]
            assert first == sorted(first)

    def teardown(self) -> None:
        super().teardown()
        check_conserved(self.core)
        assert self.core.core.state.scheduled is not None
        assert not self.core.core.state.scheduled.turns


ScheduledBooks.TestCase.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestScheduledBooks = ScheduledBooks.TestCase
