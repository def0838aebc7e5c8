"""The prefix index, filled from raw engine batches: questions, applying and memory, against the peer in one run.

The workload is `load.bench.fleet`'s. Keys of the first size of fleet have no suffix, those of the others end in
``_<workers>``; ``python_`` is the pure-Python twin, ``peer_`` the peer's tree, all else the chosen twin (``kvcore``).

Questions: every variant answers the same ones three times over, run by run in turn, one thread, collector off; per run
p50 and p99 over all answers, reported is the median of the runs. ``match``: packed chain hashes in, the answer object
out (dropped again); ``match_list``: every element of it made; ``match_first``: the first time over, when the others
have had the caches; the peer: a list of local hashes in, and ``scores`` read for ``peer_match_scores``. ``holes``:
after 1 % of every worker's blocks were removed from the middle of their runs. ``match_writer``: while another thread
applies payloads.

Applying: from an empty index, single thread; per second of wall clock, and per second of the process's CPU time
(``_per_cpu_s``), which a busy machine disturbs less. ``apply``: raw payloads, that is decoding, hashing of tokens,
engine-hash map; ``given_hashes``: no tokens, equal work to the peer's; ``peer_apply``: JSON made beforehand. Blocks are
stored plus removed ones, counted when applied. Every answer is compared with the truth that the fleet keeps block by
block: ``mismatches`` are pairs of (question, worker) that differ.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcore.hashing import pack_chain
from kvcore.index import PrefixIndex
from load.bench import peer
from load.bench.fleet import Fleet, Query, Turn, Variant
from load.bench.measure import each_us, percentile, resident_bytes, without_collector
from load.bench.options import Options
from load.bench.peer import PeerIndex
from load.bench.twins import PYTHON, Twin, all_twins

SEED = 1
PAIRS = {"shared": 2_228_224, "nested": 4_456_448}
"""(worker, block) pairs for 64 workers: above 1.5 million distinct blocks; twice as many from 256 workers on."""
HOLES = 0.01
PASSES = 3
Figures = dict[str, float | int | str | None]


@dataclass(slots=True)
class Samples:
    """Figures of every run, by key."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, key: str, value: float) -> None:
        self.values.setdefault(key, []).append(value)

    def spent(self, key: str, microseconds: Sequence[float]) -> None:
        """p50 and p99 of one run."""
        self.add(f"{key}_p50_us", percentile(microseconds, 50))
        self.add(f"{key}_p99_us", percentile(microseconds, 99))

    def medians(self) -> Figures:
        return {key: round(statistics.median(values), 2) for key, values in self.values.items()}


@dataclass(slots=True)
class Workload:
    """A fleet that is full, how it became so, and questions about it."""

    fleet: Fleet
    turns: list[Turn]
    names: list[str]
    queries: list[Query]
    truths: list[dict[int, int]]

    @property
    def blocks(self) -> int:
        return sum(turn.blocks for turn in self.turns)

    def payloads(self, turns: list[Turn]) -> list[tuple[str, bytes]]:
        """Of all ``turns``, with the worker's name."""
        return [(self.names[turn.worker], payload) for turn in turns for payload in turn.payloads]


def run(options: Options) -> dict[str, object]:
    """See the module."""
    first = all_twins()[0]
    result: dict[str, object] = {
        "bench": "index",
        "kvcore": first.name,
        "peer": "ai-dynamo-runtime" if peer.package() is not None else None,
        "variant": options.variant,
        "quick": options.quick,
        "runs": options.runs,
        "collector": "off while measuring",
    }
    for workers in options.workers:
        suffix = "" if workers == options.workers[0] else f"_{workers}"
        result |= {f"{key}{suffix}": value for key, value in _Size(workers, options).measure().items()}
    return result


class _Size:
    """One size of fleet."""

    def __init__(self, workers: int, options: Options) -> None:
        self.workers = workers
        self.options = options
        self.samples = Samples()
        self.twins = all_twins()
        self.dynamo = peer.package()
        self.indexes: dict[str, PrefixIndex] = {}
        self.peer: PeerIndex | None = None
        self.figures: Figures = {}

    def measure(self) -> Figures:
        work = self._workload()
        self.figures |= {
            "workers": self.workers,
            "resident_worker_blocks": work.fleet.resident_pairs(),
            "resident_unique_blocks": work.fleet.unique_blocks(),
            "applied_blocks": work.blocks,
        }
        lengths = [len(query.local) for query in work.queries]
        for percent in (5, 50, 95):
            self.figures[f"query_blocks_p{percent}"] = percentile(lengths, percent)
        self._apply(work)
        self._match(work, "match")
        self._stage("questions beside a writer")
        self._match_beside_writer(work)
        self._stage("holes")
        self._punch(work)
        self._match(work, "match_holes")
        return self._report()

    def _stage(self, text: str) -> None:
        self.options.progress(f"{self.workers} workers, {text}")

    def _workload(self) -> Workload:
        self._stage("filling the fleet's caches")
        pairs = PAIRS[self.options.variant] * (2 if self.workers > 128 else 1)
        capacity = 4_096 if self.options.quick else max(pairs // self.workers, 4_096)
        variant: Variant = "nested" if self.options.variant == "nested" else "shared"
        fleet = Fleet(self.workers, capacity, seed=SEED, variant=variant)
        turns = list(fleet.turns())
        turns += fleet.turns(4_096 if self.options.quick else 262_144)  # some time under constant eviction
        queries = fleet.queries(50 if self.options.quick else 500)
        names = [f"worker-{number}" for number in range(self.workers)]
        return Workload(fleet, turns, names, queries, [fleet.truth(query) for query in queries])

    # Applying

    def _apply(self, work: Workload) -> None:
        for number in range(self.options.runs):
            for twin in self.twins:
                if twin is PYTHON and len(self.twins) > 1 and number:
                    continue  # once: it takes long
                self._stage(f"run {number + 1}: applying raw payloads, {twin.name}")
                self._apply_payloads(twin, work, first=not number)
            self._stage(f"run {number + 1}: applying with hashes given")
            self._apply_given(work)
            if self.dynamo is not None:
                self._stage(f"run {number + 1}: applying, peer")
                self._apply_peer(self.dynamo, work, first=not number)

    def _prefix(self, twin: Twin) -> str:
        return "" if twin is self.twins[0] else "python_"

    def _apply_payloads(self, twin: Twin, work: Workload, *, first: bool) -> None:
        self.indexes.pop(twin.name, None)
        payloads = work.payloads(work.turns)
        before = resident_bytes() if first else 0
        index = twin.new_index()
        apply = index.apply_payload
        with without_collector():
            start, cpu = time.perf_counter(), time.process_time()
            for worker, payload in payloads:
                apply(worker, 0, payload)
            spent, cpu = time.perf_counter() - start, time.process_time() - cpu
        prefix = self._prefix(twin)
        self._applied(f"{prefix}apply", work, spent, cpu)
        if first:
            resident = index.stats().resident
            self.samples.add(f"{prefix}bytes_per_worker_block", (resident_bytes() - before) / resident)
            count: Callable[[], int] | None = getattr(index, "memory_bytes", None)
            if count is not None:
                self.samples.add(f"{prefix}own_bytes_per_worker_block", count() / resident)
        self.indexes[twin.name] = index

    def _apply_given(self, work: Workload) -> None:
        index: Any = self.twins[0].new_index()
        if not hasattr(index, "apply_hashes"):
            return
        given = [step for turn in work.turns for step in _given(work, turn)]
        with without_collector():
            start, cpu = time.perf_counter(), time.process_time()
            for step in given:
                if len(step) == 2:
                    index.apply_payload(step[0], 0, step[1])
                else:
                    worker, hashes, chain, parent = step
                    index.apply_hashes(worker, 0, hashes, chain, parent)
            spent, cpu = time.perf_counter() - start, time.process_time() - cpu
        self._applied("apply_given_hashes", work, spent, cpu)
        self.figures["given_hashes_mismatches"] = _mismatches(index, work)

    def _apply_peer(self, dynamo: Any, work: Workload, *, first: bool) -> None:
        self.peer = None
        before = resident_bytes() if first else 0
        tree = PeerIndex(dynamo)
        spent = cpu = 0.0
        for start in range(0, len(work.turns), 512):
            told = [
                (turn.worker, event)
                for number, turn in enumerate(work.turns[start : start + 512], start)
                for event in peer.told(turn, 2 * number)
            ]
            with without_collector():
                clock, cpu_clock = time.perf_counter(), time.process_time()
                tree.apply(told)
                spent, cpu = spent + time.perf_counter() - clock, cpu + time.process_time() - cpu_clock
        self._applied("peer_apply", work, spent, cpu)
        if first:
            told = []
            grown = resident_bytes() - before
            self.samples.add("peer_bytes_per_worker_block", grown / work.fleet.resident_pairs())
        self.peer = tree

    def _applied(self, key: str, work: Workload, spent: float, cpu: float) -> None:
        self.samples.add(f"{key}_blocks_per_s", work.blocks / spent)
        self.samples.add(f"{key}_blocks_per_cpu_s", work.blocks / cpu)

    # Questions

    def _match(self, work: Workload, key: str) -> None:
        self._stage(f"questions ({key})")
        for twin in self.twins:
            prefix = self._prefix(twin)
            mismatches = _mismatches(self.indexes[twin.name], work)
            self.figures[f"{prefix}exact_mismatches"] = mismatches + int(
                self.figures.get(f"{prefix}exact_mismatches") or 0
            )
        if self.peer is not None:
            peer_key = "peer_mismatches" if key == "match" else "peer_holes_mismatches"
            self.figures[peer_key] = self.peer.mismatches(work.queries, work.truths)
        chains = [query.chain for query in work.queries] * PASSES
        locals_ = [query.local for query in work.queries] * PASSES
        with without_collector():
            for _ in range(self.options.runs):
                for twin in self.twins:
                    index, prefix = self.indexes[twin.name], self._prefix(twin)
                    spent = each_us(index.match, chains)  # type: ignore[arg-type]
                    self.samples.spent(f"{prefix}{key}", spent)
                    if key == "match":
                        self.samples.spent(f"{prefix}{key}_first", spent[: len(work.queries)])
                        self.samples.spent(f"{prefix}{key}_list", each_us(_made(index), chains))
                if self.peer is not None:
                    tree = self.peer.tree
                    spent = each_us(tree.find_matches, locals_)
                    self.samples.spent(f"peer_{key}", spent)
                    if key == "match":
                        self.samples.spent(f"peer_{key}_first", spent[: len(work.queries)])
                        self.samples.spent(f"peer_{key}_scores", each_us(_scores(tree), locals_))
        self.samples.add("match_empty_us", percentile(each_us(self._index.match, [b""] * 500), 50))  # type: ignore[arg-type]

    @property
    def _index(self) -> PrefixIndex:
        return self.indexes[self.twins[0].name]

    def _match_beside_writer(self, work: Workload) -> None:
        """The writer stores and removes the same blocks again and again at every worker: in the end nothing changed."""
        index = self._index
        payloads = work.payloads(_cycle(work))
        blocks = 0
        ended = threading.Event()

        def write() -> None:
            nonlocal blocks
            while not ended.is_set():
                for worker, payload in payloads:
                    index.apply_payload(worker, 0, payload)
                blocks += _CYCLE_BLOCKS * 2 * self.workers

        chains = [query.chain for query in work.queries]
        writer = threading.Thread(target=write, name="bench-writer")
        with without_collector():
            start = time.perf_counter()
            writer.start()
            try:
                for _ in range(self.options.runs):
                    self.samples.spent("match_writer", each_us(index.match, chains))  # type: ignore[arg-type]
            finally:
                ended.set()
                writer.join()
            self.samples.add("writer_blocks_per_s", blocks / (time.perf_counter() - start))

    def _punch(self, work: Workload) -> None:
        turns = work.fleet.punch(HOLES)
        self.figures["holes"] = sum(turn.blocks for turn in turns)
        for worker, payload in work.payloads(turns):
            for index in self.indexes.values():
                index.apply_payload(worker, 0, payload)
        if self.peer is not None:
            self.figures["peer_holes_refused"] = self.peer.punch(turns)
        work.truths = [work.fleet.truth(query) for query in work.queries]

    # Report

    def _report(self) -> Figures:
        figures: Figures = dict.fromkeys(KEYS) | self.figures | self.samples.medians()
        if len(self.twins) == 1:  # pure Python is the chosen one
            figures |= {f"python_{key}": figures[key] for key in KEYS if f"python_{key}" in KEYS}
        for key in figures:
            if key.endswith("_per_s") and figures[key] is not None:
                figures[key] = round(float(figures[key] or 0))
        figures["ratio_p50"] = _ratio(figures["match_p50_us"], figures["peer_match_p50_us"])
        figures["ratio_list_p50"] = _ratio(figures["match_list_p50_us"], figures["peer_match_scores_p50_us"])
        for key, unit in (("", "s"), ("_cpu", "cpu_s")):
            for work in ("apply", "apply_given_hashes"):
                ours, theirs = figures[f"{work}_blocks_per_{unit}"], figures[f"peer_apply_blocks_per_{unit}"]
                figures[f"ratio_{work}{key}"] = _ratio(ours, theirs)
        return figures


KEYS = (
    "match_p50_us",
    "match_p99_us",
    "match_first_p50_us",
    "match_first_p99_us",
    "match_list_p50_us",
    "match_list_p99_us",
    "match_holes_p50_us",
    "match_holes_p99_us",
    "match_writer_p50_us",
    "match_writer_p99_us",
    "writer_blocks_per_s",
    "match_empty_us",
    "peer_match_p50_us",
    "peer_match_p99_us",
    "peer_match_first_p50_us",
    "peer_match_first_p99_us",
    "peer_match_scores_p50_us",
    "peer_match_scores_p99_us",
    "peer_match_holes_p50_us",
    "peer_match_holes_p99_us",
    "ratio_p50",
    "ratio_list_p50",
    "apply_blocks_per_s",
    "apply_blocks_per_cpu_s",
    "apply_given_hashes_blocks_per_s",
    "apply_given_hashes_blocks_per_cpu_s",
    "peer_apply_blocks_per_s",
    "peer_apply_blocks_per_cpu_s",
    "ratio_apply",
    "ratio_apply_cpu",
    "ratio_apply_given_hashes",
    "ratio_apply_given_hashes_cpu",
    "bytes_per_worker_block",
    "own_bytes_per_worker_block",
    "peer_bytes_per_worker_block",
    "exact_mismatches",
    "peer_mismatches",
    "peer_holes_mismatches",
    "peer_holes_refused",
    "python_match_p50_us",
    "python_match_p99_us",
    "python_match_list_p50_us",
    "python_match_list_p99_us",
    "python_match_holes_p50_us",
    "python_match_holes_p99_us",
    "python_apply_blocks_per_s",
    "python_apply_blocks_per_cpu_s",
    "python_bytes_per_worker_block",
    "python_exact_mismatches",
)
"""What every run reports, ``None`` where it could not be measured."""

_CYCLE_BLOCKS = 256


def _ratio(ours: float | str | None, other: float | str | None) -> float | None:
    if not isinstance(ours, int | float) or not isinstance(other, int | float) or not other:
        return None
    return round(ours / other, 3)


def _made(index: PrefixIndex) -> Callable[[Any], object]:
    match = index.match
    return lambda chain: list(match(chain))


def _scores(tree: Any) -> Callable[[Any], object]:
    find_matches = tree.find_matches
    return lambda local: find_matches(local).scores


def _mismatches(index: PrefixIndex, work: Workload) -> int:
    """(Question, worker) pairs whose reach differs from the truth."""
    wrong = 0
    for query, truth in zip(work.queries, work.truths, strict=True):
        told = {match.worker: match.reach for match in index.match(query.chain)}
        expected = {work.names[worker]: reach for worker, reach in truth.items()}
        wrong += sum(told.get(worker) != expected.get(worker) for worker in told.keys() | expected.keys())
    return wrong


def _given(work: Workload, turn: Turn) -> list[tuple[Any, ...]]:
    """A turn with hashes given, in two steps at most, as the peer gets it: (worker, payload of removals without
    tokens), and (worker, engine hashes, chain hashes, engine hash of the parent)."""
    worker, name = work.fleet.workers[turn.worker], work.names[turn.worker]
    steps: list[tuple[Any, ...]] = []
    if turn.evicted:
        steps.append((name, work.fleet.removal_payload(turn)))
    if turn.stored:
        hashes = b"".join(pack_chain(worker.engine_hashes(*run)) for run in turn.stored)
        chain = b"".join(pack_chain(segment.chain[start:stop]) for segment, start, stop in turn.stored)
        steps.append((name, hashes, chain, work.fleet.parent_hash(turn.worker, turn.stored[0])))
    return steps


def _cycle(work: Workload) -> list[Turn]:
    """For every worker a turn that stores blocks that nobody asks for, and one that removes them."""
    return [turn for worker in range(len(work.names)) for turn in work.fleet.visit(worker, _CYCLE_BLOCKS)]
