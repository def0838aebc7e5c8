"""The peer: the radix tree of NVIDIA Dynamo's published package (extra ``bench``), told and asked as its users do.

It takes one event at a time, as JSON with hashes given (spec: index-and-routing §2.1), and answers a list of local
hashes with an object whose ``scores`` are blocks per (worker, rank). Two things are to its advantage: a turn is told in
two events at most, one of removals and one of stores, where our twins get the engine's own events; and a block has the
same engine hash at every worker, where ours differ. It needs the latter: with hashes that differ (as vLLM's do without
a common seed) release 1.6.1 refuses stores, "failed to find parent block", once another worker has split a run.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from functools import cache
from typing import Any

from load.bench.fleet import Query, Turn


@cache
def package() -> Any | None:
    """The package, or ``None`` after one message on stderr. Its own log shows errors only: it warns of every block that
    it refuses."""
    os.environ.setdefault("DYN_LOG", "error")
    try:
        return importlib.import_module("dynamo.llm")
    except ImportError as error:
        print(
            f"the peer is not installed, its figures are null (pip install 'tidegate[bench]'): {error}", file=sys.stderr
        )
        return None


def told(turn: Turn, first_id: int) -> list[bytes]:
    """The turn as the peer's events; ids from ``first_id``."""
    data: list[dict[str, object]] = []
    removed = _evicted(turn)
    if removed:
        data.append({"removed": {"block_hashes": removed}})
    if turn.stored:
        blocks = [
            {"block_hash": own, "tokens_hash": local}
            for segment, start, stop in turn.stored
            for own, local in zip(segment.chain[start:stop], segment.local[start:stop], strict=True)
        ]
        parent = turn.stored[0][0].before(turn.stored[0][1])
        data.append({"stored": {"parent_hash": parent, "blocks": blocks}})
    return [
        json.dumps({"event_id": number, "dp_rank": 0, "data": each}, separators=(",", ":")).encode()
        for number, each in enumerate(data, first_id)
    ]


def _evicted(turn: Turn) -> list[int]:
    return [own for segment, start, stop in turn.evicted for own in reversed(segment.chain[start:stop])]


class PeerIndex:
    """One tree. Raises `RuntimeError` from its methods where the package refuses something."""

    def __init__(self, dynamo: Any) -> None:
        self.tree = dynamo.RadixTree()

    def apply(self, told_events: list[tuple[int, bytes]]) -> None:
        """Apply events of workers, and wait until the last one is applied."""
        apply_event = self.tree.apply_event
        for worker, event in told_events:
            apply_event(worker, event)
        self.tree.find_matches([], False)

    def punch(self, turns: list[Turn]) -> int:
        """Remove blocks one by one. The tree forgets what hangs on a removed block and refuses to remove that again:
        how often."""
        refused = 0
        for turn in turns:
            for engine in _evicted(turn):
                data = {"removed": {"block_hashes": [engine]}}
                event = json.dumps({"event_id": 0, "dp_rank": 0, "data": data}).encode()
                try:
                    self.tree.apply_event(turn.worker, event)
                except (RuntimeError, ValueError):
                    refused += 1
        return refused

    def mismatches(self, queries: list[Query], truths: list[dict[int, int]]) -> int:
        """Workers whose score differs from the truth, over all queries."""
        wrong = 0
        for query, truth in zip(queries, truths, strict=True):
            scores = {
                worker: blocks for (worker, _), blocks in self.tree.find_matches(query.local, False).scores.items()
            }
            wrong += sum(scores.get(worker, 0) != truth.get(worker, 0) for worker in scores.keys() | truth.keys())
        return wrong
