"""What a soak does to a system, and in which order."""

from __future__ import annotations

import random
import re
from itertools import islice
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from load.soak.parts import SERVICES
from load.soak.plan import ENGINES, LEADER, PROMISES, STANDBY, kind_of, one_round, promise, steps

SERVERS = st.sampled_from((1, 3))


@given(seed=st.integers(0, 2**32), nats=SERVERS)
def test_equal_seeds_give_equal_plans(seed: int, nats: int) -> None:
    """A soak that failed can be had again."""
    assert list(islice(steps(seed, nats), 60)) == list(islice(steps(seed, nats), 60))


@given(seed=st.integers(0, 2**32), nats=SERVERS)
def test_a_round_kills_every_process_once(seed: int, nats: int) -> None:
    """Every engine, every service (of two admissions the one that leads and the one that does not) and every server of
    the bus."""
    killed = [step.target for step in one_round(random.Random(seed), nats) if step.what == "kill"]
    servers = [f"nats-{number}" for number in range(1, nats + 1)]
    others = [name for name in SERVICES if kind_of(name) != "admission"]
    assert sorted(killed) == sorted([*ENGINES, *others, LEADER, STANDBY, *servers])


@given(seed=st.integers(0, 2**32), nats=SERVERS)
def test_a_round_has_every_kind_of_fault_that_is_promised(seed: int, nats: int) -> None:
    """What DESIGN.md decided is seen in each round, and nothing is done that it has no word for."""
    done = one_round(random.Random(seed), nats)
    assert {(step.what, step.kind) for step in done} == set(PROMISES)
    assert all(promise(step).bound_ms >= 0 for step in done)


def test_the_page_promises_what_is_checked() -> None:
    """The table of docs/soak.md has each fault with its bound, its failures and its marks."""
    page = (Path(__file__).parents[3] / "docs" / "soak.md").read_text()
    for (what, kind), each in PROMISES.items():
        (line,) = re.findall(rf"^\| {what} {kind} \|(.*)\|$", page, re.MULTILINE)
        requests, decisions, bound = line.split("|")
        assert set(re.findall(r"`(\w+)`", requests)) == each.failures
        assert set(re.findall(r"`(\w+)`", decisions)) == each.marks
        assert bound.strip().startswith(f"{each.bound_ms // 1000} s " if each.bound_ms else "at once")
        assert ("after the fault" in bound) == (each.stands_in and each.bound_ms > 0)


def test_who_has_a_stand_in_fails_nobody() -> None:
    """Requests fail only at a front door or at an engine that went, as the table says."""
    may_fail = {(what, kind) for (what, kind), each in PROMISES.items() if each.failures}
    assert may_fail == {("kill", "engine"), ("hang", "engine"), ("kill", "ingress"), ("stop", "ingress")}


def test_kinds_of_targets() -> None:
    """A number goes, a role stays."""
    assert [kind_of(name) for name in ("ingress-2", "hints", LEADER)] == ["ingress", "hints", LEADER]
