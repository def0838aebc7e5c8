"""How many turns there are, by model and tenant: kept up with every change, so that a question costs no count."""

from __future__ import annotations

from collections import Counter
from collections.abc import KeysView
from dataclasses import dataclass, field

from schemas.session import MOVES_SESSION, RequestKind, SessionIdentity


@dataclass(slots=True)
class _Model:
    turns: int = 0
    main: int = 0
    tenants: Counter[str] = field(default_factory=Counter)


_NONE = _Model()


def is_main(identity: SessionIdentity, kind: RequestKind) -> bool:
    """Whether it is a turn of an agent that is nobody's sub-agent, and that somebody waits for."""
    return identity.parent_session_id is None and not identity.background and kind in MOVES_SESSION


class TurnCounts:
    """Turns by model and tenant. What is counted in is counted out with the same words."""

    def __init__(self) -> None:
        self._models: dict[str, _Model] = {}

    def turns(self, model: str) -> int:
        return self._models.get(model, _NONE).turns

    def main(self, model: str) -> int:
        """Those for which `is_main` holds."""
        return self._models.get(model, _NONE).main

    def of_tenant(self, model: str, tenant: str) -> int:
        return self._models.get(model, _NONE).tenants[tenant]

    def tenants(self, model: str) -> KeysView[str]:
        """Those with a turn of this model."""
        return self._models.get(model, _NONE).tenants.keys()

    def add(self, model: str, tenant: str, *, main: bool = False) -> None:
        known = self._models.setdefault(model, _Model())
        known.turns += 1
        known.main += main
        known.tenants[tenant] += 1

    def remove(self, model: str, tenant: str, *, main: bool = False) -> None:
        """Raises `KeyError` for what was not counted in."""
        known = self._models[model]
        if not known.tenants[tenant]:
            raise KeyError(tenant)
        known.turns -= 1
        known.main -= main
        known.tenants[tenant] -= 1
        if not known.tenants[tenant]:
            del known.tenants[tenant]
        if not known.turns:
            del self._models[model]
