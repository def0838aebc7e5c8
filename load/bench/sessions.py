"""The session-prefix index: memory of 100,000 sessions of 100 blocks shared four-way, and what its lookups cost.

Sessions come in groups of four that have their first 75 blocks in common; the last 25 are each one's own. They are
placed turn by turn, in prompts of 20, 40, … 100 blocks, so that the trees part and grow as in life. ``bytes``: resident
memory that the index added, the names of its sessions included. Lookups are of random sessions and blocks, one
thread, collector off; per run p50 and p99 over all answers, reported is the median of the runs: ``session``: what is
known of one (frontier, unique tail, expected next prompt); ``block_shared`` and ``block_own``: every session that has
this block (four, and one); ``ends``: a next turn's chain, and which sessions end on its way; ``sharing``: who has some
of a session's prefix; ``place``: a next turn of five blocks. Every answer of one pass is compared with the truth
(``mismatches``). The index is pure Python.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from kvcore.hashing import pack_chain
from kvcore.session_index import SessionIndex, SessionLimits
from load.bench.measure import each_us, percentile, resident_bytes, without_collector
from load.bench.options import Options
from schemas.session import SessionKey

SEED = 1
SESSIONS, BLOCKS, SHARED_BY, SHARED_BLOCKS = 100_000, 100, 4, 75
TURN_BLOCKS = 20
LOOKUPS = 20_000
POOL = ("qwen", 16, "tokens")
LIMIT_BYTES, LIMIT_US = 1_500_000_000, 50.0


@dataclass(slots=True)
class Population:
    """Sessions and their whole chains, group by group."""

    names: list[SessionKey]
    shared: list[list[int]]
    own: list[list[int]]

    def chain(self, number: int) -> list[int]:
        return self.shared[number // SHARED_BY] + self.own[number]


def _population(sessions: int, random: Random) -> Population:
    def hashes(count: int) -> list[int]:
        return [random.getrandbits(64) for _ in range(count)]

    return Population(
        [SessionKey(family="codex", root=f"{random.getrandbits(128):032x}") for _ in range(sessions)],
        [hashes(SHARED_BLOCKS) for _ in range(sessions // SHARED_BY)],
        [hashes(BLOCKS - SHARED_BLOCKS) for _ in range(sessions)],
    )


def _fill(index: SessionIndex[SessionKey], population: Population, options: Options) -> None:
    for blocks in range(TURN_BLOCKS, BLOCKS + 1, TURN_BLOCKS):
        options.progress("placing", blocks, BLOCKS)
        for number, name in enumerate(population.names):
            index.place(name, POOL, pack_chain(population.chain(number)[:blocks]))


def run(options: Options) -> dict[str, object]:
    """See the module."""
    random = Random(SEED)
    sessions = 2_000 if options.quick else SESSIONS
    lookups = 1_000 if options.quick else LOOKUPS
    population = _population(sessions, random)
    before = resident_bytes()
    index: SessionIndex[SessionKey] = SessionIndex(SessionLimits(sessions, sessions * BLOCKS))
    start = time.perf_counter()
    _fill(index, population, options)
    seconds = time.perf_counter() - start
    added = resident_bytes() - before
    names = sum(72 + 49 + len(name.root) for name in population.names)  # a struct, and its root's text
    stats = index.stats()
    picked = [random.randrange(sessions) for _ in range(lookups)]
    result: dict[str, object] = {
        "bench": "sessions",
        "kvcore": "python",
        "quick": options.quick,
        "runs": options.runs,
        "sessions": stats.sessions,
        "blocks_per_session": BLOCKS,
        "distinct_blocks": stats.blocks,
        "bytes": added + names,
        "bytes_per_distinct_block": round((added + names) / stats.blocks, 1),
        "limit_bytes": LIMIT_BYTES,
        "places_per_s": round(sessions * BLOCKS / TURN_BLOCKS / seconds),
        "mismatches": _mismatches(index, population, picked),
        "limit_us": LIMIT_US,
    }
    return result | _lookups(index, population, picked, options)


def _mismatches(index: SessionIndex[SessionKey], population: Population, picked: Sequence[int]) -> int:
    """Answers that are not the truth."""
    wrong = 0
    for number in picked:
        name, chain = population.names[number], population.chain(number)
        first = number // SHARED_BY * SHARED_BY
        group = set(population.names[first : first + SHARED_BY])
        found = index.get(name)
        known, ends = index.ends_on(POOL, pack_chain([*chain, 1]))
        wrong += found is None or (found.depth, found.frontier, found.unique) != (
            BLOCKS,
            chain[-1],
            BLOCKS - SHARED_BLOCKS,
        )
        wrong += set(index.having(chain[0])) != group
        wrong += set(index.having(chain[-1])) != {name}
        wrong += set(index.sharing(name)) != group - {name}
        wrong += (known, ends) != (BLOCKS, [(BLOCKS, [name])])
    return wrong


def _lookups(
    index: SessionIndex[SessionKey], population: Population, picked: Sequence[int], options: Options
) -> dict[str, float]:
    chains = [population.chain(number) for number in picked]
    names = [population.names[number] for number in picked]
    further = [pack_chain([*chain, 1, 2, 3, 4, 5]) for chain in chains]
    shared, own = [chain[SHARED_BLOCKS // 2] for chain in chains], [chain[-1] for chain in chains]
    calls: dict[str, tuple[Callable[..., object], Sequence[object]]] = {
        "session": (index.get, names),
        "block_shared": (lambda block: list(index.having(block)), shared),
        "block_own": (lambda block: list(index.having(block)), own),
        "ends": (lambda chain: index.ends_on(POOL, chain), further),
        "sharing": (lambda name: list(index.sharing(name)), names),
    }
    samples: dict[str, list[float]] = {}

    def measure(key: str, spent: Sequence[float]) -> None:
        samples.setdefault(f"{key}_p50_us", []).append(percentile(spent, 50))
        samples.setdefault(f"{key}_p99_us", []).append(percentile(spent, 99))

    with without_collector():
        for done in range(options.runs):
            options.progress("looking up", done, options.runs)
            for key, (call, arguments) in calls.items():
                measure(key, each_us(call, arguments))
        grown = [
            (names[at], pack_chain([*chains[at], *(picked[at] * 8 + step for step in range(5))]))
            for at in range(len(names))
        ]
        measure("place", each_us(lambda turn: index.place(turn[0], POOL, turn[1]), grown))  # type: ignore[index]
    return {key: round(statistics.median(values), 2) for key, values in samples.items()}
