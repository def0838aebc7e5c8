"""Where the memory's time goes: token-seconds of KV by what they were for, as far as turns tell.

What is known: tokens of turns that run, and tokens that stayed between two turns and were found again. What is left is
free memory, KV that was kept and lost, and residue of finished programs; which of these, turns do not tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from load.sim.results import Result, TurnRow


def token_seconds(result: Result, capacity: int) -> dict[str, float]:
    """Shares of ``capacity`` tokens times the makespan: ``running``, ``kept`` (and found again), ``rest``.

    A turn counts its prompt and half of its output from its first iteration to its end, whatever it shared with others
    and while it was pre-empted, so that ``running`` can be too large; it is at most what ``kept`` leaves.
    """
    end = max((row.finished_s for row in result.turns), default=0.0)
    total = capacity * end
    if not total:
        return {f"token_seconds.{name}": 0.0 for name in ("running", "kept", "rest")}
    running = math.fsum(
        (row.prompt_tokens + row.output_tokens / 2) * (row.finished_s - row.scheduled_s) for row in result.turns
    )
    kept = min(1.0, math.fsum(_kept(result.turns)) / total)
    running = min(running / total, 1.0 - kept)
    named = {"running": running, "kept": kept, "rest": 1.0 - running - kept}
    return {f"token_seconds.{name}": value for name, value in named.items()}


def _kept(turns: Iterable[TurnRow]) -> Iterable[float]:
    """Token-seconds between turns of a program: of what the later one found."""
    ended: dict[str, float] = {}
    for row in sorted(turns, key=lambda each: (each.scheduled_s, each.index)):
        if row.program in ended:
            yield row.cached_tokens * max(0.0, row.scheduled_s - ended[row.program])
        ended[row.program] = row.finished_s
