"""A fleet whose caches are full: what its engines publish, what they hold, and what is asked about it.

Workload of performance §C: every worker has an LRU cache, fed by multi-turn sessions under shared system prefixes (48
groups of 32 to 384 blocks, Zipf) with private tails of lognormal growth; eviction takes the tail first, as vLLM's.
``nested``: the harder variant, prefixes in three layers (platform, 12 applications, 400 documents) and most turns on a
worker other than the session's last one, so that sets of workers shrink at many depths.

Caches are simulated in runs of blocks (`Segment`), which is exact: the blocks of a run are always used together, and
what hangs on a run is never newer than the run. So the truth about every worker is kept beside what it published.
Payloads are vLLM 0.32's, maps: a prefill as one event per 512 blocks, then one event per output block, one per evicted
block. Engine hashes differ from worker to worker. Everything follows from the seed.
"""

from __future__ import annotations

import random
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from msgspec import msgpack

from kvcore.hashing import chain_of, local_hashes, pack_chain

BLOCK_SIZE = 16
GROUPS = 48
PREFILL_BLOCKS = 512
OUTPUTS_PER_PAYLOAD = 8
MIN_QUERY = 200
MAX_QUERY = 2_000
MIN_CAPACITY = 4_096
"""Blocks: the longest session fits a worker, so that a turn never evicts its own blocks."""
_TOKEN_BYTES = 4
_MASK64 = (1 << 64) - 1
_ODD = 0x9E3779B97F4A7C15
_TOKEN_BITS = 17  # ids below 131,072: of three or five bytes each, as most of a real vocabulary

Variant = Literal["shared", "nested"]


@dataclass(eq=False, slots=True)
class Segment:
    """A run of blocks that follows ``parent``'s last one: its tokens (u32 bytes), local hashes, chain hashes."""

    parent: Segment | None
    tokens: bytearray = field(default_factory=bytearray)
    local: array[int] = field(default_factory=lambda: array("Q"))
    chain: array[int] = field(default_factory=lambda: array("Q"))

    def grow(self, random_: random.Random, blocks: int) -> None:
        """Append ``blocks`` of random tokens."""
        count = blocks * BLOCK_SIZE
        mask = int.from_bytes(((1 << _TOKEN_BITS) - 1).to_bytes(_TOKEN_BYTES, "little") * count, "little")
        tokens = (random_.getrandbits(count * _TOKEN_BYTES * 8) & mask).to_bytes(count * _TOKEN_BYTES, "little")
        local = local_hashes(tokens, BLOCK_SIZE)
        self.tokens += tokens
        self.local.extend(local)
        self.chain.extend(chain_of(local, self.last))

    def before(self, position: int) -> int | None:
        """Chain hash before a position; ``None`` at the root."""
        if position:
            return self.chain[position - 1]
        return self.parent.last if self.parent is not None else None

    @property
    def last(self) -> int | None:
        """Chain hash that the next block hangs on; ``None`` at the root."""
        return self.before(len(self.chain))


Run = tuple[Segment, int, int]
"""Blocks of a segment: from, to."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn changed at one worker: blocks evicted, last first, then a prompt's missing blocks and the output's.

    ``payloads``: the same as the engine's raw batches."""

    worker: int
    evicted: tuple[Run, ...]
    stored: tuple[Run, ...]
    payloads: tuple[bytes, ...]

    @property
    def blocks(self) -> int:
        """Stored and removed."""
        return sum(stop - start for _, start, stop in (*self.evicted, *self.stored))


@dataclass(frozen=True, slots=True)
class Query:
    """A session's next prompt. ``chain``: packed chain hashes; ``local``: its local hashes; ``path``: the segments
    that existed before, which it goes on from."""

    chain: bytes
    local: list[int]
    path: tuple[Segment, ...]


@dataclass(eq=False, slots=True)
class _Session:
    path: tuple[Segment, ...]
    home: int
    turns: int


class _Worker:
    """One engine: an LRU cache of segments, oldest first, each with the number of its blocks that are resident."""

    def __init__(self, number: int, capacity: int, random_: random.Random) -> None:
        self.number = number
        self.capacity = capacity
        self.resident: OrderedDict[Segment, int] = OrderedDict()
        self.used = 0
        self.holes: dict[Segment, list[int]] = {}
        self._seed = random_.getrandbits(64)

    def engine_hash(self, own: int) -> int:
        """The engine's hash of a block: one to one, of its own seed."""
        return ((own ^ self._seed) * _ODD) & _MASK64

    def engine_hashes(self, segment: Segment, start: int, stop: int) -> list[int]:
        """Those of a run."""
        seed = self._seed
        return [((own ^ seed) * _ODD) & _MASK64 for own in segment.chain[start:stop]]

    def touch(self, path: tuple[Segment, ...]) -> list[Run]:
        """Use every block of ``path``; which were missing."""
        missing: list[Run] = []
        for segment in path:
            have = self.resident.get(segment, 0)
            if have < len(segment.chain):
                missing.append((segment, have, len(segment.chain)))
                self.used += len(segment.chain) - have
                self.resident[segment] = len(segment.chain)
        for segment in reversed(path):
            self.resident.move_to_end(segment)
        return missing

    def evict(self) -> list[Run]:
        """Make the cache fit, the oldest blocks first."""
        evicted: list[Run] = []
        while self.used > self.capacity:
            segment = next(iter(self.resident))
            have = self.resident[segment]
            left = max(have - (self.used - self.capacity), 0)
            evicted.append((segment, left, have))
            self.used -= have - left
            if left:
                self.resident[segment] = left
            else:
                del self.resident[segment]
        return evicted


class Fleet:
    """Workers ``0..workers-1`` with room for ``capacity`` blocks each, and the sessions that use them.

    Raises `ValueError` for a capacity below `MIN_CAPACITY`."""

    def __init__(self, workers: int, capacity: int, *, seed: int = 1, variant: Variant = "shared") -> None:
        if capacity < MIN_CAPACITY:
            raise ValueError(f"a worker needs room for {MIN_CAPACITY} blocks, not {capacity}")
        self._random = random.Random(seed)
        self.workers = [_Worker(number, capacity, self._random) for number in range(workers)]
        self._migrate = 0.6 if variant == "nested" else 0.15
        self._tail = 60.0 if variant == "nested" else 110.0
        self._prefixes = self._nested_prefixes() if variant == "nested" else self._shared_prefixes()
        self._weights = [1 / (place + 1) for place in range(len(self._prefixes))]
        self._sessions = [self._new_session() for _ in range(max(workers * capacity // 600, 4))]

    def turns(self, blocks: int | None = None) -> Iterator[Turn]:
        """Turns until every worker is full and the whole holds its capacity; or, given ``blocks``, until so many
        were stored."""
        stored = 0
        full = sum(worker.capacity for worker in self.workers)
        used = sum(worker.used for worker in self.workers)
        while stored < blocks if blocks is not None else used < full:
            turn = self._turn()
            new = sum(stop - start for _, start, stop in turn.stored)
            stored += new
            used += new - sum(stop - start for _, start, stop in turn.evicted)
            yield turn

    def resident_pairs(self) -> int:
        """(worker, block) pairs that are resident."""
        return sum(worker.used for worker in self.workers)

    def unique_blocks(self) -> int:
        """Distinct blocks that are resident."""
        longest: dict[Segment, int] = {}
        for worker in self.workers:
            for segment, have in worker.resident.items():
                longest[segment] = max(have, longest.get(segment, 0))
        return sum(longest.values())

    def queries(self, count: int) -> list[Query]:
        """Next prompts of live sessions, 200 to 2,000 blocks: what was there, and a message more."""
        queries: list[Query] = []
        while len(queries) < count:
            session = self._random.choice(self._sessions)
            tail = session.path[-1]
            grown = Segment(session.path[-2] if len(session.path) > 1 else None)
            grown.tokens, grown.local, grown.chain = tail.tokens[:0], tail.local[:], tail.chain[:]
            grown.grow(self._random, self._lognormal(self._tail / 3, 0.8))
            parts = (*session.path[:-1], grown)
            if not MIN_QUERY <= sum(len(part.chain) for part in parts) <= MAX_QUERY:
                continue
            chain = b"".join(pack_chain(part.chain) for part in parts)
            local = [value for part in parts for value in part.local]
            queries.append(Query(chain, local, session.path))
        return queries

    def truth(self, query: Query) -> dict[int, int]:
        """Per worker the blocks of ``query`` that it holds from the first one on; block by block, workers with none are
        left out."""
        reaches: dict[int, int] = {}
        for worker in self.workers:
            reach = 0
            for segment in query.path:
                have = worker.resident.get(segment, 0)
                holes = worker.holes.get(segment)
                if holes and holes[0] < have:
                    reach += holes[0]
                    break
                reach += have
                if have < len(segment.chain):
                    break
            if reach:
                reaches[worker.number] = reach
        return reaches

    def punch(self, share: float) -> list[Turn]:
        """Remove that share of every worker's blocks, none of them the last of its run: holes. As turns to apply."""
        turns: list[Turn] = []
        for worker in self.workers:
            runs: list[Run] = []
            for segment, have in worker.resident.items():
                count = sum(self._random.random() < share for _ in range(have - 1))
                holes = sorted(self._random.sample(range(have - 1), count))
                if holes:
                    worker.holes[segment] = holes
                    runs += [(segment, hole, hole + 1) for hole in holes]
            turns.append(Turn(worker.number, tuple(runs), (), (_payload(_removals(worker, runs)),)))
        return turns

    def parent_hash(self, worker: int, run: Run) -> int | None:
        """Engine hash of the block before the run."""
        segment, start, _ = run
        own = segment.before(start)
        return None if own is None else self.workers[worker].engine_hash(own)

    def visit(self, worker: int, blocks: int) -> tuple[Turn, Turn]:
        """A turn that stores ``blocks`` that are nobody else's at a worker, and one that removes them: as if nothing
        had been."""
        segment = Segment(None)
        segment.grow(self._random, blocks)
        run = (segment, 0, blocks)
        at = self.workers[worker]
        stored = _payload(self._stores(at, [run], PREFILL_BLOCKS))
        return Turn(worker, (), (run,), (stored,)), Turn(worker, (run,), (), (_payload(_removals(at, [run])),))

    def evicted_hashes(self, turn: Turn) -> list[int]:
        """Engine hashes of what a turn evicted, in order."""
        worker = self.workers[turn.worker]
        return [
            engine
            for segment, start, stop in turn.evicted
            for engine in reversed(worker.engine_hashes(segment, start, stop))
        ]

    def removal_payload(self, turn: Turn) -> bytes:
        """What a turn evicted as one event, raw."""
        removed = self.evicted_hashes(turn)
        return _payload([{"type": "BlockRemoved", "block_hashes": removed, "medium": "GPU", "group_idx": 0}])

    # One turn

    def _turn(self) -> Turn:
        place = self._random.randrange(len(self._sessions))
        session = self._sessions[place]
        if self._random.random() < self._migrate:
            session.home = self._random.randrange(len(self.workers))
        worker = self.workers[session.home]
        tail = session.path[-1]
        tail.grow(self._random, self._lognormal(self._tail if not tail.chain else self._tail / 3, 0.8))
        prompt = worker.touch(session.path)
        evicted = worker.evict()
        events = [*_removals(worker, evicted), *self._stores(worker, prompt, PREFILL_BLOCKS)]
        payloads = [_payload(events)]
        before = len(tail.chain)
        tail.grow(self._random, self._lognormal(self._tail / 8, 0.6))
        worker.touch(session.path)
        output = (tail, before, len(tail.chain))
        more = worker.evict()
        events = [*_removals(worker, more), *self._stores(worker, [output], 1)]
        payloads += [
            _payload(events[start : start + OUTPUTS_PER_PAYLOAD])
            for start in range(0, len(events), OUTPUTS_PER_PAYLOAD)
        ]
        session.turns -= 1
        if session.turns < 1 or sum(len(segment.chain) for segment in session.path) > MAX_QUERY:
            self._sessions[place] = self._new_session()
            tail.tokens = bytearray()  # nobody sends them again
        if prompt and prompt[-1][0] is tail:
            prompt[-1] = (tail, prompt[-1][1], len(tail.chain))
        return Turn(worker.number, (*evicted, *more), tuple(prompt), tuple(payloads))

    def _stores(self, worker: _Worker, runs: list[Run], most: int) -> Iterator[dict[str, object]]:
        for segment, first, last in runs:
            for start in range(first, last, most):
                stop = min(start + most, last)
                tokens = array("I", bytes(segment.tokens[start * BLOCK_SIZE * 4 : stop * BLOCK_SIZE * 4]))
                yield {
                    "type": "BlockStored",
                    "block_hashes": worker.engine_hashes(segment, start, stop),
                    "parent_block_hash": self.parent_hash(worker.number, (segment, start, stop)),
                    "token_ids": tokens.tolist(),
                    "block_size": BLOCK_SIZE,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                    "extra_keys": [None] * (stop - start),
                    "group_idx": 0,
                    "kv_cache_spec_kind": "full_attention",
                }

    # Sessions

    def _new_session(self) -> _Session:
        prefix = self._random.choices(self._prefixes, self._weights)[0]
        tail = Segment(prefix[-1])
        turns = min(1 + int(self._random.expovariate(1 / 6)), 24)
        return _Session((*prefix, tail), self._random.randrange(len(self.workers)), turns)

    def _prefix(self, parent: Segment | None, least: int, most: int) -> Segment:
        segment = Segment(parent)
        segment.grow(self._random, self._random.randint(least, most))
        return segment

    def _shared_prefixes(self) -> list[tuple[Segment, ...]]:
        return [(self._prefix(None, 32, 384),) for _ in range(GROUPS)]

    def _nested_prefixes(self) -> list[tuple[Segment, ...]]:
        platform = self._prefix(None, 96, 96)
        applications = [self._prefix(platform, 64, 384) for _ in range(12)]
        documents = [self._random.choice(applications) for _ in range(400)]
        return [(platform, application, self._prefix(application, 64, 768)) for application in documents]

    def _lognormal(self, median: float, sigma: float) -> int:
        return max(1, min(round(median * self._random.lognormvariate(0.0, sigma)), MAX_QUERY // 2))


def _payload(events: Iterable[dict[str, object]]) -> bytes:
    return msgpack.encode((1_795_973_189.7, list(events), 0))


def _removals(worker: _Worker, runs: list[Run]) -> list[dict[str, object]]:
    """One event a block, last block first, as vLLM 0.32 publishes them."""
    return [
        {"type": "BlockRemoved", "block_hashes": [engine], "medium": "GPU", "group_idx": 0}
        for segment, start, stop in runs
        for engine in reversed(worker.engine_hashes(segment, start, stop))
    ]
