"""Random histories of the admission core under policy ``commit``, with a standby that takes over.

Asks, cancels, ends, lost ends, lost ingresses, lost workers, another leader; see `tests.unit.admission.test_books` and
`test_books_scheduled`. Every ask gets one final answer; leader and standby have the same books; in the end nothing is
left in either.
"""

from __future__ import annotations

import pytest

from tests.histories.conftest import record
from tests.histories.test_policies import SEED
from tests.unit.admission.scheduling.machine import Tally
from tests.unit.admission.test_books_scheduled import ScheduledBooks, run

HISTORIES = 125


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(8))
def test_leader_and_standby(number: int, request: pytest.FixtureRequest) -> None:
    print(f"HISTORIES_SEED={SEED}")

    class Machine(ScheduledBooks):
        """Counts for itself."""

        histories, events = 0, 0

    run(Machine, HISTORIES, 25, 1_000_000 * SEED + number)
    record(request, "the admission core, leader and standby", Tally(Machine.histories, Machine.events))
    assert Machine.histories >= HISTORIES
