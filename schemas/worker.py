"""Workers: what a bridge says about its engine, once a second."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from schemas.base import Count, Fact, Message, Sequence
from schemas.kv import MAX_RANKS
from schemas.pool import SharedLayout

Engine = Literal["vllm", "sglang", "simulated", "unknown"]
WorkerHealth = Literal["starting", "ready", "unhealthy", "mismatch", "left"]
"""``mismatch``: its events contradict its profile (block size); placed by load only. ``left``: the last fact."""


MAX_MODELS = 1024
"""Names of one worker's models."""

LOW_FIRST = "priority:low_first"
"""Feature of an SGLang that was told to run lower priorities first, as vLLM does."""

RankNumber = Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
Size = Annotated[int, Meta(ge=1, lt=1 << 53)]


class RankStream(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The event stream of one rank as the bridge has forwarded it.

    ``incarnation`` changes with each engine restart and each lost history; ``seq`` is the last one forwarded (-1: none
    yet), so that an indexer notices a lost tail although the engine is idle.
    """

    rank: RankNumber
    incarnation: str
    seq: Sequence = -1
    state: Literal["synced", "catching_up", "blind"] = "synced"
    reason: str | None = None
    gaps: Count = 0
    rejected: Count = 0


class RankLoad(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Scraped load of one rank: requests, and KV use of running requests (0..1)."""

    rank: RankNumber
    running: Count = 0
    waiting: Count = 0
    kv_usage: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0


class WorkerProfile(Message, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine is: learned from ``/v1/models``, ``/metrics`` and its events.

    ``models``: all names it serves; ``adapters``: those that are adapters of ``model``, whose blocks are nobody else's.
    ``block_size`` in tokens (``None``: not known yet), ``kv_tokens`` per rank, ``salt_rule`` names how the engine
    mixes a salt into its blocks; workers of one pool agree on model, block size and salt rule. ``shared``: how its
    pages lie in the shared pool that it reads; ``shared_problem``: it reads one, but why nobody can tell how.
    """

    url: str
    model: str
    models: Annotated[tuple[str, ...], Meta(max_length=MAX_MODELS)] = ()
    adapters: Annotated[tuple[str, ...], Meta(max_length=MAX_MODELS)] = ()
    engine: Engine = "unknown"
    engine_version: str | None = None
    ranks: Annotated[int, Meta(ge=1, le=MAX_RANKS)] = 1
    block_size: Size | None = None
    block_size_from: Literal["events", "metrics", "config", "none"] = "none"
    kv_tokens: Count | None = None
    max_model_len: Count | None = None
    salt_rule: str = "cache_salt"
    features: tuple[str, ...] = ()
    shared: SharedLayout | None = None
    shared_problem: str | None = None


def runs_high_first(profile: WorkerProfile) -> bool:
    """Whether this engine runs requests of a higher ``priority`` first, and not of a lower one: SGLang does, unless it
    was told otherwise (spec: engine-events §5)."""
    return profile.engine == "sglang" and LOW_FIRST not in profile.features


class WorkerState(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """``tg.v1.worker.state.<worker>``: profile, incarnation, load, health; the last one says ``left`` and why.

    ``reconnects``: how often its bridge has found the bus again. What it was asked before that may be lost.
    """

    worker: str
    incarnation: str
    health: WorkerHealth
    profile: WorkerProfile
    reason: str | None = None
    loads: tuple[RankLoad, ...] = ()
    streams: tuple[RankStream, ...] = ()
    reconnects: Count = 0
