"""Bounds: policies that know what no policy may know. Only the laboratory has them.

`StaticCap` lets so many programs in per seat; with the best number for a load it is the oracle cap (`oracle_cap`).
`Clairvoyant` knows every program's future: least remaining GPU work first, commitments by true final contexts, KV given
up by true return times. Without commitments (``belady``) it shows what perfect retention alone is worth: who is let in
is not planned, but of idle KV that goes first which is needed latest for its size (Belady's rule, a byte). All are
constructions, not optima: least remaining work starves the long. Source: spec policy §1 (oracle cap, clair-2, clair-1).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from load.sim.programs import Program, Turn, with_children
from load.sim.results import Result
from load.sim.run import SimConfig, simulate
from services.admission.estimators.reload_cost import H100_8B as RELOAD_H100_8B
from services.admission.estimators.reload_cost import ReloadCost
from services.admission.estimators.work import H100_8B as WORK_H100_8B
from services.admission.estimators.work import WorkCost
from services.admission.scheduling.interface import (
    Action,
    Actions,
    Admission,
    Base,
    Fleet,
    ProgramFacts,
    TurnFacts,
    TurnUsage,
    WorkerFacts,
)
from services.admission.scheduling.steering import PERIOD_S, Steering


class StaticCap(Base):
    """At most ``cap`` programs are inside a seat, from their first turn to their end, in the order of arrival. A
    sub-agent goes in with its parent. For fleets that do not change."""

    def __init__(self, cap: int) -> None:
        self._cap = cap

    def begin(self, fleet: Fleet) -> None:
        super().begin(fleet)
        self._inside = [0] * len(fleet.workers)
        self._place: dict[str, int] = {}
        self._guests: set[str] = set()
        self._waiting: list[TurnFacts] = []

    def program_arrives(self, now: float, program: ProgramFacts) -> None:
        if program.parent in self._place and program.parent is not None:
            self._place[program.name] = self._place[program.parent]
            self._guests.add(program.name)

    def turn_ready(self, now: float, turn: TurnFacts) -> Actions:
        if turn.program in self._place:
            return (Admission(turn.turn, self._place[turn.program]),)
        self._waiting.append(turn)
        return self._enter()

    def turn_finished(self, now: float, usage: TurnUsage) -> Actions:
        if not usage.final:
            return ()
        seat = self._place.pop(usage.program)
        if usage.program in self._guests:
            self._guests.remove(usage.program)
            return ()
        self._inside[seat] -= 1
        return self._enter()

    def _enter(self) -> list[Admission]:
        admitted = []
        while self._waiting:
            seat = min(range(len(self._inside)), key=lambda each: self._inside[each])
            if self._inside[seat] >= self._cap:
                break
            turn = self._waiting.pop(0)
            self._inside[seat] += 1
            self._place[turn.program] = seat
            admitted.append(Admission(turn.turn, seat))
        return admitted


def oracle_cap(programs: Sequence[Program], config: SimConfig, caps: Iterable[int]) -> tuple[int, Result]:
    """The cap of ``caps`` (at least one) with the least mean JCT for exactly these programs, and its result."""

    def mean_jct(result: Result) -> float:
        return sum(row.jct_s for row in result.roots) / max(1, len(result.roots))

    results = [(cap, simulate(programs, StaticCap(cap), config)) for cap in caps]
    return min(results, key=lambda pair: (mean_jct(pair[1]), pair[0]))


@dataclass(slots=True, eq=False)
class _Known:
    """A program, its future, and where it stands. ``work[i]``: GPU seconds from turn ``i`` on, sub-agents included;
    ``peak[i]``: its largest context from there on. ``seat``: where its KV is, or was."""

    plan: Program
    work: list[float]
    peak: list[int]
    number: int = 0
    turn: int = 0
    seat: int | None = None
    leased: bool = False
    warm: bool = False
    """Its running turn had a lease."""
    running: TurnFacts | None = None
    waiting: TurnFacts | None = None
    ready: float = 0.0
    returns: float = 0.0
    children: int = 0
    context: int = 0

    @property
    def rank(self) -> tuple[float, int]:
        """Least remaining work first."""
        return self.work[min(self.turn, len(self.work) - 1)], self.number

    @property
    def final(self) -> int:
        return self.peak[min(self.turn, len(self.peak) - 1)]

    @property
    def need(self) -> int:
        """Tokens that its next (or running) turn will hold."""
        turn = self.plan.turns[min(self.turn, len(self.plan.turns) - 1)]
        return turn.prompt_tokens + turn.output_tokens


@dataclass(slots=True, eq=False)
class _Seat:
    facts: WorkerFacts
    steering: Steering = field(default_factory=Steering)
    members: dict[int, _Known] = field(default_factory=dict)
    """Running, leased, and waiting in mid-session."""

    @property
    def load(self) -> int:
        """Tokens that turns that run and leases will hold."""
        return sum(known.need for known in self.members.values() if known.running is not None or known.leased)

    @property
    def is_idle(self) -> bool:
        return all(known.running is None for known in self.members.values())


class Clairvoyant(Base):
    """The default policy's rules with the truth in place of every estimate: order by remaining work alone, no hard cap.

    ``lo`` and ``hi``: bands; ``floor``: phi; ``bypass_s``: so long a blocked new program may be overtaken. ``commits``:
    newcomers are tested against true final contexts; without, they only have to fit (clair-1).
    """

    tick_s = PERIOD_S

    def __init__(
        self,
        programs: Sequence[Program],
        *,
        lo: float = 0.85,
        hi: float = 0.95,
        floor: float = 1.0,
        bypass_s: float = 10.0,
        commits: bool = True,
        work_cost: WorkCost = WORK_H100_8B,
        reload_cost: ReloadCost = RELOAD_H100_8B,
    ) -> None:
        self._lo, self._hi, self._floor, self._bypass_s = lo, hi, floor, bypass_s
        self._reload = reload_cost
        self._commits = commits
        self._known: dict[str, _Known] = {}
        for number, plan in enumerate(with_children(programs)):
            turns = list(_suffix(plan, work_cost))
            self._known[plan.name] = _Known(plan, [each[0] for each in turns], [each[1] for each in turns], number)

    def begin(self, fleet: Fleet) -> None:
        super().begin(fleet)
        self._seats = [_Seat(facts, Steering(host_tier=facts.host_tokens > 0)) for facts in fleet.workers]
        self._waiting: dict[str, _Known] = {}

    # What happens

    def turn_ready(self, now: float, turn: TurnFacts) -> Actions:
        known = self._known[turn.program]
        known.waiting, known.ready = turn, now
        self._waiting[turn.program] = known
        return list(self._let_in(now))

    def turn_finished(self, now: float, usage: TurnUsage) -> Actions:
        known = self._known[usage.program]
        seat = self._seats[usage.seat]
        turn = known.plan.turns[known.turn]
        known.running = None
        before = known.context
        known.context = usage.prompt_tokens + usage.output_tokens
        known.turn += 1
        seat.steering.turn_finished(
            usage.prompt_tokens, usage.cached_tokens, max(0, usage.prompt_tokens - before), warm=known.warm
        )
        known.leased = not usage.final
        known.returns = now + turn.gap_s
        known.children = len(turn.children)
        if usage.final:
            del seat.members[known.number]
            parent = self._known.get(known.plan.parent) if known.plan.parent is not None else None
            if parent is not None:
                parent.children -= 1
        if seat.load > self._hi * seat.facts.kv_tokens:
            self._revoke(now, seat, self._lo * seat.facts.kv_tokens, known, everything=True)
        return list(self._let_in(now))

    def tick(self, now: float) -> Actions:
        for seat in self._seats:
            seat.steering.step(now, any(known.turn == 0 for known in self._waiting.values()))
        return list(self._let_in(now))

    # Decisions

    def _let_in(self, now: float) -> Iterator[Action]:
        leased = sorted((known for known in self._waiting.values() if known.leased), key=lambda known: known.rank)
        for known in leased:
            assert known.seat is not None
            seat = self._seats[known.seat]
            limit = self._hi * seat.facts.kv_tokens
            if seat.load > limit and known is leased[0]:
                self._revoke(now, seat, limit, known, everything=True)
            if seat.load <= limit or seat.is_idle:
                yield self._admit(known, known.seat)
        revoked: set[int] = set()
        for known in sorted((each for each in self._waiting.values() if not each.leased), key=lambda each: each.rank):
            place = self._place(now, known, revoked)
            if place is not None:
                yield self._admit(known, place)
            elif known.turn == 0 and now - known.ready > self._bypass_s:
                break

    def _place(self, now: float, known: _Known, revoked: set[int]) -> int | None:
        """A seat that accepts the program and has room for it, the emptiest first; where it was, if that is as good."""
        numbers = sorted(
            range(len(self._seats)), key=lambda each: (each != known.seat and known.context > 0, self._seats[each].load)
        )
        for number in numbers:
            seat = self._seats[number]
            if seat.is_idle and not any(other.leased and other.waiting for other in seat.members.values()):
                return number
            if not self._accepts(now, known, seat):
                continue
            room = self._lo * seat.facts.kv_tokens - known.need
            if seat.load > room and number not in revoked:
                revoked.add(number)
                self._revoke(now, seat, room, known, everything=False)
            if seat.load <= room:
                return number
        return None

    def _accepts(self, now: float, known: _Known, seat: _Seat) -> bool:
        """COMMIT: final contexts of those that go before it, and its own, against kappa times the capacity."""
        if not self._commits:
            return True
        committed = known.final
        for other in seat.members.values():
            if other is known or other.rank > known.rank or self._counts_nothing(now, other, seat):
                continue
            committed += other.final
        return committed <= seat.steering.value * seat.facts.kv_tokens

    def _counts_nothing(self, now: float, known: _Known, seat: _Seat) -> bool:
        if known.running is not None or known.waiting is not None:
            return False
        return known.children > 0 or self._worth(now, known) < self._floor / seat.facts.kv_tokens

    def _worth(self, now: float, known: _Known) -> float:
        """I, per token: reload seconds saved per token-second held, with the true return."""
        if known.children:
            return 0.0
        left = max(1e-3, known.returns - now)
        return self._reload.seconds(known.context) / (max(1, known.context) * left)

    def _revoke(self, now: float, seat: _Seat, room: float, keep: _Known, *, everything: bool) -> None:
        """Idle leases, those first that return last for their size; all, or only those below the floor."""
        idle = [each for each in seat.members.values() if each.leased and each.waiting is None and each is not keep]
        if not everything:
            idle = [each for each in idle if self._worth(now, each) < self._floor / seat.facts.kv_tokens]
        for known in sorted(idle, key=lambda each: (self._worth(now, each), each.number)):
            if seat.load <= room:
                return
            known.leased = False
            del seat.members[known.number]

    def _admit(self, known: _Known, number: int) -> Admission:
        assert known.waiting is not None
        del self._waiting[known.plan.name]
        if known.seat is not None:
            self._seats[known.seat].members.pop(known.number, None)
        turn = known.running = known.waiting
        known.warm, known.waiting, known.leased, known.seat = known.leased, None, False, number
        self._seats[number].members[known.number] = known
        return Admission(turn.turn, number)


def _suffix(plan: Program, work_cost: WorkCost) -> Iterator[tuple[float, int]]:
    """(work, largest context) from each turn on."""
    contexts = [0, *(turn.prompt_tokens + turn.output_tokens for turn in plan.turns)]
    works = [_work(turn, context, work_cost) for turn, context in zip(plan.turns, contexts, strict=False)]
    for index in range(len(plan.turns)):
        yield sum(works[index:]), max(contexts[index + 1 :])


def _work(turn: Turn, context: int, work_cost: WorkCost) -> float:
    own = work_cost.seconds(turn.prompt_tokens, turn.output_tokens, context)
    return own + sum(next(_suffix(child, work_cost))[0] for child in turn.children)
