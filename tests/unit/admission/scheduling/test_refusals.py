"""Leaving out seats that would refuse, and looks at queues that did not change, leaves every decision as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest

from load.bench.admission_clients import FINAL_CONTEXT, Clients, EventKind, experienced
from services.admission.policies import commit
from services.admission.policies.commit import Commit, CommitParameters
from services.admission.scheduling.interface import Action
from services.admission.scheduling.refusals import Candidate, Offer, Offers
from services.admission.scheduling.seat import Seat

SEATS = 6


class AsksEverybody(Commit):
    """Looks at the queue after every event."""

    def _commit_tested(self, now: float, revoked: set[int]) -> None:
        self._tested = (-1, -1, -1)
        super()._commit_tested(now, revoked)


class AllOffers(Offers):
    """Leaves no seat out."""

    def worth_asking(
        self, seats: Iterable[Seat], candidates: Sequence[Candidate], revoked: set[int], lo: float
    ) -> list[Offer]:
        del revoked, lo
        return [self._offer(seat, candidates[0].program.rank) for seat in seats]

    def hopeful(self, offers: Sequence[Offer], candidate: Candidate) -> list[Offer]:
        return [offer for offer in offers if offer.changed > candidate.tested]


def decisions(make: type[Commit], room: float, span_s: float) -> list[tuple[EventKind, list[Action]]]:
    """All that the policy said in 12 seconds to 60 programs, of which ``room`` can stay to their end."""
    said: list[tuple[EventKind, list[Action]]] = []

    def decide(kind: EventKind, call: Callable[[], Sequence[Action]]) -> Sequence[Action]:
        actions = list(call())
        said.append((kind, actions))
        return actions

    policy = make(CommitParameters(span_s=span_s, bypass_s=3.0), experienced(60))
    kv_tokens = round(room * 60 * FINAL_CONTEXT / SEATS)
    clients = Clients(policy, programs=60, seats=SEATS, kv_tokens=kv_tokens, decide=decide)
    while clients.now < 12:
        clients.step()
    assert any(clients.held)
    return said


@pytest.mark.long
@pytest.mark.parametrize(("room", "span_s"), [(0.5, 80.0), (0.25, 80.0), (0.4, 0.0)])
def test_seats_that_are_left_out_would_have_refused(
    monkeypatch: pytest.MonkeyPatch, room: float, span_s: float
) -> None:
    pruned = decisions(Commit, room, span_s)
    monkeypatch.setattr(commit, "Offers", AllOffers)
    assert pruned == decisions(AsksEverybody, room, span_s)
