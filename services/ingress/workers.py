"""The live workers, from `schemas.worker.WorkerState` facts: who serves which model, in blocks of which size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from schemas.worker import WorkerState, runs_high_first
from services.ingress.contents import Dialect
from services.ingress.tokens import PageRule

PLACEABLE = frozenset({"ready", "mismatch"})
"""Health in which a worker takes requests; ``mismatch`` is placed by load only."""

LOOK_S = 3.0
"""Between two looks at who is silent, or two facts, there is less (a tick and the time that its bus may take). Who did
not look for longer was away itself, or its clock was set: heartbeats may lie unread, and prove no silence."""

MAX_WORKERS = 4096
MAX_MODELS = 4096
"""Models that are remembered after their last worker left, so that they are answered 503, not 404."""


@dataclass(frozen=True, slots=True)
class Pool:
    """The workers of one model that one chain stands for. ``block_size`` in tokens, ``None`` while nobody knows it.
    ``adapter``: the model is an adapter, and its blocks are nobody else's. ``pages``: the rule of the shared pool that
    most of them read, where pages follow from the tokens. ``dialect``: how most of them read Anthropic's messages."""

    model: str
    block_size: int | None
    salt_rule: str
    adapter: str | None = None
    pages: PageRule | None = None
    dialect: Dialect = "vllm"


@dataclass(slots=True)
class _Heard:
    state: WorkerState
    at: float


class Workers:
    """A worker is gone when it says ``left`` or is silent for ``lost_s`` seconds in which we listened."""

    def __init__(self, lost_s: float = 5.0) -> None:
        self._lost_s = lost_s
        self._heard: dict[str, _Heard] = {}
        self._models: dict[str, None] = {}
        self._looked_at: float | None = None

    def __len__(self) -> int:
        return len(self._heard)

    def hear(self, state: WorkerState, now: float) -> None:
        """Take one fact; one that is older than what is known of its source is ignored."""
        self._look(now)
        known = self._heard.get(state.worker)
        if known is not None and _is_older(state, known.state):
            return
        if state.health == "left":
            self._heard.pop(state.worker, None)
            return
        if known is None and len(self._heard) >= MAX_WORKERS:
            return
        self._heard[state.worker] = _Heard(state, now)
        for model in _models_of(state):
            self._models.pop(model, None)
            self._models[model] = None
        while len(self._models) > MAX_MODELS:
            del self._models[next(iter(self._models))]

    def expire(self, now: float) -> list[str]:
        """Forget the silent; their names."""
        self._look(now)
        lost = [name for name, heard in self._heard.items() if not self._is_heard(heard, now)]
        for name in lost:
            del self._heard[name]
        return lost

    def forgive(self, now: float) -> None:
        """We could not listen: count everybody's silence from now."""
        self._looked_at = now
        for heard in self._heard.values():
            heard.at = now

    def _look(self, now: float) -> None:
        if self._looked_at is not None and not 0 <= now - self._looked_at <= LOOK_S:
            self.forgive(now)
        self._looked_at = now

    def _is_heard(self, heard: _Heard, now: float) -> bool:
        """Whether it was not silent for too long by the time when we last listened."""
        if self._looked_at is not None:
            now = min(now, self._looked_at + LOOK_S)
        return now - heard.at <= self._lost_s

    def knows(self, model: str) -> bool:
        """Whether any worker ever served this model."""
        return model in self._models

    @property
    def knows_any(self) -> bool:
        """Whether any worker was ever heard."""
        return bool(self._models)

    def get(self, worker: str) -> WorkerState | None:
        """The last fact of a worker that is not gone."""
        heard = self._heard.get(worker)
        return heard.state if heard else None

    def dialect(self, worker: str) -> Dialect:
        """How this one reads and says Anthropic's messages."""
        state = self.get(worker)
        return "sglang" if state is not None and state.profile.engine == "sglang" else "vllm"

    def high_first(self, model: str, now: float) -> bool:
        """Whether most of this model's workers run requests of a higher ``priority`` first."""
        placeable = self.placeable(model, now)
        return 2 * sum(runs_high_first(state.profile) for state in placeable) > len(placeable)

    def placeable(self, model: str, now: float) -> list[WorkerState]:
        """Workers of this model that take requests, by name."""
        return sorted(
            (
                heard.state
                for heard in self._heard.values()
                if self._is_heard(heard, now) and heard.state.health in PLACEABLE and model in _models_of(heard.state)
            ),
            key=lambda state: state.worker,
        )

    def pool(self, model: str, now: float) -> Pool:
        """What a chain for this model is made for: the block size and salt rule of most of its ready workers, the
        smaller block size when equal (spec: DESIGN.md §3, model pools)."""
        placeable = self.placeable(model, now)
        adapter = model if any(model in state.profile.adapters for state in placeable) else None
        shapes = Counter(
            (state.profile.block_size, state.profile.salt_rule)
            for state in placeable
            if state.health == "ready" and state.profile.block_size is not None
        )
        pages = _page_rule(placeable)
        sglang = sum(state.profile.engine == "sglang" for state in placeable)
        dialect: Dialect = "sglang" if 2 * sglang > len(placeable) else "vllm"
        if not shapes:
            return Pool(model, None, "cache_salt", adapter, pages, dialect)
        (size, rule), _ = min(shapes.items(), key=lambda item: (-item[1], item[0][0] or 0, item[0][1]))
        return Pool(model, size, rule, adapter, pages, dialect)

    def models(self, now: float) -> list[str]:
        """Models that can be served now, sorted."""
        return sorted(
            {
                model
                for heard in self._heard.values()
                if self._is_heard(heard, now) and heard.state.health in PLACEABLE
                for model in _models_of(heard.state)
            }
        )


def _page_rule(workers: Iterable[WorkerState]) -> PageRule | None:
    """The page rule of most of the workers that read a shared pool by SGLang's rule; the smaller page when equal."""
    rules = Counter(
        (shared.page_size, shared.pairs)
        for shared in (state.profile.shared for state in workers)
        if shared is not None and shared.page_hash == "sha256_chain"
    )
    return PageRule(*min(rules, key=lambda rule: (-rules[rule], rule))) if rules else None


def _is_older(state: WorkerState, known: WorkerState) -> bool:
    return state.source == known.source and (state.epoch, state.seq) <= (known.epoch, known.seq)


def _models_of(state: WorkerState) -> frozenset[str]:
    return frozenset((state.profile.model, *state.profile.models)) - {""}
