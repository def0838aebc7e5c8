"""What a router costs between agents and engines: the house, and the peers' routers, before the same engine processes.

``direct`` is the client at the engines. ``ours`` is the whole house: nats-server, a bridge per engine, indexer,
admission with its own replica, front door with tokenizer; its CPU is that of all of them, ``ours_front`` that of the
front door alone. ``ours_2w``: the same with two processes of the front door, 200 KB only. ``ours_proxy``: no admission,
no tokens. ``smg``, ``vllm_router`` (round robin), ``vllm_router_kv``
(``kv_aware``), ``vllm_router_program`` (program scheduling): from PyPI, where installed (found on PATH), else null.

All are measured in turns, cell by cell; medians of the runs; added figures are less ``direct``'s of the same run.
``<who>_2k_c<connections>_``: ``added_p50_ms``, ``added_p99_ms``, ``per_s``, ``cpu_ms`` per request (one answer, no
stream). ``<who>_200k_``: fresh prompts; ``<who>_200k_resent_``: each the one before with a new tail; one connection.
``<who>_added_ttft_p50_ms``: streams, 2 KB, one connection. ``<who>_cpu_us_per_chunk``: 128 streams with a chunk every
5 ms, between two moments at which all of them run; ``<who>_cpu_us_per_chunk_burst``: 16 streams as fast as they are
read; ``<who>_pieces_per_chunk``: reads of the client, fewer than 1 where a machine is too busy to take each chunk by
itself (a chunk is then cheaper than it would be: compare only where this is alike); ``<who>_streams_begin_s``: until
the last of them had its first byte. Who cannot hold them all has their number among its failed, and null.
``<who>_most_per_s``: requests/s at saturation, the most of all concurrencies. ``<who>_rss_mb`` at the end. ``failed``
requests, of all and of each (``<who>_failed``). Who leaves a request without an answer for 30 s is left out of the rest
of the run."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import uvloop

from load.bench.measure import percentile
from load.bench.options import BenchError, Options
from load.bench.router_client import Held, Load, Prompts, closed_loop, held_streams
from load.bench.router_targets import Target, engines, house, peers

CONCURRENCY = (1, 16, 128)
SMALL, LARGE = 2_000, 200_000
STREAMS, PACE_MS, BURST_STREAMS = 128, 5, 16
NAMES = ("ours", "ours_proxy", "smg", "vllm_router", "vllm_router_kv", "vllm_router_program")
TWO, TWO_CELLS = "ours_2w", ("200k", "200k_resent")
_MOST = 1_000_000
_LET_GO_S = 20.0

Figures = dict[str, list[float]]


def run(options: Options) -> dict[str, object]:
    """See the module; medians of the runs, null for who is not installed."""
    figures: Figures = defaultdict(list)
    with tempfile.TemporaryDirectory() as directory, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_measured(Path(directory), options, figures))
    failed = {key: int(sum(figures.pop(key))) for key in list(figures) if key.endswith("_failed")}
    names = {key.replace("ours_", f"{name}_", 1) for key in figures if key.startswith("ours_2k") for name in NAMES}
    names |= {f"{name}_{key}" for name in NAMES for key in _KEYS}
    absent: dict[str, float | None] = dict.fromkeys(sorted(names))
    medians = {name: round(statistics.median(values), 3) for name, values in figures.items()}
    for name in ("direct", *NAMES):
        rates = [value for key, value in medians.items() if key.startswith(f"{name}_2k_c") and key.endswith("_per_s")]
        medians |= {f"{name}_most_per_s": max(rates)} if rates else {}
    return {"bench": "router", "quick": options.quick, "failed": sum(failed.values()), **absent, **failed, **medians}


_KEYS = (
    *("added_ttft_p50_ms", "200k_added_p50_ms", "200k_cpu_ms", "200k_resent_added_p50_ms", "200k_resent_cpu_ms"),
    *("cpu_us_per_chunk", "cpu_us_per_chunk_burst", "pieces_per_chunk", "pieces_per_chunk_burst"),
    *("chunks_per_s", "chunks_per_s_burst", "streams_begin_s", "streams_begin_s_burst", "most_per_s", "rss_mb"),
)


async def _measured(directory: Path, options: Options, figures: Figures) -> None:
    async with contextlib.AsyncExitStack() as stack:
        direct = engines(directory)
        stack.callback(direct.children.stop)
        await direct.ready()
        others = [
            house(directory, direct.ports, decides=True),
            house(directory, direct.ports, decides=True, workers=2),
            house(directory, direct.ports, decides=False),
        ]
        for target in others:
            stack.callback(target.children.stop)
        theirs = peers(directory, direct.ports)
        for target in theirs:
            stack.callback(target.children.stop)
        for target in others:
            options.progress(f"{target.name} starts")
            await target.ready()
        others += [target for target in theirs if await _starts(target, options)]
        unable: set[tuple[str, str]] = set()
        for number in range(options.runs):
            await _one_run([direct, *others], options, figures, number, unable)
        for target in others:
            with contextlib.suppress(OSError):  # gone
                figures[f"{target.name}_rss_mb"].append(target.resident_mb())


async def _starts(target: Target, options: Options) -> bool:
    """Whether a peer's router answers; its figures are null where it does not."""
    options.progress(f"{target.name} starts")
    try:
        await target.ready()
    except BenchError as error:
        print(error, file=sys.stderr)
        return False
    return True


async def _one_run(
    targets: list[Target], options: Options, figures: Figures, number: int, unable: set[tuple[str, str]]
) -> None:
    """``unable``: who could not hold the streams, and which: it is not tried again."""
    seconds = 0.2 if options.quick else 1.2
    silent: set[str] = set()
    for name, prompts, concurrency in _cells():
        loads: dict[str, Load] = {}
        for target in targets:
            if target.name in silent or (target.name == TWO and name not in TWO_CELLS):
                continue
            options.progress(f"run {number + 1}: {name}, {target.name}")
            front: list[float] = []

            def cpu_s(target: Target = target, front: list[float] = front) -> float:
                front.append(target.front_cpu_s())
                return target.cpu_s()

            try:
                load, spent = await closed_loop(target.ports, prompts, concurrency, seconds, cpu_s)
            except OSError as error:
                if target.name == "direct":
                    raise
                print(f"{target.name} is gone: {error}", file=sys.stderr)
                figures[f"{target.name}_failed"].append(1)
                silent.add(target.name)
                continue
            loads[target.name] = load
            figures[f"{target.name}_failed"].append(load.failed)
            if load.unanswered:
                print(
                    f"{target.name} did not answer {load.unanswered} requests of {name}: it is left out of the rest of "
                    "this run",
                    file=sys.stderr,
                )
                silent.add(target.name)
            if not loads["direct"].total_ms:
                raise BenchError("the engines do not answer")
            if not load.total_ms:
                continue
            _tell(figures, target, name, load, loads["direct"], spent)
            if target.name == "ours" and name != "ttft":
                figures[f"ours_front_{name}_cpu_ms"].append((front[1] - front[0]) / len(load.total_ms) * 1e3)
    await _streams([target for target in targets if target.name not in silent], options, figures, number, unable)


def _cells() -> list[tuple[str, Callable[[], Prompts], int]]:
    cells: list[tuple[str, Callable[[], Prompts], int]] = [
        (f"2k_c{concurrency}", lambda: Prompts(SMALL), concurrency) for concurrency in CONCURRENCY
    ]
    return [
        *cells,
        ("200k", lambda: Prompts(LARGE), 1),
        ("200k_resent", lambda: Prompts(LARGE, grows=True), 1),
        ("ttft", lambda: Prompts(SMALL, stream=True, chunks=4), 1),
    ]


def _tell(figures: Figures, target: Target, name: str, load: Load, direct: Load, cpu_s: float) -> None:
    """The figures of one cell."""
    if name == "ttft":
        figures[f"{target.name}_added_ttft_p50_ms"].append(
            percentile(load.first_ms, 50) - percentile(direct.first_ms, 50)
        )
        return
    for percent in (50, 99):
        added = percentile(load.total_ms, percent) - percentile(direct.total_ms, percent)
        figures[f"{target.name}_{name}_added_p{percent}_ms"].append(added)
    figures[f"{target.name}_{name}_cpu_ms"].append(cpu_s / len(load.total_ms) * 1e3)
    figures[f"{target.name}_{name}_per_s"].append(len(load.total_ms) / load.seconds)


async def _streams(
    targets: list[Target], options: Options, figures: Figures, number: int, unable: set[tuple[str, str]]
) -> None:
    settle_s, seconds = (0.1, 0.3) if options.quick else (0.4, 1.5)
    for suffix, streams, pace in (("", STREAMS, PACE_MS), ("_burst", BURST_STREAMS, 0)):
        for target in (target for target in targets if target.name != TWO):
            if (target.name, suffix) in unable:
                continue
            options.progress(f"run {number + 1}: streams{suffix}, {target.name}")
            spent: list[tuple[float, float]] = []

            def cpu_s(target: Target = target, spent: list[tuple[float, float]] = spent) -> float:
                spent.append((target.cpu_s(), target.front_cpu_s()))
                return spent[-1][0]

            def prompts(pace: int = pace) -> Prompts:
                return Prompts(SMALL, stream=True, chunks=_MOST, pace_ms=pace)

            held = await held_streams(target.ports, prompts, streams, settle_s, seconds, cpu_s)
            figures[f"{target.name}_failed"].append(held.failed)
            if held.begun < streams:
                print(
                    f"{target.name} cannot hold {streams} streams: {held.begun} had begun after {held.begin_s:.0f} s; "
                    "it has no figures of chunks, and is not tried again",
                    file=sys.stderr,
                )
                unable.add((target.name, suffix))
            else:
                _tell_streams(figures, target.name, suffix, held, spent[1][1] - spent[0][1])
            await _let_go(target)


def _tell_streams(figures: Figures, name: str, suffix: str, held: Held, front_cpu_s: float) -> None:
    chunks = max(1, held.chunks)
    figures[f"{name}_streams_begin_s{suffix}"].append(held.begin_s)
    figures[f"{name}_cpu_us_per_chunk{suffix}"].append(held.cpu_s / chunks * 1e6)
    figures[f"{name}_pieces_per_chunk{suffix}"].append(held.pieces / chunks)
    figures[f"{name}_chunks_per_s{suffix}"].append(held.chunks / held.wall_s)
    if name == "ours":
        figures[f"ours_front_cpu_us_per_chunk{suffix}"].append(front_cpu_s / chunks * 1e6)


async def _let_go(target: Target) -> None:
    """Streams that were cut are gone from whoever was between when it answers again."""
    with contextlib.suppress(BenchError):
        await target.ready(_LET_GO_S)
