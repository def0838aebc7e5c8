"""What the service tells its scheduling policy beside turns: sub-agents, tools, load that is not ours, costs; and what
it says of holds and leases."""

from __future__ import annotations

import msgspec
import pytest

from schemas.admit import Held
from schemas.base import to_json
from schemas.calibration import Calibration, CalibrationPoint
from schemas.decision import Decision
from schemas.request import Usage
from schemas.session import SessionFact, SessionKey
from schemas.tool import ToolEvent
from schemas.worker import RankLoad, WorkerProfile
from services.admission.effects import Effect
from services.admission.engine_priority import engine_priority
from services.admission.estimators.reload_cost import H100_8B as RELOAD_H100_8B
from services.admission.events import CalibrationTold, Decided, LearnedRead, Tick, ToolTold, WorkerStated
from services.admission.outcomes import Noticed
from services.admission.pools import Pool
from services.admission.remembered import Stored
from tests.unit.admission.build import (
    Driven,
    ask,
    check_conserved,
    driven,
    end,
    facts,
    granted,
    held,
    identity,
    in_flight,
    refused,
    worker_state,
)
from tests.unit.admission.test_scheduled import commit_of, committing, done


def pool_of(core: Driven) -> Pool:
    assert core.core.state.scheduled is not None
    (pool,) = core.core.state.scheduled.pools.values()
    return pool


def tools_of(core: Driven) -> dict[str, tuple[float, ...]]:
    return {tool.name: tool.durations for tool in pool_of(core).learned.tools.to_state().tools}


def place(told: list[Held]) -> list[int]:
    return [each.place for each in told]


# Holds


def test_a_hold_does_not_end_before_the_policys_own_limit_whatever_is_configured() -> None:
    """``hold_deadline_s`` of a second, and ``commit``'s 300 s: twice those count, and the ask's own deadline."""
    core = committing(hold_deadline_s=1.0)
    granted(core.ask(ask("r1", "s1", tokens=9_000)))
    assert held(core.ask(ask("r2", "s2", tokens=9_000)))
    deadline = ask("r3", "s3", tokens=9_000, deadline_ms=int((core.now + 10.0) * 1000))
    assert held(core.ask(deadline))
    effects: list[Effect] = []
    for _ in range(12):
        core.state(in_flight("r1", "s1", worker="a"), in_flight("r2", "s2"), in_flight("r3", "s3"))
        effects += core.wait(1.0)
    reply = refused(effects)
    assert (reply.request_id, reply.reason) == ("r3", "hold_deadline")
    assert core.core.deciding.waits("r2")
    check_conserved(core)


def test_the_place_that_is_told_is_the_one_in_the_policys_order() -> None:
    """A sub-agent has its root's arrival: it came last, and is next."""
    core = committing()
    granted(core.ask(ask("r1", "root", tokens=9_000)))
    core.now += 1.0
    assert place(held(core.ask(ask("r2", "s2", tokens=9_000)))) == [1]
    core.now += 0.1
    assert place(held(core.ask(ask("r3", "s3", tokens=9_000)))) == [2]
    core.now += 0.1
    assert place(held(core.ask(ask("r4", "child", tokens=9_000, parent="root")))) == [1]
    core.state(in_flight("r1", "root", worker="a"))
    places = {each.request_id: each.place for each in held(core.wait(1.0, ingresses=("ingress-1",)))}
    assert places == {"r4": 1, "r2": 2, "r3": 3}


# Leases


def test_a_lease_has_an_owner_an_epoch_and_an_end() -> None:
    core = committing()
    granted(core.ask(ask("r1", "s1", tokens=9_000)))
    (leased,) = [each for each in facts(done(core, "r1", "s1", 9_000), SessionFact) if each.state == "leased"]
    assert leased.lease is not None
    assert (leased.lease.owner, leased.lease.epoch) == (SessionKey(family="dynamo", root="s1").text(), 10)
    assert leased.lease.expires_ms == int((core.now + 600.0) * 1000)
    assert leased.lease.tokens == leased.numbers["tokens"]
    core.now += 1.0
    (released,) = [
        each for each in facts(core.ask(ask("r2", "s1", tokens=9_100)), SessionFact) if each.state == "released"
    ]
    assert released.lease == leased.lease


def test_lost_messages_leak_no_memory() -> None:
    """The end of one turn is lost, its ingress names it no more; a session never comes back: grants lapse, leases
    expire, and nothing is booked in the end."""
    core = committing()
    commit_of(core).idle_expiry_s = 5.0
    granted(core.ask(ask("r1", "s1", tokens=6_000)))
    granted(core.ask(ask("r2", "s2", tokens=6_000)))
    done(core, "r1", "s1", 6_000)
    (seat,) = commit_of(core).book.seats.values()
    assert seat.load > 12_000
    effects = core.wait(17.0, ingresses=("ingress-1",))
    told = [(each.state, each.session.root, each.lease) for each in facts(effects, SessionFact) if each.lease]
    assert [(state, root) for state, root, _ in told] == [("expired", "s1")]
    assert all(lease.expires_ms <= core.now * 1000 for _, _, lease in told)
    assert (seat.load, seat.running, len(seat.leases), len(pool_of(core).leases)) == (0, 0, 0, 0)
    assert len(core.core.state.ledger) == 0
    check_conserved(core)


def test_the_lease_of_a_worker_that_is_gone_is_told_once() -> None:
    core = committing("a", "b")
    where = granted(core.ask(ask("r1", "s1", tokens=9_000))).grant.worker
    done(core, "r1", "s1", 9_000)
    effects = core.do(WorkerStated(worker_state(where, health="left")))
    assert [each.state for each in facts(effects, SessionFact) if each.lease] == ["revoked"]
    assert not pool_of(core).leases


# Sub-agents


def test_a_sub_agent_blocks_its_parent_until_it_answers_without_a_tool() -> None:
    """Its session opens while its parent's turn is over; its last answer goes to its parent: nobody says so."""
    core = committing()
    granted(core.ask(ask("p1", "parent", tokens=1_000)))
    done(core, "p1", "parent", 1_000, tool="task")
    book = commit_of(core).book
    parent = book.programs.get(identity("parent").key.text())
    assert parent is not None
    blocked = [bool(parent.children)]
    for turn, tool in enumerate(("bash", None)):
        granted(core.ask(ask(f"c{turn}", "child", tokens=1_000 + turn, parent="parent")))
        blocked.append(bool(parent.children))
        usage = Usage(input_tokens=1_000 + turn, output_tokens=50)
        fact = end(f"c{turn}", identity("child", parent="parent"), usage=usage)
        core.end(msgspec.structs.replace(fact, tool_names=(tool,) if tool else ()))
    assert [*blocked, bool(parent.children)] == [False, True, True, False]
    assert book.programs.get(identity("child").key.text()) is None
    granted(core.ask(ask("p2", "parent", tokens=2_000)))
    check_conserved(core)


# Tools


def tool_event(name: str, seconds: float, **more: object) -> ToolTold:
    fact = ToolEvent(
        source="recorder-1", epoch=1, seq=0, at_ms=0, session=identity("s1").key, session_id="s1", event="end",
        tool_call_id="t1", tool_class=name, status="succeeded", duration_ms=seconds * 1000,
    )  # fmt: skip
    return ToolTold(msgspec.structs.replace(fact, **more))


def test_a_tool_that_a_harness_tells_of_counts_at_once_and_once() -> None:
    core = committing()
    granted(core.ask(ask("r1", "s1", tokens=1_000)))
    done(core, "r1", "s1", 1_000, tool="bash")
    core.now += 3.0
    core.do(tool_event("bash", 2.5))
    core.do(tool_event("search", 0.5))
    for ignored in ({"event": "start"}, {"status": "cancelled"}, {"inferred": True}, {"duration_ms": None}):
        core.do(tool_event("bash", 9.0, **ignored))
    assert tools_of(core) == {"bash": (2.5,), "search": (0.5,)}
    granted(core.ask(ask("r2", "s1", tokens=1_100)))
    assert tools_of(core) == {"bash": (2.5,), "search": (0.5,)}
    done(core, "r2", "s1", 1_100, tool=None)
    core.now += 20.0
    core.ask(ask("r3", "s1", tokens=1_200))
    assert tools_of(core)["user_turn"] == (20.0,)


@pytest.mark.parametrize(
    "wrong",
    [
        {"duration_ms": -1.0},
        {"duration_ms": float("nan")},
        {"duration_ms": float("inf")},
        {"duration_ms": 1e300},
        {"duration_ms": None, "started_at_ms": 2_000, "ended_at_ms": 1_000},
    ],
)
def test_a_duration_that_is_none_is_not_heard_and_breaks_no_policy(wrong: dict[str, object]) -> None:
    """Anybody on the bus can say so: the policy was taken for broken, and began anew."""
    core = committing()
    granted(core.ask(ask("r1", "s1", tokens=1_000)))
    core.do(tool_event("bash", 1.0, **wrong))
    assert not core.core.state.scheduled.failed  # type: ignore[union-attr]
    assert tools_of(core) == {}


def test_distributions_of_tools_are_made_anew_between_decisions() -> None:
    core = committing()
    tools = pool_of(core).learned.tools
    for _ in range(200):
        tools.record("bash", 1.0)
    for _ in range(2):  # that of the tool, and that of all calls
        core.now += 1.0
        core.do(Tick())
    assert not tools.refresh()


def test_a_standby_learns_how_long_tools_take_and_not_how_long_turns_were_held() -> None:
    leader, standby = committing(), committing(lead=False)

    def follow(effects: list[Effect]) -> None:
        for decision in facts(effects, Decision):
            standby.now = leader.now
            standby.do(Decided(decision))

    for core in (leader, standby):
        core.state()
    follow(leader.ask(ask("r1", "s1", tokens=9_000)))
    for core in (leader, standby):
        done(core, "r1", "s1", 9_000)
    leader.now += 2.0
    follow(leader.ask(ask("big", "s2", tokens=4_000)))
    leader.ask(ask("r2", "s1", tokens=12_500))
    assert leader.core.deciding.waits("r2")
    leader.now += 4.0
    follow(leader.end(end("big", identity("s2", final=True))))
    assert tools_of(standby) == tools_of(leader) == {"bash": (2.0,)}


# Load that is not ours


def test_kv_that_is_not_ours_is_told_when_it_changes_by_much() -> None:
    core = committing()

    def told(running: int, usage: float) -> int:
        load = RankLoad(rank=0, running=running, kv_usage=usage)
        core.do(WorkerStated(worker_state("a", loads=(load,))))
        (sizes,) = pool_of(core).sizes.values()
        return sizes.foreign_tokens

    assert told(0, 0.5) == 0  # nothing runs there: it is cache
    assert told(3, 0.5) == 8_000
    assert told(3, 0.53) == 8_000
    assert told(3, 0.6) == 9_600
    granted(core.ask(ask("r1", "s1", tokens=3_200)))
    told(4, 0.8)
    assert told(4, 0.8) == 9_600
    assert told(1, 0.3) == 0  # only ours: the rest is its answer
    check_conserved(core)


def test_answers_of_ours_are_not_others_kv() -> None:
    """Where others run too, nobody says whose KV is whose: beyond our prompts, what answers of ours usually need is
    ours."""
    core = committing()
    for number in range(4):
        granted(core.ask(ask(f"r{number}", f"s{number}", tokens=800)))
    load = RankLoad(rank=0, running=5, kv_usage=0.5)
    core.do(WorkerStated(worker_state("a", loads=(load,))))
    (sizes,) = pool_of(core).sizes.values()
    assert pool_of(core).learned.pooled.output.p90 == 250
    assert sizes.foreign_tokens == 8_000 - 4 * (800 + 250)


# Costs, and what is known from before


def calibration(**more: object) -> Calibration:
    point = CalibrationPoint(tokens=10_000, runs_s=(1.0,), seconds=1.0)
    stored = Calibration(model="m", engine="vllm", kv_tokens=16_000, quadratic=0.0, linear=1e-4, points=(point,))
    return msgspec.structs.replace(stored, **more)


def test_measured_costs_are_decided_by_and_damaged_ones_are_not() -> None:
    core = committing()
    profile = WorkerProfile(url="http://b", model="m", block_size=16, kv_tokens=16_000, engine="vllm")
    core.do(WorkerStated(msgspec.structs.replace(worker_state("b"), profile=profile)))
    assert pool_of(core).learned.reload_cost == RELOAD_H100_8B
    effects = core.do(CalibrationTold("m.vllm-16000", to_json(calibration())))
    (noticed,) = [each for each in effects if isinstance(each, Noticed)]
    assert (noticed.event, noticed.is_fault, noticed.fields["source"]) == ("engine_costs", False, "calibration")
    learned = pool_of(core).learned
    assert learned.reload_cost.seconds(10_000) == pytest.approx(1.0)
    assert learned.work_cost.seconds(10_000, 0) == pytest.approx(1.0)
    for key, payload in (("m.vllm-16000", b"{"), ("m.vllm-9", to_json(calibration()))):
        (noticed,) = [each for each in core.do(CalibrationTold(key, payload)) if isinstance(each, Noticed)]
        assert noticed.event == "calibration_refused"
    assert learned.reload_cost.linear == 1e-4
    core.do(CalibrationTold("m.vllm-16000", None))
    assert learned.reload_cost == RELOAD_H100_8B


def remembered_by(core: Driven) -> dict[str, bytes]:
    stored = core.core.stored_at_stop(core.now)
    return {each.key: each.payload for each in stored}


def test_what_was_learned_is_stored_by_the_leader_and_taken_over_at_the_next_start() -> None:
    first = committing()
    first.do(LearnedRead({}))
    granted(first.ask(ask("r1", "s1", tokens=1_000)))
    done(first, "r1", "s1", 1_000)
    assert not [each for each in first.wait(25.0, ingresses=("ingress-1",)) if isinstance(each, Stored)]
    assert [each.key for each in first.wait(10.0, ingresses=("ingress-1",)) if isinstance(each, Stored)] == ["m"]
    assert not first.core.stored_at_stop(first.now)
    granted(first.ask(ask("r2", "s1", tokens=1_200)))
    values = remembered_by(first)
    late = committing()  # its pool begins before the bucket could be read
    granted(late.ask(ask("r9", "s9", tokens=9_000)))
    assert remembered_by(late) == {}
    late.do(LearnedRead(values))
    early = driven(policy="commit", policy_parameters={"output_tokens": 100})
    early.do(LearnedRead(values))
    early.do(WorkerStated(worker_state("a")))
    for core in (late, early):
        assert tools_of(core).keys() == {"bash"}
        check_conserved(core)
    (seat,) = commit_of(late).book.seats.values()
    assert seat.running == 1


def test_a_damaged_value_costs_nothing_but_what_it_held() -> None:
    core = committing()
    effects = core.do(LearnedRead({"m": b"\xc1", "other": b""}))
    (noticed,) = [each for each in effects if isinstance(each, Noticed)]
    assert (noticed.event, noticed.fields["reason"]) == ("learned_state_refused", "undecodable")
    assert granted(core.ask(ask("r1", "s1", tokens=1_000))).policy == "commit"


# Priorities


def test_priorities_fit_32_bits_in_the_same_order() -> None:
    """Unix seconds, Unix milliseconds and small numbers, all the same for every leader."""
    for numbers in ((0, 1, 50_000), (1_790_000_000, 1_790_000_060), (-5, 0), (1_790_000_000_000, 1_790_000_001_500)):
        vllm = [engine_priority(number, high_first=False) for number in numbers]
        assert vllm == sorted(vllm)
        assert len(set(vllm)) == len(vllm)
        assert [engine_priority(number, high_first=True) for number in numbers] == [-value for value in vllm]
        assert all(abs(value) <= 1 << 30 for value in vllm)
