"""A recorded trace as the laboratory plays it: agentic Mooncake lines of version 2 as a graph of requests.

Source: spec identity-and-traces §3.1 (agentic_mooncake v2). Beside the format's own fields a line may have
``parent_session_id``, ``tool`` (the first that the answer asked for), ``label`` (what a program of its own is called: a
request without a session, a title), ``content_hash_ids`` and ``content_tokens`` (what prompt and answer hold, as far as
it is known). Ids of blocks and names of sessions hold over the whole file (``hash_id_scope`` ``global``). Who writes
such lines has checked them as a graph; here only fields are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

from load.sim.clock import PS_PER_S
from load.sim.content import Contents
from load.sim.programs import Program, Turn
from load.sim.traces import TRACE_LABEL, TraceError
from load.sim.workloads import BLOCK

PS_PER_MS = PS_PER_S // 1000


class _Header(msgspec.Struct):
    schema: str
    version: int
    block_size: int
    hash_id_scope: str


class _Wait(msgspec.Struct):
    request_id: str
    trigger: Literal["dispatch", "completion"]
    delay_ms: float


class _Line(msgspec.Struct):
    request_id: str
    play_id: str
    session_id: str
    input_length: int
    output_length: int
    hash_ids: list[int]
    not_before_ms: float
    dependencies: list[_Wait]
    parent_session_id: str | None = None
    tool: str | None = None
    label: str | None = None
    content_hash_ids: list[int] | None = None
    content_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Wait:
    """For the dispatch or the completion of node ``number``; then ``delay_ps`` pass."""

    number: int
    trigger: Literal["dispatch", "completion"]
    delay_ps: int


@dataclass(frozen=True, slots=True)
class Node:
    """A request: turn ``turn`` of program number ``program``, in play number ``play``."""

    request_id: str
    program: int
    turn: int
    play: int
    not_before_ps: int
    waits: tuple[Wait, ...]


@dataclass(frozen=True, slots=True)
class Recording:
    """``programs``: sessions, in the order of their first request; ``plays``: numbers of nodes. ``block_size``: of the
    engine that plays it."""

    programs: tuple[Program, ...]
    nodes: tuple[Node, ...]
    plays: tuple[tuple[int, ...], ...]
    block_size: int


def load_recording(path: Path, *, speed: float = 1.0) -> Recording:
    """Raises `TraceError`, `OSError`. ``speed`` divides delays and times of beginning."""
    with path.open("rb") as lines:
        return read_recording(lines, speed=speed)


def read_recording(lines: Iterable[bytes], *, speed: float = 1.0) -> Recording:
    """As `load_recording`, from lines. Raises `TraceError`."""
    header: _Header | None = None
    rows: list[_Line] = []
    for number, line in enumerate(lines, 1):
        try:
            if header is None:
                header = msgspec.json.decode(line, type=_Header)
            else:
                rows.append(msgspec.json.decode(line, type=_Line))
        except msgspec.DecodeError as error:
            raise TraceError(f"line {number} is not as it should be: {error}") from error
    if header is None or not rows:
        raise TraceError("the trace has no requests")
    return _Builder(header.block_size, speed).recording(rows)


@dataclass(slots=True)
class _Building:
    """A program whose turns are not all known."""

    program: Program
    turns: list[Turn] = field(default_factory=list)


class _Builder:
    def __init__(self, trace_block: int, speed: float) -> None:
        self._per_ms = PS_PER_MS / speed
        # Engines have blocks of 16 tokens, where those of the trace are made of such, or make up such.
        self.block_size = BLOCK if trace_block % BLOCK == 0 or BLOCK % trace_block == 0 else trace_block
        self._every = max(1, self.block_size // trace_block)
        self._contents = Contents(max(trace_block, self.block_size), self.block_size)
        self._programs: dict[str, int] = {}
        self._building: list[_Building] = []

    def recording(self, rows: list[_Line]) -> Recording:
        numbers = {row.request_id: number for number, row in enumerate(rows)}
        plays: dict[str, list[int]] = {}
        order: dict[str, int] = {}
        nodes = []
        for number, row in enumerate(rows):
            plays.setdefault(row.play_id, []).append(number)
            play = order.setdefault(row.play_id, len(order))
            program = self._program(row)
            turns = self._building[program].turns
            nodes.append(
                Node(
                    row.request_id,
                    program,
                    len(turns),
                    play,
                    round(row.not_before_ms * self._per_ms),
                    tuple(Wait(numbers[each.request_id], each.trigger, self._ps(each)) for each in row.dependencies),
                )
            )
            turns.append(self._turn(row))
        programs = (replace(each.program, turns=tuple(each.turns)) for each in self._building)
        return Recording(tuple(programs), tuple(nodes), tuple(tuple(of) for of in plays.values()), self.block_size)

    def _ps(self, wait: _Wait) -> int:
        return round(wait.delay_ms * self._per_ms)

    def _program(self, row: _Line) -> int:
        name = row.session_id if row.label is None else f"{row.label}:{row.request_id}"
        known = self._programs.get(name)
        if known is None:
            known = self._programs[name] = len(self._building)
            own = row.label is not None
            parent = None if own else row.parent_session_id
            program = Program(name, row.label or TRACE_LABEL, 0.0, (), parent, single=own)
            self._building.append(_Building(program))
        return known

    def _turn(self, row: _Line) -> Turn:
        prompt, output = max(1, row.input_length), max(1, row.output_length)
        ids, tokens = row.hash_ids, row.input_length
        if row.content_hash_ids is not None and row.content_tokens is not None:
            ids, tokens = row.content_hash_ids, row.content_tokens
        if self._every > 1:
            ids = ids[self._every - 1 :: self._every]
            tokens = min(tokens, len(ids) * self.block_size)
        chain, new = self._contents.chain(ids, prompt, tokens)
        return Turn(prompt, output, new, chain, row.tool)
