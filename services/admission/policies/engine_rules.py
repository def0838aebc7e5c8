"""How an engine is to be configured for a policy that acts inside it: order of its queue, and who yields memory.

A router only chooses priorities and pins; the rest is the engine's. The laboratory's engine obeys these rules. A stock
engine has the priorities alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Pressure = Literal["A", "B", "C"]
"""What gives way when blocks run out (spec scheduling §1.6):

A: a waiting request waits and pins stay; a running one pre-empts. B: any request takes the pins of others, of the
program that arrived last first, and pre-empts only then. C: a waiting request takes pins only when nothing runs; a
running one pre-empts, and takes pins only when it runs alone; of pins the one that would expire last goes first. Under
A too a pin goes where nothing could run otherwise, or the engine would stand still.
"""


@dataclass(frozen=True, slots=True)
class EngineRules:
    """``scheduling``: by arrival, or by priority (lower first; worst first to be pre-empted).

    ``pinned_first``: programs with a live pin before others; ``preempted_first``: pre-empted requests before them all.
    Both need priorities.
    """

    scheduling: Literal["fcfs", "priority"] = "fcfs"
    pinned_first: bool = False
    preempted_first: bool = False
    pressure: Pressure = "A"

    def __post_init__(self) -> None:
        if self.scheduling == "fcfs" and (self.pinned_first or self.preempted_first):
            raise ValueError("pinned or pre-empted requests come first only where the engine has priorities")


FCFS = EngineRules()
BY_PRIORITY = EngineRules(scheduling="priority")
