"""The fleet as admission sees it: every worker's last state, whether it lives, and load that is not ours."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from schemas.worker import RankLoad, WorkerHealth, WorkerState
from services.admission.accounts import SeatAccount
from services.admission.cost import Load
from services.admission.grants import Ledger

MAX_WORKERS = 4096
MAX_MODELS = 65_536
"""Workers at a time, and names of models remembered; more is taken for a broken sender."""

PLACEABLE: frozenset[WorkerHealth] = frozenset({"ready", "mismatch"})
"""``mismatch`` (its events contradict its profile) is placed by load only: the index calls it blind."""


IDLE = Load()


@dataclass(slots=True)
class Worker:
    """One engine. ``foreign``: load of each rank that our own grants do not explain, as of the last scrape;
    ``foreign_tokens``: KV there beyond the prompts of ours, where requests run that are not ours; ``ours``: how many of
    ours run beside them, whose answers are among it.

    ``process``: the engine's process that a bridge named last; one that has just begun does not know it yet.
    ``seats``: its ranks as (worker, rank). Like ``name`` and ``placeable`` they follow from ``state``, and are at hand
    because every decision walks over all of them.
    """

    state: WorkerState
    seen: float
    foreign: dict[int, Load] = field(default_factory=dict)
    foreign_tokens: dict[int, int] = field(default_factory=dict)
    ours: dict[int, int] = field(default_factory=dict)
    process: str = ""
    name: str = field(init=False)
    placeable: bool = field(init=False)
    seats: tuple[tuple[str, int], ...] = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.state.worker
        self.process = self.state.incarnation or self.process
        self.placeable = self.state.health in PLACEABLE
        self.seats = tuple((self.name, rank) for rank in range(max(self.state.profile.ranks, 1)))

    def stated(
        self,
        state: WorkerState,
        seen: float,
        foreign: dict[int, Load],
        foreign_tokens: dict[int, int],
        ours: dict[int, int],
    ) -> None:
        """A newer heartbeat."""
        self.state, self.seen = state, seen
        self.foreign, self.foreign_tokens, self.ours = foreign, foreign_tokens, ours
        self.__post_init__()


class Fleet:
    """Workers by name and by the models they serve. ``refused``: facts of workers beyond `MAX_WORKERS`."""

    def __init__(self, foreign_request_tokens: int) -> None:
        self._foreign_request_tokens = foreign_request_tokens
        self._workers: dict[str, Worker] = {}
        self._by_model: dict[str, list[Worker]] = {}
        self._salt_rules: dict[str, str | None] = {}
        self._models_seen: set[str] = set()
        self.refused = 0

    def __len__(self) -> int:
        return len(self._workers)

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def get(self, name: str) -> Worker | None:
        return self._workers.get(name)

    def serving(self, model: str) -> list[Worker]:
        """Workers of this model, healthy or not, by name."""
        return self._by_model.get(model, [])

    def salt_rule(self, model: str) -> str | None:
        """The rule that all workers of this model agree on, if they do."""
        if model in self._salt_rules:
            return self._salt_rules[model]
        rules = {worker.state.profile.salt_rule for worker in self.serving(model)}
        rule = next(iter(rules)) if len(rules) == 1 else None
        if rules:
            self._salt_rules[model] = rule
        return rule

    def known(self, model: str) -> bool:
        """Whether any worker has ever served this model."""
        return model in self._by_model or model in self._models_seen

    @property
    def models_seen(self) -> int:
        return len(self._models_seen)

    def stated(self, state: WorkerState, ledger: Ledger, now: float) -> bool:
        """Take in a heartbeat. ``True`` when the worker was lost by it (left, or its engine started anew)."""
        before = self._workers.get(state.worker)
        if state.health == "left":
            self.remove(state.worker)
            return before is not None
        if before is None and len(self._workers) >= MAX_WORKERS:
            self.refused += 1
            return False
        restarted = before is not None and before.process != "" and state.incarnation not in ("", before.process)
        foreign, tokens, running = {}, {}, {}
        for load in state.loads:
            ours = ledger.mark(state.worker, load.rank)
            running[load.rank] = ours.peak_requests
            beyond = foreign[load.rank] = self._foreign(state, load, ours)
            # Where nothing else runs, KV beyond the prompts of our own turns is that of their answers.
            is_foreign = load.running > ours.peak_requests
            tokens[load.rank] = beyond.blocks * (state.profile.block_size or 0) if is_foreign else 0
        if before is None:
            worker = self._workers[state.worker] = Worker(state, now, foreign, tokens, running)
            self._enter(worker)
        else:
            reindex = before.state.profile != state.profile
            before.stated(state, now, foreign, tokens, running)
            if reindex:
                self._index()
        return restarted

    def remove(self, name: str) -> None:
        """Forget a worker."""
        if self._workers.pop(name, None) is not None:
            self._index()

    def silent(self, since: float) -> list[str]:
        """Workers not heard of after ``since`` (Unix seconds)."""
        return [worker.name for worker in self._workers.values() if worker.seen <= since]

    def forgive(self, now: float) -> None:
        """We could not listen: count everybody's silence from now."""
        for worker in self._workers.values():
            worker.seen = now

    def _foreign(self, state: WorkerState, load: RankLoad, ours: SeatAccount) -> Load:
        size = state.profile.block_size or 0
        used = int(load.kv_usage * (state.profile.kv_tokens or 0)) // size if size else 0
        waiting = max(0, load.waiting - ours.peak_waiting)
        return Load(
            requests=max(0, load.running + load.waiting - ours.peak_requests),
            prefill_tokens=waiting * self._foreign_request_tokens,
            blocks=max(0, used - ours.peak_blocks),
        )

    def _index(self) -> None:
        self._by_model = {}
        self._salt_rules.clear()
        for worker in sorted(self._workers.values(), key=lambda each: each.name):
            self._enter(worker)

    def _enter(self, worker: Worker) -> None:
        self._salt_rules.clear()
        for model in dict.fromkeys((worker.state.profile.model, *worker.state.profile.models)):
            insort(self._by_model.setdefault(model, []), worker, key=lambda each: each.name)
            if len(self._models_seen) >= MAX_MODELS:
                self._models_seen.clear()  # of what is not served any more, remembering is a courtesy
            self._models_seen.add(model)


def load_of(worker: Worker, rank: int, ledger: Ledger) -> Load:
    """Load of one rank: our own open grants first, then what the last scrape showed beyond them (D1)."""
    return load_beside(worker.foreign.get(rank, IDLE), ledger.account(worker.name, rank))


def load_beside(foreign: Load, ours: SeatAccount) -> Load:
    """What our own grants of a rank and the load that is not ours weigh together."""
    return Load(
        ours.requests + foreign.requests,
        ours.prefill_tokens + foreign.prefill_tokens,
        ours.blocks + foreign.blocks,
    )
