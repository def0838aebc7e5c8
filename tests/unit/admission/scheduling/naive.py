"""What `services.admission.scheduling` keeps incrementally, computed from nothing each time, term by term.

The terms are those of spec policy §4. What is known of a program here (who waits, who runs, contexts, leases, children)
is compared with what its clients know by `invariants.the_table_is_true`, after every event.
"""

from __future__ import annotations

from services.admission.estimators.tool_times import lease_index
from services.admission.policies.commit import Commit
from services.admission.scheduling.programs import HeldTurn, Program, ProgramState
from services.admission.scheduling.seat import Seat


def rank(policy: Commit, program: Program) -> float:
    """D = a + S*V, with what users' policies add to a."""
    span = policy.parameters.span_s
    predicted = policy.learned.residual_work(program.key, program.work) if span else None
    return program.arrival + program.order_bias + span * (predicted.value if predicted else 0.0)


def claim(policy: Commit, program: Program) -> float:
    """The rank with which it holds its room: D - sunk*S*R, while it has its KV."""
    parameters = policy.parameters
    had = program.context if program.state is not ProgramState.COLD else 0
    return rank(policy, program) - parameters.sunk * parameters.span_s * policy.learned.reload_cost.seconds(had)


def final_context(policy: Commit, program: Program, size: int, charge: int = 0, shared: int | None = None) -> int:
    """Pk, of which what the program shares is charged to others."""
    left = policy.learned.residual_context(program.key, program.context)
    whole = program.context + left.value if left is not None else max(program.context + program.growth, size / 8)
    return max(0, round(min(size, max(whole, charge))) - (program.shared if shared is None else shared))


def shares(policy: Commit, seat: Seat, program: Program, turn: HeldTurn) -> int:
    """Tokens of its prompt that are there before it, as the index says; of who comes back no more than it shared."""
    if not policy.parameters.shared_credit or program.running or program.state is ProgramState.LEASED:
        return program.shared if program.state is ProgramState.LEASED else 0
    blocks = policy.fleet.residency(turn.facts.turn)
    there = blocks[seat.number] if blocks is not None and seat.number < len(blocks) else 0
    found = min(there * seat.facts.block_size, turn.facts.prompt_tokens, turn.charge)
    return min(found, program.shared) if program.turns else found


def index(policy: Commit, program: Program, now: float) -> float:
    """I_q."""
    assert program.idle_since is not None
    durations = policy.learned.tools.durations(program.tool or "user_turn").durations
    reload = policy.learned.reload_cost.seconds(program.context)
    return lease_index(durations.return_rate(now - program.idle_since), reload, program.context)


def revocable(policy: Commit, program: Program, seat: Seat, now: float) -> bool:
    """Idle, and I < phi/C."""
    if program.state is not ProgramState.LEASED or program.waiting or program.running:
        return False
    return not program.advised and index(policy, program, now) < policy.parameters.floor / seat.size


def counts(program: Program, *, below_floor: bool) -> bool:
    """Whether its final context is promised at its seat: (iii)."""
    if program.seat is None or program.state in (ProgramState.NEW, ProgramState.CLOSED):
        return False
    if program.running or program.waiting:
        return True
    return program.state is ProgramState.LEASED and not program.children and not below_floor


def here(policy: Commit, seat: Seat) -> list[Program]:
    """Programs that run here, or have or had their KV here."""
    return [program for program in policy.book.programs if program.seat == seat.number]


def promised(policy: Commit, seat: Seat, now: float, to: Program | None = None) -> int:
    """The commitments of a seat; ``to``: those that outrank this program, without its own."""
    total = 0
    least = rank(policy, to) if to is not None else 0.0
    for program in here(policy, seat):
        if program is to or not counts(program, below_floor=revocable(policy, program, seat, now)):
            continue
        if to is None or not policy.parameters.span_s or claim(policy, program) <= least:
            total += final_context(policy, program, seat.size)
    return total


def load(policy: Commit, seat: Seat) -> int:
    """L: charges of turns that run here, and of leases."""
    programs = here(policy, seat)
    leases = sum(program.lease_charge for program in programs if program.state is ProgramState.LEASED)
    return leases + sum(turn.charge for program in programs for turn in program.running.values())


def needed(program: Program, turn: HeldTurn) -> int:
    """Tokens by which L grows where the program has its KV."""
    if program.running:
        return max(0, turn.charge - min(program.context, turn.facts.prompt_tokens))
    return turn.charge - program.shared - program.lease_charge


def accepts(policy: Commit, seat: Seat, program: Program, turn: HeldTurn, now: float) -> bool:
    """COMMIT, of a program without a lease: (i)."""
    if must_progress(policy, seat, now) or (not policy.parameters.span_s and program.state is ProgramState.COLD):
        return True
    final = final_context(policy, program, seat.size, turn.charge, shares(policy, seat, program, turn))
    return promised(policy, seat, now, program) + final <= seat.steering.value * seat.capacity


def must_progress(policy: Commit, seat: Seat, now: float) -> bool:
    """PROGRESS: nothing runs here, and nobody's return is counted on, or was not for long enough: whoever can go here
    does."""
    kept = [
        program
        for program in here(policy, seat)
        if program.is_idle and counts(program, below_floor=revocable(policy, program, seat, now))
    ]
    return not seat.running and (not kept or now - seat.idle_since >= policy.parameters.progress_s)
