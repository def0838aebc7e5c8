"""What a trace row costs: at the ingress that makes it, and in the recorder that keeps it.

Rows are those of finished turns of 32,768 tokens, with 64 hashes (trace block 512), made by the ingress' own functions;
no two prompts have a block in common, which compresses worst.

``added_us_per_request``: build the row, encode it, hand it to the publisher; in this process, as the ingress does it
when a request ends, in CPU time of its thread. ``row_us``, ``encode_us``, ``publish_us`` are its parts.

``rows_per_s``: a stream that holds all rows is drained by a recorder that runs on one core (``core``; the nats-server
may use the others), from its first batch on the disk to its last; the start of the process does not count.
``cpu_us_per_row``: its CPU meanwhile, all threads; ``rows_per_cpu_s``: what a core that it has to itself would do. On a
machine with other work ``rows_per_s`` is less. ``mb_per_s``: uncompressed. ``bytes_per_row``: on the disk;
``raw_bytes_per_row``: as published. ``lost`` and ``doubled`` are counted in the segments, over all runs.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import msgspec
import uvloop

from bus.interface import Consumer
from bus.memory import MemoryBroker
from bus.nats import NatsBus, connect
from bus.rows import RowPublisher
from bus.subjects import TRACE_SUBJECTS, trace
from bus.tasks import Tasks
from kvcore import IMPLEMENTATION, chain_hashes
from load.bench.decision_room import Children, start_nats, start_service
from load.bench.measure import without_collector
from load.bench.options import BenchError, Options
from schemas.admit import Grant, Granted
from schemas.base import to_json
from schemas.request import Usage
from schemas.trace import ToolCall
from segments.format import members, segment_indices, segment_name, unwrap
from services.ingress.answers import AnswerFacts
from services.ingress.endpoints import ClientRequest, endpoint_of, read_request
from services.ingress.identity import Resolved, read_headers, resolve
from services.ingress.requests import Record
from services.ingress.rows import Ending, request_end_row, usage_of
from services.ingress.tokens import PromptTokens

MODEL = "bench/model"
TOKENS, BLOCK_SIZE, HASHES = 32_768, 16, 64
ROWS, _QUICK_ROWS = 20_000, 1_000
REQUESTS, _QUICK_REQUESTS = 5_000, 200
_PROMPTS = 100
"""Distinct prompts: their hashes come again only beyond the reach of gzip (32 KiB)."""
_LOOK_S = 0.01
_DRAIN_S = 120.0
_AT_ONCE = 1_000
_ACK_WAIT_S = 60.0
"""Nothing comes again while it is measured."""

Figures = dict[str, list[float]]


def run(options: Options) -> dict[str, object]:
    """See the module; medians of the runs."""
    requests = _Requests()
    result: dict[str, object] = {"bench": "traces", "kvcore": IMPLEMENTATION, "quick": options.quick, "hashes": HASHES}
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result |= runner.run(_ingress(requests, options))
    with tempfile.TemporaryDirectory() as directory, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result |= runner.run(_recorder(Path(directory), requests, options))
    return result


# Rows


class _Requests:
    """Finished requests, as the ingress knows them when they end."""

    def __init__(self) -> None:
        random = Random(1)
        tokens = [random.randbytes(TOKENS * 4) for _ in range(_PROMPTS)]
        self._prompts = [PromptTokens(each, BLOCK_SIZE, chain_hashes(each, BLOCK_SIZE)) for each in tokens]
        self._random = random
        endpoint = endpoint_of("/v1/chat/completions")
        assert endpoint is not None
        body = {"model": MODEL, "messages": [{"role": "user", "content": "go on"}], "stream": True}
        self._request: ClientRequest = read_request(endpoint, msgspec.json.encode(body))
        headers = [(b"x-claude-code-session-id", b"6f1c31de-3a52-4f7e-a5e8-5a1e4a7a0a51")]
        self._resolved: Resolved = resolve(read_headers(headers), self._request.facts, endpoint, request_id="r")

    def finished(self, number: int) -> tuple[Record, Ending]:
        """Request ``number``, just ended."""
        record = Record(
            f"{self._random.getrandbits(128):032x}", self._request, self._resolved, received_at=1e9 + number
        )
        record.tokens, record.block_size = self._prompts[number % _PROMPTS], BLOCK_SIZE
        record.tokens_from = "tokenizer"
        record.granted = self._granted(record.request_id)
        record.mode, record.worker, record.rank = "policy", "engine-1", 0
        start = record.received_at
        record.asked_at, record.decided_at = start + 0.004, start + 0.0052
        record.first_byte_at, record.status, record.chunks = start + 0.31 + number * 1e-5, 200, 200
        usage = Usage(input_tokens=TOKENS, output_tokens=200, cached_tokens=TOKENS - 700 - number % 97)
        answer = AnswerFacts(
            usage=usage, finish_reason="tool_calls", complete=True, tool_calls=(ToolCall(id="call_1", name="Bash"),)
        )
        return record, Ending(outcome="completed", at=start + 4.0 + number * 1e-4, status=200, answer=answer)

    def _granted(self, request_id: str) -> Granted:
        grant = Grant(
            grant_id=f"{self._random.getrandbits(128):032x}",
            request_id=request_id,
            worker="engine-1",
            rank=0,
            owner="ingress-1",
            epoch=7,
            expires_ms=0,
        )
        return Granted(
            request_id=request_id,
            epoch=7,
            grant=grant,
            url="http://engine-1",
            predicted_cached_tokens=TOKENS - 768,
            index_health="synced",
            policy="kv",
        )


# At the ingress


async def _ingress(requests: _Requests, options: Options) -> dict[str, object]:
    """Each part over all requests, then the next part: the parts add up to what a request pays."""
    count = _QUICK_REQUESTS if options.quick else REQUESTS
    parts: Figures = {"row_us": [], "encode_us": [], "publish_us": []}
    sums: list[float] = []
    for number in range(options.runs):
        options.progress("rows made", number, options.runs)
        ended = [requests.finished(each) for each in range(count)]
        tasks = Tasks()
        # The senders get no turn of the loop here: what is sent later is not the request's time.
        publisher = RowPublisher(await MemoryBroker().connect(), tasks, window=count)
        clock = time.thread_time
        with without_collector():
            began = clock()
            rows = [request_end_row(record, end, usage_of(record, end.answer)) for record, end in ended]
            built = clock()
            payloads = [to_json(row) for row in rows]
            encoded = clock()
            for (record, _), payload in zip(ended, payloads, strict=True):
                subject = trace("request_end", record.model, record.identity.key.text())
                publisher.publish(subject, payload, record.request_id)
            handed = clock()
        await tasks.stop()
        spent = [(built - began), (encoded - built), (handed - encoded)]
        sums.append(sum(spent) / count * 1e6)
        for name, seconds in zip(parts, spent, strict=True):
            parts[name].append(seconds / count * 1e6)
    return {"added_us_per_request": _median(sums), **{name: _median(values) for name, values in parts.items()}}


# In the recorder


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a recorder has left on the disk. ``rows``: how often each request's is there."""

    rows: Counter[str]
    disk_bytes: int


async def _recorder(directory: Path, requests: _Requests, options: Options) -> dict[str, object]:
    count = _QUICK_ROWS if options.quick else ROWS
    rows = {}
    for number in range(count):
        record, end = requests.finished(number)
        rows[record.request_id] = to_json(request_end_row(record, end, usage_of(record, end.answer)))
    raw_bytes = sum(map(len, rows.values())) / count
    figures: Figures = {"rows_per_s": [], "cpu_us_per_row": [], "bytes_per_row": []}
    lost = doubled = 0
    core = max(os.sched_getaffinity(0))
    children = Children(directory)
    try:
        url = start_nats(children, directory)
        bus = await connect(url, name="bench", timeout_s=10)
        try:
            await _publish(bus, rows, options)
            for number in range(options.runs):
                options.progress("rows recorded", number, options.runs)
                name = f"run{number}"
                consumer = await bus.consume(name, TRACE_SUBJECTS, ack_wait_s=_ACK_WAIT_S)
                settings = {"durable": name, "prefix": name, "directory": str(directory / "traces")}
                settings["flush_interval_ms"] = "50"  # the last batch is not full: its rest would count as work
                with _on_core(core):
                    start_service(
                        children, "recorder", url, ack_wait_s=str(_ACK_WAIT_S), load_samples_s="0", **settings
                    )
                rate, cpu_us = await _drained(consumer, children, count)
                children.stop_one("recorder")
                await consumer.close()
                kept = _kept(directory / "traces", name)
                lost += len(rows.keys() - kept.rows.keys())
                doubled += kept.rows.total() - len(kept.rows)
                figures["rows_per_s"].append(rate)
                figures["cpu_us_per_row"].append(cpu_us)
                figures["bytes_per_row"].append(kept.disk_bytes / count)
        finally:
            await bus.close()
    finally:
        children.stop()
    medians = {name: _median(values) for name, values in figures.items()}
    mb_per_s = round(medians["rows_per_s"] * raw_bytes / 1e6, 1)
    return {
        "core": core,
        "rows": count,
        **medians,
        "rows_per_cpu_s": round(1e6 / medians["cpu_us_per_row"]) if medians["cpu_us_per_row"] else None,
        "raw_bytes_per_row": round(raw_bytes, 1),
        "mb_per_s": mb_per_s,
        "lost": lost,
        "doubled": doubled,
    }


async def _publish(bus: NatsBus, rows: dict[str, bytes], options: Options) -> None:
    """Into the stream, acknowledged."""
    waiting = list(rows.items())
    subject = trace("request_end", MODEL, "bench")
    for start in range(0, len(waiting), _AT_ONCE):
        options.progress("rows published", start, len(waiting))
        part = waiting[start : start + _AT_ONCE]
        await asyncio.gather(*(bus.publish_row(subject, row, message_id=request) for request, row in part))


@dataclass(frozen=True, slots=True)
class _Look:
    """At one time: seconds, the recorder's seconds of CPU, rows not acknowledged."""

    at: float
    cpu: float
    left: int


async def _drained(consumer: Consumer, children: Children, count: int) -> tuple[float, float]:
    """Rows a second and microseconds of CPU a row, from the first look that finds rows acknowledged (from the one
    before, where that finds more than half of them) to the first that finds all."""
    deadline = time.monotonic() + _DRAIN_S
    before = began = None
    while time.monotonic() < deadline:
        look = _Look(time.monotonic(), children.cpu_s()["recorder"], await consumer.pending())
        if began is None and look.left < count:
            began = look if before is None or look.left > count // 2 else before
        if began is not None and look.left == 0:
            rows = began.left
            return rows / (look.at - began.at), (look.cpu - began.cpu) / rows * 1e6
        before = look
        await asyncio.sleep(_LOOK_S)
    raise BenchError(f"the recorder did not record {count} rows within {_DRAIN_S:g} s")


@contextmanager
def _on_core(core: int) -> Iterator[None]:
    """Processes that are started inside run on this core only."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _kept(directory: Path, prefix: str) -> _Kept:
    rows: Counter[str] = Counter()
    size = 0
    for index in segment_indices(prefix, os.listdir(directory)):
        data = (directory / segment_name(prefix, index)).read_bytes()
        size += len(data)
        for member in members(data):
            for line in member.lines:
                rows[msgspec.json.decode(unwrap(line))["request"]["request_id"]] += 1
    return _Kept(rows, size)


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 2)
