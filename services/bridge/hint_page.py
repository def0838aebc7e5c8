"""What an engine says of the hints that it takes: ``GET /kv_hints`` (as the simulated engine; no release of vLLM or
SGLang has the page, spec engine-events §3, §5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from schemas.base import UNDECODABLE

MAX_ACTIONS = 64
MAX_VERSIONS = 16
MAX_NAME_CHARACTERS = 64
TIERS = ("host", "disk", "pool")


@dataclass(frozen=True, slots=True)
class HintPage:
    """``protocols``: versions of the envelope; ``actions``: the versions of each type; ``tiers``: below the device."""

    protocols: frozenset[str]
    actions: tuple[tuple[str, frozenset[str]], ...]
    tiers: tuple[str, ...] = ()

    def takes(self, action_type: str, version: str) -> bool:
        return any(name == action_type and version in versions for name, versions in self.actions)


def parse_hint_page(body: bytes) -> HintPage | None:
    """Read the page, as far as it can be read; ``None``: it is no such page. What goes over the bounds is left out."""
    try:
        told = msgspec.json.decode(body)
    except UNDECODABLE:
        return None
    if not isinstance(told, dict) or not isinstance(told.get("actions"), dict):
        return None
    actions = tuple(
        (name, _names(versions))
        for name, versions in list(told["actions"].items())[:MAX_ACTIONS]
        if len(name) <= MAX_NAME_CHARACTERS
    )
    tiers = _names(told.get("tiers"))
    return HintPage(_names(told.get("protocol_versions")), actions, tuple(name for name in TIERS if name in tiers))


def _names(value: Any) -> frozenset[str]:
    given = value[:MAX_VERSIONS] if isinstance(value, list) else []
    return frozenset(name for name in given if isinstance(name, str) and len(name) <= MAX_NAME_CHARACTERS)
