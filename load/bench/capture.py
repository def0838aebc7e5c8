"""What it costs to capture prompts and answers: in the ingress' way, and in the process that writes.

A request is an agent's turn: a body of 10 KB, answered in 200 events of 140 bytes. `services.ingress.shell.capture`
keeps it as the ingress would, and the real writer writes it.

``begin_us``, ``chunk_us``, ``end_us``: what the request itself waits for, in CPU time (``chunk_us`` beside the write
to the client); ``in_the_way_us`` is their sum over a request. ``added_us_per_request``: all CPU of the ingress' thread
per request, the pipe to the writer included. ``writer_us_per_request``: CPU of the writer. ``bytes_per_request`` on the
disk, of ``raw_bytes_per_request``."""

from __future__ import annotations

import asyncio
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path
from random import Random

import msgspec
import uvloop
from prometheus_client import CollectorRegistry

from bus.tasks import Tasks
from load.bench.measure import without_collector
from load.bench.options import Options
from schemas.trace import RequestMetrics, TraceRow
from segments.format import members
from services.ingress.config import IngressSettings
from services.ingress.endpoints import endpoint_of, read_request
from services.ingress.events import RequestReceived
from services.ingress.identity import read_headers, resolve
from services.ingress.shell.capture import Capture
from web.headers import Headers

MODEL = "bench/model"
REQUESTS, _QUICK_REQUESTS = 2_000, 100
BODY_BYTES, CHUNKS = 10_000, 200
_AT_ONCE = 50
_WAIT_S = 60.0
_HEADERS: Headers = [
    (b"host", b"127.0.0.1:8080"),
    (b"user-agent", b"claude-cli/2.0 (external, cli)"),
    (b"x-claude-code-session-id", b"6f1c31de-3a52-4f7e-a5e8-5a1e4a7a0a51"),
    (b"authorization", b"Bearer none"),
    (b"content-type", b"application/json"),
]
_KEYS = ("begin_us", "chunk_us", "end_us", "in_the_way_us", "added_us_per_request", "writer_us_per_request")


def run(options: Options) -> dict[str, object]:
    """See the module; medians of the runs."""
    figures: dict[str, list[float]] = {name: [] for name in (*_KEYS, "bytes_per_request")}
    lost = 0.0
    for number in range(options.runs):
        options.progress("requests captured", number, options.runs)
        with tempfile.TemporaryDirectory() as directory, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            measured = runner.run(_captured(Path(directory), options, Random(number)))
        lost += measured.pop("lost")
        for name, value in measured.items():
            figures[name].append(value)
    medians = {name: round(statistics.median(values), 2) for name, values in figures.items()}
    raw = BODY_BYTES + CHUNKS * len(_chunk(0, "word"))
    return {"bench": "capture", "quick": options.quick, "raw_bytes_per_request": raw, **medians, "lost": lost}


def _chunk(number: int, word: str) -> bytes:
    choice = {"index": 0, "delta": {"content": f" {word}"}, "finish_reason": None}
    return (
        b"data: " + msgspec.json.encode({"id": f"chatcmpl-{number:08}", "choices": [choice], "model": MODEL}) + b"\n\n"
    )


def _request(number: int, random: Random) -> RequestReceived:
    words = [f"{random.getrandbits(24):x}" for _ in range(BODY_BYTES // 7)]
    said = " ".join(words)[: BODY_BYTES - 200]
    body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": said}]}
    endpoint = endpoint_of("/v1/chat/completions")
    assert endpoint is not None
    asked = read_request(endpoint, msgspec.json.encode(body))
    request_id = f"{number:032x}"
    resolved = resolve(read_headers(_HEADERS), asked.facts, endpoint, request_id=request_id)
    return RequestReceived(request_id=request_id, request=asked, resolved=resolved)


def _row(received: RequestReceived) -> TraceRow:
    metrics = RequestMetrics(
        request_id=received.request_id, endpoint="chat_completions", model=MODEL, outcome="completed"
    )
    return TraceRow(event_type="request_end", event_time_unix_ms=int(time.time() * 1000), request=metrics)


async def _captured(directory: Path, options: Options, random: Random) -> dict[str, float]:
    count = _QUICK_REQUESTS if options.quick else REQUESTS
    requests = [_request(number, random) for number in range(count)]
    rows = [_row(each) for each in requests]
    chunks = [_chunk(number, f"{random.getrandbits(20):x}") for number in range(CHUNKS)]
    settings = IngressSettings(
        instance="bench",
        capture="answers",
        capture_directory=str(directory),
        capture_headers=("user-agent",),
        capture_rows=count,
        capture_held_bytes=1 << 30,
    )
    tasks, capture = Tasks(), Capture(settings, CollectorRegistry())
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    await capture.start(tasks)
    assert capture.writer_pid is not None
    start_s, began = _cpu_s(capture.writer_pid), time.thread_time()
    parts = [0.0, 0.0, 0.0]
    with without_collector():
        for at in range(0, count, _AT_ONCE):
            spent = _batch(capture, requests[at : at + _AT_ONCE], rows[at : at + _AT_ONCE], chunks)
            parts = [part + more for part, more in zip(parts, spent, strict=True)]
            await asyncio.sleep(0)
        await capture.stop(_WAIT_S)
        added = time.thread_time() - began
    await tasks.stop()
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    writer = ended.ru_utime + ended.ru_stime - children.ru_utime - children.ru_stime - start_s
    rows_written, disk_bytes = _written(directory)
    begin, chunk, end = (part / count * 1e6 for part in parts)
    return {
        "begin_us": begin,
        "chunk_us": chunk / CHUNKS,
        "end_us": end,
        "in_the_way_us": begin + chunk + end,
        "added_us_per_request": added / count * 1e6,
        "writer_us_per_request": writer / count * 1e6,
        "bytes_per_request": disk_bytes / count,
        "lost": count - rows_written,
    }


def _batch(
    capture: Capture, requests: list[RequestReceived], rows: list[TraceRow], chunks: list[bytes]
) -> tuple[float, float, float]:
    """CPU seconds of the beginning, the chunks (beyond those of a client alone) and the end of these requests."""
    clock = time.thread_time
    at = clock()
    kept = [capture.begin(each, _HEADERS) for each in requests]
    begun = clock()
    for _ in requests:
        for chunk in chunks:
            _to_client(chunk)
    alone = clock()
    for each in kept:
        assert each is not None
        assert each.answer is not None
        each.answer.is_stream = True
        write = each.answer.beside(_to_client)
        for chunk in chunks:
            write(chunk)
    gathered = clock()
    for row in rows:
        capture.end(row)
    return begun - at, (gathered - alone) - (alone - begun), clock() - gathered


def _to_client(data: bytes) -> None:
    """The write to the client: nobody is there."""


def _written(directory: Path) -> tuple[int, int]:
    """Rows and bytes on the disk."""
    segments = [path.read_bytes() for path in directory.glob("*.gz")]
    return sum(len(member.lines) for data in segments for member in members(data)), sum(map(len, segments))


def _cpu_s(pid: int) -> float:
    """CPU seconds of a process so far, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
