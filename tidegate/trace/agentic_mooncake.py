"""Traces as the peer's agentic Mooncake, version 2. Source: spec identity-and-traces §3.1 (agentic_mooncake v2), §3.2.

A header, then one row for each request, with what it waits for. A play is one run of an agent with its sub-agents.
Ids of blocks and names of sessions hold within a play. A request that names no session is a play of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

from tidegate.trace.agentic_reading import AGENTIC_SCHEMA, VERSION
from tidegate.trace.dependencies import Dependency, Node, dependency_graph
from tidegate.trace.play_nodes import Plays
from tidegate.trace.replayable import HashIds, Playable, prompt
from tidegate.trace.rows import OURS

UNKNOWN_MODEL = "unknown"
"""As the peer calls it where its rows name none."""


def agentic_mooncake_lines(source: Playable, *, model: str = UNKNOWN_MODEL) -> Iterator[dict[str, Any]]:
    """The header, then rows in the order of their beginning. ``model``: of rows that name none.

    ``not_before_ms`` is a play's beginning after the first of all; of a request that waits for others it is 0: they
    alone say when it goes, so that a faster system is a faster replay. Raises `TraceFileError`.
    """
    nodes = dependency_graph(source.trace)
    zero_ms = min(node.request.start_ms for node in nodes)
    ids = HashIds()
    rows = [_row(node, ids, zero_ms, model) for node in nodes]
    yield {
        "schema": AGENTIC_SCHEMA,
        "version": VERSION,
        "block_size": source.block_size,
        "hash_id_scope": "local",
        "source": {"format": OURS, "digest": _digest(nodes)},
    }
    yield from rows


def _row(node: Node, ids: HashIds, zero_ms: float, model: str) -> dict[str, Any]:
    request = node.request
    return {
        "request_id": request.request_id,
        "play_id": node.play,
        "session_id": node.session,
        "model": request.metrics.model or model,
        "input_length": prompt(request).input_length,
        "output_length": max(1, request.metrics.output_tokens or 0),
        "hash_ids": ids.of(request),
        "not_before_ms": 0.0 if node.dependencies else round(request.start_ms - zero_ms, 3),
        "dependencies": [_dependency(each) for each in node.dependencies],
    }


def _dependency(dependency: Dependency) -> dict[str, Any]:
    return {
        "request_id": dependency.request_id,
        "trigger": dependency.trigger,
        "delay_ms": dependency.delay_ms,
        "relation": dependency.relation,
    }


def _digest(nodes: list[Node]) -> str:
    """Of what was recorded: the same for the same requests, whatever files they came in."""
    digest = hashlib.sha256()
    for node in nodes:
        request = node.request
        hashes = prompt(request).input_sequence_hashes
        digest.update(repr((request.request_id, node.session, request.start_ms, request.end_ms, hashes)).encode())
    return f"sha256:{digest.hexdigest()}"


def laboratory_lines(plays: Plays) -> Iterator[dict[str, Any]]:
    """For `load.sim.recorded`: the same form with ids and sessions that hold over the whole file, and with what the
    laboratory can use beside it (that module says what each field means)."""
    yield {
        "schema": AGENTIC_SCHEMA,
        "version": VERSION,
        "block_size": plays.block_size,
        "hash_id_scope": "global",
        "source": {"format": plays.format, "digest": ""},
    }
    ids: dict[tuple[str | None, int], int] = {}
    for node in plays.nodes:
        yield {
            "request_id": node.request_id,
            "play_id": node.play,
            "session_id": node.session,
            "parent_session_id": node.parent,
            "label": "request" if node.is_single else node.kind if node.is_aside else None,
            "tool": node.tool,
            "input_length": node.input_tokens,
            "output_length": node.output_tokens,
            "hash_ids": _numbered(node.sequence_hashes, node.model, ids),
            "content_hash_ids": _numbered(node.content_hashes, node.model, ids),
            "content_tokens": node.content_tokens,
            "not_before_ms": node.not_before_ms,
            "dependencies": [_dependency(each) for each in node.dependencies],
        }


def _numbered(hashes: Sequence[int], model: str | None, ids: dict[tuple[str | None, int], int]) -> list[int]:
    """Models share no blocks, even where they have one tokenizer."""
    return [ids.setdefault((model, each), len(ids)) for each in hashes]
