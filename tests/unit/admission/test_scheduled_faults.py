"""A scheduling policy that raises: nothing ends, turns go by cost, and a new policy knows what the old one did."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from schemas.admit import Granted
from schemas.request import RequestFirstToken, Usage
from schemas.session import SessionFact
from services.admission.effects import Effect
from services.admission.events import FirstToken, WorkerStated
from services.admission.outcomes import Noticed
from services.admission.policies.commit import Commit, CommitParameters
from services.admission.policies.registry import POLICIES, Entry, Given
from services.admission.pools import Pool
from services.admission.scheduled import Scheduled
from services.admission.scheduling.interface import (
    Actions,
    Admission,
    Fleet,
    ProgramFacts,
    TurnFacts,
    TurnUsage,
    WorkerFacts,
)
from tests.unit.admission.build import (
    MODEL,
    Driven,
    ask,
    check_conserved,
    driven,
    end,
    facts,
    granted,
    held,
    identity,
    replies,
    worker_state,
)

FAULTS: list[str] = []
"""Calls that raise, each once; ``all:`` before a name: for ever."""


def fault(call: str) -> None:
    if f"all:{call}" in FAULTS:
        raise RuntimeError(f"always: {call}")
    if call in FAULTS:
        FAULTS.remove(call)
        raise ZeroDivisionError(call)


class Faulty(Commit):
    """`Commit`, until told otherwise."""

    def begin(self, fleet: Fleet) -> None:
        fault("begin")
        super().begin(fleet)

    def worker_changed(self, now: float, seat: int, facts: WorkerFacts | None) -> Actions:
        fault("worker_changed")
        return super().worker_changed(now, seat, facts)

    def program_arrives(self, now: float, program: ProgramFacts) -> None:
        fault("program_arrives")
        super().program_arrives(now, program)

    def turn_ready(self, now: float, turn: TurnFacts) -> Actions:
        fault("turn_ready")
        if "nowhere" in FAULTS:
            FAULTS.remove("nowhere")
            return (Admission(turn.turn, 17),)
        return super().turn_ready(now, turn)

    def turn_runs(self, now: float, turn: TurnFacts, seat: int) -> Actions:
        fault("turn_runs")
        return super().turn_runs(now, turn, seat)

    def first_token(self, now: float, turn: int) -> Actions:
        fault("first_token")
        return super().first_token(now, turn)

    def turn_finished(self, now: float, usage: TurnUsage) -> Actions:
        fault("turn_finished")
        return super().turn_finished(now, usage)

    def turn_aborted(self, now: float, turn: int) -> Actions:
        fault("turn_aborted")
        return super().turn_aborted(now, turn)

    def program_closed(self, now: float, program: str) -> Actions:
        fault("program_closed")
        return super().program_closed(now, program)

    def tick(self, now: float) -> Actions:
        fault("tick")
        return super().tick(now)

    def place(self, turn: int) -> int | None:
        fault("place")
        return super().place(turn)


def make(parameters: CommitParameters, given: Given) -> Commit:
    return Faulty(parameters, given.learned, given.choose)


@pytest.fixture(autouse=True)
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(POLICIES, "faulty", Entry(CommitParameters, make))
    FAULTS.clear()
    yield
    FAULTS.clear()


def under_pressure() -> Driven:
    """One worker of 16,000 tokens: ``r1`` runs, ``r2`` is held, ``s0`` is leased."""
    core = driven(policy="faulty", policy_parameters={"output_tokens": 100})
    core.do(WorkerStated(worker_state("a")))
    granted(core.ask(ask("r0", "s0", tokens=3_000)))
    finish(core, "r0", "s0", 3_000)
    granted(core.ask(ask("r1", "s1", tokens=8_000)))
    assert held(core.ask(ask("r2", "s2", tokens=14_000)))
    return core


def scheduled(core: Driven) -> Scheduled:
    assert core.core.state.scheduled is not None
    return core.core.state.scheduled


def pool_of(core: Driven) -> Pool:
    (pool,) = scheduled(core).pools.values()
    return pool


def finish(core: Driven, name: str, session: str, tokens: int, *, final: bool = False) -> list[Effect]:
    usage = Usage(input_tokens=tokens, output_tokens=50, cached_tokens=0)
    fact = end(name, identity(session, final=final or None), usage=usage)
    return core.end(msgspec.structs.replace(fact, tool_names=("bash",)))


def provoke(core: Driven, call: str) -> list[Effect]:
    """Something in which that call comes."""
    if call in ("turn_ready", "program_arrives", "nowhere"):
        return core.ask(ask("r3", "s3", tokens=9_000))
    if call == "turn_finished":
        return finish(core, "r1", "s1", 8_000)
    if call == "turn_aborted":
        return core.cancel("r2")
    if call == "first_token":
        fact = RequestFirstToken(source="ingress-1", epoch=1, seq=0, at_ms=0, request_id="r1", model=MODEL, ttft_ms=1.0)
        return core.do(FirstToken(fact))
    if call == "turn_runs":
        core.ask(ask("r3", "s3", tokens=1_000, excluded=("b",)))
    if call == "worker_changed":
        return core.do(WorkerStated(worker_state("b")))
    if call == "program_closed":
        return core.end(end("r1", "s1", outcome="client_disconnect")) + core.wait(31.0, ingresses=("ingress-1",))
    return core.wait(1.2, ingresses=("ingress-1",))


CALLS = ("turn_ready", "program_arrives", "nowhere", "turn_finished", "turn_aborted", "first_token", "turn_runs",
         "worker_changed", "tick", "place")  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_policy_that_raises_once_is_replaced_and_the_books_hold(call: str) -> None:
    """The failure is counted by call and logged; what runs is booked with the new policy, what waits waits."""
    core = under_pressure()
    before = pool_of(core).policy
    samples = pool_of(core).learned.tools.samples
    FAULTS.append(call)
    effects = provoke(core, call)
    assert not FAULTS
    assert sum(scheduled(core).failed.values()) == 1
    (noticed,) = [each for each in core.said if isinstance(each, Noticed) and each.event == "policy_failed"]
    assert noticed.fields["policy"] == "faulty"
    assert pool_of(core).policy not in (before, None)
    assert pool_of(core).learned.tools.samples == samples
    check_conserved(core)
    if call in ("turn_ready", "program_arrives", "nowhere"):
        assert granted(effects).policy == "kv"  # by cost, at once
        assert core.core.deciding.waits("r2")
    drain(core)


def drain(core: Driven) -> None:
    """Everybody comes to their end, and nothing is left booked."""
    for name, session, tokens in (("r1", "s1", 8_000), ("r3", "s3", 9_000), ("r2", "s2", 14_000)):
        if core.core.deciding.waits(name):
            core.wait(1.0, ingresses=("ingress-1",))
        finish(core, name, session, tokens, final=True)
    core.wait(1.0, ingresses=("ingress-1",))
    check_conserved(core)
    assert not scheduled(core).turns
    assert all(not seat.running for seat in pool_of(core).policy.book.seats.values())  # type: ignore[union-attr]


def test_leases_of_the_policy_that_failed_are_told_as_revoked() -> None:
    core = under_pressure()
    assert len(pool_of(core).leases) == 1
    FAULTS.append("tick")
    lost = [each for each in facts(core.wait(1.2, ingresses=("ingress-1",)), SessionFact) if each.state == "revoked"]
    assert [(each.session.root, each.reason) for each in lost] == [("s0", "policy_restarted")]
    assert not pool_of(core).leases


def test_a_policy_that_raises_again_and_again_is_left_alone_for_a_while() -> None:
    """Turns go by cost meanwhile, also those that waited; then it is tried again, and told what runs."""
    core = under_pressure()
    FAULTS.append("all:turn_ready")
    effects = core.ask(ask("r3", "s3", tokens=9_000))  # the new policy cannot even be told of r2
    assert sorted(each.request_id for each in replies(effects, Granted)) == ["r2", "r3"]
    assert {each.policy for each in replies(effects, Granted)} == {"kv"}
    assert pool_of(core).policy is None
    failures = sum(scheduled(core).failed.values())
    assert granted(core.ask(ask("r4", "s4", tokens=9_000))).policy == "kv"
    assert sum(scheduled(core).failed.values()) == failures
    FAULTS.clear()
    core.wait(1.2, ingresses=("ingress-1",))
    assert pool_of(core).policy is not None
    check_conserved(core)
    (seat,) = pool_of(core).policy.book.seats.values()  # type: ignore[union-attr]
    assert seat.running == 4
    assert held(core.ask(ask("r5", "s5", tokens=9_000)))


def test_a_policy_that_cannot_begin_is_no_harm() -> None:
    FAULTS.append("all:begin")
    core = driven(policy="faulty")
    core.do(WorkerStated(worker_state("a")))
    assert granted(core.ask(ask("r1", "s1", tokens=9_000))).policy == "kv"
    assert scheduled(core).failed == {"begin": 1}
    FAULTS.clear()
    core.wait(61.0, ingresses=("ingress-1",))
    assert pool_of(core).policy is not None


@pytest.mark.parametrize("call", ["worker_changed", "turn_aborted"])
def test_a_policy_that_raises_while_its_worker_goes_is_replaced_by_one_without_it(call: str) -> None:
    """The new policy hears neither of the seat that goes nor of what ran there, whose ends are still to be told."""
    core = driven(policy="faulty", policy_parameters={"output_tokens": 100})
    for name in ("a", "b"):
        core.do(WorkerStated(worker_state(name)))
    for number in range(4):
        granted(core.ask(ask(f"r{number}", f"s{number}", tokens=3_000)))
    FAULTS.append(call)
    core.do(WorkerStated(worker_state("a", health="left")))
    assert not FAULTS
    assert scheduled(core).failed == {call: 1}
    pool = pool_of(core)
    assert list(pool.policy.book.seats) == list(pool.places) == [pool.seats["b", 0]]  # type: ignore[union-attr]
    assert {turn.place for turn in scheduled(core).turns.values()} == {("b", 0)}
    core.do(WorkerStated(worker_state("a")))
    assert sum(scheduled(core).failed.values()) == 1
