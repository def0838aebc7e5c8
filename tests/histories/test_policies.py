"""Ten thousand random histories of scheduling policies, the same each time: `make test-histories`.

Half of them are of policy ``commit`` in its default profile, each event checked against every invariant of spec
scheduling §5.3 as amended by policy §6 (table: `tests.unit.admission.scheduling.test_commit_histories`). Others are of
its conservative profile, of several seats, and of every policy of the registry with what all have to hold.

Another seed: ``HISTORIES_SEED=7 make test-histories``; it is printed with a failure.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.histories.conftest import record
from tests.unit.admission.policies import any_policy
from tests.unit.admission.policies.any_policy import VARIANTS
from tests.unit.admission.scheduling import machine as commit
from tests.unit.admission.scheduling.machine import CONSERVATIVE, DEFAULT, SEVERAL, Kind, Tally

SEED = int(os.environ.get("HISTORIES_SEED", "1"))
SHARD = 500
"""Histories of one test, so that processes share them evenly."""

COMMIT = ((DEFAULT, 10), (CONSERVATIVE, 3), (SEVERAL, 4))
"""Kinds, and tests of each: 5,000, 1,500 and 2,000 histories."""

OF_EACH_POLICY = 120

CAME_UP = (
    *("admitted by commitment", "admitted within a band", "blocked head", "forced", "revoked", "shed to the oldest"),
    *("revoked below the floor", "below the floor", "kappa moved", "idle for too long", "lost ends", "seat lost"),
    *("runs elsewhere", "told in vain", "told again", "nothing learned", "fell silent", "advice"),
)
"""What 500 histories always have: a check that nothing reaches is none."""

SHARDS = [(kind, number) for kind, shards in COMMIT for number in range(shards)]


def run(machine: type[RuleBasedStateMachine], histories: int, steps: int, number: int) -> None:
    """That many histories, from a seed of their own."""
    print(f"HISTORIES_SEED={SEED}")
    given = settings(
        max_examples=histories,
        stateful_step_count=steps,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(seed(1_000_000 * SEED + number)(machine), settings=given)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("kind", "number"), SHARDS, ids=lambda value: getattr(value, "name", str(value)))
def test_commit(kind: Kind, number: int, request: pytest.FixtureRequest) -> None:
    tally = Tally()
    run(commit.machine(kind, tally), SHARD, 16, number)
    record(request, kind.name, tally)
    assert tally.histories >= SHARD
    assert [what for what in CAME_UP if not tally.seen[what]] == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "parameters"), VARIANTS, ids=lambda value: str(value))
def test_every_policy(name: str, parameters: Mapping[str, object], request: pytest.FixtureRequest) -> None:
    tally = Tally()
    run(any_policy.machine(name, parameters, tally), OF_EACH_POLICY, 16, 0)
    record(request, f"any policy: {name}" + (f" {dict(parameters)}" if parameters else ""), tally)
    assert tally.histories >= OF_EACH_POLICY
