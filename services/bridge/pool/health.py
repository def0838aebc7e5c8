"""How far a pool's picture can be trusted, in one word and a reason (`schemas.pool.PoolState`)."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.index import SourceHealth
from services.bridge.pool.master import MasterView
from services.bridge.pool.triggers import Reason


@dataclass(frozen=True, slots=True)
class Standing:
    """What health is judged by. ``reconciled``: the key list was agreed with since the last reset; ``list_problem``:
    why nothing came of the last one; ``tenants``: objects are or may be there that no list names; ``full``: there are
    more pages than the bridge's index may hold."""

    stopped: str | None
    master: MasterView
    reconciled: bool
    doubt: Reason | None
    list_problem: str | None
    tenants: bool
    full: bool


def judge(standing: Standing) -> tuple[SourceHealth, str | None]:
    """``blind``: the master does not answer. ``catching_up``: its keys are not known yet. ``approximate``: they are,
    but something was missed, or will be. ``synced``: the stream is whole and agrees with the list."""
    master = standing.master
    if standing.stopped is not None:
        return "blind", standing.stopped
    if not master.reachable:
        return ("blind", master.problem) if master.looked_for else ("catching_up", "not_seen_yet")
    if not standing.reconciled:
        return "catching_up", standing.list_problem or "reconciling"
    if master.enabled is False:
        return "approximate", "events_disabled"
    if master.silent:
        return "approximate", "not_answering"
    if not master.connected:
        return "approximate", "disconnected"
    if standing.tenants:
        return "approximate", "tenants_not_listed"
    if standing.list_problem is not None:
        return "approximate", standing.list_problem
    if standing.full:
        return "approximate", "index_full"
    if standing.doubt is not None:
        return "approximate", standing.doubt
    return "synced", None
