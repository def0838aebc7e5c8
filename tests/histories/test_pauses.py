"""Random histories of sessions that policies hold and pause, with leaders that change: every pause ends once.

See `tests.unit.admission.test_pauses` and `tests.unit.admission.words`.
"""

from __future__ import annotations

import random

import pytest

from tests.histories.conftest import record
from tests.histories.test_policies import SEED
from tests.unit.admission.scheduling.machine import Tally
from tests.unit.admission.test_pauses import MOVES, SETTINGS, TOKENS, History

HISTORIES = 150
STEPS = 40


@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", sorted(SETTINGS))
def test_every_pause_ends_once(policy: str, request: pytest.FixtureRequest) -> None:
    print(f"HISTORIES_SEED={SEED}")
    reasons: set[str] = set()
    events = 0
    for number in range(HISTORIES):
        chance = random.Random(f"{SEED} {policy} {number}")
        history = History(policy)
        for _ in range(STEPS):
            history.step(chance.choice(MOVES), chance.randrange(5), chance.choice(TOKENS))
        history.give_up()
        assert not history.words.paused, number
        reasons |= set(history.words.ended)
        events += len(history.pair.said)
    record(request, "sessions that are paused, leader and standby", Tally(HISTORIES, events))
    assert {"granted", "cancelled"} <= reasons
    assert ("policy" in reasons) is (policy in ("thunderagent", "paper"))
