"""Which policies answer on the bus, and which of them admission asks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from bus import subjects
from bus.interface import Bus
from schemas.base import UNDECODABLE
from schemas.decision import PolicyAsk
from schemas.policy import POLICY_ASKS
from tidegate.services import find_services, listens, metadata_of, subjects_of


@dataclass(slots=True)
class Listed:
    """One policy. ``answers``: what somebody answers for it, with how many instances; ``asked``: what admission asks
    it (empty: nothing), with a deadline of ``deadline_ms``."""

    name: str
    answers: dict[PolicyAsk, int] = field(default_factory=dict)
    asked: tuple[PolicyAsk, ...] = ()
    deadline_ms: int | None = None

    @property
    def missing(self) -> tuple[PolicyAsk, ...]:
        """What admission asks and nobody answers."""
        return tuple(ask for ask in self.asked if ask not in self.answers)


async def list_policies(bus: Bus) -> list[Listed]:
    """By name. Policies that are no micro services are seen only where admission asks them."""
    services = await find_services(bus, "INFO")
    found: dict[str, Listed] = {}
    for service in services:
        for subject in subjects_of(service):
            known = _policy_of(subject)
            if known is not None:
                ask, name = known
                listed = found.setdefault(name, Listed(name))
                listed.answers[ask] = listed.answers.get(ask, 0) + 1
    for name, asked in asked_by_admission(services).items():
        listed = found.setdefault(name, Listed(name))
        listed.asked, listed.deadline_ms = asked.asks, asked.deadline_ms
        for ask in listed.missing:
            if await listens(bus, subjects.policy(ask, name)):
                listed.answers[ask] = 1
    return [found[name] for name in sorted(found)]


class AskedOf(msgspec.Struct, frozen=True):
    """What admission's settings say of one policy, as far as it matters here."""

    name: str
    asks: tuple[str, ...] = ()
    deadline_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What all admission processes together ask of one policy; ``deadline_ms``: the shortest."""

    asks: tuple[PolicyAsk, ...]
    deadline_ms: int | None


def asked_by_admission(services: Iterable[Mapping[str, Any]]) -> dict[str, Asked]:
    """By the policy's name; what cannot be read is nothing."""
    found: dict[str, list[AskedOf]] = {}
    for service in services:
        for one in _written(metadata_of(service).get("policies")):
            found.setdefault(one.name, []).append(one)
    return {
        name: Asked(
            tuple(ask for ask in POLICY_ASKS if any(ask in one.asks for one in entries)),
            min((one.deadline_ms for one in entries if one.deadline_ms is not None), default=None),
        )
        for name, entries in found.items()
    }


def _written(text: Any) -> list[AskedOf]:
    """As admission's metadata has it."""
    if not isinstance(text, str):
        return []
    try:
        return msgspec.json.decode(text, type=list[AskedOf])
    except UNDECODABLE:
        return []


def _policy_of(subject: str) -> tuple[PolicyAsk, str] | None:
    """What a policy's subject asks, and of whom; ``None`` for any other subject. A name that is only a hash on the bus
    is shown as it is there."""
    tokens = subject.split(".")
    prefix = [*subjects.ROOT.split("."), "policy"]
    if tokens[: len(prefix)] != prefix or len(tokens) != len(prefix) + 2:
        return None
    ask = next((each for each in POLICY_ASKS if each == tokens[-2]), None)
    if ask is None:
        return None
    try:
        return ask, subjects.decode_id(tokens[-1]) or tokens[-1]
    except ValueError:
        return ask, tokens[-1]
