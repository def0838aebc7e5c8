"""Settings of the admission service: ``[admission]``, ``TIDEGATE_ADMISSION_<KEY>``, ``--set``."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from bus.settings import CommonSettings
from replica.config import ReplicaSettings
from services.admission.cost import CostWeights
from services.admission.policies.registry import make_policy
from services.admission.user_policies import UserPolicy, check_policies, slowest_ms


class AdmissionSettings(CommonSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the leader decides by.

    ``policy``: who runs when, and where. ``kv`` holds nothing back; any other name of
    `services.admission.policies.registry` may, with ``policy_parameters`` of its own. ``engine_priorities``: send the
    policy's order with each grant, for engines that schedule by priority (others refuse the field).
    ``client_priority_s``: a client's priority (docs/harnesses.md) moves its turn in the line by so many seconds a step,
    an hour at most; 0: it is shown to users' policies and orders nothing.

    Placement: ``weights`` are the terms of the cost (see `CostWeights`). ``stickiness`` and ``child_stickiness``: how
    much dearer the session's previous worker (at a child's first placement, its parent's worker) may be and still be
    taken, as a multiple of the prompt's blocks that it holds (3: about two more running turns of that size).
    ``foreign_request_tokens``: prompt tokens assumed for a request that waits at an engine and is
    not ours. ``seed``: of the choice among equal costs.

    Holds: ``max_grants_per_rank`` open grants of one rank; a turn waits only when every eligible rank has as many.
    ``hold_queue_limit`` turns wait in all, each at most ``hold_deadline_s`` (or twice the limit that the policy keeps
    itself, if that is longer) and never beyond its ask's own deadline, told so every ``hold_keepalive_s``.
    A client that is refused for want of room reads when to ask again: when the line will be through at its speed, not
    less than ``retry_after_s`` and not more than ``retry_after_most_s``; for other reasons the former.

    ``paused_after_s``: an idle session whose turn waits with the policy for so long is told to be paused
    (`services.admission.pauses`); 0: at once.

    Index: hold an ``own`` replica, fed by the subjects that feed an indexer (``replica``: its settings; a standby's is
    as warm as the leader's, and decisions need no indexer), or ``ask`` an indexer over the bus.

    Questions: ``index_deadline_ms`` for an indexer; ``policies`` of users on ``tg.v1.policy.<ask>.<name>`` (see
    `services.admission.user_policies.UserPolicy`), each with ``policy_questions`` open at most; about ``max_deciding``
    asks anything is open at once.

    Life: ``warmup_s`` a fresh process listens to facts before it decides; ``grant_ttl_s`` a grant lives that no
    ``ingress.state`` names; ``ingress_lost_s`` and ``worker_lost_s`` of silence; ``session_idle_s`` closes a session;
    at most ``max_sessions`` are remembered; ``lease_s`` and ``renew_s`` of the leader's key. ``store_learned_s``: what
    a policy has learned is stored no more often than that.

    Traces: ``trace_decisions``: each placement is a row ``decision`` of the stream, with at most ``trace_candidates``
    of its candidates (0..64), the chosen one first.
    """

    hears_itself: ClassVar[bool] = False

    policy: str = "commit"
    policy_parameters: dict[str, Any] = msgspec.field(default_factory=dict)
    engine_priorities: bool = False
    client_priority_s: float = 0.0
    weights: CostWeights = msgspec.field(default_factory=CostWeights)
    stickiness: float = 3.0
    child_stickiness: float = 0.25
    foreign_request_tokens: int = 2048
    seed: int = 0
    max_grants_per_rank: int = 256
    hold_queue_limit: int = 1024
    hold_deadline_s: float = 60.0
    hold_keepalive_s: float = 0.5
    paused_after_s: float = 1.0
    retry_after_s: int = 1
    retry_after_most_s: int = 60
    index: Literal["ask", "own"] = "own"
    replica: ReplicaSettings = msgspec.field(default_factory=ReplicaSettings)
    index_deadline_ms: int = 250
    policies: tuple[UserPolicy, ...] = ()
    policy_questions: int = 256
    max_deciding: int = 1024
    warmup_s: float = 1.2
    grant_ttl_s: float = 8.0
    ingress_lost_s: float = 5.0
    worker_lost_s: float = 5.0
    session_idle_s: float = 1800.0
    max_sessions: int = 65_536
    lease_s: float = 2.0
    renew_s: float = 0.5
    store_learned_s: float = 30.0
    trace_decisions: bool = True
    trace_candidates: int = 8

    def __post_init__(self) -> None:
        """Rules between keys. Raises `ValueError` with one sentence."""
        for key in (
            "max_grants_per_rank",
            "hold_queue_limit",
            "hold_deadline_s",
            "hold_keepalive_s",
            "retry_after_s",
            "retry_after_most_s",
            "index_deadline_ms",
            "policy_questions",
            "max_deciding",
            "grant_ttl_s",
            "ingress_lost_s",
            "worker_lost_s",
            "session_idle_s",
            "max_sessions",
            "renew_s",
            "store_learned_s",
        ):
            if getattr(self, key) <= 0:
                raise ValueError(f"{key} must be greater than 0")
        for key in (
            "client_priority_s",
            "stickiness",
            "child_stickiness",
            "foreign_request_tokens",
            "warmup_s",
            "paused_after_s",
        ):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} must not be negative")
        if not 0 <= self.trace_candidates <= 64:
            raise ValueError("trace_candidates must be between 0 and 64")
        if self.lease_s < 3 * self.renew_s:
            raise ValueError("lease_s must be at least 3 times renew_s")
        if self.hold_keepalive_s > 1:
            raise ValueError("hold_keepalive_s must be at most 1 (an ingress takes silence for a dead leader)")
        if self.index_deadline_ms + slowest_ms(self.policies) > 1000:
            raise ValueError(
                "index_deadline_ms and the longest deadline_ms of policies must be at most 1000 together (no held "
                "reply is sent meanwhile, and an ingress takes silence for a dead leader)"
            )
        check_policies(self.policies, self.policy)
        if self.policy != "kv":
            make_policy(self.policy, self.policy_parameters)
        elif self.policy_parameters:
            raise ValueError(
                "policy_parameters: kv has none; weights, stickiness and child_stickiness are its settings"
            )
        if self.grant_ttl_s <= self.ingress_lost_s:
            raise ValueError("grant_ttl_s must be greater than ingress_lost_s (a lost ingress owes rows first)")
