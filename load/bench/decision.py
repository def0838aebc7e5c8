"""From ask to grant over a real bus: with the index asked over the bus, and with admission holding its own replica.

Both rooms (`load.bench.decision_room`) have a nats-server, an admission and an indexer as processes of their own, and
are measured in turns. Every prompt has 512 blocks, of which a shared prefix is on many workers and the session's own
part on its last one; every turn ends with its facts and with the engine's events of 16 new blocks. ``<index>_<in
flight>_``: ``p50_ms``, ``p99_ms`` from the question's publication to the grant's arrival in this process; ``per_s``
decisions; ``cpu_ms`` of admission, indexer and nats-server together per decision, the facts and events of its turn
included. With one in flight a turn asks when all that was said before has been taken in; with more, at once. Keys
without suffix: 16 workers; ``_64w``: 64.

``known_<sessions>_<policy>_``: the same with the scheduling policy named, its own replica, 16 workers, and so many
sessions known to admission, of which 16 take turns: ``p50_ms`` and ``p99_ms`` with one in flight, ``cpu_ms`` of
admission alone per turn with 8. ``known_ratio_<policy>_``: of the most sessions over the fewest.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import uvloop

from kvcore import IMPLEMENTATION
from load.bench.decision_room import Room, Session
from load.bench.measure import percentile
from load.bench.options import Options

INDEXES = ("ask", "own")
WORKERS = (16, 64)
IN_FLIGHT = (1, 16, 64)
POLICIES = ("kv", "commit")
KNOWN = (16, 1_000, 10_000)
_QUICK_KNOWN = (16, 32, 64)
_KNOWN_IN_FLIGHT = 8
_TURNS = {1: 400, 16: 2_000, 64: 2_000}
_QUICK_TURNS = {1: 20, 16: 64, 64: 128}

Figures = dict[str, list[float]]


def run(options: Options) -> dict[str, object]:
    """p50, p99, decisions a second and CPU for both ways; medians over the runs."""
    workers = WORKERS[:1] if options.quick else WORKERS
    result: dict[str, object] = {"bench": "decision", "kvcore": IMPLEMENTATION, "workers": list(workers)}
    for count in workers:
        with tempfile.TemporaryDirectory() as directory, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result.update(runner.run(_fleet(Path(directory), count, options)))
    with tempfile.TemporaryDirectory() as directory, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result.update(runner.run(_known(Path(directory), options)))
    return result


async def _known(directory: Path, options: Options) -> dict[str, object]:
    """Both policies in turns, before more and more sessions that are known."""
    rooms = {
        policy: Room(directory / policy, index="own", workers=WORKERS[0], policy=policy, sessions=1)
        for policy in POLICIES
    }
    known = _QUICK_KNOWN if options.quick else KNOWN
    turns = 20 if options.quick else _TURNS[1]
    figures: Figures = defaultdict(list)
    try:
        for room in rooms.values():
            await room.open()
        for count in known:
            for policy, room in rooms.items():
                options.progress(f"{policy}: {count} sessions are made known")
                await room.make_known(count)
            for number in range(options.runs):
                for policy, room in rooms.items():
                    options.progress(f"{policy}: {count} known, run {number + 1}")
                    alone = await measure(room, 1, turns)
                    busy = await measure(room, _KNOWN_IN_FLIGHT, turns)
                    prefix = f"known_{count}_{policy}"
                    figures[f"{prefix}_p50_ms"].append(alone["p50_ms"])
                    figures[f"{prefix}_p99_ms"].append(alone["p99_ms"])
                    figures[f"{prefix}_cpu_ms"].append(busy["admission_cpu_ms"])
    finally:
        for room in rooms.values():
            await room.close()
    medians = {name: statistics.median(values) for name, values in figures.items()}
    ratios = {
        f"known_ratio_{policy}_{name}": medians[f"known_{known[-1]}_{policy}_{name}_ms"]
        / medians[f"known_{known[0]}_{policy}_{name}_ms"]
        for policy in POLICIES
        for name in ("p50", "p99", "cpu")
    }
    return {"known": list(known), **{name: round(value, 3) for name, value in {**medians, **ratios}.items()}}


async def _fleet(directory: Path, workers: int, options: Options) -> dict[str, object]:
    suffix = "" if workers == WORKERS[0] else f"_{workers}w"
    rooms = {index: Room(directory / index, index=index, workers=workers) for index in INDEXES}
    turns = _QUICK_TURNS if options.quick else _TURNS
    figures: Figures = defaultdict(list)
    try:
        for index, room in rooms.items():
            options.progress(f"{workers} workers: {index} starts")
            await room.open()
        for number in range(options.runs):
            for in_flight in IN_FLIGHT:
                for index, room in rooms.items():
                    options.progress(f"{workers} workers: {index}, {in_flight} in flight, run {number + 1}")
                    measured = await measure(room, in_flight, turns[in_flight])
                    for name, value in measured.items():
                        figures[f"{index}_{in_flight}_{name}{suffix}"].append(value)
    finally:
        for room in rooms.values():
            await room.close()
    return {name: round(statistics.median(values), 3) for name, values in figures.items()}


async def measure(room: Room, in_flight: int, turns: int) -> dict[str, float]:
    """``turns`` turns, ``in_flight`` at a time, each of another session."""
    took_ms: list[float] = []
    left = iter(range(turns))
    sessions = itertools.cycle(room.sessions)
    before = room.children.cpu_s()
    started = time.perf_counter()
    loops = (_turns(room, sessions, left, took_ms, alone=in_flight == 1) for _ in range(in_flight))
    await asyncio.gather(*loops)
    seconds = time.perf_counter() - started
    await room.settle()
    after = room.children.cpu_s()
    cpu_ms = {name: (after[name] - before[name]) * 1e3 / turns for name in after}
    return {
        "p50_ms": percentile(took_ms, 50),
        "p99_ms": percentile(took_ms, 99),
        "per_s": turns / seconds,
        "cpu_ms": sum(cpu_ms.values()),
        **{f"{name}_cpu_ms": value for name, value in cpu_ms.items()},
    }


async def _turns(
    room: Room, sessions: Iterator[Session], left: Iterator[int], took_ms: list[float], *, alone: bool
) -> None:
    for _ in left:
        took, _ = await room.turn(next(sessions), alone=alone)
        took_ms.append(took)
