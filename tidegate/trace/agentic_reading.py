"""Reads the peer's agentic Mooncake, version 2 (spec identity-and-traces §3.1), and checks it as a graph."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec

from schemas.base import UNDECODABLE
from tidegate.trace.dependencies import Dependency, Relation, Trigger, in_cycles
from tidegate.trace.errors import Place, Problem, Problems
from tidegate.trace.files import Line, find_files, read_lines
from tidegate.trace.play_nodes import PlayNode, Plays, Turn, contents
from tidegate.trace.rows import OURS

AGENTIC_SCHEMA = "dynamo.agentic_mooncake"
VERSION = 2
MOST_TOKENS = 1 << 30
MOST_BLOCK = 1 << 20
MOST_MADE_UP = 1 << 20
"""Blocks of a prompt without ids."""
FIRST_OWN_ID = 1 << 63
"""Ids of ours lie above all that a file with ids in common can have counted to."""
LATEST_MS = float(1 << 50)


class _Source(msgspec.Struct):
    format: str = ""


class _Header(msgspec.Struct):
    schema: str
    version: int
    block_size: int
    hash_id_scope: Literal["local", "global"] = "local"
    source: _Source = msgspec.field(default_factory=_Source)

    @property
    def shares_ids(self) -> bool:
        """Whether an id is the same over all plays. The format has no word for it but ``local``, and our own exports
        number prefixes over the whole file."""
        return self.hash_id_scope == "global" or self.source.format == OURS


class _Wait(msgspec.Struct):
    request_id: str
    trigger: Trigger = "completion"
    delay_ms: float = 0.0
    relation: Relation = "sequence"


class _Line(msgspec.Struct):
    request_id: str
    play_id: str
    session_id: str
    model: str | None = None
    input_length: int | None = None
    output_length: int | None = None
    hash_ids: list[int] | None = None
    output_token_ids: list[int] | None = None
    not_before_ms: float = 0.0
    dependencies: list[_Wait] = []


_header = msgspec.json.Decoder(_Header)
_line = msgspec.json.Decoder(_Line)


def read_agentic(paths: Sequence[Path]) -> Plays:
    """All files together. Raises `TraceFileError` with the first problems of all."""
    reader = _Reader()
    for path in find_files(paths):
        header: _Header | None = None
        for line in read_lines(path, reader.damage):
            if header is None:
                header = reader.header(Place(str(path), line.number), line)
                if header is None:
                    break
            else:
                reader.line(Place(str(path), line.number), line, header)
    return reader.plays()


class _Reader:
    def __init__(self) -> None:
        self._problems = Problems()
        self._damaged: list[Problem] = []
        self._lines: dict[str, tuple[_Line, Place]] = {}
        self._hashes: dict[str, tuple[int, ...]] = {}
        self._ids: dict[tuple[str, int], int] = {}
        self._own_ids = 0
        self._block_size: int | None = None

    def damage(self, place: Place, text: str) -> None:
        self._damaged.append(Problem(place, "file", text))

    def header(self, place: Place, line: Line) -> _Header | None:
        """``None`` where it is none: then nothing of the file can be understood."""
        try:
            header = _header.decode(line.data)
        except UNDECODABLE as error:
            self._problems.add(place, "fields", f"the first line is no header of {AGENTIC_SCHEMA} ({error})")
            return None
        if header.schema != AGENTIC_SCHEMA or header.version != VERSION:
            text = f"{header.schema[:64]} version {header.version}: only {AGENTIC_SCHEMA} version {VERSION} is read"
            self._problems.add(place, "fields", text)
            return None
        if not 0 < header.block_size <= MOST_BLOCK:
            self._problems.add(place, "block_size", f"block_size is {header.block_size}")
            return None
        if self._block_size not in (None, header.block_size):
            text = f"blocks of {header.block_size} tokens here, of {self._block_size} in an earlier file"
            self._problems.add(place, "mixed_block_sizes", text)
            return None
        self._block_size = header.block_size
        return header

    def line(self, place: Place, line: Line, header: _Header) -> None:
        try:
            said = _line.decode(line.data)
        except UNDECODABLE as error:
            if line.ended:
                self._problems.add(place, "fields", f"the line is no request ({error})")
            else:
                self.damage(place, "the last line is cut")
            return
        known = self._lines.setdefault(said.request_id, (said, place))
        if known[0] is not said:
            text = f"request_id {said.request_id} was in {known[1]} already"
            self._problems.add(place, "duplicate_request_id", text)
        elif self._is_sound(place, said, header):
            self._hashes[said.request_id] = self._prefixes(said, header)

    def _is_sound(self, place: Place, said: _Line, header: _Header) -> bool:
        """Sets the lengths that the line leaves out."""
        if said.output_length is None and said.output_token_ids is not None:
            said.output_length = len(said.output_token_ids)
        if said.input_length is None:
            said.input_length = len(said.hash_ids or ()) * header.block_size
        if said.output_length is None or not 0 <= said.output_length <= MOST_TOKENS:
            self._problems.add(place, "fields", "output_length must be a number of tokens")
        elif not 0 < said.input_length <= MOST_TOKENS:
            self._problems.add(place, "fields", "input_length must be a number of tokens, at least 1")
        elif said.hash_ids is None and said.input_length > MOST_MADE_UP * header.block_size:
            text = f"a prompt without hash_ids has more than {MOST_MADE_UP} blocks of {header.block_size} tokens"
            self._problems.add(place, "hash_count", text)
        elif said.hash_ids is not None and len(said.hash_ids) != -(-said.input_length // header.block_size):
            text = f"{len(said.hash_ids)} hash_ids for {said.input_length} tokens in blocks of {header.block_size}"
            self._problems.add(place, "hash_count", text)
        elif said.hash_ids and not 0 <= min(said.hash_ids) <= max(said.hash_ids) < 1 << 64:
            self._problems.add(place, "hash_range", "a hash id has more than 64 bits")
        elif not all(_is_time(each) for each in (said.not_before_ms, *(wait.delay_ms for wait in said.dependencies))):
            self._problems.add(place, "times", "not_before_ms and delay_ms must be times in ms")
        else:
            return True
        return False

    def _prefixes(self, said: _Line, header: _Header) -> tuple[int, ...]:
        """Ids that are the same over all plays. A prompt without ids begins as no other does."""
        if said.hash_ids is None:
            count = -(-(said.input_length or 0) // header.block_size)
            return tuple(self._own_id() for _ in range(count))
        if header.shares_ids:
            return tuple(said.hash_ids)
        known = self._ids
        for each in said.hash_ids:
            if (said.play_id, each) not in known:
                known[said.play_id, each] = self._own_id()
        return tuple(known[said.play_id, each] for each in said.hash_ids)

    def _own_id(self) -> int:
        self._own_ids += 1
        return FIRST_OWN_ID + self._own_ids - 1

    def plays(self) -> Plays:
        """Raises `TraceFileError`."""
        for said, place in self._lines.values():
            for wait in said.dependencies:
                other = self._lines.get(wait.request_id)
                if other is None:
                    text = f"{said.request_id} waits for {wait.request_id}, of which there is no line"
                    self._problems.add(place, "unknown_request", text)
                elif other[0].play_id != said.play_id:
                    text = f"{said.request_id} waits for {wait.request_id}, which is of another play"
                    self._problems.add(place, "unknown_request", text)
        self._problems.raise_any()
        waits = {name: {wait.request_id for wait in said.dependencies} for name, (said, _) in self._lines.items()}
        if left := in_cycles(waits):
            text = f"request {left[0]} waits for itself, over {len(left)} requests"
            self._problems.add(self._lines[left[0]][1], "cycle", text)
        if not self._lines:
            self._problems.add(Place("the trace", 0), "nothing_to_write", "no request can be played again")
        self._problems.raise_any()
        begins = self._begins()
        sessions = self._sessions()
        ranks = {name: rank for rank, name in enumerate(begins)}
        nodes = [self._node(said, sessions) for said, _ in self._lines.values()]
        nodes.sort(key=lambda node: (begins[node.request_id], ranks[node.request_id]))
        known = contents([_turn(node, begins[node.request_id]) for node in nodes], self._block_size or 1)
        return Plays(
            nodes=tuple(
                replace(node, content_hashes=known[node.request_id][0], content_tokens=known[node.request_id][1])
                for node in nodes
            ),
            block_size=self._block_size or 0,
            format="agentic-mooncake",
            damaged=tuple(self._damaged),
        )

    def _begins(self) -> dict[str, float]:
        """When each request would go if all took no time: an order in which nobody comes before whom it waits for."""
        begins: dict[str, float] = {}
        for name in self._lines:
            path = [name]
            while path:
                said = self._lines[path[-1]][0]
                missing = [wait.request_id for wait in said.dependencies if wait.request_id not in begins]
                if missing:
                    path.extend(missing)
                    continue
                after = (begins[wait.request_id] + wait.delay_ms for wait in said.dependencies)
                begins[path.pop()] = max((said.not_before_ms, *after))
        return begins

    def _sessions(self) -> dict[tuple[str, str], str]:
        """Names that are unique over all plays, by play and name."""
        plays: dict[str, set[str]] = {}
        for said, _ in self._lines.values():
            plays.setdefault(said.session_id, set()).add(said.play_id)
        return {
            (play, session): session if len(of) == 1 else f"{play}/{session}"
            for session, of in plays.items()
            for play in of
        }

    def _node(self, said: _Line, sessions: Mapping[tuple[str, str], str]) -> PlayNode:
        spawned = [self._lines[wait.request_id][0] for wait in said.dependencies if wait.relation == "spawn"]
        parents = [sessions[said.play_id, other.session_id] for other in spawned if other.session_id != said.session_id]
        hashes = self._hashes[said.request_id]
        return PlayNode(
            request_id=said.request_id,
            session=sessions[said.play_id, said.session_id],
            parent=parents[0] if parents else None,
            play=said.play_id,
            model=said.model,
            input_tokens=said.input_length or 0,
            output_tokens=max(1, said.output_length or 0),
            sequence_hashes=hashes,
            content_hashes=hashes,
            content_tokens=said.input_length or 0,
            not_before_ms=said.not_before_ms,
            dependencies=tuple(
                Dependency(wait.request_id, wait.trigger, wait.relation, wait.delay_ms) for wait in said.dependencies
            ),
        )


def _turn(node: PlayNode, begin_ms: float) -> Turn:
    return Turn(
        request_id=node.request_id,
        session=node.session,
        start_ms=begin_ms,
        end_ms=begin_ms,
        hashes=node.sequence_hashes,
        input_tokens=node.input_tokens,
        output_tokens=node.output_tokens,
    )


def _is_time(value: float) -> bool:
    return math.isfinite(value) and 0 <= value < LATEST_MS
