"""Programs from trace files: Mooncake lines (one request each), and the same with sessions (closed loop).

A line: ``timestamp`` (ms) or, after a session's first line, ``delay`` (ms after the previous turn ended);
``input_length``, ``output_length`` (tokens), ``hash_ids`` (one per block of the trace, equal ids for equal prefixes),
optional ``session_id``. Files may be gzipped. Source: spec identity-and-traces §3.1 (mooncake).

Mooncake's lines name no sessions. `load_cut` finds them: a line that begins as a whole earlier one does (but for its
last block, which may be partly filled, and where that is at least two blocks) is its next turn, after as much time as
lies between the two (ours: the trace does not say how much of it the engine took).

A prompt is as long as the trace says; what was generated is never found in a later prompt (ids of generated tokens are
not in the trace), as in the peer's replay.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from load.sim.content import Chain, Contents
from load.sim.programs import Program, Turn

TRACE_LABEL = "trace"
"""Of every program of a trace."""
MOST_TOKENS = 10_000_000


class TraceError(ValueError):
    """A trace, or a line of it, is not what it should be, or cannot be read (the file's fault)."""

    reason = "bad_trace"


@contextmanager
def _opened(path: Path) -> Iterator[Iterable[str]]:
    """Lines of a file, plain or gzipped. Raises `TraceError`, which names the file, for what goes wrong meanwhile."""
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            yield lines
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is no text in UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        text = error.strerror if isinstance(error, OSError) else None
        raise TraceError(f"{path} cannot be read: {text or error}") from error


def load_trace(
    path: Path, *, trace_block: int = 512, block_size: int | None = None, speedup: float = 1.0, limit: int | None = None
) -> list[Program]:
    """Programs of the first ``limit`` lines of ``path``, in the order of their first lines.

    ``trace_block``: tokens of one hash id; ``block_size``: of the engine (default: the same), a divisor of it.
    ``speedup`` divides timestamps, not delays. Raises `TraceError`.
    """
    with _opened(path) as lines:
        return read_trace(lines, trace_block=trace_block, block_size=block_size, speedup=speedup, limit=limit)


def read_trace(
    lines: Iterable[str],
    *,
    trace_block: int = 512,
    block_size: int | None = None,
    speedup: float = 1.0,
    limit: int | None = None,
) -> list[Program]:
    """As `load_trace`, from lines. Raises `TraceError`, which names no file."""
    size = block_size or trace_block
    if trace_block % size:
        raise ValueError(f"blocks of {size} tokens do not divide the trace's blocks of {trace_block}")
    content = Contents(trace_block, size)
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
            session.tools.append(row.get("tool", "trace"))
        chain, new = content.chain(row["hash_ids"], prompt)
        session.requests.append((max(1, prompt), max(1, output), new, chain))
    return [session.program(name) for name, session in sessions.items()]


def load_cut(path: Path, *, requests: int, cut: int, block_size: int, trace_block: int = 512) -> list[Program]:
    """Programs of one window of a trace without sessions: of ``requests`` lines, the ``cut``-th (from 0, and from near
    the beginning again where the file ends), with the sessions that can be found in it; they arrive from 0 s on.

    Raises `TraceError`.
    """
    with _opened(path) as lines:
        rows = list(_rows(lines, None))
    if not rows:
        raise TraceError(f"{path} has no lines")
    first = cut * requests % max(1, len(rows) - requests + 1)
    chosen = [row for _, row in rows[first : first + requests]]
    if all("session_id" in row for row in chosen):
        found = read_trace((json.dumps(row) for row in chosen), trace_block=trace_block, block_size=block_size)
    else:
        times = [_ms(row, "timestamp", 0, 0.0) for row in chosen]
        if times != sorted(times):
            raise TraceError(f"{path}: lines without session_id must be in the order of their timestamps")
        found = read_trace(_with_sessions(chosen), trace_block=trace_block, block_size=block_size)
    earliest = min(program.arrival_s for program in found)
    moved = [replace(program, arrival_s=program.arrival_s - earliest) for program in found]
    return sorted(moved, key=lambda program: program.arrival_s)


def _with_sessions(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Lines of the same requests with ``session_id`` and ``delay``."""
    last: dict[tuple[int, ...], tuple[str, float]] = {}
    for number, row in enumerate(rows):
        ids, time_ms = tuple(row["hash_ids"]), _ms(row, "timestamp", number, 0.0)
        before = next((last.pop(ids[:end]) for end in range(len(ids), 1, -1) if ids[:end] in last), None)
        name = before[0] if before is not None else f"session-{number}"
        said = {**row, "session_id": name, "tool": None}
        if before is not None:
            said["delay"] = time_ms - before[1]
        if len(ids) > 2:
            last[ids[:-1]] = (name, time_ms)
        yield json.dumps(said)


def _rows(lines: Iterable[str], limit: int | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Numbered lines, whose fields are what they should be. Raises `TraceError`."""
    for number, line in enumerate(islice((line for line in lines if line.strip()), limit), 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"line {number} is not JSON: {error}") from error
        ids = row.get("hash_ids") if isinstance(row, dict) else None
        if not isinstance(ids, list) or not ids or not all(isinstance(each, int) for each in ids):
            raise TraceError(f"line {number}: hash_ids is not a list of numbers")
        for name in ("input_length", "output_length"):
            _count(row, name, number)
        for name in ("timestamp", "delay"):
            _ms(row, name, number, 0.0)
        if not isinstance(row.get("session_id"), str | int | None):
            raise TraceError(f"line {number}: session_id is neither text nor a number")
        if not isinstance(row.get("tool"), str | None):
            raise TraceError(f"line {number}: tool is not a name")
        yield number, row


def _count(row: dict[str, Any], name: str, number: int) -> int:
    value = row.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MOST_TOKENS:
        raise TraceError(f"line {number}: {name} is not a number of tokens")
    return value


def _ms(row: dict[str, Any], name: str, number: int, default: float) -> float:
    value = row.get(name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e12:
        raise TraceError(f"line {number}: {name} is not a time in ms")
    return float(value)


class _Session:
    """Requests of one session in order, and the gaps between them."""

    def __init__(self, arrival_s: float) -> None:
        self.arrival_s = arrival_s
        self.requests: list[tuple[int, int, int, Chain]] = []
        self.gaps: list[float] = []
        self.tools: list[str | None] = []

    def program(self, name: str) -> Program:
        turns = []
        for index, (prompt, output, new, chain) in enumerate(self.requests):
            last = index == len(self.gaps)
            gap_s = 0.0 if last else self.gaps[index]
            turns.append(Turn(prompt, output, new, chain, None if last else self.tools[index], gap_s))
        return Program(name, TRACE_LABEL, self.arrival_s, tuple(turns))
