"""The bridge's picture of its engine: profile, load, health and which process it is.

Health: `starting` until the profile is known, `ready`, `unhealthy` after ``unhealthy_after`` failed scrapes in a row
and until ``ready_after`` good ones, `mismatch` while its events contradict its declared block size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from schemas.pool import SharedLayout
from schemas.worker import LOW_FIRST, Engine, RankLoad, WorkerHealth, WorkerProfile
from services.bridge.adapters.actions import EngineFacts
from services.bridge.hint_page import HintPage
from services.bridge.layout import LayoutPage, SharedRules, Told, layout_of
from services.bridge.profile import MetricsReport, ModelsReport, ServerInfo

BlockSizeOrigin = Literal["config", "metrics", "events"]
_UNDECLARED: BlockSizeOrigin = "events"


@dataclass(frozen=True, slots=True)
class Sight:
    """What is asked once per engine process. ``layout``: of its pages in the shared pool, where it reads one.
    ``hints``: which it takes; ``has_pin_prefix``: SGLang's endpoint is there."""

    models: ModelsReport
    version: str | None = None
    info: ServerInfo | None = None
    layout: LayoutPage | None = None
    hints: HintPage | None = None
    has_pin_prefix: bool = False


@dataclass(slots=True)
class EngineView:
    """``block_size`` and ``engine`` as configured stand before what the engine declares."""

    url: str
    engine: Engine | None
    block_size: int | None
    unhealthy_after: int
    ready_after: int
    sight: Sight | None = None
    metrics: MetricsReport = field(default_factory=MetricsReport)
    rank_count: int = 1
    looking: bool = True
    has_events: bool = False
    has_replay: bool = False
    seen_block_size: int | None = None
    source_problem: str | None = None
    problem: str | None = None
    failed: int = 0
    good: int = 0
    needed: int = 1
    healthy: bool = False
    shared: SharedRules = field(default_factory=SharedRules)
    request_hints: frozenset[str] = frozenset()

    def scrape_failed(self, reason: str) -> None:
        """One scrape did not work."""
        self.problem = reason
        self.failed += 1
        self.good = 0
        if self.failed >= self.unhealthy_after:
            self.healthy = False
            self.needed = self.ready_after

    def scrape_worked(self, metrics: MetricsReport | None, sight: Sight | None) -> None:
        """One scrape worked; ``sight`` when it asked for all there is."""
        self.failed = 0
        self.good += 1
        if metrics is not None:
            self.metrics = metrics
        if sight is not None:
            self.sight = sight
        if self.good >= self.needed:
            self.healthy = True
            self.problem = None

    def saw_block_size(self, block_size: int) -> None:
        """A stored event carried blocks of this many tokens."""
        self.seen_block_size = block_size

    def restarted(self) -> None:
        """Another process answers now: what the old one's events said is void."""
        self.seen_block_size = None

    @property
    def declared_block_size(self) -> tuple[int, BlockSizeOrigin] | None:
        """(tokens, where from): configuration, then ``/metrics``, then ``/server_info``."""
        if self.block_size is not None:
            return self.block_size, "config"
        if self.metrics.block_size is not None:
            return self.metrics.block_size, "metrics"
        info = self.sight.info if self.sight else None
        if info is not None and info.block_size is not None:
            return info.block_size, "config"
        return None

    @property
    def kind(self) -> Engine:
        """Which engine it is, as configured or as its answers betray."""
        if self.engine is not None:
            return self.engine
        if self.sight is not None and self.sight.models.engine != "unknown":
            return self.sight.models.engine
        if self.metrics.engine != "unknown":
            return self.metrics.engine
        return "sglang" if self.sight is not None and self.sight.info and self.sight.info.block_size else "unknown"

    def health(self) -> tuple[WorkerHealth, str | None]:
        """Health and a plain reason: always unless `ready`, and then where its events cannot be read."""
        if self.sight is None:
            return ("unhealthy" if self.failed >= self.unhealthy_after else "starting"), self.problem or "not seen yet"
        if not self.healthy:
            return "unhealthy", self.problem
        if self.looking:
            return "starting", "it is being asked where its KV events are"
        declared = self.declared_block_size
        if problem := self._block_size_problem():
            return "mismatch", problem
        if declared is None and self.seen_block_size is None and self.has_events:
            return "starting", "its block size is not known: nothing says it, and no event has come (set block_size)"
        return "ready", self.source_problem

    def _block_size_problem(self) -> str | None:
        """What is expected, what the engine declares and what its events carry must be one number."""
        declared, told, seen = self.declared_block_size, self.metrics.block_size, self.seen_block_size
        if declared is None:
            return None
        if told is not None and told != declared[0]:
            return f"blocks of {declared[0]} tokens are expected, its /metrics says {told}"
        if seen is not None and seen != declared[0]:
            return f"its events carry blocks of {seen} tokens, its {declared[1]} says {declared[0]}"
        return None

    def profile(self) -> WorkerProfile:
        """As `WorkerState` says it."""
        models = self.sight.models if self.sight else None
        info = self.sight.info if self.sight else None
        declared = self.declared_block_size
        block_size, origin = declared or (self.seen_block_size, _UNDECLARED)
        shared, problem = self.shared_layout(block_size)
        return WorkerProfile(
            url=self.url,
            model=models.model if models else "",
            models=models.models if models else (),
            adapters=models.adapters if models else (),
            engine=self.kind,
            engine_version=(self.sight.version if self.sight else None) or (info.version if info else None),
            ranks=self.rank_count,
            block_size=block_size,
            block_size_from=origin if block_size is not None else "none",
            kv_tokens=self.metrics.kv_tokens or (info.kv_tokens if info else None),
            max_model_len=models.max_model_len if models else None,
            features=self.features(),
            shared=shared,
            shared_problem=problem,
        )

    def features(self) -> tuple[str, ...]:
        """What it has and takes: ``kv_events``, ``kv_replay``; ``kv_hints`` (envelopes) and ``tier:<name>`` below the
        device, as it says; `LOW_FIRST`; ``request:<name>``: what the operator says that its requests may carry."""
        info = self.sight.info if self.sight is not None else None
        low_first = self.kind == "sglang" and info is not None and info.low_first
        known = (("kv_events", self.has_events), ("kv_replay", self.has_replay), (LOW_FIRST, low_first))
        features = [name for name, has in known if has]
        page = self.sight.hints if self.sight is not None else None
        carried = self.request_hints
        if page is not None:
            features += ["kv_hints", *(f"tier:{tier}" for tier in page.tiers)]
            carried -= {"kv_hints"}  # they go to the engine at once, and need no request
        return (*features, *(f"request:{name}" for name in sorted(carried)))

    def hint_facts(self) -> EngineFacts:
        """What an adapter must know of it."""
        sight = self.sight
        return EngineFacts(
            kind=self.kind,
            page=sight.hints if sight is not None else None,
            has_pin_prefix=sight is not None and sight.has_pin_prefix,
            by_request=self.request_hints,
            pool=self.shared.pool,
        )

    def shared_layout(self, block_size: int | None) -> tuple[SharedLayout | None, str | None]:
        """How its pages lie in the shared pool, and else why that is not known; both ``None`` without a pool."""
        sight = self.sight
        if not self.shared.pool or sight is None:
            return None, None
        info, models = sight.info, sight.models
        told = Told(
            engine=self.kind,
            version=sight.version or (info.version if info else None),
            model=models.model,
            root=models.root or models.model,
            block_size=block_size,
            page=sight.layout,
            parallelism=info.parallelism if info else None,
        )
        return layout_of(self.shared, told)

    def loads(self) -> tuple[RankLoad, ...]:
        """Load of every rank, also of one that the metrics do not name."""
        told = {load.rank: load for load in self.metrics.loads}
        return tuple(told.get(rank, RankLoad(rank=rank)) for rank in range(self.rank_count))
