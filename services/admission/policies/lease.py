"""Policy ``lease``: lease and hold. The KV of idle programs is leased under a hard token budget for as long as its
tool's past says that it pays; turns that do not fit are held, and buy leases off with the time that they waited.

What it does not do, and ``commit`` does: look ahead. It charges a program what it holds now, not what it will hold, so
that it lets too many in (spec policy §0). Source: spec scheduling §5.2 to §5.4.

    charge   a turn that runs: its prompt and its answer; an idle lease: context and growth; else nothing
    B        R + eta*T: seconds to compute the context anew, and to queue without a lease
    lambda   shadow price of memory: 0 where nobody is held, else 0 to 1 as the charges go from ``lo`` to ``hi``
    I(x)     best of Pr(X<=s | X>x)*B / (c*E[min(X,s)-x | X>x]) over s: worth of a lease, per token
    tau      argmax over s of Pr(X<=s | X>x)*B - lambda*(c/cbar)*E[min(X,s)-x | X>x], at most Q99 of the tool, tau_max
    pi       (hold + 1 s) / (charge * turn): what a held turn pays, per token; it grows until it is let in

Where the book leaves things open: cbar is the mean charge at the seat; a lease whose KV the index no longer finds when
its program returns is none; T is learned from the first token less the predicted computing, for the engine's own queue
is not seen; a held turn is priced anew when its seat changed, when it becomes the first, and once a tick.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from services.admission.estimators.learned_pool import LearnedPool
from services.admission.estimators.tool_times import USER_TURN
from services.admission.scheduling.book import Book
from services.admission.scheduling.booked import TRIED, Booked
from services.admission.scheduling.interface import Actions, TurnFacts, TurnUsage
from services.admission.scheduling.programs import HeldTurn, Program, ProgramState
from services.admission.scheduling.seat import Seat


class LeaseParameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``lo``, ``hi``: bands, shares of the capacity. ``ttl_limit_s``: tau_max. ``turn_s``: mean time of a turn, in pi.
    ``bypass_s``: so long a blocked head may be overtaken. ``hold_limit_s``: H. ``output_tokens``: what a turn is
    charged for its answer (``None``: as learned, nine of ten are no longer). Source of the defaults: spec scheduling
    §5.4.

    Raises `ValueError`.
    """

    lo: float = 0.85
    hi: float = 0.95
    ttl_limit_s: float = 60.0
    turn_s: float = 5.0
    bypass_s: float = 10.0
    hold_limit_s: float = 300.0
    idle_expiry_s: float = 600.0
    output_tokens: int | None = None
    max_programs: int = 100_000

    def __post_init__(self) -> None:
        if not 0 < self.lo <= self.hi <= 1:
            raise ValueError("lease: 0 < lo <= hi <= 1")
        if not self.turn_s > 0:
            raise ValueError("lease: turn_s must be greater than 0")
        for name in ("ttl_limit_s", "bypass_s", "hold_limit_s", "idle_expiry_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"lease: {name} must not be negative")


class LeaseBook(Book):
    """No commitments: charges are what programs hold now. In order of arrival."""

    def __init__(self, learned: LearnedPool, *, max_programs: int) -> None:
        super().__init__(learned, span=0.0, floor=0.0, max_programs=max_programs)

    def _counts(self, program: Program) -> bool:
        return False

    def index(self, program: Program, now: float) -> float:
        """I, per token."""
        if program.idle_since is None or not program.context:
            return 0.0
        durations = self.learned.tools.durations(tool_of(program)).durations
        benefit = self.learned.lease_benefit(program.context)
        return durations.return_rate(max(0.0, now - program.idle_since)) * benefit / program.context


def tool_of(program: Program) -> str:
    """What the idle program waits for."""
    return program.tool if program.tool is not None else USER_TURN


def time_to_live(learned: LearnedPool, tool: str, benefit: float, price: float, elapsed: float, limit: float) -> float:
    """tau in seconds from the start of ``tool``, which has run for ``elapsed``; no more than that: not worth a lease.

    ``benefit``: B in seconds; ``price``: lambda*c/cbar; ``limit``: tau_max. In the cold start ln(B), at most 2 s.
    Source: spec scheduling §5.2 (tau_p), §5.4.
    """
    durations, source = learned.tools.durations(tool)
    if source == "cold_start":
        return min(limit, durations.best_ttl(benefit))
    best = durations.best_ttl_by_occupancy(benefit, price, elapsed)
    return min(best, durations.quantile(0.99), limit)


class Lease(Booked):
    """Feeds ``learned``, and decides by it."""

    def __init__(self, parameters: LeaseParameters, learned: LearnedPool) -> None:
        super().__init__(
            LeaseBook(learned, max_programs=parameters.max_programs),
            learned,
            hold_limit_s=parameters.hold_limit_s,
            idle_expiry_s=parameters.idle_expiry_s,
            output_tokens=parameters.output_tokens,
        )
        self.parameters = parameters
        self.until: dict[int, float] = {}
        """When each idle lease expires, by the program's number."""
        self._first_tokens: dict[int, float] = {}
        """Of turns that came back without a lease, and run."""
        self._head = -1
        """The turn that was the first without a lease when they were looked at last."""

    # Leases

    def price(self, seat: Seat) -> float:
        """lambda of the seat. Source: spec scheduling §5.2."""
        if not (seat.warm or self.book.cold or self.book.new):
            return 0.0
        lo, hi = self.parameters.lo * seat.capacity, self.parameters.hi * seat.capacity
        if seat.load >= hi:
            return 1.0
        return (seat.load - lo) / (hi - lo) if seat.load > lo else 0.0

    def _expiry(self, program: Program, seat: Seat, now: float) -> float:
        """When its lease is to end, as things stand."""
        assert program.idle_since is not None
        owners = seat.running + len(seat.leases)
        mean = max(1.0, seat.load / max(1, owners))
        ttl = time_to_live(
            self.learned,
            tool_of(program),
            self.learned.lease_benefit(program.context),
            self.price(seat) * program.context / mean,
            max(0.0, now - program.idle_since),
            self.parameters.ttl_limit_s,
        )
        return program.idle_since + ttl

    def _leased(self, program: Program, seat: Seat, now: float) -> Mapping[str, float]:
        self.until[program.number] = self._expiry(program, seat, now)
        ttl = self.until[program.number] - now
        return {"tokens": float(program.lease_charge), "ttl_s": ttl, "index": self.book.index(program, now)}

    def _expires(self, program: Program, now: float) -> float | None:
        del now
        return self.until.get(program.number)

    def _lease_over(self, program: Program) -> None:
        self.until.pop(program.number, None)

    def _crowded(self, seat: Seat, now: float) -> None:
        """Shedding: beyond ``hi`` the leases that are worth least go until ``lo``; never the oldest program's."""
        if seat.load <= self.parameters.hi * seat.capacity:
            return
        idle = [program for program in seat.leases.values() if program.is_idle]
        oldest = min((program.arrival, program.number) for program in idle)[1] if idle else -1
        others = [program for program in idle if program.number != oldest]
        self._revoke(now, seat, others, self.parameters.lo * seat.capacity)

    def tick(self, now: float) -> Actions:
        """Prices every idle lease anew: a tool may have run past the time at which it returns soon."""
        self.book.advance(now)
        self._expire(now)
        for seat in self.book.seats.values():
            for program in [each for each in seat.leases.values() if each.is_idle]:
                until = self.until[program.number] = self._expiry(program, seat, now)
                if until <= now:
                    self._lose(program, "expired", {"tokens": float(program.lease_charge), "ttl_s": until - now})
        self._head = -1
        return self._answer(now)

    def _returns(self, program: Program, turn: TurnFacts, now: float) -> None:
        """A lease that is over by now, or whose KV is gone, is none."""
        if program.state is not ProgramState.LEASED or not program.is_idle:
            return
        assert program.seat is not None
        if self.until.get(program.number, now) < now:
            self._lose(program, "expired", {"tokens": float(program.lease_charge)})
            return
        blocks = self.fleet.residency(turn.turn)
        if blocks is None or program.seat >= len(blocks):
            return
        resident = blocks[program.seat] * self.book.seats[program.seat].facts.block_size
        if 2 * resident < min(program.context, turn.prompt_tokens):
            self._lose(program, "revoked", {"resident_tokens": float(resident)})

    # T

    def first_token(self, now: float, turn: int) -> Actions:
        program = self.book.turns.get(turn)
        running = program.running.get(turn) if program is not None else None
        if program is not None and program.turns and running is not None and not running.warm:
            self._first_tokens[turn] = now
        return super().first_token(now, turn)

    def _measured(self, program: Program, turn: HeldTurn, usage: TurnUsage) -> None:
        first = self._first_tokens.pop(usage.turn, None)
        if first is not None and usage.cached_tokens is not None:
            computed = self.learned.reload_cost.seconds(usage.prompt_tokens, usage.cached_tokens)
            self.learned.unleased_return(max(0.0, first - turn.ready - computed))

    def turn_aborted(self, now: float, turn: int) -> Actions:
        self._first_tokens.pop(turn, None)
        program = self.book.turns.get(turn)
        if program is not None and program.seat is not None and program.seat in self.book.seats:
            self.book.made_room(self.book.seats[program.seat])  # if it was the head there, nobody waits behind it now
        return super().turn_aborted(now, turn)

    # Decisions

    def _decide(self, now: float) -> None:
        before = -1
        while self.book.seats and len(self._actions) != before:  # who went in may have left room to others
            before = len(self._actions)
            blocked: dict[int, bool] = {}
            for seat in self.book.seats.values():
                if seat.warm:
                    self._let_in_leased(now, seat, blocked)
            if self.book.cold or self.book.new:
                self._let_in_unleased(now, blocked)
            self._progress(now)
            self._force(now)

    def _let_in_leased(self, now: float, seat: Seat, blocked: dict[int, bool]) -> None:
        """Turns of programs with a live lease, or that run: they only have to fit into ``hi``, and the first may buy.
        ``blocked``: seats with such a turn that does not fit, and whether nobody may overtake it any more."""
        limit = self.parameters.hi * seat.capacity
        for _, number in [seat.warm.at(place) for place in range(min(TRIED, len(seat.warm)))]:
            program = self.book.programs.numbered(number)
            while program is not None and program.waiting:
                turn = program.first_waiting
                missing = seat.load + self._needed(program, turn) - limit
                if missing > 0 and seat.number not in blocked:
                    self._buy(now, seat, program, turn, missing)
                if seat.load + self._needed(program, turn) > limit:
                    if blocked.setdefault(seat.number, now - turn.ready >= self.parameters.bypass_s):
                        return
                    break
                self._admit(program, turn, seat)

    def _let_in_unleased(self, now: float, blocked: Mapping[int, bool]) -> None:
        """Turns without a lease, by arrival of their programs: they have to fit into ``lo``; the first may buy, and
        stops those behind it when it waited for long."""
        again = True
        while again:  # from the beginning, for who went in changed the queue
            again, is_head = False, True
            for program in (each for each, _ in zip(self.book.in_order(), range(TRIED), strict=False)):
                turn = program.first_waiting
                if self._let_in(now, program, turn, blocked, is_head=is_head):
                    again = True
                    break
                if is_head and now - turn.ready >= self.parameters.bypass_s:
                    return
                is_head = False

    def _let_in(
        self, now: float, program: Program, turn: HeldTurn, blocked: Mapping[int, bool], *, is_head: bool
    ) -> bool:
        seen = turn.tested
        if is_head and self._head != turn.facts.turn:
            self._head, seen = turn.facts.turn, -1
        if seen == self.book.changes:
            return False
        seats = [
            seat
            for seat in self.book.seats.values()
            if seat.changed > seen and not blocked.get(seat.number) and turn.charge <= seat.capacity
        ]
        fitting = [seat for seat in seats if seat.load + turn.charge <= self.parameters.lo * seat.capacity]
        if not fitting and is_head:
            for seat in seats:
                missing = seat.load + turn.charge - self.parameters.lo * seat.capacity
                if seat.number not in blocked and self._buy(now, seat, program, turn, missing):
                    fitting = [seat]
                    break
        if not fitting:
            turn.tested = self.book.changes
            return False
        self._admit(program, turn, self._cheapest(turn, fitting))
        return True

    def _buy(self, now: float, seat: Seat, program: Program, turn: HeldTurn, missing: float) -> bool:
        """Revokes the leases that are worth least, where they give ``missing`` tokens, and none of them is worth more
        than the turn pays by now. Source: spec scheduling §5.2 (dispatch, pi)."""
        others = [each for each in seat.leases.values() if each is not program and each.is_idle]
        if sum(each.lease_charge for each in others) < missing:
            return False
        pays = (now - turn.ready + 1.0) / (max(1, turn.charge) * self.parameters.turn_s)
        chosen: list[tuple[float, Program]] = []
        for index, each in self._by_index(others, now):
            if index > pays:
                return False
            chosen.append((index, each))
            missing -= each.lease_charge
            if missing <= 0:
                break
        for index, each in chosen:
            self._lose(each, "revoked", {"tokens": float(each.lease_charge), "index": index, "price": pays})
        return True

    # Placement

    def _cheapest(self, turn: HeldTurn, seats: list[Seat]) -> Seat:
        """Of ``seats``, where the turn costs least; of equal ones, the emptiest."""
        if len(seats) == 1:
            return seats[0]
        reach = self._reach(turn, seats)
        return min(
            seats,
            key=lambda seat: (self._cost_s(turn, seat, reach[seat.number]), seat.load / seat.capacity, seat.number),
        )

    def _cost_s(self, turn: HeldTurn, seat: Seat, reach: int) -> float:
        """a1*(queued tokens + n - rho) + lambda*charge, in seconds: the last, in tokens, at the same a1. Source: spec
        scheduling §5.2 (placement)."""
        tokens = seat.prefill + turn.facts.prompt_tokens - reach * seat.facts.block_size
        tokens += round(turn.facts.seat_bias.get(seat.number, 0.0) * seat.facts.block_size)
        return self.learned.reload_cost.linear * (tokens + self.price(seat) * turn.charge)
