"""What the turns that run at each seat weigh together: the one accounting of the service's grants and of policy ``kv``.

Sums are kept incrementally and reversed with exactly the amounts that were added; nothing is clamped, so a mistake
shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

S = TypeVar("S")


@dataclass(slots=True)
class SeatAccount:
    """The turns that run at one seat; ``waiting``: those without a first token. ``prefill_tokens``: of prompts, not
    computed yet. ``blocks``: of prompts.

    ``peak_*``: the most since `SeatAccounts.mark` was called last.
    """

    requests: int = 0
    waiting: int = 0
    prefill_tokens: int = 0
    blocks: int = 0
    peak_requests: int = 0
    peak_waiting: int = 0
    peak_blocks: int = 0


NO_ACCOUNT = SeatAccount()
"""Of a seat where nothing runs. Read only."""


class SeatAccounts(Generic[S]):
    """Accounts by seat; one where nothing runs may be missing."""

    def __init__(self) -> None:
        self.by_seat: dict[S, SeatAccount] = {}

    def of(self, seat: S) -> SeatAccount:
        """Read only: seats where nothing runs share one empty account."""
        return self.by_seat.get(seat, NO_ACCOUNT)

    def add(self, seat: S, prefill_tokens: int, blocks: int) -> None:
        """A turn runs there."""
        account = self.by_seat.setdefault(seat, SeatAccount())
        account.requests += 1
        account.prefill_tokens += prefill_tokens
        account.blocks += blocks
        account.waiting += prefill_tokens > 0
        account.peak_requests = max(account.peak_requests, account.requests)
        account.peak_waiting = max(account.peak_waiting, account.waiting)
        account.peak_blocks = max(account.peak_blocks, account.blocks)

    def prefilled(self, seat: S, prefill_tokens: int) -> None:
        """A turn that was added with so many (more than 0) has them computed; it has 0 from now on."""
        account = self.by_seat[seat]
        account.prefill_tokens -= prefill_tokens
        account.waiting -= 1

    def remove(self, seat: S, prefill_tokens: int, blocks: int) -> None:
        """A turn is over. Raises `KeyError` where none was added."""
        account = self.by_seat[seat]
        account.requests -= 1
        account.prefill_tokens -= prefill_tokens
        account.blocks -= blocks
        account.waiting -= prefill_tokens > 0

    def mark(self, seat: S) -> SeatAccount:
        """The account with the peaks since the last call, and start new peaks."""
        account = self.by_seat.get(seat)
        if account is None:
            return NO_ACCOUNT
        seen = replace(account)
        account.peak_requests, account.peak_waiting = account.requests, account.waiting
        account.peak_blocks = account.blocks
        if not account.requests:
            del self.by_seat[seat]
        return seen

    def forget_idle(self, known: Callable[[S], bool]) -> None:
        """Drop the accounts where nothing runs of seats that are not ``known`` any more: nobody marks them."""
        for seat in [seat for seat, account in self.by_seat.items() if not account.requests and not known(seat)]:
            del self.by_seat[seat]
