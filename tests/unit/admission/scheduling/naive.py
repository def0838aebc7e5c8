"""What `services.admission.scheduling` keeps incrementally, computed from nothing each time, term by term."""

from __future__ import annotations

from services.admission.estimators.tool_times import lease_index
from services.admission.policies.commit import Commit
from services.admission.scheduling.programs import HeldTurn, Program, ProgramState
from services.admission.scheduling.seat import Seat


def rank(policy: Commit, program: Program) -> float:
    """D = a + S*V."""
    span = policy.parameters.span_s
    predicted = policy.learned.residual_work(program.key, program.work)
    return program.arrival + span * (predicted.value if predicted and span else 0.0)


def final_context(policy: Commit, program: Program, capacity: int) -> int:
    """Pk."""
    left = policy.learned.residual_context(program.key, program.context)
    if left is None:
        return round(min(capacity, max(program.context + program.growth, capacity / 8)))
    return round(min(capacity, program.context + left.value))


def revocable(policy: Commit, program: Program, seat: Seat, now: float) -> bool:
    """Idle, and I < phi/C."""
    if program.state is not ProgramState.LEASED or program.waiting or program.running:
        return False
    assert program.idle_since is not None
    durations = policy.learned.tools.durations(program.tool or "user_turn").durations
    reload = policy.learned.reload_cost.seconds(program.context)
    index = lease_index(durations.return_rate(now - program.idle_since), reload, program.context)
    return index < policy.parameters.floor / seat.capacity


def counts(program: Program, *, below_floor: bool) -> bool:
    """Whether its final context is promised at its seat."""
    if program.seat is None or program.state in (ProgramState.NEW, ProgramState.CLOSED):
        return False
    if program.running or program.waiting:
        return True
    return program.state is ProgramState.LEASED and not program.children and not below_floor


def promised(policy: Commit, seat: Seat, now: float, to: Program | None = None) -> int:
    """The commitments of a seat; ``to``: those that outrank this program, without its own."""
    total = 0
    for program in policy.book.programs:
        if program.seat != seat.number or program is to:
            continue
        if not counts(program, below_floor=revocable(policy, program, seat, now)):
            continue
        if to is None or not policy.parameters.span_s or rank(policy, program) <= rank(policy, to):
            total += final_context(policy, program, seat.capacity)
    return total


def load(policy: Commit, seat: Seat) -> int:
    """L: charges of turns that run here, and of leases."""
    here = [program for program in policy.book.programs if program.seat == seat.number]
    leases = sum(program.lease_charge for program in here if program.state is ProgramState.LEASED)
    return leases + sum(turn.charge for program in here for turn in program.running.values())


def accepts(policy: Commit, seat: Seat, program: Program, turn: HeldTurn, now: float) -> bool:
    """COMMIT, of a program without a lease."""
    if not seat.running or (not policy.parameters.span_s and program.state is ProgramState.COLD):
        return True
    final = min(seat.capacity, max(final_context(policy, program, seat.capacity), turn.charge))
    return promised(policy, seat, now, program) + final <= seat.steering.value * seat.capacity
