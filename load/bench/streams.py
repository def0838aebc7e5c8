"""Many streams held at once: memory of the front door for each, whether it grows, and whether others are answered.

The whole house of `load.bench.router` (bus, bridges, indexer, admission, front door with tokenizer) before the same two
engine processes: 1,000 streams (``streams``), a chunk a second each, held for ``--seconds``. ``rss_kb_per_stream``:
resident memory of the front door's process with all of them open, less that before the first, in KiB;
``growth_kb_per_stream``: its median in the last quarter of the time less that in the first; ``healthz_p50_ms``,
``healthz_p99_ms``: of ``/healthz``, asked every 100 ms on a connection of its own meanwhile; ``engine_p99_ms``: the
same of a process that does next to nothing, an engine's ``/health``: what the machine adds to both; ``failed``: streams
that did not last, and questions without an answer; ``chunks_late_percent``: of the chunks that engines were to send in
that time, those that had not come; ``front_cpu_percent``: of one core."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from load.bench.measure import percentile
from load.bench.options import BenchError, Options
from load.bench.router_client import Load, Prompts, open_streams
from load.bench.router_targets import Target, engines, house
from web.client import HttpClient, Timeouts
from web.errors import WebError

STREAMS, SECONDS, PACE_MS = 1_000, 120.0, 1_000
QUICK_STREAMS, QUICK_SECONDS = 50, 3.0
_PROMPT_BYTES = 2_000
_BEGIN_S = 120.0
_SETTLE_S = 1.0
_SAMPLE_S = 0.1


@dataclass(slots=True)
class _Seen:
    """What was sampled while the streams ran."""

    resident_mb: list[float] = field(default_factory=list)
    healthz_ms: list[float] = field(default_factory=list)
    engine_ms: list[float] = field(default_factory=list)
    unanswered: int = 0


def run(options: Options) -> dict[str, object]:
    """See the module. Raises `BenchError` where not all streams begin."""
    with tempfile.TemporaryDirectory() as directory, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measured(Path(directory), options))


async def _measured(directory: Path, options: Options) -> dict[str, object]:
    streams = QUICK_STREAMS if options.quick else STREAMS
    seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    async with contextlib.AsyncExitStack() as stack:
        direct = engines(directory)
        stack.callback(direct.children.stop)
        await direct.ready()
        target = house(directory, direct.ports, decides=True, grants=streams)
        stack.callback(target.children.stop)
        options.progress("the house starts")
        await target.ready()
        before = target.front_resident_mb()

        def prompts() -> Prompts:
            return Prompts(_PROMPT_BYTES, stream=True, chunks=2 * int(seconds + _BEGIN_S), pace_ms=PACE_MS)

        options.progress(f"{streams} streams begin")
        opened = open_streams(target.ports, prompts, streams, _BEGIN_S, within_s=2 * (seconds + _BEGIN_S))
        load, took = await stack.enter_async_context(opened)
        if load.begun < streams:
            raise BenchError(
                f"{load.begun} of {streams} streams had begun after {took:.0f} s, {load.failed} had failed"
            )
        await asyncio.sleep(_SETTLE_S)
        resident, cpu, chunks, began = (
            target.front_resident_mb(),
            target.front_cpu_s(),
            load.chunks,
            time.perf_counter(),
        )
        seen = await _held(target, direct.ports[0], seconds, options, load)
        lasted = time.perf_counter() - began
        quarter = max(1, len(seen.resident_mb) // 4)
        first, last = (statistics.median(part) for part in (seen.resident_mb[:quarter], seen.resident_mb[-quarter:]))
        due = streams * lasted * 1_000 / PACE_MS
        return {
            "bench": "streams",
            "quick": options.quick,
            "failed": load.failed + seen.unanswered,
            "streams": streams,
            "seconds": round(lasted, 1),
            "begin_s": round(took, 2),
            "rss_before_mb": round(before, 1),
            "rss_kb_per_stream": round((resident - before) * 1_024 / streams, 1),
            "rss_kb_per_stream_at_most": round((max(seen.resident_mb) - before) * 1_024 / streams, 1),
            "growth_kb_per_stream": round((last - first) * 1_024 / streams, 2),
            "healthz_p50_ms": round(percentile(seen.healthz_ms, 50), 2),
            "healthz_p99_ms": round(percentile(seen.healthz_ms, 99), 2),
            "healthz_most_ms": round(max(seen.healthz_ms), 2),
            "engine_p50_ms": round(percentile(seen.engine_ms, 50), 2),
            "engine_p99_ms": round(percentile(seen.engine_ms, 99), 2),
            "engine_most_ms": round(max(seen.engine_ms), 2),
            "chunks_late_percent": round(max(0.0, 1 - (load.chunks - chunks) / due) * 100, 2),
            "front_cpu_percent": round((target.front_cpu_s() - cpu) / lasted * 100, 1),
        }


async def _held(target: Target, engine_port: int, seconds: float, options: Options, load: Load) -> _Seen:
    """Memory and the time of an answer to ``/healthz``, ten times a second."""
    seen = _Seen()
    client = HttpClient()
    front, engine = f"http://127.0.0.1:{target.ports[0]}/healthz", f"http://127.0.0.1:{engine_port}/health"
    began = time.perf_counter()
    try:
        while (passed := time.perf_counter() - began) < seconds:
            options.progress(f"{load.begun - load.failed} streams run", int(passed), int(seconds))
            seen.resident_mb.append(target.front_resident_mb())
            due = time.perf_counter() + _SAMPLE_S
            for url, took_ms in ((front, seen.healthz_ms), (engine, seen.engine_ms)):
                asked = time.perf_counter()
                try:
                    answer = await client.fetch("GET", url, [], b"", Timeouts(total_s=30))
                    seen.unanswered += answer.status != 200
                except WebError:
                    seen.unanswered += 1
                took_ms.append((time.perf_counter() - asked) * 1_000)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
    finally:
        await client.close()
    return seen
