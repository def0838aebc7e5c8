"""What holds after every event, whatever happened: spec scheduling §5.3 by number, as amended by policy §6 (i to v)."""

from __future__ import annotations

from services.admission.scheduling.lease_prices import KEPT_SHARE
from services.admission.scheduling.programs import Program, ProgramState
from services.admission.scheduling.seat import Seat
from tests.unit.admission.scheduling import naive
from tests.unit.admission.scheduling.world import World

BOUND = (ProgramState.RUNNING, ProgramState.LEASED)
"""States in which a program has its KV on a seat, and waits for that one."""


def the_table_is_true(world: World) -> None:
    """8, 13: the policy's programs are those of the clients, with the turns that wait, run and are leased; no turn that
    runs is ever ended by the policy."""
    book = world.policy.book
    assert set(book.turns) == {*world.held, *world.running}, "13: turns that are not there"
    assert set(book.seats) == set(world.seats)
    assert {program.facts.name for program in book.programs} == set(world.programs), "2: programs that are over"
    waiting, running = 0, 0
    for name, known in world.programs.items():
        program = book.programs.get(name)
        assert program is not None
        for turn in program.waiting:
            assert world.held[turn].program == name
        for turn in program.running:
            assert world.running[turn] == (program.running[turn].facts, program.seat) or "#" in name, "8"
        waiting, running = waiting + len(program.waiting), running + len(program.running)
        assert program.context == known.context or program.context < world.parameters.rewritten_below * known.context
        assert program.arrival == known.arrival
        assert program.children == known.children
        assert (program.state is ProgramState.RUNNING) == bool(program.running)
        assert (program.state is ProgramState.LEASED) == (name in world.leased)
        assert program.state is not ProgramState.NEW or not known.finished
    assert (waiting, running) == (len(world.held), len(world.running))


def sums_are_exact(world: World) -> None:
    """2, (iii): L, commitments and what is revocable are the sums of their parts."""
    policy = world.policy
    for seat in policy.book.seats.values():
        assert seat.running == sum(at == seat.number for _, at in world.running.values())
        leases = {program.facts.name for program in seat.leases.values()}
        assert leases == {name for name, at in world.leased.items() if at == seat.number}
        assert seat.load == naive.load(policy, seat), "2: L"
        assert seat.committed.total == naive.promised(policy, seat, world.now), "2, (iii): commitments"
        below = [each for each in seat.leases.values() if naive.revocable(policy, each, seat, world.now)]
        assert seat.revocable == sum(program.lease_charge for program in below), "2: revocable"
        world.seen["below the floor"] += bool(below)


def an_idle_seat_takes_who_waits(world: World) -> None:
    """5: never somebody held, and nothing in flight on a seat that could have it."""
    for seat in world.policy.book.seats.values():
        if world.history[-1][0] != "first_token" and naive.must_progress(world.policy, seat, world.now):
            assert not any(could_go(world, turn, seat) for turn in world.held), "5: idle, and held"


def could_go(world: World, turn: int, seat: Seat) -> bool:
    """Whether the turn could go there alone: its program is not bound to another seat."""
    program = world.policy.book.turns[turn]
    if program.state in BOUND and program.seat != seat.number:
        return False
    return world.held[turn].prompt_tokens < seat.capacity and program.first_waiting.charge <= seat.capacity


def kappa_moves_slowly(world: World) -> None:
    """(iv)"""
    for seat in world.policy.book.seats.values():
        steered = seat.steering.steered
        since, before = world.kappas.get(seat.number, (0.0, steered))
        assert 0.8 <= steered <= 2
        if steered != before:
            world.seen["kappa moved"] += 1
            assert abs(steered - before) <= 0.02 + 1e-9, "(iv): too far"
            assert since == 0.0 or world.now - since >= 5, "(iv): too soon"
            world.kappas[seat.number] = (world.now, steered)
        else:
            world.kappas[seat.number] = (since, before)


def in_order(world: World) -> list[Program]:
    policy = world.policy
    waiting = [program for program in policy.book.programs if program.waiting]
    return sorted(waiting, key=lambda each: (naive.rank(policy, each), each.number))


def nobody_waits_who_may_go(world: World) -> None:
    """3, 5: nobody waits who is accepted, fits, and has no blocked head before; nor for longer than H in mid-session,
    but behind a forced turn."""
    if world.history[-1][0] in ("program_arrives", "first_token"):
        return
    policy, book = world.policy, world.policy.book
    order = in_order(world)
    head = next((each for each in order if each.state is ProgramState.NEW), None)
    is_stopped = False
    for program in order:
        turn = program.first_waiting
        is_bound = program.state in BOUND
        is_late = turn.facts.index > 0 and world.now - turn.ready >= policy.parameters.hold_limit_s
        for seat in book.seats.values():
            if (is_bound and program.seat != seat.number) or turn.charge > seat.capacity:
                continue
            assert seat.forced or not is_late, "3: held beyond H"
            if is_bound:
                room = policy.parameters.hi * seat.capacity - seat.load
                assert naive.needed(program, turn) > room, "5: held, and fits"
            elif not is_stopped and seat.load + turn.charge <= policy.parameters.lo * seat.capacity:
                assert not naive.accepts(policy, seat, program, turn, world.now), "5: held, and accepted"
        if program is head and world.now - turn.ready > policy.parameters.bypass_s:
            is_stopped = True
            world.seen["blocked head"] += 1


def leases_are_bounded(world: World) -> None:
    """6: only who has a live lease, or runs, waits in the line of those; and the idle are forgotten, with their leases,
    unless sub-agents run."""
    for seat in world.policy.book.seats.values():
        for _, number in seat.warm:
            program = world.policy.book.programs.numbered(number)
            assert program is not None
            assert program.state in BOUND, "6: priority without a lease"
            assert program.seat == seat.number
    if world.history[-1][0] == "tick":
        busy, most = world.in_flight(), 2 * world.parameters.idle_expiry_s
        for name, known in world.programs.items():
            if name not in busy and not any(child in busy for child in known.children):
                family = (known, *(world.programs[child] for child in known.children if child in world.programs))
                assert world.now - max(max(each.touched, each.freed) for each in family) < most, "6: kept for too long"


def advice_is_bounded(world: World) -> None:
    """6: leases that are kept because somebody asked hold a quarter of a seat at most, each no longer than `keep_s`."""
    for seat in world.policy.book.seats.values():
        kept = [program for program in seat.leases.values() if program.advised]
        charges = sum(program.lease_charge for program in kept)
        world.seen["kept by advice"] += bool(kept)
        assert seat.advised == charges <= KEPT_SHARE * seat.capacity, "6: too much is kept by advice"
        assert all(program.keep_until <= world.now + world.parameters.keep_s for program in kept), "6: for too long"


def equals_go_by_arrival(world: World) -> None:
    """12, (v): of one class, who came first (or was put there) has no worse a rank; with S = 0 of all."""
    policy = world.policy
    revision = policy.learned.revision
    lines: dict[object, list[Program]] = {}
    for program in policy.book.programs:
        if program.revision < 0:
            continue  # it arrived, and asked for nothing yet
        if not policy.parameters.span_s:
            assert program.rank == program.due, "(v)"
        elif program.state is ProgramState.NEW and program.waiting and program.revision == revision:
            lines.setdefault(program.key, []).append(program)
    for line in lines.values():
        ranks = [program.rank for program in sorted(line, key=lambda each: (each.due, each.number))]
        assert ranks == sorted(ranks), "12: the younger before the older"


def without_predictions_an_eighth(world: World) -> None:
    """(v): with nothing learned, D is the arrival and Pk is max(c + g, C/8)."""
    policy = world.policy
    if policy.learned.pooled.context.mean_residual(0.0) is not None:
        return
    world.seen["nothing learned"] += 1
    for program in policy.book.programs:
        assert program.revision < 0 or program.rank == program.due, "(v)"
        if program.committed is not None:
            capacity = policy.book.seats[program.committed[0]].size
            expected = max(
                0, round(min(capacity, max(program.context + program.growth, capacity / 8))) - program.shared
            )
            assert program.committed[2] == expected, "(v)"


def nothing_oversize_is_parked(world: World) -> None:
    """15"""
    if world.history[-1][0] in ("turn_ready", "worker_changed"):
        assert not [turn for turn in world.held.values() if world.is_oversize(turn)], "15: parked for ever"


def singles_go_at_once(world: World) -> None:
    """10: who has no session is forwarded without delay."""
    if world.history[-1][0] == "turn_ready":
        for turn in world.held.values():
            program = world.policy.book.turns[turn.turn]
            assert not program.facts.single or len(program.waiting) + len(program.running) > 1, "10: a single waits"


EVERY_EVENT = (
    the_table_is_true,
    sums_are_exact,
    an_idle_seat_takes_who_waits,
    kappa_moves_slowly,
    nobody_waits_who_may_go,
    leases_are_bounded,
    advice_is_bounded,
    equals_go_by_arrival,
    without_predictions_an_eighth,
    nothing_oversize_is_parked,
    singles_go_at_once,
)


def nothing_is_left(world: World) -> None:
    """2: all programs gone, so that L = 0 and every map is empty."""
    book = world.policy.book
    assert not book.turns
    assert not book.new
    assert not len(book.cold)
    assert not len(book.programs)
    assert not world.leased
    assert not len(world.policy.learned)
    for seat in book.seats.values():
        assert (seat.load, seat.running, seat.forced, seat.prefill, seat.running_tokens) == (0, 0, 0, 0, 0)
        assert (seat.revocable, seat.committed.total, len(seat.committed), len(seat.warm)) == (0, 0, 0, 0)
        assert not seat.leases
        assert not seat.programs


def the_same_again(world: World) -> None:
    """11, 16"""
    world.seen["told again"] += 1
    assert world.told_again() == world.said
