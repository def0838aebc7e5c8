"""The ledger: every open grant, and what the grants of each rank weigh together.

Invariants: a request has at most one open grant; the accounts of a rank are the sums over its open grants, kept
incrementally and reversed with exactly the amounts that the grant recorded; nothing is clamped, so a mistake shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from schemas.admit import Grant


@dataclass(slots=True)
class OpenGrant:
    """A grant and the amounts it was booked with. ``expires`` (Unix seconds) moves with its owner's facts.

    ``prefill_tokens``: prompt tokens to compute, 0 after the first token of the answer. ``blocks``: full blocks of the
    prompt. ``adopted``: learned from facts (another leader granted it, or the ingress placed it by itself).
    """

    grant: Grant
    attempt: int
    prefill_tokens: int
    blocks: int
    expires: float
    adopted: bool = False


@dataclass(slots=True)
class RankAccount:
    """The open grants of one (worker, rank) together; ``waiting``: those without a first token.

    ``peak_*``: the most since `Ledger.mark` was called last.
    """

    requests: int = 0
    waiting: int = 0
    prefill_tokens: int = 0
    blocks: int = 0
    peak_requests: int = 0
    peak_waiting: int = 0
    peak_blocks: int = 0


_EMPTY = RankAccount()


class Ledger:
    """Open grants by request, accounts by (worker, rank)."""

    def __init__(self) -> None:
        self._open: dict[str, OpenGrant] = {}
        self._accounts: dict[tuple[str, int], RankAccount] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[OpenGrant]:
        return iter(self._open.values())

    def get(self, request_id: str) -> OpenGrant | None:
        """The open grant of this request."""
        return self._open.get(request_id)

    def account(self, worker: str, rank: int) -> RankAccount:
        """What the open grants of this rank weigh. Read only: a rank without grants shares one empty account."""
        return self._accounts.get((worker, rank), _EMPTY)

    @property
    def by_seat(self) -> Mapping[tuple[str, int], RankAccount]:
        """The accounts by (worker, rank), as they are now; a rank without grants may be missing."""
        return self._accounts

    def accounts(self) -> Iterator[tuple[tuple[str, int], RankAccount]]:
        """Every rank that has open grants."""
        return iter(self._accounts.items())

    def forget_idle(self, known: Callable[[str], bool]) -> None:
        """Drop the accounts without grants of workers that are not ``known`` any more: nobody marks them."""
        for worker, rank in [key for key, account in self._accounts.items() if not account.requests]:
            if not known(worker):
                del self._accounts[worker, rank]

    def open(self, entry: OpenGrant) -> None:
        """Book a grant. Raises `ValueError` when the request has one already (release it first)."""
        request_id = entry.grant.request_id
        if request_id in self._open:
            raise ValueError(f"request {request_id} has an open grant")
        self._open[request_id] = entry
        account = self._accounts.setdefault((entry.grant.worker, entry.grant.rank), RankAccount())
        account.requests += 1
        account.prefill_tokens += entry.prefill_tokens
        account.blocks += entry.blocks
        account.waiting += entry.prefill_tokens > 0
        account.peak_requests = max(account.peak_requests, account.requests)
        account.peak_waiting = max(account.peak_waiting, account.waiting)
        account.peak_blocks = max(account.peak_blocks, account.blocks)

    def release(self, request_id: str) -> OpenGrant | None:
        """Reverse a grant by its recorded amounts; ``None`` when the request has none."""
        entry = self._open.pop(request_id, None)
        if entry is None:
            return None
        rank = (entry.grant.worker, entry.grant.rank)
        account = self._accounts[rank]
        account.requests -= 1
        account.prefill_tokens -= entry.prefill_tokens
        account.blocks -= entry.blocks
        account.waiting -= entry.prefill_tokens > 0
        return entry

    def prefilled(self, request_id: str) -> None:
        """The first token came: the prompt's prefill is no load any more."""
        entry = self._open.get(request_id)
        if entry is None or entry.prefill_tokens == 0:
            return
        account = self._accounts[(entry.grant.worker, entry.grant.rank)]
        account.prefill_tokens -= entry.prefill_tokens
        account.waiting -= 1
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

    def lapsed(self, now: float) -> list[OpenGrant]:
        """Grants past their expiry, still open: release them."""
        return [entry for entry in self._open.values() if entry.expires <= now]

    def mark(self, worker: str, rank: int) -> RankAccount:
        """The account with the peaks since the last call, and start new peaks: called once per scrape of the rank.

        What the engine reported may be as old as the scrape before: all that we had open since then explains it.
        """
        account = self._accounts.get((worker, rank))
        if account is None:
            return _EMPTY
        seen = replace(account)
        account.peak_requests, account.peak_waiting = account.requests, account.waiting
        account.peak_blocks = account.blocks
        if not account.requests:
            del self._accounts[(worker, rank)]
        return seen
