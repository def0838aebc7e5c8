"""Mooncake traces: rows of ours from them, and them from rows. Source: spec identity-and-traces §3.1 (mooncake).

A line is one prompt. Lines of one ``session_id`` are a closed loop: the first has its ``timestamp``, each later one the
``delay`` between the end of the one before and its own beginning. Parents are not in the format; nor are tools, but as
parts of delays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from schemas.base import UNDECODABLE
from tidegate.trace.errors import Place, Problems
from tidegate.trace.files import find_files, read_lines
from tidegate.trace.reading import Trace
from tidegate.trace.replayable import HashIds, Playable, prompt
from tidegate.trace.rows import OURS, Request, read_request

MOST_TOKENS = 1 << 30


def mooncake_lines(source: Playable, *, open_loop: bool = False) -> Iterator[dict[str, Any]]:
    """In the order of their beginning; times in ms after the first. ``open_loop``: each at its own time and of no
    session (for readers that take the lines of a session for additions to one another)."""
    ids = HashIds()
    zero_ms = min(request.start_ms for request in source.trace.requests)
    ended_ms: dict[str, float] = {}
    for request in source.trace.requests:
        line: dict[str, Any] = {"request_id": request.request_id}
        session = None if open_loop else request.session
        if session is not None:
            line["session_id"] = session
        if session is not None and session in ended_ms:
            line["delay"] = round(max(0.0, request.start_ms - ended_ms[session]), 3)
        else:
            line["timestamp"] = round(request.start_ms - zero_ms, 3)
        if session is not None:
            ended_ms[session] = request.end_ms
        line["input_length"] = prompt(request).input_length
        line["output_length"] = max(1, request.metrics.output_tokens or 0)
        line["hash_ids"] = ids.of(request)
        yield line


class MooncakeLine(msgspec.Struct, kw_only=True):
    """A line as others write it: two names for some."""

    hash_ids: list[int]
    session_id: str | int | None = None
    request_id: str | None = None
    timestamp: float | None = None
    created_time: float | None = None
    delay: float | None = None
    delay_ms: float | None = None
    input_length: int | None = None
    input_tokens: int | None = None
    output_length: int | None = None
    output_tokens: int | None = None
    model: str | None = None


_decoder = msgspec.json.Decoder(MooncakeLine)


def rows_of_mooncake(
    paths: Sequence[Path], *, block_size: int, start_ms: int = 0, model: str | None = None
) -> Iterator[dict[str, Any]]:
    """Rows of ours (`request_end`), one for each line. Raises `TraceFileError` at the end with what was wrong.

    ``block_size``: tokens of one hash id. ``start_ms``: Unix ms of timestamp 0. A trace says nothing of how long a
    request took: rows have no duration, and a turn after a ``delay`` begins that long after the one before had begun.
    Ids stand for a whole prefix in these traces, so they are the rows' sequence hashes as they are.
    """
    for _, row in _rows(paths, block_size=block_size, start_ms=start_ms, model=model):
        yield row


def _rows(
    paths: Sequence[Path], *, block_size: int, start_ms: int = 0, model: str | None = None
) -> Iterator[tuple[Place, dict[str, Any]]]:
    """As `rows_of_mooncake`, with each row's line."""
    problems = Problems()
    for path in find_files(paths):
        damage: list[tuple[Place, str]] = []
        last_ms: dict[str, float] = {}
        for line in read_lines(path, lambda place, text, found=damage: found.append((place, text))):  # type: ignore[misc]
            place = Place(str(path), line.number)
            try:
                said = _decoder.decode(line.data)
            except UNDECODABLE as error:
                problems.add(place, "json", f"the line is no Mooncake line ({error})")
                continue
            row = _row(said, place, problems, block_size=block_size, last_ms=last_ms)
            if row is not None:
                yield place, _event(row, said, place, block_size=block_size, start_ms=start_ms, model=model)
        for place, text in damage:
            problems.add(place, "file", text)
    problems.raise_any()


def trace_of_mooncake(paths: Sequence[Path], *, block_size: int) -> Trace:
    """The lines as requests, whose places are theirs. Raises `TraceFileError`."""
    problems = Problems()
    requests: dict[str, Request] = {}
    for place, event in _rows(paths, block_size=block_size):
        request = read_request(place, event)
        before = requests.setdefault(request.request_id, request)
        if before is not request:
            text = f"request_id {request.request_id} was in {before.place} already"
            problems.add(place, "duplicate_request_id", text)
    problems.raise_any()
    ordered = sorted(requests.values(), key=lambda each: (each.start_ms, each.end_ms, each.place.file, each.place.line))
    return Trace(requests=tuple(ordered))


def _row(
    said: MooncakeLine, place: Place, problems: Problems, *, block_size: int, last_ms: dict[str, float]
) -> tuple[float, int, int] | None:
    """Time (ms), input and output tokens of a line; ``None`` where it is wrong."""
    count = len(said.hash_ids)
    input_length = said.input_tokens if said.input_length is None else said.input_length
    room = count * block_size
    length = room if input_length is None else input_length
    if room < length < room + block_size:
        length = room  # who hashes only whole blocks: a prompt is as long as its blocks at most (the peer's rule)
    output = said.output_tokens if said.output_length is None else said.output_length
    if output is None or not 0 <= output <= MOST_TOKENS or not 0 <= length <= MOST_TOKENS:
        problems.add(place, "fields", "input_length and output_length must be numbers of tokens")
        return None
    if -(-length // block_size) != count:
        text = f"{count} hash_ids for {length} tokens in blocks of {block_size} (see --block-size)"
        problems.add(place, "hash_count", text)
        return None
    if said.hash_ids and not 0 <= min(said.hash_ids) <= max(said.hash_ids) < 1 << 64:
        problems.add(place, "hash_range", "a hash id has more than 64 bits")
        return None
    session = None if said.session_id is None else str(said.session_id)
    timestamp = said.created_time if said.timestamp is None else said.timestamp
    delay = said.delay_ms if said.delay is None else said.delay
    if any(value is not None and not (math.isfinite(value) and 0 <= value < 1e15) for value in (timestamp, delay)):
        problems.add(place, "times", "timestamp and delay must be times in ms")
        return None
    before = None if session is None else last_ms.get(session)
    if before is None and delay:
        problems.add(place, "times", "the first line of a session has no delay")
        return None
    at_ms = before + delay if before is not None and delay is not None else timestamp or before or 0.0
    if session is not None:
        last_ms[session] = at_ms
    return at_ms, length, output


def _event(
    row: tuple[float, int, int],
    said: MooncakeLine,
    place: Place,
    *,
    block_size: int,
    start_ms: int,
    model: str | None,
) -> dict[str, Any]:
    at_ms, length, output = row
    received_ms = start_ms + round(at_ms)
    request: dict[str, Any] = {
        # Unique over many files, as a trace's own ids are.
        "request_id": said.request_id or f"{Path(place.file).name}:{place.line}",
        "model": said.model or model,
        "input_tokens": length,
        "output_tokens": output,
        "request_received_ms": received_ms,
        "replayable": True,
        "replay": {
            "trace_block_size": block_size,
            "input_length": length,
            "input_sequence_hashes": said.hash_ids,
        },
    }
    event: dict[str, Any] = {
        "schema": OURS,
        "event_type": "request_end",
        "event_time_unix_ms": received_ms,
        "event_source": "mooncake",
        "request": {key: value for key, value in request.items() if value is not None},
    }
    if said.session_id is not None:
        event["agent_context"] = {"session_id": str(said.session_id)}
    return event
