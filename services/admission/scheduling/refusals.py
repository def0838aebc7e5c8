"""Which seats need not be asked whether they accept who waits, for they would refuse.

A seat whose promises leave so much to one program leaves no more to those behind it. Source: spec policy §4 (COMMIT).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf

from services.admission.scheduling.book import Book
from services.admission.scheduling.programs import HeldTurn, Program
from services.admission.scheduling.seat import Seat

Residency = Callable[[int], Sequence[int] | None]
"""As `Fleet.residency`."""

ANY = 1 << 62
"""More tokens than there are."""


class Candidate:
    """A program without a lease, and the first of its turns that wait; in tokens.

    ``most``: of its prompt, what it may share with others, by what ``residency`` says; ``home``: the seat that counts
    it among its promises, and ``own`` by how much. ``least``: no more than `final` is anywhere; below all where any
    seat accepts it. ``tested``: as its turn's, when it was looked at.
    """

    __slots__ = (
        "_blocks",
        "_book",
        "_finals",
        "_loose",
        "_made_of",
        "_residency",
        "charge",
        "home",
        "least",
        "most",
        "own",
        "program",
        "tested",
        "turn",
    )

    def __init__(self, book: Book, program: Program, turn: HeldTurn, most: int, residency: Residency) -> None:
        self._book, self._residency = book, residency
        self._finals: dict[int, int] = {}
        self._blocks: Sequence[int] | None = None
        self._made_of = program.left_tokens, program.context, program.shared, turn.charge
        self.program, self.turn, self.most, self.charge, self.tested = program, turn, most, turn.charge, turn.tested
        self.home, self.own = None, 0
        if program.committed is not None:
            self.home, _, self.own = program.committed
        self.least = self._loose = max(0, self._final(book.smallest) - most)

    def accepted_anywhere(self) -> None:
        """Every seat accepts it."""
        self.least = self._loose = -ANY

    def look_again(self) -> bool:
        """Another event: who holds what of the prompt may have changed. Whether all else is as it was."""
        self._blocks, self.least, self.tested = None, self._loose, self.turn.tested
        program, committed = self.program, self.program.committed
        is_home = self.home is None if committed is None else (committed[0], committed[2]) == (self.home, self.own)
        made_of = program.left_tokens, program.context, program.shared, self.turn.charge
        return is_home and made_of == self._made_of

    def _final(self, size: int) -> int:
        known = self._finals.get(size)
        if known is None:
            known = self._finals[size] = self._book.final_tokens(self.program, size, self.charge)
        return known

    @property
    def blocks(self) -> Sequence[int]:
        """Of its prompt, by seat."""
        if self._blocks is None:
            self._blocks = self._residency(self.turn.facts.turn) or ()
        return self._blocks

    def shared(self, seat: Seat) -> int:
        """What others are charged for there already."""
        if not self.most or seat.number >= len(self.blocks):
            return 0
        return min(self.blocks[seat.number] * seat.facts.block_size, self.most)

    def final(self, seat: Seat) -> int:
        """Pk, if it goes there."""
        return max(0, self._final(seat.size) - self.shared(seat))

    def come_closer(self) -> bool:
        """Makes ``least`` as large as what is known allows; whether it was not yet."""
        if not self.most or self._blocks is not None or self.least < 0:
            return False
        most = min(self.most, max(self.blocks, default=0) * self._book.largest_block)
        self.least = max(0, self._final(self._book.smallest) - most)
        return True


class Offer:
    """A seat that is asked. ``limit``: what it may promise, in tokens; ``left``: no less than what of it is left to
    those from ``rank`` on. ``is_open``: it takes everybody. ``changed``: as the seat's, when it was asked."""

    __slots__ = ("changed", "is_open", "left", "limit", "number", "rank", "seat")

    def __init__(self, seat: Seat) -> None:
        self.seat, self.number = seat, seat.number
        self.limit = seat.may_promise
        self.is_open = False
        self.begin()

    def begin(self) -> None:
        """Nothing is known of what is left."""
        self.left, self.rank, self.changed = self.limit, -inf, self.seat.changed


class Offers:
    """What was found out of the seats in the course of one decision, so that nothing is asked twice; the limits of
    seats, and who else waits, do not change meanwhile. Those who wait are asked for in the order of their ranks.

    ``accepts``: asks a seat, and notes in the offer what was left. ``promised``: what a seat has promised to those that
    are no later than a rank, in tokens. ``is_open``: whether a seat where nothing runs takes
    everybody.
    """

    def __init__(
        self,
        accepts: Callable[[Offer, Candidate], bool],
        promised: Callable[[Seat, float], int],
        is_open: Callable[[Seat], bool],
    ) -> None:
        self._accepts = accepts
        self._promised = promised
        self._is_open = is_open
        self._known: dict[int, Offer] = {}

    def worth_asking(
        self, seats: Iterable[Seat], candidates: Sequence[Candidate], revoked: set[int], lo: float
    ) -> list[Offer]:
        """Of ``seats`` those where the least of those who wait would fit, if all that may be revoked were.

        Of the others it counts only whether somebody is accepted there: leases go to the first alone, and the seat is
        among the ``revoked`` from then on. Source: spec policy §4 (FIT, REVOKE).
        """
        first = candidates[0].program.rank
        least_charge = min(each.turn.charge - _most_shared(each.program, each.turn) for each in candidates)
        least = min(each.least for each in candidates)
        homes = {each.home for each in candidates}
        found = []
        for seat in seats:
            offer = self._offer(seat, first)
            if offer.left < least and seat.number not in homes:
                continue
            if seat.load + least_charge - lo * seat.capacity <= max(0, seat.revocable):
                found.append(offer)
            elif seat.number not in revoked and any(
                self._accepts(offer, each)
                for each in candidates
                if offer.changed > each.tested and (offer.left >= each.least or offer.number == each.home)
            ):
                revoked.add(seat.number)
        return found

    def keeps_out(self, seat: Seat, candidates: Iterable[Candidate], revoked: set[int], lo: float) -> bool:
        """Whether nobody goes to the seat: who is accepted does not fit, nor would if all that may be revoked were.
        Somebody accepted: the seat is among the ``revoked`` then."""
        if not seat.running and self._is_open(seat):
            return False
        offer, room, is_revoked = Offer(seat), lo * seat.capacity - seat.load, seat.number in revoked
        for each in candidates:
            if (offer.left < each.least and each.home != seat.number) or (
                is_revoked and each.charge - each.most > room
            ):
                continue
            missing = each.charge - each.shared(seat) - room
            if (is_revoked and missing > 0) or not self._accepts(offer, each):
                continue
            if missing <= (0 if is_revoked else max(0, seat.revocable)):
                return False
            is_revoked = True
        if is_revoked:
            revoked.add(seat.number)
        return True

    def hopeful(self, offers: Sequence[Offer], candidate: Candidate) -> list[Offer]:
        """Those of ``offers`` that may accept the candidate, and have not refused it already."""
        found = self._hopeful(offers, candidate)
        return self._hopeful(found, candidate) if found and candidate.come_closer() else found

    @staticmethod
    def _hopeful(offers: Sequence[Offer], candidate: Candidate) -> list[Offer]:
        least, home, tested = candidate.least, candidate.home, candidate.tested
        return [offer for offer in offers if offer.changed > tested and (offer.left >= least or offer.number == home)]

    def _offer(self, seat: Seat, first: float) -> Offer:
        offer = self._known.get(seat.number)
        if offer is None:
            offer = self._known[seat.number] = Offer(seat)
        elif offer.changed != seat.changed or offer.rank > first:
            offer.begin()
        is_open = not seat.running and self._is_open(seat)
        if is_open:
            offer.left = ANY
        elif offer.is_open or offer.rank == -inf:
            offer.begin()
            offer.left, offer.rank = offer.limit - self._promised(seat, first), first
        offer.is_open = is_open
        return offer


def _most_shared(program: Program, turn: HeldTurn) -> int:
    """No less than what the turn shares with others on any seat."""
    return program.shared if program.turns else turn.charge
