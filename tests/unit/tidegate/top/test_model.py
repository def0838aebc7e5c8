"""The picture is that of the facts, in whatever order, however often and however many of them come."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.decision import Decision
from schemas.request import RequestAccepted, RequestDispatched, RequestEnd, RequestFirstToken, Usage
from schemas.session import SessionFact, SessionFactState
from schemas.tool import ToolEvent
from tests.unit.tidegate.top.facts import START, Heard, House, identity, told
from tidegate.top.model import Model
from tidegate.top.requests import MAX_REQUESTS
from tidegate.top.snapshot import SessionRow, Snapshot

NOW = 10.0
STATES: tuple[SessionFactState, ...] = ("acting", "paused", "resumed", "closed", "released")


def seen(model: Model, at: float = NOW) -> Snapshot:
    return model.snapshot(START + at)


def row(model: Model, session: str, at: float = NOW) -> SessionRow:
    (found,) = [row for row in seen(model, at).sessions if row.session_id == session]
    return found


@st.composite
def histories(draw: st.DrawFn) -> list[Heard]:
    """Facts about three sessions, each at a time of its own: some never told, some twice, in any order."""
    house, facts = House(), []
    for number in range(draw(st.integers(1, 14))):
        who = identity(f"s{draw(st.integers(0, 2))}")
        at, request = number * 0.5, f"r{number}"
        match draw(st.sampled_from(["turn", "turn", "turn", "session", "tool"])):
            case "turn":
                tools = ("bash",) if draw(st.booleans()) else ()
                tokens = (1000 + number, 10, draw(st.integers(0, 1000)))
                facts += [
                    house.accepted(at, request, who),
                    house.decision(at + 0.01, request, who, f"w{number % 2}", hold_ms=number),
                    house.dispatched(at + 0.02, request, f"w{number % 2}"),
                    house.first_token(at + 0.03, request, float(number)),
                    house.end(at + draw(st.sampled_from([0.04, 0.94])), request, who, tokens=tokens, tools=tools),
                ]
            case "session":
                state: SessionFactState = draw(st.sampled_from(STATES))
                facts.append(house.session(at, who, state, turns=number))
                facts.append(house.session(at + 0.1, who, "leased", worker="w0", lease=(20.0, number)))
            case "tool":
                facts.append(house.tool(at + 0.2, who, f"c{number}", "grep"))
                facts.append(house.tool(at + 0.3, who, f"c{number}", "grep", ended=True))
    facts = [fact for fact in facts if draw(st.integers(0, 5))]
    again = draw(st.lists(st.sampled_from(facts), max_size=4)) if facts else []
    return draw(st.permutations(facts + again))


def naive(heard: list[Heard]) -> dict[str, Any]:
    """The same by looking through all facts for each figure."""
    facts = [fact for _, fact in heard]
    ends = {fact.request_id: fact for fact in facts if isinstance(fact, RequestEnd)}
    named = defaultdict(list)
    for fact in facts:
        if isinstance(fact, RequestAccepted | Decision | RequestDispatched | RequestFirstToken):
            named[fact.request_id].append(fact)
    flying = {request: said for request, said in named.items() if request not in ends}
    held = {request for request, said in flying.items() if all(isinstance(one, RequestAccepted) for one in said)}
    whose = {
        request: one.identity.session_id
        for request, said in flying.items()
        for one in said
        if isinstance(one, RequestAccepted | Decision)
    }
    return {
        "in_flight": len(flying),
        "held": len(held),
        "reported": sum(end.usage.cached_tokens or 0 for end in ends.values()),
        "predicted": sum(end.predicted_cached_tokens or 0 for end in ends.values()),
        "decisions": sum(isinstance(fact, Decision) for fact in facts),
        "sessions": {name: naive_session(name, facts, whose, held) for name in names_of(facts)},
    }


def names_of(facts: list[Any]) -> set[str]:
    sessions = {fact.session_id for fact in facts if isinstance(fact, SessionFact | ToolEvent)}
    return sessions | {
        fact.identity.session_id for fact in facts if isinstance(fact, RequestAccepted | Decision | RequestEnd)
    }


def naive_session(name: str, facts: list[Any], whose: dict[str, str], held: set[str]) -> tuple[Any, ...]:
    """State, turns, context, hit ratio, tokens of the lease, and the tool that runs."""
    flying = [request for request, session in whose.items() if session == name]
    ends = {
        fact.request_id: fact for fact in facts if isinstance(fact, RequestEnd) and fact.identity.session_id == name
    }
    last_end = max(ends.values(), key=lambda fact: fact.at_ms, default=None)
    began = max(
        (f.received_ms for f in facts if isinstance(f, RequestAccepted) and f.identity.session_id == name), default=0
    )
    said = sorted(
        (fact for fact in facts if isinstance(fact, SessionFact) and fact.session_id == name), key=lambda f: f.at_ms
    )
    closed = max((fact.at_ms for fact in said if fact.state == "closed"), default=0) > began
    pauses = [fact for fact in said if fact.state in ("paused", "resumed", "closed")]
    leases = [fact for fact in said if fact.state in ("leased", "released", "closed")]
    lease = leases[-1].lease if leases and leases[-1].state == "leased" and not closed else None
    tools = [fact for fact in facts if isinstance(fact, ToolEvent) and fact.session_id == name]
    over = {fact.tool_call_id for fact in tools if fact.event == "end"}
    calls = [fact for fact in tools if fact.tool_call_id not in over and fact.at_ms >= began]
    tool_ended = max((fact.at_ms for fact in tools if fact.event == "end"), default=0)
    called = last_end is not None and last_end.tool_names and last_end.at_ms > tool_ended and last_end.at_ms >= began
    placed = [request for request in flying if request not in held]
    if len(placed) < len(flying):
        state = "held"
    elif flying:
        state = "running"
    elif closed:
        state = "closed"
    elif pauses and pauses[-1].state == "paused":
        state = "paused"
    elif calls or called:
        state = "acting"
    else:
        state = "leased" if lease else "idle"
    told_turns = max((f.turns for f in said if f.state in ("acting", "leased", "paused", "closed")), default=0)
    tool = (min(calls, key=lambda f: f.at_ms).tool_class if calls else "bash") if state == "acting" else None
    usage = last_end.usage if last_end is not None else Usage()
    prompt = usage.input_tokens or 0
    hit = min(1.0, (usage.cached_tokens or 0) / prompt) if prompt else None
    context = prompt + (usage.output_tokens or 0) if prompt else None
    return (
        state,
        max(told_turns, len(ends)) + len(placed),
        context,
        hit,
        lease.tokens if lease else None,
        tool,
    )


@pytest.mark.long
@given(histories())
def test_any_order_gives_what_a_recount_gives(heard: list[Heard]) -> None:
    """Facts that are lost are not guessed, those that come late or twice change nothing that they should not."""
    snapshot = seen(told(*heard))
    headline = snapshot.headline
    found = {
        "in_flight": headline.in_flight,
        "held": headline.held,
        "reported": headline.cached_tokens_reported,
        "predicted": headline.cached_tokens_predicted,
        "decisions": round(sum(worker.decisions_per_s for worker in snapshot.workers) * NOW),
        "sessions": {
            row.session_id: (row.state, row.turns, row.context_tokens, row.hit_ratio, row.lease_tokens, row.tool)
            for row in snapshot.sessions
        },
    }
    assert found == naive(heard)
    assert sum(headline.states.values()) == len(snapshot.sessions)


def test_an_ingress_that_names_its_requests_says_who_is_gone() -> None:
    """Joined in the middle: what it names is there. An end that was lost is noticed a second later, in all parts of
    its state, and what was accepted since is kept."""
    house, who = House(), identity("s")
    model = told(house.in_flight(0.0, ("r1", who, "w1"), ("r2", who, None)))
    shown = row(model, "s")
    assert (shown.state, shown.requests, shown.hold_reason, shown.for_ms) == ("held", 2, "at_limit", 10_400)
    assert seen(model).headline.in_flight == 2
    newer = house.accepted(1.5, "r4", who)
    parts = [house.in_flight(1.0, ("r2", who, "w1"), parts=2), house.in_flight(1.0, part=1, parts=2)]
    told(newer, parts[1], model=model)
    assert seen(model).headline.in_flight == 3
    told(parts[0], model=model)
    headline = seen(model).headline
    assert (headline.in_flight, headline.held, headline.requests_vanished) == (2, 1, 1)
    told(house.end(2.0, "r2", who), house.in_flight(0.5, ("r2", who, "w1")), model=model)
    assert seen(model).headline.in_flight == 1, "an old state does not bring back what has ended"


def test_a_silent_ingress_has_no_requests_and_a_silent_worker_is_lost() -> None:
    house, who = House(), identity("s")
    model = told(house.worker(0.0, "w1"), house.accepted(0.0, "r1", who), house.dispatched(0.1, "r1", "w1"), at=1.0)
    model.tick(START + 7.0)
    (worker,) = seen(model, 7.0).workers
    assert (worker.health, worker.open_grants, worker.kv_used_tokens) == ("lost", 1, 25_000)
    model.tick(START + 12.0)
    assert seen(model, 12.0).headline.in_flight == 0
    model.tick(START + 100.0)
    assert seen(model, 100.0).workers == ()


def test_facts_that_never_came_are_counted() -> None:
    house, who = House(), identity("s")
    facts = [house.accepted(number, f"r{number}", who) for number in range(10)]
    headline = seen(told(facts[0], facts[3], facts[9])).headline
    assert headline.facts_missed == 7


def test_a_lease_ends_by_itself_and_a_tool_that_is_told_replaces_the_guess() -> None:
    """The turn's own tool calls are a guess until a harness tells; when all it told of have ended, nothing acts."""
    house, who = House(), identity("s")
    facts = [
        house.end(1.0, "r1", who, tools=("bash", "grep")),
        house.session(1.1, who, "leased", worker="w1", turns=1, lease=(5.0, 700)),
    ]
    model = told(*facts, at=2.0)
    assert (row(model, "s", 2.0).tool, row(model, "s", 2.0).tool_inferred) == ("bash", True)
    assert row(model, "s", 2.0).lease_ms == 4_100
    told(house.tool(2.5, who, "c", "pytest"), model=model)
    shown = row(model, "s", 3.0)
    assert (shown.state, shown.tool, shown.tool_ms, shown.tool_inferred) == ("acting", "pytest", 500, False)
    told(house.tool(3.5, who, "c", "pytest", ended=True), model=model)
    assert (row(model, "s", 4.0).state, row(model, "s", 6.2).state) == ("leased", "idle")


@pytest.mark.long
def test_hostile_floods_are_bounded_and_counted() -> None:
    """Ids of any length and number: what is kept has a bound, and what is not is said."""
    house, model = House(), Model(max_sessions=50)
    for number in range(MAX_REQUESTS + 300):
        who = identity(f"{number}" + "\x1b" * 50_000 if number % 1000 == 0 else f"s{number}")
        family, fact = house.accepted(0.0, f"r{number}", who)
        model.handle(family, fact, START)
    for number in range(1_000):
        family, fact = house.worker(0.0, f"w{number}")
        model.handle(family, fact, START)
    snapshot = seen(model, 0.0)
    assert len(snapshot.sessions) == 50
    assert all(len(row.session_id) <= 256 and len(row.session) <= 256 for row in snapshot.sessions)
    headline = snapshot.headline
    assert (headline.requests_forgotten, headline.in_flight) == (300, MAX_REQUESTS)
    assert (headline.sessions_forgotten, headline.workers_forgotten) == (MAX_REQUESTS + 250, 488)


def test_requests_without_identity_do_not_stay() -> None:
    """Each is a session of its own, and gone soon after its end."""
    house, single = House(), identity("r1")
    key = single.key.__class__(family="request", root="r1")
    single = single.__class__(key=key, session_id="r1")
    model = told(house.accepted(0.0, "r1", single), house.end(1.0, "r1", single), at=1.0)
    assert row(model, "r1", 1.0).state == "closed"
    model.tick(START + 5.0)
    assert seen(model, 5.0).sessions == ()


def test_a_grant_counts_where_it_is() -> None:
    """A second attempt moves it; the first one, told late, does not move it back."""
    house, who = House(), identity("s")
    facts = [house.worker(0.0, "w1"), house.worker(0.0, "w2"), house.accepted(0.1, "r", who)]
    again, first = house.dispatched(0.3, "r", "w2", attempt=1), house.dispatched(0.2, "r", "w1")
    model = told(*facts, again, first)
    assert {worker.worker: worker.open_grants for worker in seen(model).workers} == {"w1": 0, "w2": 1}
    assert (row(model, "s").worker, row(model, "s").state) == ("w2", "running")
