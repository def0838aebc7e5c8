"""The program table: where each program is in its life, what it holds, and what is known of it.

A program waits with any number of turns, and runs any number of them, all on one seat. Parallel turns share what they
have in common, which is the program's context.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from services.admission.estimators.class_key import ClassKey, class_key
from services.admission.estimators.tool_times import USER_TURN
from services.admission.scheduling.interface import ProgramFacts, TurnFacts
from services.admission.scheduling.ordered import Key, OrderedKeys
from services.admission.scheduling.outlook import Outlook

SUB_AGENTS = "sub_agents"
"""The tool of a gap in which sub-agents run, counted from the end of the last: their time is not that of the tool that
started them."""


class ProgramState(Enum):
    """``NEW``: nothing of it ran to its end. ``RUNNING``: a turn runs. ``LEASED``: nothing runs, its KV is kept.
    ``COLD``: nothing runs and nothing is kept. ``CLOSED``: over."""

    NEW = "new"
    RUNNING = "running"
    LEASED = "leased"
    COLD = "cold"
    CLOSED = "closed"


class ProgramEvent(Enum):
    """What moves a program. ``TURN_OVER``: others of its turns still run. ``ABORTED``: its only one, or its seat."""

    ADMITTED = "admitted"
    TURN_OVER = "turn_over"
    LEASED = "leased"
    ABORTED = "aborted"
    ABORTED_FIRST = "aborted_first"
    LEASE_LOST = "lease_lost"
    CLOSED = "closed"


_LIVE = (ProgramState.NEW, ProgramState.RUNNING, ProgramState.LEASED, ProgramState.COLD)

TRANSITIONS: dict[tuple[ProgramState, ProgramEvent], ProgramState] = {
    **{(state, ProgramEvent.ADMITTED): ProgramState.RUNNING for state in _LIVE},
    **{(state, ProgramEvent.CLOSED): ProgramState.CLOSED for state in _LIVE},
    (ProgramState.RUNNING, ProgramEvent.TURN_OVER): ProgramState.RUNNING,
    (ProgramState.RUNNING, ProgramEvent.LEASED): ProgramState.LEASED,
    (ProgramState.RUNNING, ProgramEvent.ABORTED): ProgramState.COLD,
    (ProgramState.RUNNING, ProgramEvent.ABORTED_FIRST): ProgramState.NEW,
    (ProgramState.LEASED, ProgramEvent.LEASE_LOST): ProgramState.COLD,
}
"""Every move there is; a pair that is not here is a bug of the caller (`KeyError`)."""


@dataclass(eq=False, slots=True)
class HeldTurn:
    """A turn that waits or runs. ``charge``: tokens that it takes of its seat while it runs. ``tested``: seats that
    changed no later than this have refused it."""

    facts: TurnFacts
    ready: float
    charge: int = 0
    prefill: int = 0
    forced: bool = False
    warm: bool = False
    tested: int = -1


@dataclass(eq=False, slots=True)
class Program:
    """One program. Contexts and charges in tokens, times in seconds.

    ``number``: by arrival, unique. ``seat``: where it runs, is kept, or was last. ``work``: attained, in GPU seconds.
    ``growth``: g, as it was known when its last turn ended.
    ``rank``: D. ``left_tokens``: mean residual of its context (``None``: no prediction). ``outlook`` and
    ``revision`` of what is learned: with which both were made. ``is_final``: over with the last of its
    turns. ``returned``: how long its tool took is known already. ``touched``: when a turn
    came or ended. ``order_bias``: seconds added to its arrival in the order. ``shared``: tokens of its context that
    others on its seat are charged for. ``keep_until``: until when somebody asked to keep its lease; ``advised``: it is
    kept for that. ``kept_at``: the seat that counts on its return. ``standing``: counts the times that its lease was
    priced, so that an older timer can be told.
    """

    number: int
    facts: ProgramFacts
    key: ClassKey
    arrival: float
    state: ProgramState = ProgramState.NEW
    seat: int | None = None
    context: int = 0
    work: float = 0.0
    growth: float = 0.0
    turns: int = 0
    waiting: dict[int, HeldTurn] = field(default_factory=dict)
    running: dict[int, HeldTurn] = field(default_factory=dict)
    children: set[str] = field(default_factory=set)
    tool: str | None = None
    idle_since: float | None = None
    returned: bool = False
    is_final: bool = False
    touched: float = 0.0
    rank: float = 0.0
    left_tokens: float | None = None
    revision: int = -1
    outlook: Outlook | None = None
    lease_charge: int = 0
    revocable: bool = False
    order_bias: float = 0.0
    shared: int = 0
    keep_until: float = 0.0
    advised: bool = False
    kept_at: int | None = None
    standing: int = 0
    written_mark: int = 0
    committed: tuple[int, Key, int] | None = None
    queued: tuple[OrderedKeys, Key] | None = None

    def move(self, event: ProgramEvent) -> None:
        self.state = TRANSITIONS[self.state, event]

    @property
    def waits_for(self) -> str:
        """The tool that it called; a person is one too."""
        return self.tool if self.tool is not None else USER_TURN

    @property
    def due(self) -> float:
        """Its arrival as the order counts it."""
        return self.arrival + self.order_bias

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    @property
    def first_waiting(self) -> HeldTurn:
        """Raises `StopIteration` where nothing waits."""
        return next(iter(self.waiting.values()))


class ProgramTable:
    """Programs by name and by number, bounded: the longest untouched idle one makes room."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._by_name: dict[str, Program] = {}
        self._by_number: dict[int, Program] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Program]:
        return iter(self._by_name.values())

    def get(self, name: str) -> Program | None:
        return self._by_name.get(name)

    def numbered(self, number: int) -> Program | None:
        return self._by_number.get(number)

    def last_touched(self, program: Program, now: float) -> float:
        """When a turn of the program, or of sub-agents that it waits for, came or ended last; ``now`` for those that
        wait or run. Sub-agents that never arrived, or that wait for it in their turn, do not count."""
        known = (self._by_name.get(name) for name in program.children)
        family = (program, *(child for child in known if child is not None))
        return max(each.touched if each.is_idle else now for each in family)

    def open(self, facts: ProgramFacts, now: float) -> Program:
        """A program that is not known yet. A sub-agent arrived when its root did."""
        parent = self._by_name.get(facts.parent) if facts.parent is not None else None
        arrival = facts.arrival if facts.arrival is not None else now
        if parent is not None:
            parent.children.add(facts.name)
            arrival = min(arrival, parent.arrival)
        key = class_key(agent_type=facts.label, is_sub_agent=facts.parent is not None, model=facts.model)
        program = Program(self._count, facts, key, min(arrival, now))
        self._count += 1
        program.touched = now
        self._by_name[facts.name] = program
        self._by_number[program.number] = program
        return program

    @property
    def is_full(self) -> bool:
        return len(self._by_name) >= self._limit

    def longest_untouched(self) -> Program | None:
        """The first to leave."""
        return next(iter(self._by_name.values()), None)

    def touch(self, program: Program, now: float) -> None:
        """It is the last to leave now."""
        program.touched = now
        self._by_name[program.facts.name] = self._by_name.pop(program.facts.name)

    def drop(self, program: Program) -> Program | None:
        """It is over. Returns its parent, where that is known."""
        program.move(ProgramEvent.CLOSED)
        del self._by_name[program.facts.name]
        del self._by_number[program.number]
        parent = self._by_name.get(program.facts.parent) if program.facts.parent is not None else None
        if parent is not None:
            parent.children.discard(program.facts.name)
        return parent
