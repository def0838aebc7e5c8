"""One seat's account: what is charged, leased and committed there, kept up with every change."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import floor

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
    ``advised``: of leases that somebody asked to keep. ``kept``: programs with an idle lease whose return is counted on
    (neither revocable nor blocked). ``idle_since``: since when nothing runs. ``opened``: its number in the order in
    which seats were opened.
    """

    number: int
    facts: WorkerFacts
    steering: Steering
    opened: int = 0
    load: int = 0
    revocable: int = 0
    running: int = 0
    forced: int = 0
    prefill: int = 0
    running_tokens: int = 0
    written: int = 0
    changed: int = 0
    advised: int = 0
    kept: int = 0
    idle_since: float = 0.0
    committed: OrderedSums = field(default_factory=OrderedSums)
    warm: OrderedKeys = field(default_factory=lambda: OrderedKeys(is_of_seat=True))
    leases: dict[int, Program] = field(default_factory=dict)
    programs: dict[int, Program] = field(default_factory=dict)
    """Whose seat this is, or was last."""

    size: int = field(init=False)
    """All that the seat can ever hold."""
    capacity: int = field(init=False)
    """What load that is not ours leaves of it."""

    def __post_init__(self) -> None:
        self.resize(self.facts)

    def resize(self, facts: WorkerFacts) -> None:
        """Its engine has these sizes from now on."""
        self.facts, self.size = facts, facts.kv_tokens
        self.capacity = max(1, facts.kv_tokens - facts.foreign_tokens)

    @property
    def may_promise(self) -> int:
        """kappa of its capacity."""
        return floor(self.steering.value * self.capacity)

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
