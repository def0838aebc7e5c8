"""Questions to a user's policy (JSON, with a deadline). Late, absent or malformed: the built-in answer stands.

Each kind of question has its subject, ``tg.v1.policy.<ask>.<name>``. Every field of an answer is optional; the empty
answer ``{}`` is no opinion. ``docs/custom-policies.md`` shows all of them as JSON.
"""

from __future__ import annotations

from typing import Annotated, Literal, get_args

import msgspec

from schemas.base import Count, Message, Number, Tokens
from schemas.decision import Candidate, PolicyAsk
from schemas.hint import ActionType
from schemas.session import RequestKind, SessionIdentity, SessionKey

POLICY_ASKS: tuple[PolicyAsk, ...] = get_args(PolicyAsk)

MAX_HOLD_MS = 30_000
"""One answer holds a turn no longer; then the policy is asked again."""

MAX_ORDER_BIAS_S = 3600.0

MAX_ANSWER_BYTES = 65_536
"""A longer answer is malformed: it is kept as long as its turn waits, and of its words little travels on."""

Bias = Annotated[float, msgspec.Meta(ge=-1e9, le=1e9)]


class RouteQuestion(Message, frozen=True, kw_only=True, omit_defaults=True):
    """``tg.v1.policy.route.<name>``: which of these candidates? ``choice`` is what the built-in policy would take."""

    request_id: str
    model: str
    identity: SessionIdentity
    candidates: tuple[Candidate, ...]
    choice: Count
    deadline_ms: Count
    kind: RequestKind = "turn"
    input_tokens: Tokens = 0
    previous_worker: str | None = None


class RouteAnswer(Message, frozen=True, kw_only=True, omit_defaults=True):
    """``worker`` (and ``rank``, if the policy cares) must be one of the candidates. Empty worker: no opinion."""

    worker: str = ""
    rank: Count | None = None
    reason: str | None = None


class AdmitQuestion(Message, frozen=True, kw_only=True, omit_defaults=True):
    """``tg.v1.policy.admit.<name>``: may this turn run now?

    ``turn_index`` counts its session's turns from 0. ``expected_output_tokens``, ``priority`` (lower for earlier): what
    the client says of it, if it says so. ``held_ms``: how long it has waited so far; ``expires_ms``: Unix
    ms at which it is refused if it still waits. The rest is the model's load at this moment, without this turn:
    ``open_grants`` run, ``waiting`` wait, of which ``waiting_main`` are turns of agents that are nobody's sub-agent;
    ``tenant_*``: those of the same tenant; ``tenants``: how many have something that runs or waits, this one included.
    """

    request_id: str
    model: str
    identity: SessionIdentity
    deadline_ms: Count
    kind: RequestKind = "turn"
    turn_index: Count = 0
    input_tokens: Tokens = 0
    max_output_tokens: Count | None = None
    expected_output_tokens: Count | None = None
    priority: Number = 0
    held_ms: Count = 0
    expires_ms: Count = 0
    waiting: Count = 0
    waiting_main: Count = 0
    open_grants: Count = 0
    tenants: Count = 1
    tenant_open_grants: Count = 0
    tenant_waiting: Count = 0


AdmitAction = Literal["", "admit", "hold", "refuse"]


class AdmitAnswer(Message, frozen=True, kw_only=True, omit_defaults=True):
    """``admit`` and the empty action let the turn go on to the built-in policy, which may still hold it.

    ``hold``: for ``hold_ms`` (at most 30,000), then the question comes again. ``refuse``: the client reads 429
    ``policy_refused`` with ``reason``. ``order_bias_s``: seconds added to the session's arrival where turns wait for
    memory (negative: earlier; at most an hour either way).
    """

    action: AdmitAction = ""
    hold_ms: Count | None = None
    order_bias_s: Bias = 0.0
    reason: str | None = None


class BuiltinLease(Message, frozen=True, kw_only=True, omit_defaults=True):
    """What the built-in policy has done, and the numbers that made it do so (as in `schemas.session.SessionFact`)."""

    state: str = "leased"
    numbers: dict[str, float] = msgspec.field(default_factory=dict)


class LeaseQuestion(Message, frozen=True, kw_only=True, omit_defaults=True):
    """``tg.v1.policy.lease.<name>``: a session's turn has ended and its KV is leased at a rank; should it stay?

    ``context_tokens`` of KV, kept while ``tool_names`` run (empty: a person is next, or nobody).
    """

    identity: SessionIdentity
    model: str
    worker: str
    rank: Count
    deadline_ms: Count
    turns: Count = 0
    context_tokens: Tokens = 0
    tool_names: tuple[str, ...] = ()
    builtin: BuiltinLease = BuiltinLease()


class LeaseAnswer(Message, frozen=True, kw_only=True, omit_defaults=True):
    """``keep`` false: give it up now. True: nobody may take it for ``ttl_ms``, within what the built-in policy allows
    such leases in all. Absent: no opinion."""

    keep: bool | None = None
    ttl_ms: Count | None = None
    reason: str | None = None


class PlannedAction(Message, frozen=True, kw_only=True, omit_defaults=True):
    """One action that the built-in planner would send (`schemas.hint.ActionPayload` says what the fields mean)."""

    action_type: ActionType
    worker: str
    rank: Count = 0
    ttl_ms: Count | None = None
    priority: Number | None = None
    reason: str | None = None


class HintQuestion(Message, frozen=True, kw_only=True, omit_defaults=True):
    """``tg.v1.policy.hint.<name>``: this has happened to a session; what should the caches be told?

    ``trigger``: the session's new state, or ``decided``. ``builtin``: what the planner would send.
    """

    session: SessionKey
    session_id: str
    trigger: str
    deadline_ms: Count
    model: str | None = None
    worker: str | None = None
    rank: Count | None = None
    context_tokens: Tokens = 0
    builtin: tuple[PlannedAction, ...] = ()


class HintAnswer(Message, frozen=True, kw_only=True, omit_defaults=True):
    """``actions``: instead of the planner's, within the same budget; absent: no opinion; empty: nothing is sent."""

    actions: Annotated[tuple[PlannedAction, ...], msgspec.Meta(max_length=16)] | None = None
    reason: str | None = None


PolicyQuestion = RouteQuestion | AdmitQuestion | LeaseQuestion | HintQuestion
PolicyAnswer = RouteAnswer | AdmitAnswer | LeaseAnswer | HintAnswer

QUESTIONS: dict[PolicyAsk, type[PolicyQuestion]] = {
    "route": RouteQuestion,
    "admit": AdmitQuestion,
    "lease": LeaseQuestion,
    "hint": HintQuestion,
}
ANSWERS: dict[PolicyAsk, type[PolicyAnswer]] = {
    "route": RouteAnswer,
    "admit": AdmitAnswer,
    "lease": LeaseAnswer,
    "hint": HintAnswer,
}
