"""A decision's row: what the fact says, fewer candidates, nothing null."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.admit import Grant
from schemas.base import from_json, to_json
from schemas.decision import Candidate, Decision, PolicyAsked
from schemas.session import SessionIdentity, SessionKey
from schemas.trace import TracedDecision, TraceRow
from services.admission.config import AdmissionSettings
from services.admission.decision_rows import best, decision_row, message_id

NAMED = SessionIdentity(key=SessionKey(family="dynamo", root="s"), session_id="s", parent_session_id="p")
NAMELESS = SessionIdentity(key=SessionKey(family="request", root="r1"), session_id="r1")


def decision(*candidates: Candidate, identity: SessionIdentity = NAMED, **more: Any) -> Decision:
    """w1 was chosen of these."""
    grant = Grant(grant_id="g1", request_id="r1", worker="w1", rank=1, owner="ingress-1", epoch=1, expires_ms=0)
    return Decision(
        source="admission-1",
        epoch=1,
        seq=0,
        at_ms=1_000_000,
        request_id="r1",
        model="m",
        worker="w1",
        rank=1,
        identity=identity,
        grant=grant,
        candidates=candidates,
        **more,
    )


def test_a_full_row() -> None:
    """All that the fact says of the placement; the grant's number joins it with the row of its request."""
    asked = PolicyAsked(policy="mine", ask="route", outcome="used", took_ms=1.5)
    chosen = Candidate(worker="w1", rank=1, cost=3.0, parts={"prefill": 3.0}, health="synced")
    made = decision(
        Candidate(worker="w0", rank=0, cost=9.0),
        chosen,
        attempt=1,
        policy="commit",
        input_tokens=64,
        block_size=16,
        predicted_cached_tokens=32,
        previous_worker="w1",
        index_health="synced",
        hold_ms=200,
        hold_reason="no_room",
        decide_us=80,
        policies=(asked,),
    )
    row = decision_row(made, 1)
    assert from_json(to_json(row), TraceRow) == row
    assert json.loads(to_json(row)) == {
        "schema": "tidegate.request.trace.v1",
        "event_type": "decision",
        "event_source": "tidegate",
        "event_time_unix_ms": 1_000_000,
        "agent_context": {
            "session_id": "s",
            "parent_session_id": "p",
            "session": {"tenant": "default", "family": "dynamo", "root": "s", "agent": ""},
        },
        "decision": {
            "request_id": "r1",
            "grant_id": "g1",
            "worker": {"worker": "w1", "rank": 1},
            "model": "m",
            "attempt": 1,
            "policy": "commit",
            "input_tokens": 64,
            "block_size": 16,
            "predicted_cached_tokens": 32,
            "previous_worker": "w1",
            "index_health": "synced",
            "hold_ms": 200,
            "hold_reason": "no_room",
            "decide_us": 80,
            "candidates_seen": 2,
            "candidates": [{"worker": "w1", "rank": 1, "cost": 3.0, "parts": {"prefill": 3.0}, "health": "synced"}],
            "policies": [{"policy": "mine", "ask": "route", "outcome": "used", "took_ms": 1.5}],
        },
    }
    assert message_id(made) == "decision:g1"


def test_every_field_of_the_fact_that_a_row_has_is_said() -> None:
    """A field that both have is never forgotten when one is added."""
    made = decision(attempt=2, kind="title", mode="custom", index_reason="gap", predicted_shared_tokens=4, hold_ms=1)
    traced = decision_row(made, 8).decision
    assert traced is not None
    shared = set(TracedDecision.__struct_fields__) & set(Decision.__struct_fields__) - {"worker", "candidates"}
    assert {name: getattr(traced, name) for name in shared} == {name: getattr(made, name) for name in shared}


def test_a_request_without_identity_has_no_context() -> None:
    """As in the rows of an ingress (identity-and-traces §8.3)."""
    row = decision_row(decision(identity=NAMELESS), 8)
    assert row.agent_context is None
    assert row.decision is not None


costs = st.one_of(st.none(), st.floats(0, 100))
seats = st.lists(st.tuples(costs, st.booleans(), st.sampled_from([0.0, -5.0])), max_size=12)


@given(seats, st.integers(0, 12), st.integers(0, 14))
def test_the_chosen_candidate_first_then_by_cost(
    drawn: list[tuple[float | None, bool, float]], chosen: int, most: int
) -> None:
    """Whatever the bound: the chosen one, then who could be chosen, cheapest first, as a plain sort says."""
    candidates = [
        Candidate(
            worker="w1" if place == chosen else f"x{place}",
            rank=1,
            cost=cost,
            parts={"policy": bias} if bias else {},
            excluded="at_limit" if excluded else None,
        )
        for place, (cost, excluded, bias) in enumerate(drawn)
    ]
    kept = best(decision(*candidates), most)
    assert len(kept) == min(most, len(candidates))

    def key(one: Candidate) -> tuple[bool, bool, float]:
        cost = float("inf") if one.cost is None else one.cost + one.parts.get("policy", 0.0)
        return one.worker != "w1", one.excluded is not None, cost

    assert [key(one) for one in kept] == sorted(map(key, candidates))[:most]


@pytest.mark.parametrize("most", [-1, 65])
def test_the_bound_of_candidates(most: int) -> None:
    """0..64: a row stays small."""
    with pytest.raises(ValueError, match="trace_candidates must be between 0 and 64"):
        AdmissionSettings(trace_candidates=most)
