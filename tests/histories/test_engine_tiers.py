"""Random histories of the simulated engine's core: memory below the device, and hints.

The same checks as in tests/unit/engine, many more of them.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.histories.conftest import record
from tests.unit.admission.scheduling.machine import Tally
from tests.unit.engine import test_hint_actions, test_tiers

HISTORIES = 1000


@pytest.mark.timeout(300)
def test_memory_below_the_device(request: pytest.FixtureRequest) -> None:
    """Requests, aborts and resets over host and disk of every size."""
    events = []

    @given(*test_tiers.scenes)
    @settings(max_examples=HISTORIES, deadline=None, suppress_health_check=list(HealthCheck))
    def run(history: list[tuple[str, int, int]], host: int, disk: int, write: str, block_s: float) -> None:
        events.append(len(history))
        test_tiers.keep_books(history, host, disk, write, block_s)

    run()
    record(request, "the simulated engine's tiers", Tally(len(events), sum(events)))


@pytest.mark.timeout(300)
def test_hints_among_requests(request: pytest.FixtureRequest) -> None:
    """Hints of every kind among requests: no answer changes."""
    events = []

    @given(*test_hint_actions.scenes)
    @settings(max_examples=HISTORIES, deadline=None, suppress_health_check=list(HealthCheck))
    def run(history: list[Any], host: int, pool: bool) -> None:
        events.append(len(history))
        test_hint_actions.say_the_same(history, host, pool)

    run()
    record(request, "the simulated engine's hints", Tally(len(events), sum(events)))
