"""How many waiting programs go before one, in the order of the policy: O(classes * log n), and nothing changes."""

from __future__ import annotations

from services.admission.scheduling.book import Book
from services.admission.scheduling.programs import ProgramState


def programs_before(book: Book, turn: int) -> int | None:
    """Programs that wait and are to be let in before the one that waits with ``turn``; ``None``: it does not wait.

    A program with its KV on a seat waits for room there alone, behind those of the same kind. All others wait in one
    order, by D, behind every one of those. Predictions are taken as they are: some may be due to be made anew.

    Source: spec policy §4 (ORDER: live lease, D).
    """
    program = book.turns.get(turn)
    if program is None or turn not in program.waiting or program.queued is None:
        return None
    queue, key = program.queued
    if program.state in (ProgramState.RUNNING, ProgramState.LEASED):
        return queue.before(key)
    rank = program.rank, program.number
    before = sum(len(seat.warm) for seat in book.seats.values()) + book.cold.before(rank)
    for each, line in book.new.items():
        offset = book.span * book.outlooks.of(each).first_work
        before += line.before((rank[0] - offset, rank[1]))
    return before
