"""Reads a trace for a player: requests, what each waits for, and what was recorded of it.

Both replays take it: `tidegate replay`, and `tidegate simulate --trace`. Three formats are read, told by their first
line: rows of ours or of the peer's, agentic Mooncake of version 2, and Mooncake lines.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from schemas.base import UNDECODABLE
from tidegate.trace.agentic_reading import AGENTIC_SCHEMA, read_agentic
from tidegate.trace.dependencies import Node, dependency_graph, without_unplayable
from tidegate.trace.errors import Place, Problem, TraceFileError
from tidegate.trace.files import find_files, read_lines
from tidegate.trace.mooncake import trace_of_mooncake
from tidegate.trace.play_nodes import Content, Format, PlayNode, Plays, Recorded, Turn, contents
from tidegate.trace.reading import read_trace
from tidegate.trace.replayable import DEFAULT_BLOCK, Playable, completion_hashes, playable, prompt

__all__ = ["PlayNode", "Plays", "Recorded", "format_of", "plays_of", "read_plays"]


ADVICE = "--skip-unplayable leaves out the sessions that these are of"


def read_plays(paths: Sequence[Path], *, mooncake_block: int = DEFAULT_BLOCK, skip_unplayable: bool = False) -> Plays:
    """All files and folders together, which are of one format. ``mooncake_block``: tokens of one hash id of Mooncake
    lines, which do not say it. ``skip_unplayable``: see `plays_of`. Raises `TraceFileError`, which names file, line
    and rule."""
    kind = format_of(paths) or "rows"
    if kind == "agentic-mooncake":
        return read_agentic(paths)
    trace = trace_of_mooncake(paths, block_size=mooncake_block) if kind == "mooncake" else read_trace(paths)
    return plays_of(playable(trace), damaged=trace.damaged, kind=kind, skip_unplayable=skip_unplayable)


class _FirstLine(msgspec.Struct):
    schema: object = None
    event: object = None
    event_type: object = None
    hash_ids: object = None


def format_of(paths: Sequence[Path]) -> Format | None:
    """By the first line of each file; ``None`` where all of those are nothing known. Raises `TraceFileError` where a
    file cannot be read, or files are of several formats."""
    told: dict[Format, Path] = {}
    for path in find_files(paths):
        found = _format_of_file(path)
        if found is not None:
            told.setdefault(found, path)
    kinds = list(told.items())
    if len(kinds) > 1:
        (kind, path), (other, second) = kinds[:2]
        text = f"this is {other}, and {path} is {kind}: play files of one format at a time"
        raise TraceFileError([Problem(Place(str(second), 1), "fields", text)])
    return kinds[0][0] if kinds else None


def _format_of_file(path: Path) -> Format | None:
    line = next(read_lines(path, lambda place, text: None), None)
    if line is None:
        return None
    try:
        first = msgspec.json.decode(line.data, type=_FirstLine)
    except UNDECODABLE:
        return None
    if first.schema == AGENTIC_SCHEMA:
        return "agentic-mooncake"
    if first.event is not None or first.event_type is not None:
        return "rows"
    return None if first.hash_ids is None else "mooncake"


def plays_of(
    source: Playable, *, damaged: Sequence[Problem] = (), kind: Format = "rows", skip_unplayable: bool = False
) -> Plays:
    """Of rows. ``skip_unplayable``: sessions that contradict themselves are left out and counted. Raises
    `TraceFileError` (`dependency_graph`)."""
    trace, left_out = source.trace, source.left_out
    if skip_unplayable:
        trace, skipped = without_unplayable(trace)
        left_out = left_out + skipped
        if not trace.requests:
            text = f"no session can be played again ({left_out.total()} requests left out)"
            raise TraceFileError([Problem(source.trace.requests[0].place, "nothing_to_write", text)])
    try:
        nodes = dependency_graph(trace)
    except TraceFileError as error:
        raise TraceFileError(error.problems, error.more, ADVICE) from error
    zero_ms = min(node.request.start_ms for node in nodes)
    parents = trace.parents()
    workers = {node.request.metrics.worker.worker for node in nodes if node.request.metrics.worker is not None}
    known = contents([_turn(node) for node in nodes], source.block_size)
    return Plays(
        nodes=tuple(_play_node(node, zero_ms, parents, known[node.request.request_id]) for node in nodes),
        block_size=source.block_size,
        format=kind,
        left_out=left_out,
        damaged=tuple(damaged),
        workers=len(workers),
        kv_tokens=max((sample.load.kv_tokens or 0 for sample in trace.loads), default=0),
    )


def _play_node(node: Node, zero_ms: float, parents: dict[str, str], content: Content) -> PlayNode:
    request, metrics = node.request, node.request.metrics
    finish = metrics.finish_reason_metadata
    tools = [] if finish is None else [call.name for call in finish.tool_calls if call.name]
    # A row that tells its wait and no hold was not held.
    hold_ms = 0 if metrics.hold_ms is None and metrics.admission_wait_ms is not None else metrics.hold_ms
    recorded = Recorded(
        start_ms=request.start_ms,
        end_ms=request.end_ms,
        ttft_ms=metrics.ttft_ms,
        avg_itl_ms=metrics.avg_itl_ms,
        cached_tokens=metrics.cached_tokens,
        hold_ms=hold_ms,
        worker=None if metrics.worker is None else metrics.worker.worker,
    )
    return PlayNode(
        request_id=request.request_id,
        session=node.session,
        parent=parents.get(node.session),
        play=node.play,
        model=metrics.model,
        kind=metrics.kind,
        tool=tools[0] if tools else None,
        input_tokens=prompt(request).input_length,
        output_tokens=max(1, metrics.output_tokens or 0),
        sequence_hashes=prompt(request).input_sequence_hashes,
        content_hashes=content[0],
        content_tokens=content[1],
        not_before_ms=0.0 if node.dependencies else round(float(request.start_ms) - zero_ms, 3),
        dependencies=node.dependencies,
        recorded=recorded if metrics.total_time_ms is not None else None,
    )


def _turn(node: Node) -> Turn:
    request, block = node.request, prompt(node.request)
    return Turn(
        request_id=request.request_id,
        session=node.session,
        start_ms=request.start_ms,
        end_ms=request.end_ms,
        hashes=block.input_sequence_hashes,
        input_tokens=block.input_length,
        output_tokens=request.metrics.output_tokens or 0,
        completion=completion_hashes(block),
        cached_tokens=request.metrics.cached_tokens,
    )
