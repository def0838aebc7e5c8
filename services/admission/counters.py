"""Everything admission counts: plain numbers, read by the metrics page."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Totals since the process started; each counts by its stable reason.

    ``grants``: by mode, and ``adopted`` ones. ``sticky``: turns that kept or left their session's previous worker.
    ``released``: grants by why they were released (``end``, ``lapsed``, ``ingress_lost``, ``cancelled``, ``attempt``,
    ``worker_lost``, ``vanished``; ``hedge``: of a second sending, when the race was over). ``index``: questions by what
    became of them; ``policies``: those to users' policies,
    by (policy, ask, what became of it). ``held``: by reason.
    ``resends``: turns that were sent again because the last one did not come through.
    ``hedges``: second sendings of slow requests that were asked for: ``granted``, or why not.
    ``lost``: requests whose ingress was lost. ``vanished``: requests that no fact names any more.
    """

    asks: int = 0
    asks_again: int = 0
    resends: int = 0
    cancels: Counter[str] = field(default_factory=Counter)
    grants: Counter[str] = field(default_factory=Counter)
    sticky: Counter[str] = field(default_factory=Counter)
    released: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    held: Counter[str] = field(default_factory=Counter)
    hedges: Counter[str] = field(default_factory=Counter)
    index: Counter[str] = field(default_factory=Counter)
    policies: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    lost: Counter[str] = field(default_factory=Counter)
    workers_lost: Counter[str] = field(default_factory=Counter)
    sessions: Counter[str] = field(default_factory=Counter)
    vanished: int = 0
    predicted_cached_tokens: int = 0
    predicted_shared_tokens: int = 0
    input_tokens: int = 0
