"""The ledger: exact books (D3)."""

from __future__ import annotations

import pytest

from schemas.admit import Grant
from services.admission.grants import Ledger, OpenGrant


def entry(
    request_id: str, *, worker: str = "a", prefill: int = 50, blocks: int = 4, expires: float = 10.0
) -> OpenGrant:
    grant = Grant(
        grant_id=f"g-{request_id}", request_id=request_id, worker=worker, rank=0, owner="i", epoch=1, expires_ms=0
    )
    return OpenGrant(grant, 0, prefill, blocks, expires)


def test_release_reverses_exactly_what_was_booked() -> None:
    """D3: the amounts recorded with the grant are taken back, whatever is known of the request by then."""
    ledger = Ledger()
    ledger.open(entry("r1", prefill=50, blocks=4))
    ledger.open(entry("r2", prefill=70, blocks=6))
    account = ledger.account("a", 0)
    assert (account.requests, account.waiting, account.prefill_tokens, account.blocks) == (2, 2, 120, 10)
    ledger.prefilled("r1")
    assert (account.waiting, account.prefill_tokens) == (1, 70)
    ledger.release("r1")
    assert (account.requests, account.waiting, account.prefill_tokens, account.blocks) == (1, 1, 70, 6)
    ledger.release("r2")
    assert (account.requests, account.waiting, account.prefill_tokens, account.blocks) == (0, 0, 0, 0)


def test_a_request_is_released_once_and_has_one_grant() -> None:
    """A second release finds nothing; a second grant is a bug that shows."""
    ledger = Ledger()
    ledger.open(entry("r1"))
    with pytest.raises(ValueError, match="r1"):
        ledger.open(entry("r1"))
    assert ledger.release("r1") is not None
    assert ledger.release("r1") is None
    ledger.prefilled("r1")
    assert ledger.account("a", 0).requests == 0


def test_a_grant_lapses_at_its_expiry_unless_it_is_renewed() -> None:
    """Renewing moves the expiry forward, never back."""
    ledger = Ledger()
    ledger.open(entry("r1", expires=10.0))
    ledger.open(entry("r2", expires=10.0))
    assert ledger.renew("r1", 20.0)
    assert ledger.renew("r1", 15.0)
    assert not ledger.renew("r3", 15.0)
    assert ledger.lapsed(9.9) == []
    assert [each.grant.request_id for each in ledger.lapsed(10.0)] == ["r2"]
    assert [each.grant.request_id for each in ledger.lapsed(20.0)] == ["r1", "r2"]


def test_marking_a_scrape_starts_new_peaks_and_forgets_idle_ranks() -> None:
    """The most open since the last scrape explains it; a rank without grants leaves no account behind."""
    ledger = Ledger()
    ledger.open(entry("r1"))
    ledger.open(entry("r2"))
    ledger.release("r1")
    ledger.release("r2")
    assert ledger.mark("a", 0).peak_requests == 2
    assert list(ledger.accounts()) == []
    assert ledger.mark("a", 0).peak_requests == 0


def test_ranks_of_workers_that_are_gone_leave_no_account_behind() -> None:
    """Workers come and go under new names: an account lives as long as its worker, or its last grant."""
    ledger = Ledger()
    ledger.open(entry("r1"))
    ledger.forget_idle(known=lambda worker: False)
    assert ledger.account("a", 0).requests == 1
    ledger.release("r1")
    ledger.forget_idle(known=lambda worker: True)
    assert len(list(ledger.accounts())) == 1
    ledger.forget_idle(known=lambda worker: False)
    assert list(ledger.accounts()) == []
