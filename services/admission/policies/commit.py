"""Policy ``commit``, the default: lease, hold, commit.

A program is charged the context that it is predicted to end with from its first admission on, so that those that were
let in can run to their end with their KV kept. Who is let in first goes by arrival and predicted remaining work. KV of
idle programs is leased, and given up where it is needed and least worth.

Several seats, which the study left open: commitments are per seat; a program without a lease may go anywhere, and goes
where it costs least of those seats that accept it; one that waits without a lease counts where it was last. A turn
without a session is forwarded at once, and its load counts.

Source: spec policy §4; scheduling §5.2 for what it does not change (bands, order, progress, hard cap).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

import msgspec

from services.admission.cost import CostWeights
from services.admission.estimators.learned_pool import LearnedPool
from services.admission.scheduling.book import Book
from services.admission.scheduling.booked import TRIED, Booked
from services.admission.scheduling.interface import Actions, TurnFacts
from services.admission.scheduling.programs import HeldTurn, Program, ProgramState
from services.admission.scheduling.refusals import Candidate, Offer, Offers
from services.admission.scheduling.seat import Seat
from services.admission.scheduling.steering import STEERING, SteeringParameters
from services.admission.scoring import EQUAL, Choose, first, placement_costs


class CommitParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``span_s``: S; 0 is the conservative profile, first come, first served. ``lo``, ``hi``: bands, shares of the
    capacity. ``floor``: phi. ``bypass_s``: so long a blocked new program may be overtaken. ``hold_limit_s``: H.
    ``output_tokens``: what a turn is charged for its answer (``None``: as learned, nine of ten are no longer).
    ``steering``: of kappa. ``progress_s``: so long a seat whose leases are to return soon may do nothing while somebody
    waits. ``sunk``: see `Book`. ``shared_credit``: what the index finds of a new program's
    prompt is taken for others', and charged once; only where ended programs leave nothing that comes again.
    ``rewritten_below``: a prompt that is smaller than this share of the program's context says that its harness made it
    anew. ``keep_s``: for so long a lease is kept at most because somebody asked.

    Raises `ValueError`.
    """

    span_s: float = 60.0
    lo: float = 0.85
    hi: float = 0.95
    floor: float = 1.0
    bypass_s: float = 10.0
    hold_limit_s: float = 300.0
    idle_expiry_s: float = 600.0
    output_tokens: int | None = None
    max_programs: int = 100_000
    weights: CostWeights = CostWeights()
    steering: SteeringParameters = STEERING
    progress_s: float = 1.0
    sunk: float = 2.0
    shared_credit: bool = False
    rewritten_below: float = 0.5
    keep_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 < self.lo <= self.hi <= 1:
            raise ValueError("commit: 0 < lo <= hi <= 1")
        for name in ("span_s", "floor", "bypass_s", "hold_limit_s", "idle_expiry_s", "progress_s", "sunk", "keep_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"commit: {name} must not be negative")
        if not 0 <= self.rewritten_below <= 1:
            raise ValueError("commit: 0 <= rewritten_below <= 1")


class Commit(Booked):
    """Feeds ``learned``, and decides by it. ``choose`` draws below n, among equal seats."""

    def __init__(self, parameters: CommitParameters, learned: LearnedPool, choose: Choose = first) -> None:
        book = Book(
            learned,
            span=parameters.span_s,
            floor=parameters.floor,
            max_programs=parameters.max_programs,
            sunk=parameters.sunk,
            steering=parameters.steering,
        )
        super().__init__(
            book,
            learned,
            hold_limit_s=parameters.hold_limit_s,
            idle_expiry_s=parameters.idle_expiry_s,
            output_tokens=parameters.output_tokens,
        )
        self._choose = choose
        self.parameters = parameters
        self.load_weight = parameters.weights.shared_cache_multiplier
        self._hold_limit_from = parameters.lo
        self._tested = (-1, -1, -1)  # what `_commit_tested` has seen last, and let nobody in any more
        self._offers = Offers(self._accepts, self._promised, lambda seat: True)
        self._asked: list[Offer] = []  # seats that may accept somebody, while it looks
        self._refused_all: list[Candidate] = []  # all that were looked at last, and that every seat refuses
        self._candidates: dict[int, Candidate] = {}

    def tick(self, now: float) -> Actions:
        self.book.advance(now)
        self._expire(now)
        for seat in self.book.seats.values():
            if seat.steering.step(now, bool(self.book.new)):
                self.book.made_room(seat)
        return self._answer(now)

    def _priority(self, program: Program) -> int:
        return round(program.rank)

    def _returns(self, program: Program, turn: TurnFacts, now: float) -> None:
        if program.is_idle and turn.prompt_tokens < self.parameters.rewritten_below * program.context:
            self.book.rewritten(program, turn.prompt_tokens, now)

    # Leases

    def lease_advice(self, now: float, program: str, keep: bool | None, until: float | None) -> Actions:
        """``keep`` true without ``until``: for ``keep_s``, which also bounds it; neither true nor false: takes back
        what was said."""
        self.book.advance(now)
        known = self.book.programs.get(program)
        if known is not None and known.is_idle and known.state is ProgramState.LEASED:
            latest = now + self.parameters.keep_s
            if keep is False:
                self._lose(known, "revoked", {"tokens": float(known.lease_charge), "advised": 1.0})
            elif keep:
                self.book.keep(known, latest if until is None else min(until, latest), now)
            else:
                self.book.keep(known, 0.0, now)
        return self._answer(now)

    def _leased(self, program: Program, seat: Seat, now: float) -> Mapping[str, float]:
        final = self.book.final_context(program, seat)
        return {"tokens": float(program.lease_charge), "final_tokens": float(final)}

    def _crowded(self, seat: Seat, now: float) -> None:
        """Gives leases up, the least worth first, where there is more than the band allows; never the oldest's."""
        if seat.load <= self.parameters.hi * seat.capacity:
            return
        idle = self._takable(seat)
        oldest = min((program.arrival, program.number) for program in idle)[1] if idle else -1
        chosen = [program for program in idle if program.number != oldest]
        self._revoke(now, seat, chosen, self.parameters.lo * seat.capacity)

    # Decisions

    def _decide(self, now: float) -> None:
        """Lets in whom it may, in order."""
        revoked: set[int] = set()
        before = -1
        if not self.book.queued:
            self._deadlines.clear()  # of turns that do not wait any more
            return
        self._offers = Offers(self._accepts, self._promised, lambda seat: self._may_progress(seat, now))
        while (
            self.book.queued and self.book.seats and len(self._actions) != before
        ):  # who went in may have left room to others
            before = len(self._actions)
            for seat in self.book.warm_seats():
                self._warm(now, seat, revoked)
            if len(self.book.cold) or self.book.new:
                self._commit_tested(now, revoked)
            self._progress(now)
            self._force(now)

    def _warm(self, now: float, seat: Seat, revoked: set[int]) -> None:
        """Turns of programs that have their KV here: they only have to fit. The first that does not may take leases."""
        limit = self.parameters.hi * seat.capacity
        for _, number in list(islice(seat.warm, TRIED)):
            program = self.book.programs.numbered(number)
            while program is not None and program.waiting:
                turn = program.first_waiting
                if turn.tested >= seat.changed and seat.number in revoked:
                    break
                needed = self._needed(program, turn)
                if seat.load + needed > limit and seat.number not in revoked:
                    revoked.add(seat.number)
                    self._revoke_others(now, seat, program, limit - needed)
                if seat.load + needed > limit:
                    turn.tested = self.book.changes
                    break
                self._admit(program, turn, seat)

    def _revoke_others(self, now: float, seat: Seat, program: Program, room: float) -> None:
        """Idle leases, where giving up all of them but the program's own would do."""
        others = self._takable(seat, program)
        if seat.load - sum(other.lease_charge for other in others) <= room:
            self._revoke(now, seat, others, room)

    def _commit_tested(self, now: float, revoked: set[int]) -> None:
        """Programs without a lease, by D: whom a seat accepts, goes; from the beginning again then, for that changed
        the queue. Nothing is looked at twice while nothing changed."""
        book = self.book
        state = book.changes, book.requeued, self.learned.revision
        if self._tested == state:
            return
        if not (self._tested[1:] == state[1:] and self._are_refused_again(now, revoked)):
            while self._let_one_in(now, revoked):
                pass
        self._tested = book.changes, book.requeued, self.learned.revision

    def _are_refused_again(self, now: float, revoked: set[int]) -> bool:
        """Whether seats that changed since keep out all those that were looked at then, who did not change."""
        if not self._refused_all or not all(each.look_again() for each in self._refused_all):
            return False
        looked_at = list(self._looked_at(self._refused_all, now))
        revoked_too = set(revoked)
        for seat in self.book.changed_since(self._tested[0]):
            if not self._offers.keeps_out(seat, looked_at, revoked_too, self.parameters.lo):
                return False
        revoked |= revoked_too
        changes = self.book.changes
        for candidate in looked_at:
            candidate.turn.tested = changes
        return True

    def _let_one_in(self, now: float, revoked: set[int]) -> bool:
        """The first that a seat accepts."""
        candidates = map(self._candidate, islice(self.book.in_order(), TRIED))
        looked_at = list(self._looked_at(candidates, now))
        changes = self.book.changes
        waiting = [candidate for candidate in looked_at if candidate.tested != changes]
        if waiting:
            seats = self.book.changed_since(min(candidate.tested for candidate in waiting))
            self._asked = self._offers.worth_asking(seats, waiting, revoked, self.parameters.lo)
            if any(self._try(now, candidate, revoked) for candidate in waiting):
                return True
        is_any_accepted = any(candidate.least < 0 for candidate in looked_at)
        self._refused_all = [] if is_any_accepted else looked_at
        self._candidates = {candidate.turn.facts.turn: candidate for candidate in looked_at}
        return False

    def _looked_at(self, candidates: Iterable[Candidate], now: float) -> Iterator[Candidate]:
        """Those of them that are looked at: a new one that is blocked for too long stops those behind it."""
        is_first_new = True
        for candidate in candidates:
            yield candidate
            if is_first_new and candidate.program.state is ProgramState.NEW:
                is_first_new = False
                if now - candidate.turn.ready > self.parameters.bypass_s:
                    return

    def _candidate(self, program: Program) -> Candidate:
        turn = program.first_waiting
        known = self._candidates.get(turn.facts.turn)
        if known is None or not known.look_again():
            most = self._shared_at_most(program, turn)
            known = self._candidates[turn.facts.turn] = Candidate(self.book, program, turn, most, self.fleet.residency)
            if not self.parameters.span_s and program.state is ProgramState.COLD:
                known.accepted_anywhere()
        return known

    def _try(self, now: float, candidate: Candidate, revoked: set[int]) -> bool:
        """``revoked``: seats where somebody before was accepted, but did not fit: leases go to the first only."""
        turn, lo = candidate.turn, self.parameters.lo
        fitting, others = [], []
        for offer in self._offers.hopeful(self._asked, candidate):
            seat = offer.seat
            missing = seat.load + turn.charge - candidate.shared(seat) - lo * seat.capacity
            if (missing > 0 and seat.number in revoked) or not self._accepts(offer, candidate):
                continue
            if missing <= 0:
                fitting.append(seat)
                continue
            revoked.add(seat.number)
            if missing <= seat.revocable:
                others.append(seat)
        if not fitting and not others:
            turn.tested = self.book.changes
            return False
        seat = self._cheapest(turn, fitting or others)
        if not fitting:
            below = [other for other in seat.leases.values() if other.revocable]
            charge = turn.charge - candidate.shared(seat)
            self._revoke(now, seat, below, lo * seat.capacity - charge)
        self._admit(candidate.program, turn, seat)
        return True

    def _accepts(self, offer: Offer, candidate: Candidate) -> bool:
        """COMMIT: what is promised to those that outrank the program leaves room for its final context."""
        if offer.is_open:
            return True
        seat, program = offer.seat, candidate.program
        if not self.parameters.span_s and program.state is ProgramState.COLD:
            return True
        promised = self._promised(seat, program.rank)
        left = offer.left = offer.limit - promised
        offer.rank = program.rank
        if candidate.home == seat.number:
            left += candidate.own
        return candidate.final(seat) <= left

    def _promised(self, seat: Seat, rank: float) -> int:
        return seat.committed.through(rank) if self.parameters.span_s else seat.committed.total

    def _may_progress(self, seat: Seat, now: float) -> bool:
        """Those whose KV is kept are to return, and will run: a seat that waits for them is not idle yet. Without this,
        a seat whose turns are short against its tools takes everybody in, one by one."""
        return not seat.kept or now - seat.idle_since >= self.parameters.progress_s

    def _shared(self, program: Program, turn: HeldTurn, seats: list[Seat]) -> dict[int, int]:
        """Of a program that nothing ran of, what the index finds of its prompt is others'; of one that comes back, no
        more than it shared before."""
        if program.state is ProgramState.LEASED:
            return {seat.number: program.shared for seat in seats}
        most = self._shared_at_most(program, turn)
        blocks = (self.fleet.residency(turn.facts.turn) or ()) if most else ()
        return {
            seat.number: min(blocks[seat.number] * seat.facts.block_size, most)
            for seat in seats
            if seat.number < len(blocks)
        }

    def _shared_at_most(self, program: Program, turn: HeldTurn) -> int:
        """What a program without a lease may share with others, in tokens."""
        if not self.parameters.shared_credit or program.running or (program.turns and not program.shared):
            return 0
        return min(turn.facts.prompt_tokens, turn.charge, program.shared if program.turns else turn.charge)

    # Placement

    def _cheapest(self, turn: HeldTurn, seats: list[Seat]) -> Seat:
        """Of ``seats``, where the turn costs least; of equal ones, where least is promised."""
        if len(seats) == 1:
            return seats[0]
        reach = self._reach(turn, seats)
        costs = placement_costs(
            self.parameters.weights,
            turn.facts.prompt_tokens,
            {seat.number: seat.facts.block_size for seat in seats},
            {seat.number: seat.placement_load for seat in seats},
            reach,
            shared=self._loadable(turn, seats),
        )
        for number in costs:
            costs[number] += turn.facts.seat_bias.get(number, 0.0)
        best = min(costs.values()) + EQUAL
        tied = [seat for seat in seats if costs[seat.number] <= best]
        promised = min(seat.committed.total / seat.capacity for seat in tied)
        least = sorted((seat.number, seat) for seat in tied if seat.committed.total / seat.capacity <= promised)
        return least[0 if len(least) == 1 else self._choose(len(least))][1]
