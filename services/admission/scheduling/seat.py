"""One seat's account: what is charged, leased and committed there, kept up with every change."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.admission.cost import Load
from services.admission.scheduling.interface import WorkerFacts
from services.admission.scheduling.ordered import OrderedKeys, OrderedSums
from services.admission.scheduling.programs import Program
from services.admission.scheduling.steering import Steering


@dataclass(eq=False, slots=True)
class Seat:
    """Tokens throughout. ``load``: L, the charges of turns that run and of leases. ``revocable``: of leases below the
    floor. ``committed``: predicted final contexts by D. ``warm``: programs with their KV here that wait. ``written``:
    tokens that entered its cache so far. ``changed``: when it last may have gained room, on the policy's own count.
    """

    number: int
    facts: WorkerFacts
    steering: Steering
    load: int = 0
    revocable: int = 0
    running: int = 0
    forced: int = 0
    prefill: int = 0
    running_tokens: int = 0
    written: int = 0
    changed: int = 0
    committed: OrderedSums = field(default_factory=OrderedSums)
    warm: OrderedKeys = field(default_factory=OrderedKeys)
    leases: dict[int, Program] = field(default_factory=dict)
    programs: dict[int, Program] = field(default_factory=dict)
    """Whose seat this is, or was last."""

    @property
    def capacity(self) -> int:
        return self.facts.kv_tokens

    @property
    def placement_load(self) -> Load:
        """As `services.admission.cost` counts it."""
        return Load(self.running, self.prefill, self.running_tokens // max(1, self.facts.block_size))

    def still_holds(self, program: Program, context: int) -> bool:
        """By stack distance: what was written since its last turn cannot have pushed ``context`` out.

        Source: spec scheduling §5.2 (shadow LRU). The distance is at most what was written since, and what others hold
        that may have been used since.
        """
        if program.seat != self.number or not context:
            return False
        return self.written - program.written_mark + self.load - program.lease_charge + context <= self.capacity
