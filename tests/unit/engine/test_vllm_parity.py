"""The core does with the same requests what a real vLLM 0.32.0 was seen to do (captured events, renumbered hashes)."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

from load.engine.block_hash import ExtraKeys
from load.engine.core import CoreConfig, EngineCore
from load.engine.kv_events import AllBlocksCleared, BlockStored, KvEvent
from load.engine.requests import EngineRequest
from load.engine.timing import INSTANT

FIXTURE = Path(__file__).parents[2] / "fixtures" / "engine" / "vllm_0_32_cache_events.json"


class Renumbered:
    """Events with their hashes numbered in order of first appearance, as the fixture has them."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def number(self, digest: bytes) -> int:
        return self._numbers.setdefault(digest, len(self._numbers))

    def batch(self, events: list[KvEvent]) -> list[Any]:
        return [self.event(event) for event in events]

    def event(self, event: KvEvent) -> Any:
        if isinstance(event, AllBlocksCleared):
            return "cleared"
        if not isinstance(event, BlockStored):
            return {"removed": [self.number(event.digest)]}
        shown: dict[str, Any] = {
            "stored": [self.number(digest) for digest in event.digests],
            "parent": None if event.parent is None else self.number(event.parent),
        }
        keys = [event.extra.published(event.first_index + offset) for offset in range(len(event.digests))]
        if any(keys):
            shown["extra_keys"] = keys
        if event.session_id is not None:
            shown["session_id"] = event.session_id
        return shown


def prompt_of(spec: Any) -> array[int]:
    if isinstance(spec, list):
        return array("I", spec)
    seed, count = spec["seed"], spec["count"]
    return array("I", [10 + (seed * 7919 + i * 31 + (i * i) % 13) % 900 for i in range(count)])


def run(core: EngineCore, names: Renumbered, requests: list[dict[str, Any]], label: str) -> list[Any]:
    """Serve ``requests`` together; returns the non-empty event batches. Checks the cached tokens seen."""
    served = []
    for index, spec in enumerate(requests):
        extra = ExtraKeys(cache_salt=spec.get("salt"))
        output = array("I", spec["output"])
        request = EngineRequest(
            f"{label}-{index}", prompt_of(spec["tokens"]), output, extra=extra, session_id=spec.get("session")
        )
        core.add_request(request)
        served.append((spec, request))
    batches = []
    while core.unfinished:
        result = core.step()
        assert result is not None
        if result.events:
            batches.append(names.batch(result.events))
    for spec, request in served:
        if spec.get("cached") is not None:
            assert spec["cached"] == request.cached_tokens, label
    return batches


def test_same_events_as_a_captured_vllm() -> None:
    """Stores, parents, duplicates, salts, sessions, eviction order and cached tokens equal the captured ones."""
    recorded = json.loads(FIXTURE.read_text())
    core = EngineCore(CoreConfig(num_blocks=recorded["num_blocks"], block_size=recorded["block_size"]), INSTANT)
    names = Renumbered()
    for step in recorded["steps"]:
        label = step["scenario"]
        if "requests" in step:
            batches = run(core, names, step["requests"], label)
        else:
            batches = [
                batch
                for index, request in enumerate(step["requests_in_turn"])
                for batch in run(core, names, [request], f"{label}-{index}")
            ]
        assert step["batches"] == batches, label
