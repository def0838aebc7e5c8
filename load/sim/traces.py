"""Programs from trace files: Mooncake lines (one request each), and the same with sessions (closed loop).

A line: ``timestamp`` (ms) or, after a session's first line, ``delay`` (ms after the previous turn ended);
``input_length``, ``output_length`` (tokens), ``hash_ids`` (one per block of the trace, equal ids for equal prefixes),
optional ``session_id``. Files may be gzipped. Source: spec identity-and-traces §3.1 (mooncake).

A prompt is as long as the trace says; what was generated is never found in a later prompt (ids of generated tokens are
not in the trace), as in the peer's replay.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from load.sim.content import Chain
from load.sim.programs import Program, Turn

MOST_TOKENS = 10_000_000


class TraceError(ValueError):
    """A line of a trace is not what it should be (the file's fault)."""

    reason = "bad_trace"


def load_trace(
    path: Path, *, trace_block: int = 512, block_size: int | None = None, speedup: float = 1.0, limit: int | None = None
) -> list[Program]:
    """Programs of the first ``limit`` lines of ``path``, in the order of their first lines.

    ``trace_block``: tokens of one hash id; ``block_size``: of the engine (default: the same), a divisor of it.
    ``speedup`` divides timestamps, not delays. Raises `TraceError`, `OSError`.
    """
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        return read_trace(lines, trace_block=trace_block, block_size=block_size, speedup=speedup, limit=limit)


def read_trace(
    lines: Iterable[str],
    *,
    trace_block: int = 512,
    block_size: int | None = None,
    speedup: float = 1.0,
    limit: int | None = None,
) -> list[Program]:
    """As `load_trace`, from lines."""
    size = block_size or trace_block
    if trace_block % size:
        raise ValueError(f"blocks of {size} tokens do not divide the trace's blocks of {trace_block}")
    content = _Content(trace_block, size)
    sessions: dict[str, _Session] = {}
    for number, row in _rows(lines, limit):
        name = str(row.get("session_id") or f"request-{number}")
        session = sessions.get(name)
        prompt = min(_count(row, "input_length", number), len(row["hash_ids"]) * trace_block)
        output = _count(row, "output_length", number)
        if session is None:
            arrival_s = _ms(row, "timestamp", number, 0.0) / 1000 / speedup
            session = sessions[name] = _Session(arrival_s)
        else:
            session.gaps.append(_ms(row, "delay", number, 0.0) / 1000)
        chain, new = content.chain(row["hash_ids"], prompt)
        session.requests.append((max(1, prompt), max(1, output), new, chain))
    return [session.program(name) for name, session in sessions.items()]


def _rows(lines: Iterable[str], limit: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(islice((line for line in lines if line.strip()), limit), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise TraceError(f"line {number} is not JSON: {error}") from error
        ids = row.get("hash_ids") if isinstance(row, dict) else None
        if not isinstance(ids, list) or not ids or not all(isinstance(each, int) for each in ids):
            raise TraceError(f"line {number}: hash_ids is not a list of numbers")
        yield number, row


def _count(row: dict[str, Any], name: str, number: int) -> int:
    value = row.get(name)
    if not isinstance(value, int) or not 0 <= value <= MOST_TOKENS:
        raise TraceError(f"line {number}: {name} is not a number of tokens")
    return value


def _ms(row: dict[str, Any], name: str, number: int, default: float) -> float:
    value = row.get(name, default)
    if not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise TraceError(f"line {number}: {name} is not a time in ms")
    return float(value)


class _Session:
    """Requests of one session in order, and the gaps between them."""

    def __init__(self, arrival_s: float) -> None:
        self.arrival_s = arrival_s
        self.requests: list[tuple[int, int, int, Chain]] = []
        self.gaps: list[float] = []

    def program(self, name: str) -> Program:
        turns = []
        for index, (prompt, output, new, chain) in enumerate(self.requests):
            last = index == len(self.gaps)
            gap_s = 0.0 if last else self.gaps[index]
            turns.append(Turn(prompt, output, new, chain, None if last else "trace", gap_s))
        return Program(name, "trace", self.arrival_s, tuple(turns))


class _Content:
    """Hash ids to chains: prefixes in common are parts of one chain."""

    def __init__(self, trace_block: int, block_size: int) -> None:
        self._size = block_size
        self._ratio = trace_block // block_size
        self._ids: dict[Chain, list[int]] = {}
        self._forks: dict[tuple[Chain | None, int, int], Chain] = {}

    def chain(self, ids: list[int], prompt: int) -> tuple[Chain, int]:
        """The chain of one prompt and its output, and how many of its tokens no line before had."""
        chain: Chain | None = None
        own: list[int] = []
        start = known = 0
        fresh = False
        for index, identity in enumerate(ids):
            place = index - start
            if chain is not None and place < len(own) and own[place] == identity:
                known += not fresh
                continue
            key = (chain, index, identity)
            if chain is not None and place == len(own):
                own.append(identity)
                fresh = True
                continue
            child = self._forks.get(key)
            if child is None:
                child = self._forks[key] = Chain(chain, index * self._ratio)
                self._ids[child] = []
                fresh = True
            chain, own, start = child, self._ids[child], index
            if fresh:
                own.append(identity)
            else:
                known += 1
        cached = min(known * self._ratio, (prompt - 1) // self._size) * self._size
        return Chain(chain, prompt // self._size), max(1, prompt - cached)
