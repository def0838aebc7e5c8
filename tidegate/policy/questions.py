"""The questions of the conformance kit: as admission asks them, as a newer admission may, and as nobody should."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import msgspec

from schemas.decision import Candidate, PolicyAsk
from schemas.hint import ActionType
from schemas.index import TierBlocks
from schemas.policy import (
    AdmitQuestion,
    BuiltinLease,
    HintQuestion,
    LeaseQuestion,
    PlannedAction,
    PolicyQuestion,
    RouteQuestion,
)
from schemas.session import SessionIdentity, SessionKey

MODEL = "conformance/model"
WORKERS, RANKS = 16, 4
"""Of the large question: 64 candidates."""

PARENT = SessionKey(tenant="acme", family="tidegate", root="conformance")
IDENTITY = SessionIdentity(key=PARENT, session_id="conformance")
CHILD = SessionIdentity(
    key=SessionKey(tenant="acme", family="tidegate", root="conformance-child"),
    session_id="conformance-child",
    parent_session_id="conformance",
    parent=PARENT,
    background=True,
)

GARBAGE: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{not json",
    "bytes that are no text": b"\xff\xfe\x00\xc1",
    "JSON of another shape": b'[{"worker": null}]',
    "an empty object": b"{}",
    "wrong types": b'{"request_id": 7, "candidates": "all", "deadline_ms": "soon"}',
    "deep nesting": b"[" * 20_000,
}
"""What a subject may carry that is no question, by name."""


@dataclass(frozen=True, slots=True)
class Case:
    """One question. ``expects_nothing``: no answer with an opinion can be legal."""

    name: str
    question: PolicyQuestion
    expects_nothing: bool = False
    extended: bool = False

    def payload(self, deadline_ms: int) -> bytes:
        """As it travels, with this deadline (Unix ms); ``extended``: with fields of a later version, at every level."""
        question = msgspec.structs.replace(self.question, deadline_ms=deadline_ms)
        if not self.extended:
            return msgspec.json.encode(question)
        return msgspec.json.encode(_extended(msgspec.to_builtins(question)))


def cases(ask: PolicyAsk) -> list[Case]:
    """Every well-formed case of one kind; the first is the plain one."""
    if ask == "route":
        return _route_cases()
    if ask == "admit":
        return _admit_cases()
    if ask == "lease":
        return _lease_cases()
    return _hint_cases()


def _candidates(workers: int, ranks: int, excluded: str | None = None) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(
            worker=f"worker-{worker}",
            rank=rank,
            cost=10.0 + worker + rank / 10,
            parts={"prefill": 8.0, "device_credit": 2.0, "decode": 4.0 + worker, "requests": 0.0},
            blocks=TierBlocks(device=worker),
            open_grants=worker,
            health="synced",
            sticky=worker == 0,
            excluded=excluded if excluded is not None else ("at_limit" if worker == 1 and workers > 2 else None),
        )
        for worker in range(workers)
        for rank in range(ranks)
    )


def _route_cases() -> list[Case]:
    def question(candidates: tuple[Candidate, ...], choice: int = 0) -> RouteQuestion:
        return RouteQuestion(
            request_id="conformance-1",
            model=MODEL,
            identity=IDENTITY,
            candidates=candidates,
            choice=choice,
            deadline_ms=0,
            input_tokens=6_400,
            previous_worker="worker-0",
        )

    small = question(_candidates(2, 1))
    return [
        Case("small question", small),
        Case(f"{WORKERS * RANKS} candidates", question(_candidates(WORKERS, RANKS), choice=3)),
        Case("unknown fields", small, extended=True),
        Case("no candidate usable", question(_candidates(2, 1, "unhealthy")), expects_nothing=True),
        Case("no candidate at all", question(()), expects_nothing=True),
    ]


def _admit_cases() -> list[Case]:
    small = AdmitQuestion(request_id="conformance-1", model=MODEL, identity=IDENTITY, deadline_ms=0, input_tokens=640)
    busy = AdmitQuestion(
        request_id="conformance-2",
        model=MODEL,
        identity=CHILD,
        deadline_ms=0,
        kind="title",
        turn_index=70_000,
        input_tokens=2_000_000,
        max_output_tokens=128_000,
        held_ms=55_000,
        expires_ms=1,
        waiting=100_000,
        waiting_main=50_000,
        open_grants=65_536,
        tenants=1_000,
        tenant_open_grants=60_000,
        tenant_waiting=3,
    )
    return [
        Case("small question", small),
        Case("everybody waits", busy),
        Case("unknown fields", small, extended=True),
    ]


def _lease_cases() -> list[Case]:
    small = LeaseQuestion(
        identity=IDENTITY, model=MODEL, worker="worker-0", rank=0, deadline_ms=0, tool_names=("bash",)
    )
    large = LeaseQuestion(
        identity=CHILD,
        model=MODEL,
        worker="worker-0",
        rank=3,
        deadline_ms=0,
        turns=70_000,
        context_tokens=2_000_000,
        tool_names=tuple(f"tool-{number}" for number in range(64)),
        builtin=BuiltinLease(numbers={"tokens": 2e6, "final_tokens": 3e6}),
    )
    return [
        Case("small question", small),
        Case("a long session with 64 tools", large),
        Case("unknown fields", small, extended=True),
    ]


def _hint_cases() -> list[Case]:
    small = HintQuestion(
        session=PARENT,
        session_id="conformance",
        trigger="acting",
        deadline_ms=0,
        model=MODEL,
        worker="worker-0",
        rank=0,
        context_tokens=6_400,
        builtin=(PlannedAction(action_type="retain", worker="worker-0", ttl_ms=120_000, priority=4),),
    )
    large = HintQuestion(
        session=CHILD.key,
        session_id="conformance-child",
        trigger="revoked",
        deadline_ms=0,
        model=MODEL,
        worker="worker-0",
        rank=3,
        context_tokens=2_000_000,
        builtin=tuple(
            PlannedAction(action_type=each, worker="worker-0", rank=3, ttl_ms=600_000, reason="conformance")
            for each in get_args(ActionType)
        ),
    )
    nowhere = HintQuestion(session=PARENT, session_id="conformance", trigger="decided", deadline_ms=0)
    return [
        Case("small question", small),
        Case("a long session with every action", large),
        Case("unknown fields", small, extended=True),
        Case("a session that ran nowhere", nowhere, expects_nothing=True),
    ]


_OPEN = ("parts", "numbers")
"""Mappings where a further key is content."""


def _extended(value: Any) -> Any:
    if isinstance(value, dict):
        inside = {key: item if key in _OPEN else _extended(item) for key, item in value.items()}
        return {**inside, "future_field": {"a": [None, 1, "b"]}}
    return [_extended(item) for item in value] if isinstance(value, list | tuple) else value
