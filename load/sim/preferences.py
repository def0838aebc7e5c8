"""What caches prefer to keep: a priority for each chain that somebody asked for, 0 for all others.

A chain that is to stay longer is of no use without what it forks off: that stays as long as any of those that need it.
One that is to go earlier takes nothing else with it.
"""

from __future__ import annotations

from collections import Counter

from load.sim.content import Chain


class Preferences:
    """Wishes by chain, and the priorities of chains' own parts that follow from them."""

    def __init__(self) -> None:
        self._wishes: dict[Chain, int] = {}
        self._needed: dict[Chain, Counter[int]] = {}
        """Of what others fork off: how many of them wish for each priority."""

    def __bool__(self) -> bool:
        return bool(self._wishes)

    def of(self, chain: Chain) -> int:
        """The priority of the chain's own part."""
        own = self._wishes.get(chain)
        needed = self._needed.get(chain)
        if needed is None:
            return own or 0
        return max(own or 0, *needed)

    def wish(self, chain: Chain, priority: int) -> None:
        """From now on, in place of what was wished for the chain before; 0 takes it back."""
        before = self._wishes.pop(chain, 0)
        if priority:
            self._wishes[chain] = priority
        for own, _, _ in chain.path[:-1]:
            counts = self._needed.setdefault(own, Counter())
            if before > 0:
                counts[before] -= 1
                if not counts[before]:
                    del counts[before]
            if priority > 0:
                counts[priority] += 1
            if not counts:
                del self._needed[own]
