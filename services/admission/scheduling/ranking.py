"""What a program is predicted to need: its place in the order, and the room that is promised to it.

Source: spec policy §4 (D, V, Pk).
"""

from __future__ import annotations

from services.admission.estimators.learned_pool import LearnedPool
from services.admission.estimators.residual import predicted_final_context
from services.admission.scheduling.outlook import Outlooks
from services.admission.scheduling.programs import Program, ProgramState
from services.admission.scheduling.seat import Seat


class Ranking:
    """``span``: S, seconds of arrival that one GPU second of work to come outweighs; 0: first come, first served.
    ``sunk``: how much of what a program would compute again without its KV counts for it where others want its room; 0:
    nothing."""

    def __init__(self, learned: LearnedPool, *, span: float, sunk: float = 0.0) -> None:
        self.learned = learned
        self.span = span
        self.sunk = sunk
        self.outlooks = Outlooks(learned, with_work=bool(span))

    def predict(self, program: Program) -> None:
        """Makes D and what its context will still grow anew."""
        outlook = program.outlook = self.outlooks.of(program.key)
        if program.state is ProgramState.NEW:
            work, program.left_tokens = outlook.first_work, outlook.first_context
        else:
            work = outlook.work.mean_residual(program.work) if outlook.work is not None else 0.0
            grows = outlook.context
            program.left_tokens = grows.mean_residual(program.context) if grows is not None else None
        program.rank = program.due + self.span * work
        program.revision = self.learned.revision

    def final_context(self, program: Program, seat: Seat) -> int:
        """Pk in tokens, without what the program shares with others on its seat."""
        return max(0, self.final_tokens(program, seat.size, 0) - program.shared)

    def final_tokens(self, program: Program, size: int, charge: int) -> int:
        """Pk in tokens on a seat of ``size``, with what is shared there; no less than ``charge``, what its next turn
        takes. Does not fall with ``size``."""
        if program.left_tokens is not None:
            predicted = program.context + max(0.0, program.left_tokens)
        else:
            predicted = predicted_final_context(program.context, None, growth=program.growth, capacity=size)
        return round(min(size, max(predicted, charge)))

    def claim(self, program: Program) -> float:
        """The rank with which it holds its room: who has its KV ranks as if that much less were left to compute, since
        whoever takes the room makes it compute that again."""
        if not (self.sunk and self.span) or program.state is ProgramState.COLD:
            return program.rank
        return program.rank - self.sunk * self.span * self.learned.reload_cost.seconds(program.context)
