"""The ledger: every open grant, and what the grants of each rank weigh together.

Invariants: a request has at most one open grant; the accounts of a rank are the sums over its open grants, kept
incrementally and reversed with exactly the amounts that the grant recorded; nothing is clamped, so a mistake shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from schemas.admit import Grant
from services.admission.accounts import SeatAccount, SeatAccounts
from services.admission.turn_counts import TurnCounts


@dataclass(slots=True)
class OpenGrant:
    """A grant and the amounts it was booked with. ``expires`` (Unix seconds) moves with its owner's facts.

    ``tenant``: whose turn of ``model`` it is. ``prefill_tokens``: prompt tokens to compute, 0 after the first token of
    the answer. ``blocks``: full blocks of the prompt. ``adopted``: learned from facts (another leader granted it, or
    the ingress placed it by itself). ``sent``: its ingress has said that it runs there.
    """

    grant: Grant
    attempt: int
    prefill_tokens: int
    blocks: int
    expires: float
    adopted: bool = False
    model: str = ""
    tenant: str = ""
    sent: bool = False


class Ledger:
    """Open grants by request, accounts by (worker, rank)."""

    def __init__(self) -> None:
        self._open: dict[str, OpenGrant] = {}
        self._accounts: SeatAccounts[tuple[str, int]] = SeatAccounts()
        self.counts = TurnCounts()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenGrant]:
        return iter(self._open.values())

    def get(self, request_id: str) -> OpenGrant | None:
        """The open grant of this request."""
        return self._open.get(request_id)

    def account(self, worker: str, rank: int) -> SeatAccount:
        """What the open grants of this rank weigh. Read only: a rank without grants shares one empty account."""
        return self._accounts.of((worker, rank))

    @property
    def by_seat(self) -> Mapping[tuple[str, int], SeatAccount]:
        """The accounts by (worker, rank), as they are now; a rank without grants may be missing."""
        return self._accounts.by_seat

    def accounts(self) -> Iterator[tuple[tuple[str, int], SeatAccount]]:
        """Every rank that has open grants."""
        return iter(self._accounts.by_seat.items())

    def forget_idle(self, known: Callable[[str], bool]) -> None:
        """Drop the accounts without grants of workers that are not ``known`` any more: nobody marks them."""
        self._accounts.forget_idle(lambda seat: known(seat[0]))

    def open(self, entry: OpenGrant) -> None:
        """Book a grant. Raises `ValueError` when the request has one already (release it first)."""
        request_id = entry.grant.request_id
        if request_id in self._open:
            raise ValueError(f"request {request_id} has an open grant")
        self._open[request_id] = entry
        self.counts.add(entry.model, entry.tenant)
        self._accounts.add((entry.grant.worker, entry.grant.rank), entry.prefill_tokens, entry.blocks)

    def release(self, request_id: str) -> OpenGrant | None:
        """Reverse a grant by its recorded amounts; ``None`` when the request has none."""
        entry = self._open.pop(request_id, None)
        if entry is None:
            return None
        self.counts.remove(entry.model, entry.tenant)
        self._accounts.remove((entry.grant.worker, entry.grant.rank), entry.prefill_tokens, entry.blocks)
        return entry

    def prefilled(self, request_id: str) -> None:
        """The first token came: the prompt's prefill is no load any more."""
        entry = self._open.get(request_id)
        if entry is None or entry.prefill_tokens == 0:
            return
        self._accounts.prefilled((entry.grant.worker, entry.grant.rank), entry.prefill_tokens)
        entry.prefill_tokens = 0

    def renew(self, request_id: str, expires: float) -> bool:
        """Its owner still names it; ``False`` when there is no such grant."""
        entry = self._open.get(request_id)
        if entry is None:
            return False
        entry.expires = max(entry.expires, expires)
        return True

    def renew_all(self, expires: float) -> None:
        """We could not listen: nobody's silence counts."""
        for entry in self._open.values():
            entry.expires = max(entry.expires, expires)

    def expire_at(self, expires: float) -> None:
        """As `renew_all`, by a clock that was set back: what they were to live until is far away."""
        for entry in self._open.values():
            entry.expires = expires

    def lapsed(self, now: float) -> list[OpenGrant]:
        """Grants past their expiry, still open: release them."""
        return [entry for entry in self._open.values() if entry.expires <= now]

    def mark(self, worker: str, rank: int) -> SeatAccount:
        """The account with the peaks since the last call, and start new peaks: called once per scrape of the rank.

        What the engine reported may be as old as the scrape before: all that we had open since then explains it.
        """
        return self._accounts.mark((worker, rank))
