"""What is known at one moment: what the terminal shows, and what ``--json`` prints. Times in ms, sizes in tokens."""

from __future__ import annotations

from typing import Literal

import msgspec

SessionState = Literal["held", "running", "paused", "acting", "leased", "idle", "closed"]
"""``held``: accepted, not yet sent to a worker. ``acting``: its tools run. ``leased``: idle, its KV is kept. A session
is shown by the first of these that it is; a lease is told besides."""

STATES: tuple[SessionState, ...] = ("held", "running", "paused", "acting", "leased", "idle", "closed")


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One session. ``session``: its key as text; ``for_ms``: how long it has been in its state.

    ``tools``: calls that run; ``tool`` and ``tool_ms`` of the oldest, ``tool_inferred`` where no harness said it and
    the turn's own tool calls did. ``hold_reason`` of a turn that waits, where it is known; ``last_hold_ms`` and
    ``last_hold_reason`` of the last turn that was placed. ``hit_ratio``: cached share of the last turn's input.
    """

    session: str
    session_id: str
    tenant: str
    state: SessionState
    for_ms: int | None = None
    agent: str = ""
    parent: str | None = None
    model: str | None = None
    tool: str | None = None
    tool_ms: int | None = None
    tool_inferred: bool = False
    tools: int = 0
    hold_reason: str | None = None
    last_hold_ms: int | None = None
    last_hold_reason: str | None = None
    pause_reason: str | None = None
    lease_ms: int | None = None
    lease_tokens: int | None = None
    context_tokens: int | None = None
    turns: int = 0
    requests: int = 0
    worker: str | None = None
    rank: int | None = None
    hit_ratio: float | None = None


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One worker, its ranks together. ``health``: as its bridge says, ``lost`` when that is silent, ``unknown`` before
    it was heard. ``index``: the worst of its ranks, as indexers and admission say. ``kv_*`` over all ranks;
    ``open_grants``: requests that were sent there and run; ``lease_tokens``: of live leases there; ``hints_*``: actions
    of the last minute."""

    worker: str
    health: str
    reason: str | None = None
    index: str | None = None
    index_reason: str | None = None
    engine: str | None = None
    model: str | None = None
    ranks: int = 1
    silent_ms: int | None = None
    kv_usage: float | None = None
    kv_used_tokens: int | None = None
    kv_tokens: int | None = None
    running: int | None = None
    waiting: int | None = None
    open_grants: int = 0
    lease_tokens: int = 0
    decisions_per_s: float = 0.0
    hints_accepted: int = 0
    hints_other: int = 0


class Headline(msgspec.Struct, frozen=True, kw_only=True):
    """All of it in a few figures; rates, quantiles, tokens and ``failed`` are of the last ``window_s`` (a minute at
    most). ``facts_missed``: numbers that never came; ``facts_dropped``: came faster than they were read here;
    ``facts_unreadable``: not what their subject promises; ``*_forgotten``: more than are remembered."""

    window_s: float
    ingresses: int = 0
    in_flight: int = 0
    held: int = 0
    ended_per_s: float = 0.0
    failed: int = 0
    ttft_ms_p50: float | None = None
    ttft_ms_p95: float | None = None
    hit_ratio: float | None = None
    cached_tokens_predicted: int = 0
    cached_tokens_reported: int = 0
    facts: int = 0
    facts_missed: int = 0
    facts_dropped: int = 0
    facts_unreadable: int = 0
    sessions_forgotten: int = 0
    requests_forgotten: int = 0
    requests_vanished: int = 0
    workers_forgotten: int = 0
    states: dict[str, int] = msgspec.field(default_factory=dict)


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One moment. ``at_ms``: Unix ms."""

    at_ms: int
    headline: Headline
    workers: tuple[WorkerRow, ...] = ()
    sessions: tuple[SessionRow, ...] = ()
