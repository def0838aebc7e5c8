"""Which requests of a trace can be played again, and their prompts as small ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from schemas.trace import ReplayBlock
from tidegate.trace.errors import Place, Problem, Problems, TraceFileError
from tidegate.trace.reading import Trace
from tidegate.trace.rows import Request

DEFAULT_BLOCK = 512


@dataclass(frozen=True, slots=True)
class Playable:
    """``trace`` holds only requests with their prompt's hashes, of blocks of ``block_size`` tokens; ``left_out`` counts
    the others by reason."""

    trace: Trace
    block_size: int
    left_out: Counter[str] = field(default_factory=Counter)


def playable(trace: Trace) -> Playable:
    """What can be played again. Rows with hashes of smaller blocks are brought to the largest size there is.

    Raises `TraceFileError`: sizes that do not divide the largest one, or nothing to play.
    """
    left_out: Counter[str] = Counter()
    kept: list[Request] = []
    for request in trace.requests:
        reason = _unplayable(request)
        if reason is None:
            kept.append(request)
        else:
            left_out[reason] += 1
    if not kept:
        where = trace.requests[0].place if trace.requests else Place("the trace", 0)
        text = "no request can be played again" + (f" ({_counted(left_out)})" if left_out else ": there is none")
        raise TraceFileError([Problem(where, "nothing_to_write", text)])
    size = _block_size(kept)
    return Playable(replace(trace, requests=tuple(_coarse(request, size) for request in kept)), size, left_out)


def prompt(request: Request) -> ReplayBlock:
    """Of a request that `playable` kept."""
    if request.replay is None:
        raise ValueError(f"{request.request_id} has no replay block")
    return request.replay


def _unplayable(request: Request) -> str | None:
    if request.metrics.replayable is False:
        return "not replayable"
    if request.replay is None:
        return "no replay block"
    if not request.replay.input_length:
        return "empty prompt"
    if request.metrics.kind == "count_tokens":
        return "counts tokens only"
    return None


def _block_size(requests: Sequence[Request]) -> int:
    """The largest size, if the others divide it."""
    largest = max(requests, key=lambda request: prompt(request).trace_block_size)
    size = prompt(largest).trace_block_size
    problems = Problems()
    for request in requests:
        if size % (own := prompt(request).trace_block_size):
            text = f"blocks of {own} tokens here, which do not divide those of {size} in {largest.place}"
            problems.add(request.place, "mixed_block_sizes", text)
    problems.raise_any()
    return size


def _coarse(request: Request, size: int) -> Request:
    """With the hashes of blocks of ``size``. Hashes are chained, so that of a larger block is the last of those in it.
    A partial block at the end keeps its own: there, rows of smaller and of larger blocks never agree."""
    block = prompt(request)
    every = size // block.trace_block_size
    if every == 1:
        return request
    length = block.input_length
    changed = msgspec.structs.replace(
        block, trace_block_size=size, input_sequence_hashes=_every(block.input_sequence_hashes, every, length // size)
    )
    if completion := completion_hashes(block):
        tokens = length + (request.metrics.output_tokens or 0)
        changed = msgspec.structs.replace(changed, completion_sequence_hashes=_every(completion, every, tokens // size))
    return replace(request, metrics=msgspec.structs.replace(request.metrics, replay=changed))


def _every(hashes: tuple[int, ...], every: int, whole: int) -> tuple[int, ...]:
    """Of ``whole`` larger blocks, and of what is left after them."""
    return hashes[every - 1 : whole * every : every] + (hashes[-1:] if len(hashes) > whole * every else ())


def completion_hashes(block: ReplayBlock) -> tuple[int, ...]:
    """Of prompt and answer; none where the row does not tell."""
    told = block.completion_sequence_hashes
    return () if isinstance(told, msgspec.UnsetType) else told


def _counted(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in counts.most_common())


class HashIds:
    """Small ids for 64-bit sequence hashes, in the order in which they are first seen: equal prefixes, equal ids."""

    def __init__(self) -> None:
        self._ids: dict[int, int] = {}

    def of(self, request: Request) -> list[int]:
        ids = self._ids
        return [ids.setdefault(each, len(ids)) for each in prompt(request).input_sequence_hashes]
